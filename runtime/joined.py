"""Attention of several rows over tokens that all of them come behind, and over their own, on the GPU.

Both are attended apart, so that the tokens before are read once for all rows, and where queries are few in stretches,
so that all multiprocessors have some; `cuda/join.cuh` adds up what comes of it by the sums of exponentials.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from runtime import jit
from runtime.exact import HALVES
from runtime.jit import Unit
from runtime.pack_units import INPUTS
from runtime.pieces import PIECE

THREADS = 256
ROWS = 128  # of queries that a block of flash attention takes


class _Params(ctypes.Structure):
    """`signpost::JoinParams`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "of_before", "own", "of_own", "out")),
        *((name, ctypes.c_int) for name in ("stretches", "t", "m", "h", "pieces")),
    )


class Bounds(NamedTuple):
    """Stretches into which the tokens before are divided: where their queries and keys begin and end, int32
    [stretches + 1]. Made once for all layers of a pass."""

    queries: Tensor
    keys: Tensor

    @classmethod
    def of(cls, count: Tensor, tokens: int, h_q: int) -> "Bounds":
        """For so many query tokens of all rows; count: tokens before, int32 [1], read on the device."""
        stretches = stretches_for(tokens * h_q, count.device)
        ends = torch.arange(stretches + 1, device=count.device)
        return cls((tokens * ends).int(), (count * ends // stretches).int())


def stretches_for(rows: int, device: torch.device) -> int:
    """As many as leave each multiprocessor some of so many query rows."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, processors // -(-rows // ROWS))


def has_flash(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attention_behind` takes numbers of this type there."""
    return device.type == "cuda" and dtype in HALVES


def attention_behind(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, bounds: Bounds, scaling: float
) -> Tensor:
    """Attention of m tokens of each row over tokens that all rows come behind, and their own: [b, m, h_q, d].

    q [b, h_q, m, d], k and v [b, h_kv, m, d]; keys, values [room, h_kv, d], of which the first ones are there, as
    many as `bounds` says on the device: so it can be captured in a graph. Where `has_flash` says so.
    """
    (b, _, m, _), rows, stretches = q.shape, q.transpose(1, 2), len(bounds.queries) - 1
    flat = rows.flatten(0, 1).repeat(stretches, 1, 1)
    before, of_before = _flash(flat, keys, values, bounds, (b * m, keys.shape[0]), False, scaling)
    own, of_own = _flash(rows, k.transpose(1, 2), v.transpose(1, 2), None, (m, m), True, scaling)
    return _join(before, of_before, own, of_own)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, most: tuple[int, int], causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Flash attention with logarithms of the sums of exponentials, float32: of a batch [b, tokens, heads, d] and [b,
    h_q, tokens], or with bounds of [all tokens, heads, d] and [h_q, all tokens]."""
    ends = (None, None) if bounds is None else (bounds.queries, bounds.keys)
    found = torch.ops.aten._flash_attention_forward(q, k, v, *ends, *most, 0.0, causal, False, scale=scaling)
    return found[0], found[1]


def _join(before: Tensor, of_before: Tensor, own: Tensor, of_own: Tensor) -> Tensor:
    """Attention over several stretches of keys [stretches * b * m, h, d] and over others [b, m, h, d], with their sums
    as of `_flash`, as one [b, m, h, d]."""
    (b, m, h, d), out = own.shape, torch.empty_like(own, memory_format=torch.contiguous_format)
    given = [x.contiguous() for x in (before, of_before, own, of_own)]
    pieces = d * own.itemsize // PIECE
    made = _Params(*(x.data_ptr() for x in (*given, out)), before.shape[0] // (b * m), b * m, m, h, pieces)
    kernel = jit.load(join_unit(own.dtype), own.device).kernel("join")
    kernel.launch((-(-b * m * h * pieces // THREADS), 1, 1), THREADS, 0, made, jit.current_stream(own.device))
    return out


def join_unit(dtype: torch.dtype) -> Unit:
    """The unit of `join` for numbers of two bytes."""
    source = f"""#include "join.cuh"
using Layers = signpost::JoinParams;
static_assert(sizeof(Layers) == {ctypes.sizeof(_Params)}, "runtime/joined.py has the same parameters");
extern "C" __global__ void __launch_bounds__({THREADS})
join(const __grid_constant__ Layers layers) {{ signpost::join<signpost::{INPUTS[dtype]}, {THREADS}>(layers); }}
"""
    return Unit("join", source, ("join",))
