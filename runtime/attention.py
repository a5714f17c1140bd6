"""Attention over packed pages on a CUDA device: what a decode step launches for one layer.

Nothing allocates or synchronizes once the buffers of a batch size exist, so a step can be captured in a CUDA graph;
lengths and block tables are read on the device.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import e as EULER
from math import log2
from typing import Any

import torch
from torch import Tensor

from artifacts import Format, LayerFormat, PageGeometry
from runtime import jit, pieces, project, smooth
from runtime.dealing import aligned_blocks, merged
from runtime.fragments import of_heads, pieces_of_matrix
from runtime.pack import check_ids
from runtime.parts import banded, rotate
from runtime.parts.dense import codebook
from runtime.rope import Rotation
from runtime.turns import turns
from runtime.units import (
    ALL_PLAIN,
    MOST_ROWS,
    TYPES,
    WRITE_THREADS,
    Scoring,
    Sharing,
    attend_unit,
    fits_bytes,
    sharing,
    ways,
)

HEAD_DIMS = (64, 128, 256)


class _Side(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "heads", "records", "segments", "table", "sinks", "window", "values", "bands", "scale", "zero", "mean",
        )
    ] + [("table_stride", ctypes.c_longlong), ("capacity", ctypes.c_longlong)]  # fmt: skip


class _Attend(ctypes.Structure):
    _fields_ = [
        ("key", _Side),
        ("value", _Side),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "projected",
                "rotation",
                "restoring",
                "out",
                "partial",
                "ranges",
                "lengths",
                "offsets",
                "turns",
                "inv_freq",
                "functions",
            )
        ),
        *((name, ctypes.c_longlong) for name in ("q_sequence", "q_token", "q_head")),
        *((name, ctypes.c_longlong) for name in ("out_sequence", "out_token", "out_head", "turns_head")),
        *((name, ctypes.c_double) for name in ("of_all", "of_aligned")),
        *((name, ctypes.c_int) for name in ("aligned", "whole")),
        *((name, ctypes.c_float) for name in ("rope_scaling", "scale")),
        *((name, ctypes.c_int) for name in ("b", "h_kv", "g", "m", "follows", "window")),
        *((name, ctypes.c_float) for name in ("cap", "bend")),
    ]


class _Merge(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "out", "ranges", "rotation", "fragments", "mean")),
        *((name, ctypes.c_longlong) for name in ("out_sequence", "out_token", "out_head")),
        *((name, ctypes.c_int) for name in ("b", "h_kv", "g", "m", "grid", "each")),
    ]


class _WriteSide(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("from", "sinks", "window")),
        *((name, ctypes.c_longlong) for name in ("sequence", "head", "token", "capacity")),
    ]


class _Write(ctypes.Structure):
    _fields_ = [
        ("key", _WriteSide),
        ("value", _WriteSide),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("h_kv", "m")),
    ]


@dataclass(frozen=True)
class PagedSide:
    """Keys or values of one layer on the device.

    heads, records, segments  bytes of the pool (`runtime.codec.PagePool`)
    table                     int32 [b, pages], page ids
    sinks                     [b, sinks, h_kv, d] in the model's dtype
    window                    [b, capacity, h_kv, d]: token n behind the sinks stands at n % capacity; room for all that
                              are exact, the format's recent tokens and a page but one, and a step's new ones
    """

    heads: Tensor
    records: Tensor
    segments: Tensor
    table: Tensor
    sinks: Tensor
    window: Tensor


class Workspace:
    """Memory on the device in which steps work one after the other: all layers of a cache have one.

    What is of one kind lies apart from all else, so that a kernel which begins before another step's has ended writes
    only what that one has read.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is in it is nobody's between steps."""
        return self.__dict__ | {"_memory": {}}

    def take(self, kind: str, size: int) -> Tensor:
        """float32 [size], not filled: the same memory as earlier and later ones of its kind, or larger. Who holds it
        keeps it."""
        if kind not in self._memory or size > self._memory[kind].numel():
            self._memory[kind] = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._memory[kind][:size]


class PagedAttention:
    """Kernels for one layer's formats.

    key, value  geometries; tables: the bundle's tensors of each side, on any device
    rotation    the model's rotary embedding
    h_q         query heads, a multiple of the kv heads
    dtype       of queries, sinks, window and output: float16, bfloat16 or float32
    scoring     what becomes of scores beside softmax
    workspace   memory that steps work in (None: of these kernels' own). Who gives several kernels the same one runs all
                their steps one after the other, on one stream
    Raises KernelError where the kernels do not cover the formats or the dimensions.
    """

    def __init__(
        self,
        key: PageGeometry,
        value: PageGeometry,
        key_tables: Mapping[str, Tensor],
        value_tables: Mapping[str, Tensor],
        rotation: Rotation,
        h_q: int,
        dtype: torch.dtype,
        device: torch.device | str | int,
        scoring: Scoring = ALL_PLAIN,
        workspace: Workspace | None = None,
    ):
        check(key, value, h_q, dtype)
        self.scoring = scoring
        self.key, self.value, self.rotation, self.dtype = key, value, rotation, dtype
        self.device = self._device(device)
        self.h_kv, self.d, self.g = key.shape.h_kv, key.shape.d, h_q // key.shape.h_kv
        self.grid = self._processors()
        self.workspace = workspace or Workspace(self.device)
        self._tables = [self._on_device(side, tables) for side, tables in ((key, key_tables), (value, value_tables))]
        self._inv_freq, functions = _of_rotation(rotation, self.device)
        self.by_bytes = fits_bytes(rotation.inv_freq, (side["values"] for side in self._tables if "values" in side))
        self._functions = functions if self.by_bytes else None
        self.columns = project.columns(key)  # numbers of a query that are made before attention
        self._matrices = project.matrices(key, self._moved(key_tables), dtype) if self.columns else {}
        self._turns: Tensor | None = None
        self._restoring: Tensor | None = None
        self._settle()

    @staticmethod
    def _device(device: torch.device | str | int) -> torch.device:
        return torch.device("cuda", jit._index(device))

    def _processors(self) -> int:
        """Multiprocessors, among which the blocks of a step are dealt out."""
        return jit.processors(self.device)

    @staticmethod
    def _stream(device: torch.device) -> int:
        return jit.current_stream(device.index)

    def _moved(self, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in tables.items()}

    def _on_device(self, side: PageGeometry, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tables of a side as the kernels read them, the codebook among them."""
        moved = self._moved(tables)
        if side.format.dense:
            moved["values"] = codebook(side.format.dense, side.shape.d, moved, self.device).float()
        if side.format.banded:
            moved |= banded.kernel_tables(moved, side.shape)
        if side.format.rotate and side.shape.side == "value":
            moved["rotation"] = rotate.inverse_matrix(rotate.prepared(moved))
            moved.pop("unrotation", None)
        return {name: tensor.contiguous() for name, tensor in moved.items()}

    def sharing(self, rows: int, b: int, tokens: int) -> Sharing:
        """How a batch of b sequences of at most so many tokens is dealt out, with so many query rows per kv head."""
        can = ways(self.key, self.value, self.rotation.rope, rows, self.by_bytes, self.scoring)
        return sharing(LayerFormat(self.key.format, self.value.format), can, b, self.h_kv, tokens, self.grid)

    def unit(self, rows: int, how: Sharing) -> jit.Unit:
        """The kernels for so many query rows per kv head whose work is dealt out so."""
        dtype, rows = TYPES[self.dtype], min(rows, MOST_ROWS)
        return attend_unit(self.key, self.value, self.rotation.rope, dtype, rows, self.by_bytes, how, self.scoring)

    def module(self, rows: int, how: Sharing) -> jit.Module:
        """The same, compiled. Not to be called first within a capture."""
        return self._load(self.unit(rows, how))

    def _load(self, unit: jit.Unit) -> jit.Module:
        return jit.load(unit, self.device)

    def projection(self, to: Tensor, scale: float, sizes: tuple[int, int, int, int]) -> project.Projection | None:
        """What makes those numbers, where keys are rotated or sketched; parameters as of `project.Projection`."""
        if not self.columns:
            return None
        module = self._load(project.project_unit(self.key, self.dtype))
        return project.Projection(self._matrices, module, to, scale, sizes, self.grid)

    def turns(self) -> Tensor:
        """What turns keys (`runtime.turns`), made when a step first needs it."""
        if self._turns is None:
            self._turns = turns(self.key, self._tables[0], self.rotation, self.device)
            self._settle()
        return self._turns

    def restoring(self) -> Tensor:
        """What brings back sums of rotated values in blocks of attention, or in those of the merge that have many: P
        inverted as fragments, made when a step first needs it."""
        if self._restoring is None:
            pieces = pieces_of_matrix(self.value.format.rotate, self.dtype)
            self._restoring = of_heads(self._tables[1]["rotation"], pieces)
            self._settle()
        return self._restoring

    def _settle(self) -> None:
        """Waits for the tables: kernels read them before they wait for the kernel before them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def plan(
        self, key: PagedSide, value: PagedSide, lengths: Tensor, offsets: Tensor, m: int, scale: float,
        tokens: int | None = None,
    ) -> "Step":  # fmt: skip
        """A step of m new tokens for every sequence of a batch, whose tensors stay where they are.

        lengths: int32 [b], cached tokens of each sequence with the m new ones, which `Step.write` or the caller puts
        among sinks and newest tokens before `Step.run`;
        offsets: int32 [b], position of token 0. Both are read when the step runs. scale: of scores, usually d**-0.5.
        tokens: that a sequence holds at most (None: what its table has pages for): work is dealt out for these; with
        longer ones results are the same, but it takes longer. Where nothing is packed and a window slides, rings may
        be shorter than what m new tokens see if they hold so many; then sequences must not grow longer.
        The first plan of a kind loads kernels and may make tables, which waits for the device: not within a capture.
        """
        return Step(self, key, value, lengths, offsets, m, scale, tokens)

    def _pointer(self, index: int, name: str) -> int | None:
        tables = self._tables[index]
        return tables[name].data_ptr() if name in tables else None

    def _side(self, index: int, side: PagedSide) -> _Side:
        return _Side(
            side.heads.data_ptr(), side.records.data_ptr(), side.segments.data_ptr(), side.table.data_ptr(),
            side.sinks.data_ptr(), side.window.data_ptr(),
            *(self._pointer(index, name) for name in ("values", "bands", "scale", "zero", "mean")),
            side.table.stride(0), side.window.shape[1],
        )  # fmt: skip


def _of_rotation(rotation: Rotation, device: torch.device) -> tuple[Tensor, ...]:
    """Frequencies, and functions of the token that turn keys (`runtime.smooth`), on the device: once for all layers."""
    if device not in rotation.derived:
        inv_freq = rotation.inv_freq.to(device)
        few = smooth.functions(inv_freq) if smooth.is_smooth(inv_freq) else torch.empty(0)
        rotation.derived[device] = inv_freq, few.to(device)
    return rotation.derived[device]


class Step:
    """A planned step: `write` and `run` may be repeated and captured; see `PagedAttention.plan`.

    With SIGNPOST_DEBUG=1 `run` checks lengths and page ids before it launches, which waits for the device, unless a
    graph is being captured.
    """

    def __init__(
        self, kernels: PagedAttention, key: PagedSide, value: PagedSide, lengths: Tensor, offsets: Tensor, m: int,
        scale: float, tokens: int | None = None,
    ):  # fmt: skip
        b, rows, most = lengths.numel(), kernels.g * m, tokens
        tokens = key.table.shape[1] * kernels.key.format.t if tokens is None else tokens
        for name, side, geometry in (("keys", key, kernels.key), ("values", value, kernels.value)):
            check_window(name, side, geometry.format, m, kernels.scoring.window, most)
        self._formats, self._m, self._sliding = (kernels.key.format, kernels.value.format), m, kernels.scoring.window
        module = kernels.module(rows, kernels.sharing(rows, b, tokens))
        self._write, self._attend, self._merge = (module.kernel(name) for name in ("write_tokens", "attend", "merge"))
        self._threads, self._shared = module.integers["attend_threads"], module.integers["attend_shared"]
        taken = module.integers["attend_rows"]
        self._tiles, self._rows = -(-rows // taken), rows
        self._grid = kernels.grid * module.integers["attend_blocks"]
        workers = module.integers["attend_workers"]  # of a block: what leaves partial results of its own
        places = self._grid if workers == 1 else (self._grid + kernels.h_kv) * workers
        slots = places + 2 * b * kernels.h_kv
        sizes_of = {
            "partial": self._tiles * slots * taken * (kernels.d + 2), "ranges": 2 * b * kernels.h_kv,
            "projected": b * kernels.h_kv * rows * kernels.columns,
        }  # fmt: skip
        self._memory = [kernels.workspace.take(kind, size) for kind, size in sizes_of.items()]
        partial, ranges, projected = self._memory
        self._kept = (key, value, lengths, offsets)
        self._debug = jit.switch("SIGNPOST_DEBUG")
        self._stream = lambda: kernels._stream(kernels.device)
        self._merge_threads = module.integers["merge_threads"]
        at_once, most = module.integers["merge_sequences"], module.integers["merge_most"]
        self._merge_slices = module.integers["merge_slices"]
        warps = self._merge_threads // 32
        rotated = kernels.value.format.rotate is not None and not module.integers["attend_restores"]
        if most > at_once and not rotated:  # few are left to add up: those that warps shared
            each = warps * min(most // warps, max(1, b * kernels.h_kv // places))
        else:
            each = merged(at_once, most, warps, b * kernels.h_kv * rows, kernels.grid)
        self._merge_blocks = kernels.h_kv * -(-b // each)
        pairs = b * kernels.h_kv
        aligned, whole, of_aligned = aligned_blocks(pairs, self._grid)
        turned = kernels.turns() if module.integers["attend_turns"] else None
        projects = module.integers["attend_projects"]  # blocks themselves do
        sizes, (window, softcap) = (b, kernels.h_kv, kernels.g, m), kernels.scoring
        self.params = _Attend(
            kernels._side(0, key), kernels._side(1, value), 0,
            projected.data_ptr(),
            kernels._matrices["rotation"].data_ptr() if projects else None,
            kernels.restoring().data_ptr() if module.integers["attend_restores"] else None,
            0, partial.data_ptr(), ranges.data_ptr(), lengths.data_ptr(), offsets.data_ptr(),
            turned.data_ptr() if turned is not None else None,
            kernels._inv_freq.data_ptr(), kernels._functions.data_ptr() if kernels._functions is not None else None,
            0, 0, 0, 0, 0, 0, turned[0].nbytes // 16 if turned is not None and len(turned) > 1 else 0,
            1 / self._grid, of_aligned, aligned, whole, kernels.rotation.rope.scaling, scale * log2(EULER), *sizes, 0,
            window, *((softcap * log2(EULER), 2 / softcap) if softcap else (0.0, 0.0)),
        )  # fmt: skip
        self._projection = None if projects else kernels.projection(projected, self.params.scale, sizes)
        self._new, self._dtype = (b, kernels.h_kv, m, kernels.d), kernels.dtype
        self.write_params = _Write(
            *(_WriteSide(0, x.sinks, x.window, 0, 0, 0, x.capacity) for x in (self.params.key, self.params.value)),
            lengths.data_ptr(), kernels.h_kv, m,
        )  # fmt: skip
        self.merge_params = _Merge(
            partial.data_ptr(), 0, ranges.data_ptr(),
            kernels._pointer(1, "rotation"), kernels.restoring().data_ptr() if most > at_once and rotated else None,
            kernels._pointer(1, "mean"),
            0, 0, 0, *sizes, places, each,
        )  # fmt: skip

    def write(self, k: Tensor, v: Tensor) -> None:
        """Puts the new tokens k, v [b, h_kv, m, d] where the lengths say, among sinks or newest tokens.

        Views will do if heads are contiguous and lie at multiples of 16 bytes, else KernelError.
        """
        params = self.write_params
        for name, side, x in (("keys", params.key, k), ("values", params.value, v)):
            setattr(side, "from", x.data_ptr())
            side.sequence, side.head, side.token = _strides(name, x, self._new, self._dtype)
        b, _, m, _ = self._new
        self._write.launch((b, m, 2), WRITE_THREADS, 0, params, self._stream(), overlap=True)

    def run(self, q: Tensor, out: Tensor, follows: bool = False) -> None:
        """Attention of q [b, h_q, m, d] over the cache into out [b, h_q, m, d]; both may be views, d contiguous.

        follows: the newest launch on the stream is a step's own, this one's `write` or another's `run`, and what this
        one reads but for `write`'s tokens was there before it. Then the kernel begins while that one still works.
        """
        if self._debug and not torch.cuda.is_current_stream_capturing():
            key, value, lengths, _ = self._kept
            for name, side, fmt in zip(("keys", "values"), (key, value), self._formats, strict=True):
                check_tables(name, side, fmt, [n - self._m for n in lengths.tolist()], self._sliding)
        params = self.params
        if self._projection:
            self._projection.run(q, follows, self._stream())
            follows = True
        params.q, params.follows = q.data_ptr(), int(follows)
        params.q_sequence, params.q_head, params.q_token, _ = q.stride()
        params.out, (params.out_sequence, params.out_head, params.out_token, _) = out.data_ptr(), out.stride()
        self._attend.launch(
            (self._grid, self._tiles, 1), self._threads, self._shared, params, self._stream(), overlap=True
        )
        self.merge(out)

    def merge(self, out: Tensor) -> None:
        """Adds up the partial results that `run` left, into the out [b, h_q, m, d] that `run` was given: it has those
        sequences already which one warp had all of."""
        params = self.merge_params
        params.out = out.data_ptr()
        params.out_sequence, params.out_head, params.out_token, _ = out.stride()
        blocks = (self._merge_blocks, self._rows, self._merge_slices)
        self._merge.launch(blocks, self._merge_threads, 0, params, self._stream(), overlap=True)


def _strides(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Of x [b, h_kv, m, d] but the last, in 16 bytes."""
    strides = pieces.strides(x)
    if x.shape != shape or x.dtype != dtype or strides is None:
        raise jit.KernelError(
            f"new {name}: {x.dtype} {tuple(x.shape)} with strides {x.stride()}: a step takes {dtype} {shape} whose "
            "heads are contiguous and begin at multiples of 16 bytes; make them contiguous"
        )
    return strides


def check_window(name: str, side: PagedSide, fmt: Format, m: int, sliding: int = 0, tokens: int | None = None) -> None:
    """Raises KernelError where the window has not room for all tokens that are exact when m new ones have come.

    sliding: how many tokens a query sees (0: all); tokens: that a sequence holds at most (None: nobody says). Without
    pages the window has what one query sees, or all tokens.
    """
    if not fmt.parts:
        needed = sliding + m - 1 if tokens is None else min(sliding + m - 1, tokens)
        if sliding and m > 1 and side.window.shape[1] < needed:
            raise jit.KernelError(
                f"{name}: a window of {side.window.shape[1]} tokens; {m} new ones that see {sliding} each need "
                f"{needed}: make it longer, or take fewer new tokens at once"
            )
        return
    needed = fmt.window.recent + fmt.t - 1 + m
    if side.window.shape[1] < needed:
        raise jit.KernelError(
            f"{name}: a window of {side.window.shape[1]} tokens; {fmt.window.recent} recent ones, a page but one and "
            f"{m} new ones need {needed}: make it longer, or take fewer new tokens at once"
        )


def check_tables(name: str, side: PagedSide, fmt: Format, lengths: Sequence[int], sliding: int = 0) -> None:
    """Raises KernelError where a sequence of so many cached tokens has pages that its table or the pool has not.

    name: of the side, for messages. lengths: of each sequence, without the step's new tokens. sliding: how many tokens
    a query sees (0: all): ids of pages that lie wholly behind that are not read, and may be any.
    """
    if not fmt.parts:
        return  # no pages
    for i, n in enumerate(lengths):
        if n < 0:
            continue  # a sequence of nobody, which fills up a batch: nothing of it is read
        pages, room = fmt.window.pages(n, fmt.t), side.table.shape[1]
        if pages > room:
            raise jit.KernelError(
                f"{name}: {n} tokens of sequence {i} fill {pages} pages, its block table has {room}: "
                "give it more columns"
            )
        behind = max(0, n + 1 - sliding - fmt.window.sinks) // fmt.t if sliding else 0
        check_ids(side.table[i : i + 1, behind:pages], behind, side.heads.shape[0], i)


def check(key: PageGeometry, value: PageGeometry, h_q: int, dtype: torch.dtype) -> None:
    """Raises KernelError where the kernels do not cover formats or dimensions."""
    h_kv, d, t = key.shape.h_kv, key.shape.d, key.format.t
    if d not in HEAD_DIMS:
        raise jit.KernelError(f'head dimension {d}: the kernels have {HEAD_DIMS}; take device="cpu"')
    if h_q % h_kv:
        raise jit.KernelError(f"{h_q} query heads are not a multiple of {h_kv} kv heads")
    if dtype not in TYPES:
        raise jit.KernelError(f"dtype {dtype}: the kernels take {', '.join(str(name) for name in TYPES)}")
    if {t, value.format.t} - {16, 32, 64, 128}:
        raise jit.KernelError(
            f"pages of {t} tokens of keys and {value.format.t} of values: the kernels take 16, 32, 64 or 128"
        )
    for name, side in (("key", key), ("value", value)):
        if side.format.lowrank and side.format.lowrank.rank > 8:
            raise jit.KernelError(f"{name}.lowrank.rank={side.format.lowrank.rank}: the kernels take at most 8")
        dense = side.format.dense
        if dense and dense.axis == "token" and dense.group % 16:
            raise jit.KernelError(f"{name}.dense.group={dense.group}: the kernels take multiples of 16 channels")
