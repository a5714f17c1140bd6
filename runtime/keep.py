"""What of prompts stays in full precision goes to its places in a cache on the GPU, of many sides in one launch."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from runtime import jit, pieces
from runtime.jit import KernelError, Unit

AT_ONCE, THREADS = 128, 256  # sides of a launch, whose parameters have 32764 bytes; of a block


class _Side(ctypes.Structure):
    """`signpost::KeepSide`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("from", "to")),
        *((name, ctypes.c_longlong) for name in ("row", "token", "head")),
    )


class _Params(ctypes.Structure):
    """`signpost::KeepParams`."""

    _fields_ = (
        ("side", _Side * AT_ONCE),
        ("tokens", ctypes.c_void_p),
        ("h_kv", ctypes.c_int),
        ("pieces", ctypes.c_int),
    )


def keep_unit() -> Unit:
    """The unit of `keep`: the same for all formats, models and types of numbers."""
    source = f"""#include "keep.cuh"
using Layers = signpost::KeepParams<{AT_ONCE}>;
static_assert(sizeof(Layers) == {ctypes.sizeof(_Params)}, "runtime/keep.py has the same parameters");
extern "C" __global__ void __launch_bounds__({THREADS})
keep(const __grid_constant__ Layers layers) {{ signpost::keep<{THREADS}>(layers); }}
"""
    return Unit("keep", source, ("keep",))


def keep(sides: Sequence[tuple[Tensor, Tensor]], tokens: Tensor) -> None:
    """Copies tokens of prompts to where they are kept, the same ones of each side. Queued on PyTorch's current stream.

    sides: numbers [rows, n, h_kv, d] and where they go, [places, h_kv, d] contiguous, all of one dtype, h_kv, d and GPU
    tokens: int32 [count, 3], contiguous: of each its row, its number and its place

    Raises KernelError where heads are not contiguous or do not begin at multiples of 16 bytes, and copies nothing.
    """
    made = [_side(x, to) for x, to in sides]
    if not made or not len(tokens):
        return
    h_kv, d = sides[0][1].shape[1:]
    kernel, stream = jit.load(keep_unit(), tokens.device).kernel("keep"), jit.current_stream(tokens.device)
    for first in range(0, len(made), AT_ONCE):
        some = made[first : first + AT_ONCE]
        params = _Params(tokens=tokens.data_ptr(), h_kv=h_kv, pieces=d * sides[0][1].itemsize // pieces.PIECE)
        for i, side in enumerate(some):
            params.side[i] = side
        kernel.launch((len(tokens), len(some), 1), THREADS, 0, params, stream)


def _side(x: Tensor, to: Tensor) -> _Side:
    strides, place = pieces.strides(x), pieces.strides(to)
    alike = x.dtype == to.dtype and x.shape[2:] == to.shape[1:] and to.is_contiguous()
    if not alike or strides is None or place is None:
        raise KernelError(
            f"numbers {x.dtype} {tuple(x.shape)} with strides {x.stride()} for {to.dtype} {tuple(to.shape)}: heads "
            "must be alike, contiguous and begin at multiples of 16 bytes; make them contiguous"
        )
    return _Side(x.data_ptr(), to.data_ptr(), *strides)
