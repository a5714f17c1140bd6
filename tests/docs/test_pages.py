"""Every command and code block of the documentation is run, or says why not. Links lead somewhere, tables are true."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from benchmarks.recipe_table import table
from tests.artifacts.stand_in_hub import running
from tests.docs.blocks import PYTHON, ROOT, SHELL, Block, blocks, pages

PAGES = [page for page in pages() if any(b.language in (SHELL, PYTHON) for b in blocks(page))]
LIMIT = 600  # seconds for a block that hangs


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """An empty folder, `python` on the path, a hub; the quickstart has been followed in it."""
    folder = tmp_path_factory.mktemp("new-user")
    shim = tmp_path_factory.mktemp("bin") / "python"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    shim.chmod(0o755)
    with running() as hub:
        environment = os.environ | {
            "PATH": f"{shim.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_stand_in",
            "HF_HUB_OFFLINE": "0",
            "OMP_NUM_THREADS": "1",
        }
        follow(PAGES[0], folder, environment)
        yield folder, environment


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Runs the page's blocks in their order; neighbours of one language together."""
    wanted = [b for b in blocks(page) if b.how != "no" and b.language in (SHELL, PYTHON)]
    for (language, how), group in groupby(wanted, key=lambda b: (b.language, b.how)):
        members = list(group)
        code = "\n".join(b.text for b in members)
        if how == "compose":
            code = composed(code)
        start = ["bash", "-euo", "pipefail", "-c"] if language == SHELL else [sys.executable, "-c"]
        done = subprocess.run(
            [*start, code], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT,
        )  # fmt: skip
        where = f"{members[0].page}:{members[0].line}"
        assert done.returncode == 0, f"{where}\n{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def composed(code: str) -> str:
    """Commands of calib with all their options, but printing the configuration instead of running."""
    lines = code.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("python -m calib ")]
    assert commands == [line for line in lines if line.strip()], "only commands of calib can be composed"
    # Of several values, composing takes the first.
    single = [re.sub(r"=([\w.]+)(,[\w.]+)+(?= |$)", r"=\1", line.replace(" -m ", " ", 1)) for line in
              (line.replace("python -m calib -m ", "python -m calib ") for line in commands)]  # fmt: skip
    single = [line.replace("python calib", "python -m calib") for line in single]
    return "\n".join(f"{line} --cfg job" for line in single)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run(page, workspace):
    if page != PAGES[0]:  # the workspace has followed that one
        follow(page, *workspace)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page):
    for block in blocks(page):
        assert block.language in (SHELL, PYTHON, "text", "yaml", ""), block
        if page.name != "README.md":  # its picture
            assert block.language, f"{block.page}:{block.line} names no language"
        assert block.how in ("yes", "compose", "no"), block
        assert block.how == "yes" or len(block.reason) > 10, block


def test_composing_keeps_all_options():
    code = "python -m calib -m bits=2,3,4 outliers=0,0.01 x.y=z\n"
    assert composed(code) == "python -m calib bits=2 outliers=0 x.y=z --cfg job"
    with pytest.raises(AssertionError, match="only commands of calib"):
        composed("rm -r x\n")


def test_a_block_that_fails_is_found(tmp_path, monkeypatch):
    page = ROOT / "docs/x.md"
    for language, text in ((SHELL, "false | true\n"), (PYTHON, "1 / 0\n")):
        broken = [Block("docs/x.md", 3, language, text)]
        monkeypatch.setattr("tests.docs.test_pages.blocks", lambda page, broken=broken: broken)
        with pytest.raises(AssertionError, match=r"docs/x\.md:3"):
            follow(page, tmp_path, dict(os.environ))


# What the pages say


def test_table_of_recipes_is_that_of_the_results():
    assert table() in (ROOT / "docs/choosing.md").read_text()


def test_switches_are_all_listed():
    listed = set(re.findall(r"^\| `(SIGNPOST_\w+)`", (ROOT / "docs/commands.md").read_text(), re.MULTILINE))
    used = set()
    for folder in ("artifacts", "runtime", "calib"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"[\"'](SIGNPOST_[A-Z_]+)[\"']", path.read_text()))
    assert listed == used


def test_commands_are_all_listed():
    text = (ROOT / "docs/commands.md").read_text()
    from artifacts.__main__ import COMMANDS

    for name in COMMANDS:
        assert re.search(rf"`(python -m artifacts )?{name}`", text), name
    with (ROOT / "pyproject.toml").open("rb") as file:
        for script in tomllib.load(file)["project"]["scripts"]:
            assert f"`{script}`" in text or f"{script} " in text, script


def heading_ids(page: Path) -> set[str]:
    """Anchors as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower() for title in titles)
    return {re.sub(r"[ \-]+", "-", title) for title in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in heading_ids(path), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / ".ci/mkdocs.yml").read_text())

    def leaves(node):
        if isinstance(node, str):
            return {node}
        return {leaf for item in (node.values() if isinstance(node, dict) else node) for leaf in leaves(item)}

    named = leaves(config["nav"])
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {name for name in named if not name.startswith("reference/")} == there


def test_site_builds_strictly(tmp_path):
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-f", ".ci/mkdocs.yml", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "site/reference/artifacts.html").read_text()
    assert "BundleCorruptError" in text
    assert "method=kvquant" in (tmp_path / "site/reference/configuration.html").read_text()
