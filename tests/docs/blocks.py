"""The code blocks of Markdown pages, and how they are run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL, PYTHON = "bash", "python"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- run: (\w+), (.+?) -->\s*\Z")
_ELSEWHERE = re.compile(r"<!-- (tests/\S+) runs this -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block. how: `yes`, `compose` (its options are checked, nothing is calibrated) or `no`, with a reason."""

    page: str
    line: int
    language: str
    text: str
    how: str = "yes"
    reason: str = ""


def pages() -> list[Path]:
    """README.md and all pages of docs/, the quickstart first: it makes the bundle that the others use."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    first = ROOT / "docs/quickstart.md"
    return [first, *(page for page in found if page != first), ROOT / "README.md"]


def blocks(page: Path) -> list[Block]:
    """The page's blocks in their order."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        how = (mark[1], mark[2]) if mark else ("yes", "")
        if elsewhere := _ELSEWHERE.search(text[: match.start()]):
            assert (ROOT / elsewhere[1]).exists(), elsewhere[1]
            how = ("no", elsewhere[0])
        line = text[: match.start()].count("\n") + 1
        found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2], *how))
    return found
