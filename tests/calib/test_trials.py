"""Benchmarks of ideas and of errors that may predict damage: their arithmetic, and whole runs on the CPU."""

import json
import sys

import pytest
import torch

from benchmarks import joint_codes, objectives


def test_points_are_found_again():
    points = torch.tensor([[-3.0, 0.0], [0.0, 2.0], [4.0, -1.0]])
    x = points.repeat(50, 1)
    book, error = joint_codes.kmeans(x, torch.ones_like(x), 3)
    assert error < 1e-12
    assert torch.equal(book[joint_codes.nearest(points, book)], points)


def test_means_are_weighted():
    x, weight = torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [1.0]])
    assert joint_codes.kmeans(x, weight, 1)[0].item() == pytest.approx(0.25)


@pytest.mark.parametrize("kind", joint_codes.KINDS)
def test_many_points_leave_every_number_in_its_place(kind):
    """More points than different pairs: next to nothing is lost, so what was split is joined as it was."""
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).repeat(8, 1, 1)
    fit = joint_codes.Fit(x, torch.ones_like(x), kind, 3 if kind in joint_codes.JOINT else 6)
    assert (fit.quantized(x) - x).abs().mean() < 0.05
    assert torch.equal(fit._join(fit._split(x)), x)


def test_correlations_by_hand():
    rows = [
        {"layer": layer, "side": side, "damage": d, "numbers": d, "output": -d, "fisher": d * (10 if layer else 1)}
        for layer in (0, 1)
        for side in ("key", "value")
        for d in (1.0 + layer, 2.0 + layer, 4.0 + layer)
    ]
    found = objectives.correlations(rows)
    assert found["numbers"] == {"all": 1, "key": 1, "value": 1, "mean": 1}
    assert found["output"] == {"all": -1, "key": -1, "value": -1, "mean": -1}
    assert found["fisher"]["mean"] == 1 > found["fisher"]["all"]


def run(module, options, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module.__name__, *(f"--{name}={value}" for name, value in options.items())])
    module.main()
    return json.loads(options["out"].read_text())


def test_joint_codes_of_a_model(saved_model, text_file, tmp_path, monkeypatch, capfd):
    options = {"model": saved_model, "data": text_file, "eval": text_file, "device": "cpu", "out": tmp_path / "x.json"}
    options |= {"samples": 1, "seqlen": 96, "tokens": 96, "context": 96}
    rows = run(joint_codes, options, monkeypatch)["rows"]
    assert len(rows) == 21
    for kind in (*joint_codes.KINDS, joint_codes.FEEDBACK):
        assert rows[f"{kind}, 1"]["kl_mean"] > rows[f"{kind}, 3"]["kl_mean"] > 0
        assert rows[f"{kind}, 1"]["error"] > rows[f"{kind}, 3"]["error"] > 0
    assert capfd.readouterr().out.count("\n|") == 22


def test_objectives_of_a_table(calib, saved_model, text_file, tmp_path, monkeypatch, capfd):
    small = ["candidates=plain", "candidates.bins=512", "candidates.fillings=[{t:16,sinks:1}]"]
    table = tmp_path / "two.table"
    made = calib(
        "model=local", f"model.path={saved_model}", "model.name=two", *small, "candidates.tokens=96", "seqlen=96",
        "samples=2", f"data.path={text_file}", "eval=none", "budget=3bits@1K", f"table={table}",
        f"out={tmp_path / 'b'}",
    )  # fmt: skip
    assert made.code == 0, made.err
    options = {"model": saved_model, "data": text_file, "table": table, "options": " ".join(small), "tokens": 96}
    found = run(objectives, options | {"device": "cpu", "out": tmp_path / "x.json"}, monkeypatch)
    assert all(row["damage"] > 0 and row["fisher"] > 0 and row["output"] > 0 for row in found["rows"])
    assert found["correlations"]["numbers"]["mean"] > 0.8  # more bits, less of all errors
    assert "Fisher over damage" in capfd.readouterr().out
