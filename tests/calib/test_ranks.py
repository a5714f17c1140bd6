"""What ranks refuse: too many of them, different settings, a rank that is gone, more ranks than GPUs."""

import pytest
import torch

from calib import devices, ranks
from calib.devices import Place, place
from calib.ranks import RankError, Ranks
from runtime.hf import ModelLoadError

CPU = torch.device("cpu")


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Ranks.join(CPU)
    assert (alone.rank, alone.world, alone.first) == (0, 1, True)
    assert alone.gather("x") == ["x"]
    assert alone.share("x") == "x"
    assert alone.bring({"x": torch.ones(1)}, 0) == []
    alone.agree({"configuration": "c"})


def test_more_ranks_than_lanes_are_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "17", "RANK": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="make 17 ranks, at most 16 can share the samples"):
        Ranks.join(CPU)


def test_ranks_with_different_settings_are_refused_by_name(monkeypatch):
    both = [{"configuration": "bits=3", "versions": "v"}, {"configuration": "bits=4", "versions": "v"}]
    monkeypatch.setattr(Ranks, "gather", lambda self, value: both)
    with pytest.raises(
        RankError, match=r"the ranks have different configuration \(bits=3; bits=4\): start all of them by"
    ):
        Ranks(0, 2).agree(both[0])
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [both[0]] * 2)
    Ranks(1, 2).agree(both[0])


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("all_gather_object", lambda r: r.gather(1)),
        ("broadcast_object_list", lambda r: r.share(1)),
        ("all_gather_object", lambda r: r.bring({"x": torch.ones(1)}, 0)),
    ],
)
def test_a_rank_that_is_gone_is_said(monkeypatch, function, call):
    def broken(*args, **kwargs):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234\nstack")

    monkeypatch.setattr(ranks.dist, function, broken)
    message = (
        r"rank 1 lost the others \(Connection closed by peer .*1234\): .* The same command continues where this one"
    )
    with pytest.raises(RankError, match=message):
        call(Ranks(1, 2))


def machine(monkeypatch, gpus):
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("name", "rank", "ranks", "expected"),
    [
        ("auto", 3, 4, Place(torch.device("cuda", 3))),
        ("cuda", 1, 2, Place(torch.device("cuda", 1))),
        ("cpu", 1, 2, Place(CPU)),
        ("split", 0, 1, Place(torch.device("cuda", 0), (0, 1, 2, 3))),
        ("split", 1, 2, Place(torch.device("cuda", 2), (2, 3))),
    ],
)
def test_every_rank_has_its_gpus(monkeypatch, name, rank, ranks, expected):
    machine(monkeypatch, 4)
    assert place(name, {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}) == expected


@pytest.mark.parametrize(("name", "gpus", "ranks"), [("cuda", 2, 3), ("auto", 1, 2), ("split", 0, 1)])
def test_fewer_gpus_than_ranks_are_refused(monkeypatch, name, gpus, ranks):
    machine(monkeypatch, gpus)
    with pytest.raises(
        ModelLoadError, match=f"device={name}: {ranks} ranks on this machine, but torch sees {gpus} CUDA"
    ):
        place(name, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)})
