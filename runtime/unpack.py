"""All tokens of a sequence as the model's numbers, on the GPU: what prompts behind cached tokens attend to.

One launch of `cuda/unpack.cuh` a layer: pages are decoded, keys turned by RoPE, exact tokens copied. Queued on
PyTorch's current stream, and captured in graphs: which sequence it is, and how long, is read on the device.
"""

import ctypes
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from artifacts import Bundle, PageGeometry, Rope
from runtime import jit, pieces
from runtime.codec import Codec
from runtime.fragments import of_heads, pieces_of_matrix
from runtime.jit import KernelError, Unit
from runtime.pack import check_ids
from runtime.pack_units import INPUTS
from runtime.parts import banded, dense, rotate
from runtime.rope import Rotation
from runtime.side import Side
from runtime.units import side_struct

# Threads of a block, and blocks of both sides that a multiprocessor is to hold: of formats with matrices, which a warp
# reads once for more tokens, and of others.
MATRICES, OTHERS = (256, 2), (128, 6)


class _Side(ctypes.Structure):
    """`signpost::UnpackSide`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "records", "segments", "table", "sinks", "window")),
        *((name, ctypes.c_void_p) for name in ("values", "bands", "scale", "zero", "mean", "unrotation")),
        *((name, ctypes.c_void_p) for name in ("sketch", "outlier_sketch", "outlier_mask", "out")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "out_token", "out_head")),
        *((name, ctypes.c_int) for name in ("window_tokens", "capacity_pages", "capacity_segments")),
    )


class _Params(ctypes.Structure):
    """`signpost::UnpackParams`."""

    _fields_ = (
        ("key", _Side),
        ("value", _Side),
        ("which", ctypes.c_void_p),
        ("inv_freq", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
    )


class Unpacker:
    """Keys and values of one layer's sequences as numbers. Makes its tables and loads its kernel once.

    key, value: of the layer, on a CUDA device. rotation: the model's rotary embedding. Raises KernelError for head
    dimensions and dtypes without a kernel.
    """

    def __init__(self, key: Side, value: Side, rotation: Rotation):
        self.key, self.value, self.rotation, self.dtype = key, value, rotation, key.buffer.dtype
        self.device = key.codec.device
        unit = unpack_unit(key.geometry, value.geometry, rotation.rope, self.dtype)
        self._kernel = jit.load(unit, self.device).kernel("unpack")
        self._threads, self._blocks = launched(key.geometry, value.geometry)
        self._shared = max(shared_bytes(side.geometry, rotation.rope, self._threads) for side in (key, value))
        self._tables = [_tables(side.codec, self.dtype) for side in (key, value)]
        self._inv_freq = rotation.inv_freq.to(self.device).contiguous()
        self._debug = jit.switch("SIGNPOST_DEBUG")

    @property
    def processors(self) -> int:
        """Multiprocessors of the device."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def run(self, which: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes a sequence's tokens to the first places of keys and values, each [tokens, h_kv, d] of the model's
        dtype, with room for them: keys after RoPE. What is behind them stays as it was.

        which: int32 [3] on the device, read when the kernel runs: the sequence, its tokens, the position of token 0.
        Raises KernelError for other tensors. With SIGNPOST_DEBUG=1, unless a graph is captured, page ids are checked.
        """
        if which.dtype != torch.int32 or which.shape != (3,) or not which.is_contiguous():
            raise KernelError(f"which sequence: contiguous int32 [3], not {which.dtype} {list(which.shape)}")
        if self._debug and not torch.cuda.is_current_stream_capturing():
            self._check(*which.tolist()[:2])
        made = _Params(which=which.data_ptr(), inv_freq=self._inv_freq.data_ptr(), scaling=self.rotation.rope.scaling)
        sides = (("keys", self.key, keys), ("values", self.value, values))
        for i, (name, side, out) in enumerate(sides):
            setattr(made, ("key", "value")[i], self._side(name, side, self._tables[i], out))
        most = max(_items(side.geometry, self._threads, out.shape[0]) for _, side, out in sides)
        blocks = min(most, self._blocks * self.processors // 2)
        if blocks:
            stream = jit.current_stream(self.device)
            self._kernel.launch((blocks, 2, 1), self._threads, self._shared, made, stream)

    def _side(self, name: str, side: Side, tables: dict[str, Tensor], out: Tensor) -> _Side:
        shape, strides = side.geometry.shape, pieces.strides(out)
        if out.dtype != self.dtype or out.shape[1:] != (shape.h_kv, shape.d) or strides is None:
            raise KernelError(
                f"{name} {out.dtype} {tuple(out.shape)} with strides {out.stride()}: a layer of this cache is unpacked "
                f"to {self.dtype} [tokens, {shape.h_kv}, {shape.d}], heads contiguous and at multiples of 16 bytes"
            )
        pool, each = side.pool, pieces.PIECE // out.itemsize
        return _Side(
            heads=pool.heads.data_ptr(), records=pool.records.data_ptr(), segments=pool.segments.data_ptr(),
            table=side.table.data_ptr(), sinks=side.sinks.data_ptr(), window=side.window.data_ptr(),
            **{field: tensor.data_ptr() for field, tensor in tables.items()},
            out=out.data_ptr(), table_stride=side.table.stride(0), out_token=strides[0] * each,
            out_head=strides[1] * each, window_tokens=side.capacity, capacity_pages=pool.capacity,
            capacity_segments=pool.segments.shape[0],
        )  # fmt: skip

    def _check(self, sequence: int, n: int) -> None:
        for side in (self.key, self.value):
            pages = side.format.window.pages(n, side.format.t)
            check_ids(side.table[sequence : sequence + 1, :pages], 0, side.pool.capacity, sequence)


def _tables(codec: Codec, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the kernel for numbers of `dtype` reads of a side's tables, by the names in `_Side`; matrices as fragments
    of bfloat16 pieces (`pieces_of_matrix`)."""
    key = "unpack", dtype
    if key not in codec.derived:
        codec.derived[key] = _made(codec, dtype)
    return codec.derived[key]


def _made(codec: Codec, dtype: torch.dtype) -> dict[str, Tensor]:
    fmt, tables = codec.geometry.format, codec.tables
    found: dict[str, Tensor] = {n: tables[n].float() for n in ("scale", "zero", "mean") if n in tables}
    if fmt.dense:
        found["values"] = dense.codebook(fmt.dense, codec.geometry.shape.d, tables, codec.device).float()
    if fmt.banded:
        found["bands"] = banded.pack_tables(tables)
    if fmt.rotate:
        found["unrotation"] = of_heads(rotate.inverse_matrix(tables), pieces_of_matrix(fmt.rotate, dtype))
    if fmt.sketch:
        found["sketch"] = of_heads(tables["sketch"], 1)
    if fmt.sketch and fmt.sketch.outliers:
        found["outlier_sketch"] = of_heads(tables["outlier_sketch"], 1)
        found["outlier_mask"] = tables["outlier_mask"]
    return {name: x.contiguous() for name, x in found.items()}


def launched(key: PageGeometry, value: PageGeometry) -> tuple[int, int]:
    """Threads of a block, and blocks of both sides that a multiprocessor is to hold."""
    return MATRICES if any(side.format.rotate or side.format.sketch for side in (key, value)) else OTHERS


def _items(geometry: PageGeometry, threads: int, tokens: int) -> int:
    """Of a sequence of so many tokens, each of one head."""
    shape, window = geometry.shape, geometry.format.window
    pages = window.pages(tokens, shape.t)
    return pages * shape.h_kv * (shape.t // _chunk(geometry, threads)) + tokens - pages * shape.t


def _chunk(geometry: PageGeometry, threads: int) -> int:
    """Tokens of an item: `signpost::Unpacker::TOKENS`."""
    tokens = 32 * threads // geometry.shape.d
    while geometry.shape.t % tokens:
        tokens //= 2
    return tokens


def shared_bytes(geometry: PageGeometry, rope: Rope, threads: int) -> int:
    """Shared memory of a block: `signpost::Unpacker::BYTES`, which the unit asserts."""
    tokens, part = _chunk(geometry, threads), geometry.format.dense
    pairs = rope.dim // 2 if geometry.format.domain == "pre_rope" else 0
    return 4 * tokens * (geometry.shape.d + 4) + 8 * tokens * pairs + (4 << part.bits if part else 0)


def unpack_unit(key: PageGeometry, value: PageGeometry, rope: Rope, dtype: torch.dtype) -> Unit:
    """The unit that unpacks one layer's keys and values to numbers of `dtype`; its entry is `unpack`.

    Raises KernelError for head dimensions and dtypes without a kernel.
    """
    shape = key.shape
    if dtype not in INPUTS:
        raise KernelError(f"numbers of {dtype}: the unpack kernel makes {', '.join(map(str, INPUTS))}")
    if shape.d not in (64, 128, 256):
        raise KernelError(f"head dimension {shape.d}: unpack kernels exist for 64, 128 and 256")
    model = f"{'' if dtype == torch.float32 else 'signpost::'}{INPUTS[dtype]}"
    threads, blocks = launched(key, value)
    sizes = [shared_bytes(side, rope, threads) for side in (key, value)]
    source = f"""#include "unpack.cuh"
{side_struct("Key", key, rope)}
{side_struct("Value", value, None)}
struct Plan {{
    static constexpr int D = {shape.d}, H = {shape.h_kv}, THREADS = {threads};
    using Model = {model};
}};
using Layers = signpost::UnpackParams;
using Work = signpost::Unpack<Key, Value, Plan>;
static_assert(Work::Keys::BYTES == {sizes[0]} && Work::Values::BYTES == {sizes[1]}, "runtime/unpack.py counts alike");
static_assert(sizeof(Layers) == {ctypes.sizeof(_Params)}, "runtime/unpack.py has the same parameters");
extern "C" __global__ void __launch_bounds__(Plan::THREADS, {blocks})
unpack(const __grid_constant__ Layers layers) {{ Work::run(layers); }}
"""
    return Unit("unpack", source, ("unpack",))


def units(bundle: Bundle, dtypes: Iterable[torch.dtype] = (torch.float16, torch.bfloat16)) -> list[Unit]:
    """What unpacks a bundle's layers, for models of these types, each unit once. Raises as `unpack_unit`."""
    rope, wanted = bundle.model.rope, product(dict.fromkeys(bundle.geometry.pairs), dtypes)
    return [unpack_unit(key, value, rope, dtype) for (key, value), dtype in wanted]
