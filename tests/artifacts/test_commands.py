"""`python -m artifacts`: what it prints, its exit codes, its errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from artifacts import load
from artifacts.__main__ import COMMANDS, main
from artifacts.commands import show
from tests.artifacts.samples import kvquant, mixed_bundle, sample_bundle

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = sample_bundle(layers=(kvquant(3), kvquant(3), kvquant(4)))
HOSTILE = "[red]not red[/] \x1b]0;title\x07\n\u202e<b>"


@pytest.fixture
def saved(tmp_path):
    return str(BUNDLE.save(tmp_path / "bundle"))


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command in this process, 200 columns wide: exit code, what it printed, and that as JSON where it is."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        data = json.loads(out) if "--json" in arguments else None
        return SimpleNamespace(code=code, out=out, err=err, data=data)

    return run


def test_show_names_formats_and_sizes(saved, command):
    out = command("show", saved)
    assert (out.code, out.err) == (0, "")
    for text in ("LlamaForCausalLM", "0-1", "2", "dense bits=4", "sparse fraction=0.01", "131072", "loss_increase"):
        assert text in out.out


def test_show_of_layers_in_full_precision(tmp_path, command):
    out = " ".join(command("show", mixed_bundle().save(tmp_path / "b")).out.split())
    for text in ("full precision, the newest", "16.000", "512 tokens in 3 of 4 layers", "capped at 50"):
        assert text in out


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_tables_cut_nothing_off(saved, tmp_path, command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    odd = {name: -BUNDLE.tensors[name] for name in ("rope.inv_freq", "layers.0.key.upper")}
    other = replace(BUNDLE, tensors=dict(BUNDLE.tensors) | odd, recipe="another" * 30).save(tmp_path / "other")
    for words in (("show", other), ("diff", saved, other), ("verify", other)):
        out = command(*words).out
        assert "…" not in out
        assert max(len(line) for line in out.splitlines() if line[0] in "│┃┌┏") <= int(columns)
    cells = [
        re.sub(r"[^a-z]", "", line.split("│")[2]) for line in command("show", other).out.splitlines() if "│" in line
    ]
    assert "another" * 30 in "".join(cells)


def test_the_hash_of_weights_is_not_one_of_their_values(saved, command):
    assert re.search(f"weights' names and shapes │ {BUNDLE.model.weights_hash}", command("show", saved).out)


def test_show_json_agrees_with_the_geometry(saved, command):
    facts, geometry = command("show", saved, "--json").data, BUNDLE.geometry
    assert [(g["first"], g["last"]) for g in facts["formats"]] == [(0, 1), (2, 2)]
    assert facts["sizes"][0] == {"tokens": 4096, "bits": geometry.bits(4096), "bytes": geometry.cache_bytes(4096)}
    assert facts["bytes_per_token"] * 64 == sum(side.page_bytes for pair in geometry.layers for side in pair)
    assert facts["tensors"]["bytes"] == sum(tensor.nbytes for tensor in BUNDLE.tensors.values())
    assert facts["calibration"] == BUNDLE.calibration
    assert facts["evaluation"] == BUNDLE.evaluation


def test_show_of_hostile_texts_prints_no_markup_and_no_control_characters(tmp_path, command):
    model = replace(BUNDLE.model, name=HOSTILE)
    path = replace(BUNDLE, model=model, recipe=HOSTILE, calibration={HOSTILE: HOSTILE}).save(tmp_path / "b")
    out = command("show", path).out
    assert "[red]not red[/]" in out
    assert not [c for c in out if not c.isprintable() and c != "\n"]


def test_bundle_without_evaluation_or_provenance(tmp_path, command):
    out = command("show", replace(BUNDLE, evaluation=None, calibration={}).save(tmp_path / "b"))
    assert "not evaluated" in out.out
    assert "nothing is known of it" in out.out


def test_verify_of_a_sound_bundle(saved, command):
    assert command("verify", saved).out == f"{saved}: sound ({len(BUNDLE.tensors)} tensors)\n"
    assert command("verify", saved, "--json").data["sound"] is True


def test_verify_lists_every_finding(tmp_path, command):
    odd = {name: -BUNDLE.tensors[name] for name in ("rope.inv_freq", "layers.0.key.upper")}
    path = replace(BUNDLE, tensors=dict(BUNDLE.tensors) | odd).save(tmp_path / "b")
    out = command("verify", path)
    assert out.code == 1
    assert "rope.inv_freq" in out.out
    assert "layers.0.key.lower" in out.out
    assert [finding["name"] for finding in command("verify", path, "--json").data["findings"]] == [
        "rope.inv_freq",
        "layers.0.key.lower",
    ]


def test_diff_of_the_same(saved, tmp_path, command):
    other = load(saved).save(tmp_path / "other")
    assert (command("diff", saved, other).out, command("diff", saved, other).code) == ("the same\n", 0)


def test_diff_names_entries_and_tensors(saved, tmp_path, command):
    name = "layers.1.key.scale"
    scale = BUNDLE.tensors[name].copy()
    scale[0, 3] += 0.5
    other = replace(
        BUNDLE,
        recipe="another",
        layers=(kvquant(3), kvquant(3), kvquant(3)),
        tensors=dict(BUNDLE.tensors)
        | {name: scale}
        | {f"layers.2.{s}.signposts": np.linspace(0, 1, 8, dtype=np.float32) for s in ("key", "value")},
        evaluation=None,
    ).save(tmp_path / "other")
    result = command("diff", saved, other, "--json")
    assert result.code == 1
    fields = {change["path"]: (change["old"], change["new"]) for change in result.data["fields"]}
    assert fields == {
        "recipe": (BUNDLE.recipe, "another"),
        "layers.2.key.dense.bits": (4, 3),
        "layers.2.value.dense.bits": (4, 3),
        "evaluation": (BUNDLE.evaluation, "absent"),
    }
    tensors = {change["name"]: change for change in result.data["tensors"]}
    assert tensors.keys() == {name, "layers.2.key.signposts", "layers.2.value.signposts"}
    assert tensors["layers.2.key.signposts"]["new"] == "float32 [8]"
    norm = np.linalg.norm(BUNDLE.tensors[name].astype(np.float64))
    assert tensors[name]["count"] == 1
    assert tensors[name]["largest"] == pytest.approx(0.5, rel=1e-6)
    assert tensors[name]["relative"] == pytest.approx(0.5 / norm, rel=1e-6)
    table = command("diff", saved, other).out
    assert "4 entries differ" in table
    assert "3 tensors differ" in table


def test_diff_tells_true_from_one(saved, tmp_path, command):
    other = replace(BUNDLE, calibration=dict(BUNDLE.calibration) | {"seed": False}).save(tmp_path / "other")
    assert command("diff", saved, other, "--json").data["fields"] == [
        {"path": "calibration.seed", "old": 0, "new": False}
    ]


def test_upgrade_writes_the_card_once(saved, command):
    (Path(saved) / "README.md").unlink()  # as Signpost wrote bundles before there were cards
    assert command("upgrade", saved).out == f"{saved}: schema 1 -> 1, with card\n"
    assert (Path(saved) / "README.md").exists()
    before = {path.name: path.stat().st_mtime_ns for path in Path(saved).iterdir()}
    assert command("upgrade", saved).out == f"{saved}: up to date already\n"
    assert before == {path.name: path.stat().st_mtime_ns for path in Path(saved).iterdir()}


def test_upgrade_to_another_folder(saved, tmp_path, command):
    out = command("upgrade", saved, "--out", tmp_path / "new", "--json")
    assert out.data == {"path": str(tmp_path / "new"), "from_version": 1, "to_version": 1, "written": True}
    assert command("diff", saved, tmp_path / "new").code == 0


@pytest.mark.parametrize("name", ["show", "verify", "upgrade"])
def test_errors_are_one_line_and_exit_code_2(tmp_path, command, name):
    out = command(name, tmp_path / "no\nwhere", "--json")
    assert (out.code, out.err.count("\n")) == (2, 1)
    assert out.err.startswith("error: no bundle at ")
    assert f"error: {out.data['error']}\n" == out.err
    assert command(name, tmp_path).out == ""


def test_system_errors_are_one_line_too(saved, command, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", saved)

    monkeypatch.setattr("os.open", refused)
    out = command("show", saved)
    assert (out.code, out.err) == (2, f"error: [Errno 13] Permission denied: {saved!r}\n")


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_what_cannot_be_printed_is_one_line_too(saved, how):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "artifacts", "show", saved, *how],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_ctrl_c(saved, command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "run", interrupted)
    out = command("show", saved)
    assert (out.code, out.err) == (130, "interrupted\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_the_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as info:
        main([name, "--help"])
    assert info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in text
    assert "2 with one line on what is wrong" in text


@pytest.mark.parametrize("arguments", [[], ["shw"], ["show"], ["diff", "one"], ["show", "x", "--jsn"]])
def test_wrong_command_line(arguments):
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2


def test_as_a_module(saved):
    done = subprocess.run(
        [sys.executable, "-m", "artifacts", "verify", saved], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{saved}: sound")


def test_library_does_not_import_rich():
    code = "import artifacts, sys; print([name for name in ('rich', 'huggingface_hub') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"
