"""`python -m runtime.lm_eval` where lm_eval is not installed, and how it ends."""

import sys
from types import ModuleType

import pytest

from artifacts.errors import SignpostError
from runtime.lm_eval.__main__ import main


def test_without_lm_eval(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith(": pip install 'signpost-kv[lm-eval]'\n")


@pytest.mark.parametrize(
    "raised, code, message",
    [(None, 0, ""), (SignpostError("no [/x]"), 2, "error: no [/x]\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_how_it_ends(monkeypatch, capsys, raised, code, message):
    def cli_evaluate():
        if raised:
            raise raised

    stand_in = ModuleType("lm_eval.__main__")
    stand_in.cli_evaluate = cli_evaluate
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", stand_in)
    monkeypatch.setitem(sys.modules, "runtime.lm_eval.model", ModuleType("runtime.lm_eval.model"))
    assert main() == code
    assert capsys.readouterr().err == message
