"""The unpack kernel on the CPU (tests/cuda/emulator.h) against what the torch codec decodes. Needs g++, no GPU."""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import Dense, Format, LowRank, Rope, Sparse, Window
from runtime import KVCache, joined
from runtime.jit import KernelError
from runtime.unpack import Unpacker, unpack_unit
from tests import standins
from tests.cuda.emulated import stand_in
from tests.formats import CASES, Case, cache_numbers
from tests.packing import check_unpacked

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def emulated(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(Unpacker, "processors", 3)  # blocks take several items each


def filled(case, dtype, lengths, offset=7):
    """A cache of one layer, sequences of so many tokens."""
    kv = KVCache(case.bundle(), len(lengths), None, dtype)
    (layer,) = kv.layers
    for i, n in enumerate(lengths):
        if n:
            x = torch.from_numpy(cache_numbers((2, case.h_kv, n, case.d), i)).to(dtype)
            layer.append(i, x[0], x[1], offset + 1000 * i)
    return kv, layer


def unpacked(kv, layer, sequence, room, dtype):
    """Tokens [2, room, h_kv, d], those behind the sequence NaN."""
    out = torch.full((2, room, *layer.key.buffer.shape[1:]), torch.nan, dtype=dtype)
    which = torch.tensor([sequence, layer.lengths[sequence], layer.offsets[sequence]], dtype=torch.int32)
    Unpacker(layer.key, layer.value, kv.rotation).run(which, out[0], out[1])
    return out


# One in two: tests/gpu/test_unpack.py has all of them.
CHOSEN = [*range(0, len(CASES), 2)]


@pytest.mark.parametrize("index", CHOSEN, ids=[CASES[i].name for i in CHOSEN])
def test_numbers_of_formats(emulated, index):
    """Of all types of numbers, two kv heads at most."""
    case = CASES[index]
    heads = min(2, case.h_kv)
    check(replace(case, h_q=case.h_q // case.h_kv * heads, h_kv=heads), DTYPES[index % 3])


def check(case, dtype):
    """Two sequences, one of them all exact; pages lie in another order than tokens."""
    key, value = case.key, case.value
    longest = max(f.window.sinks + f.window.recent + f.t for f in (key, value)) + max(key.t, value.t) + 3
    kv, layer = filled(case, dtype, (longest, 3))
    for i, n in enumerate(layer.lengths):
        got = unpacked(kv, layer, i, n + 2, dtype)
        check_unpacked(layer, i, got)


@pytest.mark.parametrize(("t", "d"), [(16, 128), (128, 64), (128, 256), (96, 64), (80, 128)])
def test_pages_of_other_sizes(emulated, t, d):
    """Of fewer tokens than a block takes at once, of more, and of no multiple of these."""
    key = Format(t, Dense(3, "channel", 16), Sparse(0.02, "channel", "online"), Window(1, 5), "pre_rope")
    value = Format(t, Dense(4, "token"), window=Window(1, 5), lowrank=LowRank(2, 1))
    check(Case("pages", key, value, 2, 2, d, Rope(d, "half", 1.0, "default")), torch.float16)


def test_numbers_that_are_none(emulated):
    """In a window they stay what they are, and parts that hold nothing else do not become zeros."""
    own = torch.full((1, 1, 1, 64), torch.nan, dtype=torch.bfloat16)
    sums = torch.zeros(1, 1, 1)
    assert joined._join(own[0], sums[0], own, sums).isnan().all()


def test_what_is_not_written_to(emulated):
    kv, layer = filled(CASES[0], torch.float16, (100,))
    unpacker, which = Unpacker(layer.key, layer.value, kv.rotation), torch.tensor([0, 100, 0], dtype=torch.int32)
    shape = layer.key.buffer.shape[1:]
    right = torch.empty(2, 100, *shape, dtype=torch.float16)
    for wrong in (right[0].float(), right[0, :, :, 1:], torch.empty(100, shape[0], 2 * shape[1]).half()[..., ::2]):
        with pytest.raises(KernelError, match=r"keys .* is unpacked to torch\.float16"):
            unpacker.run(which, wrong, right[1])
    for wrong in (which.long(), which[:2]):
        with pytest.raises(KernelError, match=r"contiguous int32 \[3\]"):
            unpacker.run(wrong, *right)


def test_what_has_no_kernel():
    kv, layer = filled(CASES[0], torch.float32, (3,))
    sides = layer.key.geometry, layer.value.geometry
    with pytest.raises(KernelError, match=r"numbers of torch\.float64"):
        unpack_unit(*sides, kv.rotation.rope, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stretches, b, m, h, d", [(1, 1, 1, 1, 64), (3, 2, 5, 3, 64), (4, 1, 9, 2, 256)])
def test_joined_attention(dtype, stretches, b, m, h, d, monkeypatch):
    """Parts by their sums of exponentials, those without keys not at all; rounded once."""
    stand_in(monkeypatch)
    torch.manual_seed(d)
    before, own = torch.randn(stretches * b * m, h, d).to(dtype), torch.randn(b, m, h, d).to(dtype)
    of_before, of_own = 30 * torch.randn(h, stretches * b * m), 30 * torch.randn(b, h, m)
    if stretches > 1:
        of_before.view(h, stretches, b * m)[:, 1] = torch.inf
        before.view(stretches, b * m, h, d)[1] = torch.nan
    out = joined._join(before, of_before, own, of_own)
    before = before.nan_to_num()
    exact = standins.join(before.double(), of_before.double(), own.double(), of_own.double())
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6).all()
