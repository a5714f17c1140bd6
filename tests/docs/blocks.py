"""The code blocks of Markdown pages, and how they are run."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
SHELL, PYTHON = "bash", "python"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- run: (\w+), (.+?) -->\s*\Z")
_INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}.*\n)+)")
_ELSEWHERE = re.compile(r"<!-- (tests/\S+) runs this -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A block of code.

    how: `yes`, `compose` (options of calib are checked, nothing is calibrated), `options` (the same for any of our
    programs; indented blocks, which reproduce measurements, are such) or `no`, with a reason.
    """

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
    """The page's fenced blocks in their order, then the indented ones."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        how = (mark[1], mark[2]) if mark else ("yes", "")
        if elsewhere := _ELSEWHERE.search(text[: match.start()]):
            assert (ROOT / elsewhere[1]).exists(), elsewhere[1]
            how = ("no", elsewhere[0])
        line = text[: match.start()].count("\n") + 1
        found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2], *how))
    return found + _indented(page, text)


def _indented(page: Path, text: str) -> list[Block]:
    """What the fences leave, by four spaces."""
    rest = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        Block(
            str(page.relative_to(ROOT)), rest[: match.start(1)].count("\n") + 1, SHELL, dedent(match[1]), "options",
            "it measures for minutes or hours, most of them on models that are not here",
        )
        for match in _INDENTED.finditer(rest)
    ]  # fmt: skip


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())
