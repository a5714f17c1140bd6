"""Memory that decode steps share."""

from copy import deepcopy

import pytest
import torch

from runtime import KVCache
from runtime.attention import PagedAttention, Workspace
from tests.formats import kivi, random_bundle


def test_steps_of_all_sizes_have_the_same_memory():
    work = Workspace(torch.device("cpu"))
    first, other, none = work.take("a", 10), work.take("b", 7), work.take("c", 0)
    assert [x.numel() for x in (first, other, none)] == [10, 7, 0]
    assert work.take("a", 5).data_ptr() == first.data_ptr() != other.data_ptr()


def test_more_memory_leaves_what_is_held():
    work = Workspace(torch.device("cpu"))
    small = work.take("a", 4).fill_(3.0)
    large = work.take("a", 1 << 20).fill_(5.0)
    assert (small == 3).all()
    assert work.take("a", 4).data_ptr() == large.data_ptr()


def test_a_copy_has_none():
    work = Workspace(torch.device("cpu"))
    work.take("a", 1 << 20)
    assert deepcopy(work)._memory == {}
    assert work.take("a", 1).untyped_storage().nbytes() == 4 << 20


@pytest.mark.parametrize("first", [kivi(2), None], ids=["packed", "full precision"])
def test_layers_of_a_cache_share_one(first, monkeypatch):
    monkeypatch.setattr(PagedAttention, "_device", staticmethod(lambda device: torch.device("cpu")))
    monkeypatch.setattr(PagedAttention, "_processors", lambda self: 4)
    bundle = random_bundle([first, kivi(2)], 8, 2, 128)
    kv = KVCache(bundle, 2, 300, torch.float16)
    steps = [layer.step(8) for layer in kv.layers]
    assert all(step.kernels.workspace is kv.room.workspace for step in steps)
