"""Every command and code block of the documentation is run, or says why not. Links lead somewhere, tables are true."""

import argparse
import importlib
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

import artifacts
import runtime
from benchmarks.recipe_table import table
from tests.artifacts.stand_in_hub import running
from tests.docs.blocks import PYTHON, ROOT, SHELL, Block, blocks, pages, prose

PAGES = [page for page in pages() if any(b.language in (SHELL, PYTHON) for b in blocks(page))]
LIMIT = 600  # seconds for a block that hangs


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Environment variables with `python` on the path."""
    shim = tmp_path_factory.mktemp("bin") / "python"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, shell):
    """An empty folder, `python` on the path, a hub; the quickstart has been followed in it."""
    folder = tmp_path_factory.mktemp("new-user")
    with running() as hub:
        environment = shell | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_stand_in", "HF_HUB_OFFLINE": "0"}
        follow(PAGES[0], folder, environment)
        yield folder, environment


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Runs the page's blocks in their order; neighbours of one language together."""
    wanted = [b for b in blocks(page) if b.how in ("yes", "compose") and b.language in (SHELL, PYTHON)]
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
    single = [re.sub(r"=([\w.-]+)(,[\w.-]+)+(?= |$)", r"=\1", line.replace(" -m ", " ", 1)) for line in
              (line.replace("python -m calib -m ", "python -m calib ") for line in commands)]  # fmt: skip
    single = [line.replace("python calib", "python -m calib") for line in single]
    return "\n".join(f"{line} --cfg job" for line in single)


def checked(code: str) -> str:
    """Commands with all their options, but ending once these are parsed; those of calib compose."""
    commands = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    for line in commands:
        assert re.match(r"(\w+=\S+ )*(python|torchrun [-\w ]+) -m [\w.]+( |$)", line), f"not a command of ours: {line}"
    calib = [re.sub(r"^.*? -m calib ", "python -m calib ", line) for line in commands if " -m calib " in line]
    others = [line for line in commands if " -m calib " not in line]
    checks = [f"python -m tests.docs.options <<'END'\n{chr(10).join(others)}\nEND"] if others else []
    return "\n".join([composed("\n".join(calib)), *checks])


def test_blocks_run(workspace):
    """One test, so that one process follows the quickstart, which they all need."""
    for page in PAGES[1:]:
        follow(page, *workspace)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page):
    for block in blocks(page):
        assert block.language in (SHELL, PYTHON, "text", "yaml", ""), block
        if page.name != "README.md":  # its picture
            assert block.language, f"{block.page}:{block.line} names no language"
        assert block.how in ("yes", "compose", "options", "no"), block
        assert block.how == "yes" or len(block.reason) > 10, block


def test_composing_keeps_all_options():
    code = "python -m calib -m bits=2,3,4 outliers=0,0.01 x.y=z\n"
    assert composed(code) == "python -m calib bits=2 outliers=0 x.y=z --cfg job"
    with pytest.raises(AssertionError, match="only commands of calib"):
        composed("rm -r x\n")


def run_checked(code, folder, environment):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", checked(code)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip


def test_measurements_are_commands_with_options_that_exist(shell, tmp_path):
    """One process for all pages: what it imports takes seconds."""
    found = [block for page in pages() for block in blocks(page) if block.how == "options"]
    assert {"docs/quality.md", "docs/hostile-input.md", "docs/howto/ship.md"} <= {block.page for block in found}
    done = run_checked("\n".join(block.text for block in found), tmp_path, shell)
    assert done.returncode == 0, done.stderr


def test_wrong_options_are_found(shell, tmp_path):
    done = run_checked("python -m tests.fuzz.kills \\\n    --kills 200\n", tmp_path, shell)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = "python -m tests.fuzz.kills --kills 200\npython -m tests.fuzz.kills --deaths 200\n"
    done = run_checked(wrong, tmp_path, shell)
    assert done.returncode == 2
    assert "unrecognized arguments: --deaths 200" in done.stderr
    done = run_checked("torchrun --nproc-per-node 4 -m benchmarks.none\n", tmp_path, shell)
    assert done.returncode == 1
    assert "there is no benchmarks.none" in done.stderr
    assert checked("torchrun --nproc-per-node 4 -m calib bits=3\n") == "python -m calib bits=3 --cfg job"
    with pytest.raises(AssertionError, match="not a command of ours: rm -r x"):
        checked("rm -r x\n")


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
    from runtime.__main__ import parser

    (action,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name in (*COMMANDS, *action.choices):
        assert re.search(rf"`(python -m (artifacts|runtime) )?{name}`", text), name
    with (ROOT / "pyproject.toml").open("rb") as file:
        for script in tomllib.load(file)["project"]["scripts"]:
            assert f"`{script}`" in text or f"{script} " in text, script


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_programs_and_files_that_the_text_names_are_there(page):
    text = prose(page)
    for module in set(re.findall(r"python -m ((?:\w+\.?)+\b)", text)):
        assert (ROOT / module.replace(".", "/")).is_dir() or (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for name in set(re.findall(r"`((?:artifacts|runtime|calib|conf|cuda|benchmarks|tests|docs)/[\w./-]+)`", text)):
        assert "NAME" in name or (ROOT / name).exists(), f"{page.name}: {name}"


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


@pytest.mark.parametrize("package", [artifacts, runtime], ids=lambda package: package.__name__)
def test_reference_has_all_that_is_exported(package, monkeypatch):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    monkeypatch.syspath_prepend(ROOT / ".ci")
    reference = importlib.import_module("docs_reference")
    name = package.__name__
    text = "\n".join(reference.module(name, module) for module in reference.MODULES[name])
    described = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    elsewhere = set() if package is artifacts else set(artifacts.__all__)
    assert set(package.__all__) - elsewhere <= described


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
