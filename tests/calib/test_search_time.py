"""The benchmark of a whole search: it runs what calib runs, and every stage is on the clock."""

import json
import sys

import pytest
import torch

from benchmarks import search_time
from calib.allocation import damage, job

SMALL = ["--shape=small", "--layers=1", "--samples=2", "--seqlen=130", "--tokens=200", "--candidates=plain"]
COLLECT = ["collect, pass 1: ranges, thresholds", "merge", "fit", "collect, pass 2: signposts"]
STAGES = ["checksum of the weights", *COLLECT, "measure", "save the table", "solve", "save the bundle"]


def test_a_search_and_another_budget(tmp_path, monkeypatch, capsys):
    text, out = tmp_path / "text.bin", tmp_path / "found.json"
    text.write_bytes(bytes(range(256)) * 2)
    monkeypatch.setattr(search_time, "command_seconds", lambda *given: 1.5)
    before = job.measure, damage._Passes.damage
    options = [*SMALL, "--budget", "3bits@4K", "--other", "4bits@4K", "--text", str(text), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["search_time", *options])
    search_time.main()
    found = json.loads(out.read_text())
    assert (job.measure, damage._Passes.damage) == before
    assert found == json.loads(capsys.readouterr().out)
    assert str(tmp_path) not in out.read_text()
    # 8 variants of each side, and 4 more fillings of each, on the one window of 130 tokens that 200 hold.
    assert found["measured_passes"] == 2 * (8 + 4)
    assert found["measured_on"] == "1 x 130 tokens of the calibration text"
    assert found["text"] == "bytes of text.bin"
    assert found["passes_over_the_text"] >= 2
    assert list(found["stages_s"]) == STAGES
    assert found["bits"] <= 3
    assert 3 < found["another"]["bits"] <= 4
    assert found["another"]["command_s"] == 1.5
    assert found["table_bytes"] > 10_000


def test_bytes_are_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdef")
    ids, text = search_time.token_ids(path, 2, 2, 256)
    assert (ids.tolist(), ids.dtype, text) == ([[97, 98], [99, 100]], torch.int64, "bytes of text.txt")
    for samples, vocabulary in ((4, 256), (2, 255)):
        with pytest.raises(SystemExit, match=r"bytes are needed .* and it has .* the vocabulary must have 256 tokens"):
            search_time.token_ids(path, samples, 2, vocabulary)


def test_random_tokens_are_of_the_vocabulary():
    ids, text = search_time.token_ids(None, 3, 500, 7)
    assert (ids.shape, text, ids.unique().tolist()) == ((3, 500), "random tokens", list(range(7)))
