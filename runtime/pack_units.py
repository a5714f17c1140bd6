"""Pack kernels as translation units: how a format's pages are cut among CTAs, the kernel's parameters, its source."""

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

import torch

from artifacts import Bundle, PageGeometry, Rope
from artifacts.order import TILE
from artifacts.parts.banded import BAND
from runtime import pack_codebook
from runtime.jit import KernelError, Unit
from runtime.keep import keep_unit
from runtime.pack_factors import factor_unit
from runtime.pack_params import LAYERS_AT_ONCE, Params
from runtime.units import side_struct

INPUTS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "float"}
HEAD_DIMS = (64, 128, 256)
CLUSTER_LIMIT = 8  # CTAs of a portable cluster
CANDIDATES = 1024  # bytes of a warp: `PackLayout::CANDIDATE_BYTES`
QUEUE = 4 * 64  # bytes of a warp: `PackLayout::QUEUE`
BAND_BOOK = 288  # bytes: `BandBook` of cuda/pack_bands.cuh

# KiB of shared memory that a CTA can have, and all that an SM has.
_SHARED = {"sm_80": (163, 164), "sm_90a": (227, 228), "sm_100": (227, 228)} | {
    f"sm_{n}": (99, 100) for n in (86, 89, 120)
}


@dataclass(frozen=True)
class Plan:
    """How pages are cut: see `cuda/pack_page.cuh`."""

    select: str
    per_end: int
    slots: int
    tokens: int
    heads: int
    ctas: int
    cluster: bool
    store: str
    threads: int
    blocks: int  # that an SM is to hold: what registers are divided by
    shared: int  # bytes of a CTA
    workspace: int  # bytes of a CTA
    units: int = 0  # of a page, if warps pack them (`cuda/pack_direct.cuh`)
    held: bool = False  # matrices are in shared memory
    together: bool = False  # four warps multiply with them together

    def launch(self, h_kv: int, pages: int, b: int, layers: int, processors: int) -> tuple[tuple[int, int, int], int]:
        """The grid that packs so many pages of b sequences of each layer, and how many heads a CTA takes in turn.

        Where warps pack units, a CTA's beginning takes about half as long as a head's, and as many CTAs as there is
        room for begin at once."""
        if not self.units:
            return (pages * self.ctas, b, layers), self.heads
        groups = ceil(pages * b * self.units / (self.threads // 32))

        def time(each: int) -> float:
            return ceil(groups * layers * ceil(h_kv / each) / (processors * self.blocks)) * (each + 0.5)

        each = min(range(1, h_kv + 1), key=time)
        return (groups * ceil(h_kv / each), 1, layers), each


def select_kind(geometry: PageGeometry) -> str:
    """Which of `pack_page.cuh`'s ways to find outliers the sparse part has."""
    part = geometry.format.sparse
    if part is None:
        return "NONE"
    if part.axis == "token":
        return "TOKEN"
    return f"{part.axis.upper()}_{'BUNDLE' if part.thresholds == 'bundle' else 'PAGE'}"


def edges_in_bins(geometry: PageGeometry) -> int:
    """How many edges of the codebook a bin has at most (`pack_codebook.table`): 1 where formulas say how far they are
    apart, 0 where calibration does."""
    part = geometry.format.dense
    return 0 if part is None or part.codebook in ("nuq", "nuq-qnorm") else 1


def bounds_with_scales(geometry: PageGeometry) -> bool:
    """Whether channels' bounds are read with their scales: `Shape::TOGETHER`."""
    fmt = geometry.format
    return select_kind(geometry) == "CHANNEL_BUNDLE" and fmt.dense is not None and fmt.dense.scales == "bundle"


@dataclass(frozen=True)
class _Cut:
    """A slice of `tokens` x `heads`, and what a CTA that packs `slices` of them, one at a time, needs."""

    geometry: PageGeometry
    rope_dim: int
    input_bytes: int
    tokens: int
    heads: int

    @property
    def slices(self) -> int:
        shape = self.geometry.shape
        return shape.t // self.tokens * ceil(shape.h_kv / self.heads)

    @property
    def tile(self) -> int:
        """Bytes of the slice's numbers."""
        stored = 4 if self.geometry.format.rotate else self.input_bytes
        return _align(self.heads * self.tokens * (self.geometry.shape.d + 8) * stored)

    @property
    def scales(self) -> int:
        part = self.geometry.format.dense
        if self.geometry.format.banded:
            return self.heads * self.geometry.shape.d
        if part is None:
            return 0
        if part.spans_heads:
            return self.tokens
        rows, _, columns = part.scale_shape(self.geometry.shape)
        of_slice = max(1, rows * self.tokens // self.geometry.shape.t)
        return of_slice * self.heads * columns

    def shared(self, store: str, per_cta: int, threads: int, cluster: bool = False) -> int:
        """Shared bytes: `PackLayout::BYTES`, which the unit asserts."""
        shape, fmt = self.geometry.shape, self.geometry.format
        d, select = shape.d, select_kind(self.geometry)
        direct = store == "REGISTERS"
        size = {"SHARED": self.tile, "REGISTERS": threads // 32 * self.tokens * d * self.input_bytes}.get(store, 0)
        size += _align(self.tokens * (d + 8) * 4) if fmt.rotate and not direct else 0
        size += 16 * self.tokens * (threads // 32 if direct else 1) + (
            self.tokens * (self.rope_dim // 2 + 8) * 8 if self.rope_dim else 0
        )
        size += 2 * _align(4 << fmt.dense.bits) if fmt.dense else 0
        size += pack_codebook.BYTES if fmt.dense and fmt.dense.bits in pack_codebook.WIDTHS else 0
        size += self.heads * d // BAND * BAND_BOOK if fmt.banded else 0
        size += _align(8 * self.scales)
        size += _align(4 * self.scales) if fmt.dense and fmt.dense.scales == "online" else 0
        size += 8 * self.heads * d if select == "CHANNEL_BUNDLE" else 0
        if fmt.sparse:
            lists, parts = shape.h_kv * shape.t // TILE, 1 if self.tokens >= TILE else 2
            mask = _align(4 * self.heads * self.tokens * d // 32)
            size += per_cta * mask + _align(4 * lists * parts)
            size += threads // 32 * (CANDIDATES if select == "TOKEN" else QUEUE)
            size += (16 + (parts - 1) * mask) if cluster else 0  # mailbox, the other halves' mask
        size += _align(self.tokens * (d + 4) * 4) if fmt.sketch and not direct else 0
        return size + 256


def _align(size: int) -> int:
    return -(-size // 16) * 16


def plan(geometry: PageGeometry, rope: Rope | None, dtype: torch.dtype, arch: str) -> Plan:
    """How to cut pages for `arch`. rope: of keys that are stored before RoPE, or None.

    Slices that must agree (outliers of all heads share a list) are a cluster's where there are clusters, else a CTA's.
    Raises KernelError for shapes and dtypes without a kernel, and where a page does not fit.
    """
    shape, fmt = geometry.shape, geometry.format
    if dtype not in INPUTS:
        raise KernelError(f"numbers of {dtype}: the pack kernel takes {', '.join(map(str, INPUTS))}")
    if shape.d not in HEAD_DIMS:
        raise KernelError(f"head dimension {shape.d}: pack kernels exist for {HEAD_DIMS}, or use the torch codec")
    if fmt.domain == "pre_rope" and rope is None:
        raise KernelError("keys stored before RoPE: the pack kernel needs the rotary embedding to undo it")
    if is_direct(geometry, dtype):
        return _direct_plan(geometry, dtype, arch)
    select, part = select_kind(geometry), fmt.dense
    room, whole = (1024 * k for k in _SHARED[arch])
    rope_dim = rope.dim if rope and fmt.domain == "pre_rope" else 0
    spans = select == "TOKEN" or (part is not None and part.spans_heads)
    together = part.group if part and part.axis == "channel" and part.group else 1
    clusters = fmt.sparse is not None and arch not in ("sm_80", "sm_86", "sm_89")

    def cut(tokens: int, heads: int) -> _Cut:
        return _Cut(geometry, rope_dim, dtype.itemsize, tokens, heads)

    tokens = [n for n in (TILE // 2, *range(TILE, shape.t + 1, TILE)) if shape.t % n == 0 and n % together == 0]
    tokens = [n for n in tokens if (n >= TILE or together == 1) and (select != "CHANNEL_PAGE" or n == shape.t)]
    heads = [shape.h_kv] if spans else range(1, shape.h_kv + 1)
    cuts = [cut(n, h) for n in tokens for h in heads]

    def made(c: _Cut, ctas: int, store: str) -> Plan:
        threads = 512 if c.heads * c.tokens * shape.d > 1 << 14 else 256
        per_cta = c.slices // ctas
        workspace = c.heads * c.tokens * (shape.d + 8) * 4 if store == "WORKSPACE" else 0
        slots = fmt.sparse.slots(shape) if fmt.sparse else 0
        online = fmt.sparse is not None and fmt.sparse.thresholds == "online"
        per_end = fmt.sparse.per_end(shape) if fmt.sparse and online else 0
        cluster = clusters and ctas > 1
        size = c.shared(store, per_cta, threads, cluster)
        # Sums over channels keep more registers busy.
        most = 512 if fmt.rotate or fmt.sketch else 1024
        blocks = max(1, min(whole // (size + 1024), most // threads, 4))
        return Plan(select, per_end, slots, c.tokens, c.heads, ctas, cluster, store, threads, blocks, size, workspace)

    def work(p: Plan) -> tuple[int, ...]:
        # Small enough for several CTAs on an SM, whole tiles if that leaves two, then least work beside the numbers:
        # angles and scales of each CTA. Where CTAs agree about outliers larger slices are worth more than a fourth CTA.
        beside = p.ctas * (p.tokens * rope_dim // 2 * 80 + p.heads * shape.d * 20)
        crowd = min(3 if fmt.sparse else 4, whole // (p.shared + 1024))
        return (crowd < 2, p.tokens < TILE, -crowd, beside, p.ctas)

    agreeing = [c for c in cuts if clusters and 1 < c.slices <= CLUSTER_LIMIT]
    apart = [made(c, c.slices, "SHARED") for c in (agreeing if fmt.sparse else cuts)]
    alone = [made(c, 1, "SHARED") for c in cuts] if fmt.sparse else []
    elsewhere = [made(c, 1 if fmt.sparse else c.slices, "WORKSPACE" if fmt.rotate else "INPUT") for c in cuts]
    for options in (apart, alone, elsewhere):
        fits = [p for p in options if p.shared <= room]
        if fits:
            if options is alone:  # one slice, if it can be, is read once
                fits = [p for p in fits if p.tokens * p.heads == max(q.tokens * q.heads for q in fits)]
            return min(fits, key=work)
    least = min(p.shared for p in elsewhere)
    raise KernelError(
        f"to pack a page of {shape.t} tokens x {shape.h_kv} kv heads x {shape.d} channels takes {least} bytes of "
        f"shared memory, {arch} has {room}: take pages of fewer tokens (t), or use the torch codec"
    )


def is_direct(geometry: PageGeometry, dtype: torch.dtype) -> bool:
    """Whether numbers go from the input through a matrix product in registers: `cuda/pack_direct.cuh`."""
    fmt = geometry.format
    if dtype.itemsize != 2 or fmt.sparse or fmt.lowrank or fmt.center or fmt.domain == "pre_rope":
        return False
    if fmt.rotate and fmt.banded:
        return fmt.rotate.kind == "learned" and fmt.sketch is None
    if fmt.rotate:
        norms = fmt.dense is not None and fmt.dense.normalize == "norm" and fmt.sketch is None
        return norms and fmt.rotate.kind != "learned"  # which changes them
    return fmt.sketch is not None and fmt.dense is None and fmt.banded is None


def _direct_plan(geometry: PageGeometry, dtype: torch.dtype, arch: str) -> Plan:
    """Warps take 32 tokens of a head if their vectors fit registers beside the sums, so that a warp reads the matrix
    once for twice the numbers; those of a CTA take the same heads in turn, and share matrices if these fit."""
    shape, fmt = geometry.shape, geometry.format
    tokens = 32 if shape.t % 32 == 0 and shape.d <= 128 else 16
    room, whole = (1024 * k for k in _SHARED[arch])
    heads = 2 if fmt.rotate and fmt.rotate.kind == "learned" else 1  # one's tables while another one's come
    cut = _Cut(geometry, 0, dtype.itemsize, tokens, heads)
    rows = shape.d if fmt.rotate else fmt.sketch.m if fmt.sketch else 0
    matrices = 2 * shape.d * rows * heads
    ways = [(threads, cut.shared("REGISTERS", 1, threads), matrices) for threads in (512, 256, 128)]
    fits = [way for way in ways if way[1] + matrices <= room]
    threads, size, held = fits[0] if fits else (*ways[1][:2], 0)
    size += held
    blocks = max(1, min(512 // threads, whole // (size + 1024)))
    return Plan(
        "NONE", 0, 0, tokens, cut.heads, 1, False, "REGISTERS", threads, blocks, size, 0,
        units=shape.t // tokens, held=held > 0,
        together=held > 0 and arch == "sm_90a" and fmt.sketch is not None and rows % 64 == 0,
    )  # fmt: skip


def sketched_together(geometry: PageGeometry, dtype: torch.dtype, arch: str) -> bool:
    """Whether a sketch's matrix is read as cores (`fragments.cores`): `Plan.together` of what packs it."""
    if geometry.format.lowrank:
        return sketch_plan(geometry, arch).together
    return is_direct(geometry, dtype) and _direct_plan(geometry, dtype, arch).together


def outlier_steps(geometry: PageGeometry) -> int:
    """Steps of 16 channels in which the products of a sketch's outlier channels are summed."""
    sketch = geometry.format.sketch
    return ceil(sketch.outliers / 16) if sketch else 0


def pack_unit(
    name: str, geometry: PageGeometry, rope: Rope | None, dtype: torch.dtype, arch: str, layers: int = 1
) -> Unit:
    """The unit that packs pages of one side of at most `layers` layers at once for `arch`; its entry is `pack`.

    Raises as `plan`, and KernelError for more than LAYERS_AT_ONCE layers.
    """
    return _unit(name, "Side", geometry, rope, dtype, plan(geometry, rope, dtype, arch), layers)


def sketch_unit(name: str, geometry: PageGeometry, arch: str, layers: int = 1) -> Unit:
    """For formats with factors and a sketch: packs the sketch of what is left, float16 [p, t, h_kv, d], and no more."""
    numbers = "BITS = 0, BANDED = 0, SPARSE = 0, RANK = 0, CENTER = 0, ROTATE = 0, ROPE_DIM = 0"
    scales = "static constexpr signpost::Scales SCALES = signpost::Scales::NONE;"
    left = f"Left : Side {{ static constexpr int {numbers}; {scales} }}"
    return _unit(name, left, geometry, None, torch.float16, sketch_plan(geometry, arch), layers)


def factor_units(name: str, geometry: PageGeometry, arch: str, layers: int = 1) -> list[Unit]:
    """What runs behind `pack_unit`: for formats with factors the kernels that find them, and the sketch's if there is
    one. Raises KernelError for ranks without a kernel."""
    if not geometry.format.lowrank:
        return []
    sketch = [sketch_unit(f"{name}-sketch", geometry, arch, layers)] if geometry.format.sketch else []
    return [factor_unit(f"{name}-factors", geometry, layers), *sketch]


def sketch_plan(geometry: PageGeometry, arch: str) -> Plan:
    """`plan` of `sketch_unit`."""
    alone = replace(
        geometry.format,
        dense=None,
        banded=None,
        sparse=None,
        lowrank=None,
        center=None,
        rotate=None,
        domain="post_rope",
    )
    return plan(PageGeometry(alone, geometry.shape), None, torch.float16, arch)


def _unit(
    name: str, side: str, geometry: PageGeometry, rope: Rope | None, dtype: torch.dtype, p: Plan, layers: int = 1
) -> Unit:
    if layers > LAYERS_AT_ONCE:
        raise KernelError(f"{layers} layers in one launch: parameters of {LAYERS_AT_ONCE} fit")
    shape = geometry.shape
    numbers = {
        "H": shape.h_kv,
        "D": shape.d,
        "VALUES": int(shape.side == "value"),
        "PER_END": p.per_end,
        "SLOTS": p.slots,
        "EDGES": edges_in_bins(geometry),
        "TOKENS": p.tokens,
        "HEADS": p.heads,
        "CTAS": p.ctas,
        "CLUSTER": int(p.cluster),
        "HELD": int(p.held),
        "TOGETHER": int(p.together),
        "THREADS": p.threads,
        "OUTLIER_STEPS": outlier_steps(geometry),
    }
    packed, _, body = side.partition(" ")
    at = "blockIdx.z" if layers > 1 else "0"
    cluster = f" __cluster_dims__({p.ctas}, 1, 1)" if p.cluster else ""
    lines = [
        '#include "pack.cuh"',
        side_struct("Side", geometry, rope),
        *([f"struct {packed} {body};"] if body else []),
        "struct Plan {",
        *(f"    static constexpr int {key} = {value};" for key, value in numbers.items()),
        f"    using Input = {'' if dtype == torch.float32 else 'signpost::'}{INPUTS[dtype]};",
        f"    static constexpr signpost::Select SELECT = signpost::Select::{p.select};",
        f"    static constexpr signpost::Store STORE = signpost::Store::{p.store};",
        "};",
        f"static_assert(signpost::PackLayout<{packed}, Plan>::BYTES == {p.shared}, "
        '"runtime/pack_units.py counts shared memory alike");',
        f"static_assert(sizeof(signpost::PackParams) == {ctypes.sizeof(Params)}, "
        '"runtime/pack_units.py has the same parameters");',
        f"struct Layers {{ signpost::PackParams layer[{layers}]; }};",
        f'extern "C" __global__ void __launch_bounds__(Plan::THREADS, {p.blocks}){cluster}',
        f"pack(const __grid_constant__ Layers layers) {{ signpost::pack<{packed}, Plan>(layers.layer[{at}]); }}",
    ]
    return Unit(name, "\n".join(lines) + "\n", ("pack",))


def units(bundle: Bundle, arch: str, dtypes: Iterable[torch.dtype] = (torch.float16, torch.bfloat16)) -> list[Unit]:
    """What packs a bundle's pages on `arch`, for models of these types, each unit once: a layer at a time, and all
    layers that are alike at once; and what keeps prompts' other tokens. Raises as `plan`."""
    rope = bundle.model.rope
    alike = Counter(bundle.geometry.sides)
    found = [keep_unit()]
    for (geometry, count), dtype in product(alike.items(), dtypes):
        turned = rope if geometry.format.domain == "pre_rope" else None
        for layers in sorted({1, min(count, LAYERS_AT_ONCE)}, reverse=True):  # prompts wait for the first ones
            found.append(pack_unit("pack", geometry, turned, dtype, arch, layers))
            found += factor_units("pack", geometry, arch, layers)
    return list(dict.fromkeys(found))
