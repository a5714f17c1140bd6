"""Shell completion: what bash asks when somebody presses <TAB>, and what it is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The command as pip installs it."""
    path = tmp_path_factory.mktemp("bin") / "signpost-calib"
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                    "from calib.__main__ import main\nmain()\n")  # fmt: skip
    path.chmod(0o755)
    return path


def asked(script, line):
    """What completion offers behind `line`."""
    environment = os.environ | {"COMP_LINE": f"signpost-calib {line}", "COMP_CWORD": "1"}
    done = subprocess.run([script, "-sc", "query=bash"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "line, some",
    [
        ("bit", {"bits="}),
        ("method=kivi eval=", {"eval=none", "eval=text"}),
    ],
)
def test_offers(script, line, some):
    assert some <= asked(script, line)


def test_bash_itself_completes(script):
    """As bash does it: install, then call the function that it registered."""
    code = (
        f'export PATH="{script.parent}:$PATH"; eval "$(signpost-calib -sc install=bash)"; '
        "COMP_LINE='signpost-calib method=ki'; COMP_POINT=${#COMP_LINE}; COMP_WORDS=(signpost-calib method = ki); "
        "COMP_CWORD=3; $(complete -p signpost-calib 2>/dev/null | sed 's/.*-F \\([^ ]*\\).*/\\1/' "
        "|| true) 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert "kivi" in done.stdout, done.stderr
