"""Stages on disk are there as a whole or not at all, and what is not what its name says is refused with the way out."""

import json
import shutil

import pytest
import torch

from calib import store as module
from calib.store import StageError, Store

KEY = {"model": "m", "sees": [[None, {"fit": "X"}]]}
LAYERS = [{"0.tails.low": torch.arange(6.0).view(2, 3)}, {"1.sum.lanes": torch.tensor([1.5], dtype=torch.float64)}]


def same(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "work")


def folder(store):
    (path,) = store.folder.iterdir()
    return path


def test_what_was_put_is_got_by_its_key_alone(store):
    assert store.get(KEY) is None
    store.put(KEY, LAYERS)
    assert same(Store(store.folder).get(dict(reversed(KEY.items()))), LAYERS)
    assert store.get(KEY | {"model": "other"}) is None
    assert sorted(path.name for path in folder(store).iterdir()) == [
        "layer-000.safetensors",
        "layer-001.safetensors",
        "stage.json",
    ]


def test_the_last_part_counts_and_others_keep_theirs(store):
    assert store.get_part(KEY, "rank0of2") is None
    for done in (1, 12):
        store.put_part(KEY, "rank0of2", done, [{"x": torch.tensor([done])}])
    store.put_part(KEY, "rank1of2", 3, LAYERS)
    done, layers = store.get_part(KEY, "rank0of2")
    assert (done, layers[0]["x"].item()) == (12, 12)
    assert len(list(store.folder.iterdir())) == 2
    store.drop_parts(KEY, "rank0of2")
    assert store.get_part(KEY, "rank0of2") is None
    assert store.get_part(KEY, "rank1of2")[0] == 3


def test_a_kill_between_saving_and_forgetting_leaves_the_newer_part(store, monkeypatch):
    store.put_part(KEY, "r", 1, LAYERS)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
    store.put_part(KEY, "r", 2, LAYERS)
    assert store.get_part(KEY, "r")[0] == 2


def test_a_write_that_fails_leaves_nothing(store, monkeypatch):
    def refuse(path, data):
        raise OSError("no space left")

    monkeypatch.setattr(module, "_write_file", refuse)
    with pytest.raises(OSError, match="no space left"):
        store.put(KEY, LAYERS)
    assert list(store.folder.iterdir()) == []


def test_clearing_takes_what_was_asked_for_and_leaves_the_rest(store):
    store.put(KEY, LAYERS)
    store.put_part(KEY, "r", 1, LAYERS)
    other = Store(store.folder)
    other.put(KEY | {"model": "other"}, LAYERS)
    assert store.kept
    assert not store.clear()
    assert not store.kept
    assert same(other.get(KEY | {"model": "other"}), LAYERS)
    assert other.clear()
    assert not store.folder.exists()


def change_record(path, **changes):
    record = json.loads((path / "stage.json").read_text())
    (path / "stage.json").write_text(json.dumps(record | changes))


def flip_a_byte(path):
    file = path / "layer-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: change_record(p, version=0), f"it is of version 0, this Signpost reads version {module.VERSION}"),
        (lambda p: change_record(p, key={"model": "x"}), "it belongs to another run: its settings or inputs differ"),
        (lambda p: (p / "stage.json").write_text("{"), "stage.json cannot be read"),
        (lambda p: (p / "stage.json").unlink(), "there is no stage.json in it"),
        (lambda p: (p / "layer-001.safetensors").unlink(), "layer-001.safetensors is missing"),
        (flip_a_byte, "layer-000.safetensors was altered since it was written"),
    ],
)
def test_statistics_of_another_run_or_version_are_refused(store, damage, reason):
    store.put(KEY, LAYERS)
    path = folder(store)
    damage(path)
    with pytest.raises(StageError, match=f"{path.name} cannot be used: {reason}.*Delete that folder"):
        store.get(KEY)
    shutil.rmtree(path)
    assert store.get(KEY) is None
