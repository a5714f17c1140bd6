"""Packing on the GPU: numbers of a prompt or of the window become pages, by one kernel, without asking the host.

`plan` decides how a format's pages are cut among CTAs, `pack_unit` writes the unit over `cuda/pack.cuh`, and `Packer`
launches it on PyTorch's current stream: nothing is allocated and nothing is waited for, so a step can be captured in a
CUDA graph. The bytes are those of the torch codec (`runtime.codec`) on the same device, with these exceptions, where a
sum is rounded in another order: norms (`normalize: norm`, sketches) by one unit of float16 in the last place, and what
follows from them; signs of a sketch's products that are within rounding of zero; all of a rotated format's numbers in
the last bits of float32; and which of two zeros the middle of a range of zeros is.

Formats with low-rank factors: the kernel packs codes and outliers and writes out what they leave (`residual`, float32).
Factors are found by torch (`runtime.parts.lowrank`), which synchronizes, so that they cannot be captured in a graph.
`Packer.prompt` does both, and then packs a sketch of what is left with a second kernel, if the format has one.
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log2

import torch
from torch import Tensor

from artifacts import Bundle, PageGeometry, Rope
from artifacts.geometry import SEGMENT_PAGES
from artifacts.order import TILE
from artifacts.parts.sparse import BLOCK
from runtime import jit
from runtime.codec import Codec, PagePool
from runtime.jit import KernelError, Unit
from runtime.parts import dense, lowrank
from runtime.rope import Rotation
from runtime.units import lacking_parts, side_struct

INPUTS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "float"}
HEAD_DIMS = (64, 128, 256)
CLUSTER_LIMIT = 8  # CTAs of a portable cluster
CANDIDATES = 1024  # bytes of a warp: `PackLayout::CANDIDATE_BYTES`
QUEUE = 8 * 384  # bytes: `PackLayout::QUEUE`
NO_PROMPT = (1 << 31) - 1
LAYERS_AT_ONCE = 64  # of a launch: a kernel's parameters have 32764 bytes
MATRIX_SCALE = 1024.0  # of float16 pieces of a rotation, as in `cuda/pack_matrix.cuh`

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


def select_kind(geometry: PageGeometry) -> str:
    """Which of `pack_page.cuh`'s ways to find outliers the sparse part has."""
    part = geometry.format.sparse
    if part is None:
        return "NONE"
    if part.axis == "token":
        return "TOKEN"
    return f"{part.axis.upper()}_{'BUNDLE' if part.thresholds == 'bundle' else 'PAGE'}"


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
        if part is None:
            return 0
        if part.spans_heads:
            return self.tokens
        rows, _, columns = part.scale_shape(self.geometry.shape)
        of_slice = max(1, rows * self.tokens // self.geometry.shape.t)
        return of_slice * self.heads * columns

    def shared(self, store: str, per_cta: int, threads: int) -> int:
        """Shared bytes: `PackLayout::BYTES`, which the unit asserts."""
        shape, fmt = self.geometry.shape, self.geometry.format
        d, select = shape.d, select_kind(self.geometry)
        direct = store == "REGISTERS"
        size = {"SHARED": self.tile, "REGISTERS": threads // 32 * self.tokens * d * self.input_bytes}.get(store, 0)
        size += _align(self.tokens * (d + 8) * 4) if fmt.rotate and not direct else 0
        size += 16 * self.tokens + (self.tokens * (self.rope_dim // 2 + 8) * 8 if self.rope_dim else 0)
        size += 2 * _align(4 << fmt.dense.bits) if fmt.dense else 0
        size += _align(8 * self.scales)
        size += _align(4 * self.scales) if fmt.dense and fmt.dense.scales == "online" else 0
        size += 8 * self.heads * d if select == "CHANNEL_BUNDLE" else 0
        if fmt.sparse:
            tiles = shape.h_kv * shape.t // TILE
            size += _align(4 * per_cta * self.heads * self.tokens * d // 32)
            size += _align(2 * shape.numbers // BLOCK) + _align(4 * tiles + 4)
            size += threads // 32 * CANDIDATES if select == "TOKEN" else QUEUE
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
    if lacking := lacking_parts(geometry):
        raise KernelError(f"the pack kernel cannot write {' and '.join(lacking)} yet: use the torch codec")
    if is_direct(geometry, dtype):
        return _direct_plan(geometry, dtype)
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
        size = c.shared(store, per_cta, threads)
        # Sums over channels, and the search for a token's outliers, keep more registers busy.
        most = 512 if fmt.rotate or fmt.sketch else 1024
        blocks = max(1, min(whole // (size + 1024), most // threads, 3 if select == "TOKEN" else 4))
        cluster = clusters and ctas > 1
        return Plan(select, per_end, slots, c.tokens, c.heads, ctas, cluster, store, threads, blocks, size, workspace)

    def work(p: Plan) -> tuple[int, ...]:
        # Small enough for three CTAs on an SM, then least work beside the numbers: angles and scales of each CTA.
        beside = p.ctas * (p.tokens * rope_dim // 2 * 80 + p.heads * shape.d * 20)
        crowd = min(3, whole // (p.shared + 1024))
        return (-crowd, beside, p.ctas)

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
    if fmt.rotate:
        return fmt.dense is not None and fmt.dense.normalize == "norm" and fmt.sketch is None
    return fmt.sketch is not None and fmt.dense is None


def _direct_plan(geometry: PageGeometry, dtype: torch.dtype) -> Plan:
    """Warps take 32 tokens of a head if their vectors fit registers beside the sums, so that a warp reads the matrix
    once for twice the numbers."""
    shape = geometry.shape
    tokens = 32 if shape.t % 32 == 0 and shape.d <= 128 else 16
    heads, threads = min(8, shape.h_kv), 64
    made = _Cut(geometry, 0, dtype.itemsize, tokens, heads)
    size = made.shared("REGISTERS", 1, threads)
    return Plan("NONE", 0, 0, tokens, heads, made.slices, False, "REGISTERS", threads, 6, size, 0)


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


def sketch_unit(name: str, geometry: PageGeometry, arch: str) -> Unit:
    """For formats with factors and a sketch: packs the sketch of what is left, float32 [p, t, h_kv, d], and no more."""
    numbers = "BITS = 0, SPARSE = 0, RANK = 0, CENTER = 0, ROTATE = 0, ROPE_DIM = 0"
    scales = "static constexpr signpost::Scales SCALES = signpost::Scales::NONE;"
    left = f"Left : Side {{ static constexpr int {numbers}; {scales} }}"
    return _unit(name, left, geometry, None, torch.float32, sketch_plan(geometry, arch))


def sketch_plan(geometry: PageGeometry, arch: str) -> Plan:
    """`plan` of `sketch_unit`."""
    alone = replace(
        geometry.format, dense=None, sparse=None, lowrank=None, center=None, rotate=None, domain="post_rope"
    )
    return plan(PageGeometry(alone, geometry.shape), None, torch.float32, arch)


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
        "TOKENS": p.tokens,
        "HEADS": p.heads,
        "CTAS": p.ctas,
        "CLUSTER": int(p.cluster),
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
        '"runtime/pack.py counts shared memory alike");',
        f"static_assert(sizeof(signpost::PackParams) == {ctypes.sizeof(Params)}, "
        '"runtime/pack.py has the same parameters");',
        f"struct Layers {{ signpost::PackParams layer[{layers}]; }};",
        f'extern "C" __global__ void __launch_bounds__(Plan::THREADS, {p.blocks}){cluster}',
        f"pack(const __grid_constant__ Layers layers) {{ signpost::pack<{packed}, Plan>(layers.layer[{at}]); }}",
    ]
    return Unit(name, "\n".join(lines) + "\n", ("pack",))


def units(bundle: Bundle, arch: str) -> list[Unit]:
    """What packs a bundle's pages on `arch`, for float16 and bfloat16 models, each unit once: a layer at a time, and
    all layers that are alike at once. Raises as `plan`."""
    rope = bundle.model.rope
    alike = Counter(bundle.geometry.sides)
    found = []
    for (geometry, count), dtype in product(alike.items(), (torch.float16, torch.bfloat16)):
        turned = rope if geometry.format.domain == "pre_rope" else None
        for layers in sorted({1, min(count, LAYERS_AT_ONCE)}):
            found.append(pack_unit("pack", geometry, turned, dtype, arch, layers))
        if geometry.format.lowrank and geometry.format.sketch:
            found.append(sketch_unit("pack-sketch", geometry, arch))
    return list(dict.fromkeys(found))


class Source(ctypes.Structure):
    """Numbers: strides of sequences, tokens and heads."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("sequence", "token", "head")))


_POINTERS = (
    *(
        "table",
        "lengths",
        "offsets",
        "heads",
        "records",
        "edges",
        "values",
        "scale",
        "inverse",
        "zero",
        "lower",
        "upper",
        "mean",
    ),
    *("rotation", "inv_freq", "sketch", "outlier_sketch", "outlier_mask", "kept_words", "outlier_channels"),
    *("residual", "workspace", "status"),
)


class Params(ctypes.Structure):
    """`signpost::PackParams`."""

    _fields_ = (
        ("prompt", Source),
        ("ring", Source),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("table_stride", ctypes.c_longlong),
        ("ring_capacity", ctypes.c_int),
        ("prompt_first", ctypes.c_int),
        ("first_page", ctypes.c_int),
        ("fresh", ctypes.c_int),
        ("capacity_pages", ctypes.c_int),
        ("scaling", ctypes.c_float),
        ("unscaling", ctypes.c_float),
    )


@functools.cache
def layers_type(count: int) -> type[ctypes.Structure]:
    """The kernel's argument: the parameters of so many layers."""
    return type("Layers", (ctypes.Structure,), {"_fields_": (("layer", Params * count),)})


def source(x: Tensor) -> Source:
    """x [b, tokens, h_kv, d] as a kernel takes it. Raises KernelError where 16 bytes of channels lie apart."""
    pieces = 16 // x.dtype.itemsize
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    if x.dim() != 4 or x.stride(3) != 1 or any(stride % pieces for stride in strides) or x.data_ptr() % 16:
        raise KernelError(
            f"numbers {tuple(x.shape)} with strides {x.stride()}: the pack kernel reads [b, tokens, h_kv, d] in pieces "
            "of 16 bytes of neighbouring channels; make them contiguous"
        )
    return Source(x.data_ptr(), *x.stride()[:3])


STATUS = {
    1: "a block table holds a page id outside the pool",
    2: "a scale or zero point does not fit float16 (largest 65504): is the model sound?",
    4: "keys or values hold NaN or infinity: check the model's dtype and weights",
}


def _rope_of(geometry: PageGeometry, rotation: Rotation | None) -> Rope | None:
    """The rotary embedding that packing undoes."""
    return rotation.rope if rotation and geometry.format.domain == "pre_rope" else None


class Packer:
    """Packs pages of one side of a layer, or of several layers with the same format and shape.

    Makes its tables and kernels once; `prompt` and `step` only launch. codecs: of the layers, on a CUDA device.
    rotation: of the model, for keys stored before RoPE, or None. dtype: of the numbers. name: of the unit.

    With SIGNPOST_DEBUG=1 every call checks page ids before it launches and waits for what the kernel reports, so that
    an error is raised where it was made; nothing can be captured then.
    """

    def __init__(
        self, codecs: Codec | Sequence[Codec], rotation: Rotation | None, dtype: torch.dtype, name: str = "pack"
    ):
        self.codecs = [codecs] if isinstance(codecs, Codec) else list(codecs)
        geometry, self.device = self.codecs[0].geometry, self.codecs[0].device
        if any(codec.geometry != geometry for codec in self.codecs):
            raise KernelError("layers of different formats or shapes: a packer is for layers that are alike")
        rope = _rope_of(geometry, rotation)
        arch = jit.arch_of(self.device)
        self.geometry, self.dtype = geometry, dtype
        self.plan = plan(geometry, rope, dtype, arch)
        self.at_once = min(len(self.codecs), LAYERS_AT_ONCE)
        self.unit = pack_unit(name, geometry, rope, dtype, arch, self.at_once)
        self.kernel = jit.load(self.unit, self.device).kernel("pack")
        self.tables = [device_tables(codec, rotation if rope else None, dtype) for codec in self.codecs]
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._debug = jit.switch("SIGNPOST_DEBUG")
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._sketcher = None
        if geometry.format.lowrank and geometry.format.sketch:
            self._sketch_plan = sketch_plan(geometry, arch)
            self._sketcher = jit.load(sketch_unit(f"{name}-sketch", geometry, arch), self.device).kernel("pack")
        self._index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self._params = [self._of_layer(tables, rope) for tables in self.tables]

    @staticmethod
    def begin(codec: Codec, rotation: Rotation | None, dtype: torch.dtype, name: str = "pack") -> None:
        """Begins to compile what a packer of these arguments will load. Raises as `plan`."""
        arch, rope = jit.arch_of(codec.device), _rope_of(codec.geometry, rotation)
        jit.begin([pack_unit(name, codec.geometry, rope, dtype, arch)], codec.device)

    def _of_layer(self, tables: dict[str, Tensor], rope: Rope | None) -> Params:
        params = Params(status=self.status.data_ptr(), scaling=1.0, unscaling=1.0, prompt_first=NO_PROMPT)
        for field, tensor in tables.items():
            setattr(params, field, tensor.data_ptr())
        if rope:
            params.scaling, params.unscaling = scalings(rope)
        return params

    def reserve(self, b: int, pages: int = 1) -> None:
        """Work space for launches of so many pages of b sequences, which few formats need (`plan.workspace`).

        To be called before a step is captured in a graph; launches that need more take it themselves.
        """
        size = self.at_once * self.plan.ctas * pages * b * self.plan.workspace
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def prompt(
        self,
        pool: PagePool,
        table: Tensor,
        x: Tensor,
        first_page: int,
        pages: int,
        first_token: int = 0,
        ring: Tensor | None = None,
        offsets: Tensor | None = None,
        segments: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        """Packs `pages` pages from `first_page` on of every sequence into the ids that the table has for them.

        x [b, n, h_kv, d]: tokens from number `first_token` on; older ones come from ring [b, capacity, h_kv, d], where
        token n behind the sinks is at n % capacity. table int32 [b, at least first_page + pages]. offsets: int32 [b],
        positions of token 0, or None. segments: int64 on the device, ids of segments to fill, for formats with factors:
        for each sequence as many as `geometry.segments` says for `pages` pages at once. layer: number of the codec.
        """
        params = self._bound(layer, pool, table, offsets)
        params.prompt, params.prompt_first = source(self._checked(x)), first_token
        if ring is not None:
            params.ring, params.ring_capacity = source(self._checked(ring)), ring.shape[1]
        oldest = first_page * self.geometry.shape.t + self.geometry.format.window.sinks
        if oldest < first_token and ring is None:
            raise KernelError(
                f"page {first_page} begins at token {oldest}, before the first given one ({first_token}): pass the ring"
            )
        b = table.shape[0]
        if self._debug:
            check_ids(table[:, first_page : first_page + pages], first_page, pool.capacity)
        if not self.geometry.format.lowrank:
            params.first_page = first_page
            self._launch(self.kernel, self.plan, [params], b, pages)
            return
        each = self.geometry.segments(pages, pages)
        if segments is None or segments.numel() != b * each:
            have = 0 if segments is None else segments.numel()
            raise KernelError(f"{b} x {pages} pages form {b * each} segments, {have} ids were given (segments=)")
        for k in range(each):
            params.first_page = first_page + k * SEGMENT_PAGES
            count = min(SEGMENT_PAGES, pages - k * SEGMENT_PAGES)
            self._with_factors(params, pool, table, b, count, segments.view(b, each)[:, k])

    def step(
        self,
        pools: PagePool | Sequence[PagePool],
        table: Tensor,
        rings: Tensor | Sequence[Tensor],
        lengths: Tensor,
        fresh: int = 1,
        offsets: Tensor | None = None,
    ) -> None:
        """Packs the page that has just filled, of each sequence where one has: lengths, int32 [b] on the device, say.

        All layers in one launch (of LAYERS_AT_ONCE each), so that a step in which no page fills costs next to nothing.
        pools, rings: of each layer; lengths: cached tokens, the last `fresh` (at most t) of them new since the last
        call. rings, table, offsets: as in `prompt`, all layers have the same. Raises KernelError for formats with
        factors.
        """
        if self.geometry.format.lowrank:
            raise KernelError("factors are found by torch, and the host has to know which pages fill: use `prompt`")
        pools = [pools] if isinstance(pools, PagePool) else pools
        rings = [rings] if isinstance(rings, Tensor) else rings
        if not len(pools) == len(rings) == len(self.codecs):
            raise KernelError(f"{len(pools)} pools and {len(rings)} rings for {len(self.codecs)} layers")
        if self._debug:
            self._check_step(pools, table, lengths, fresh)
        layers = []
        for i, (pool, ring) in enumerate(zip(pools, rings, strict=True)):
            params = self._bound(i, pool, table, offsets)
            params.ring, params.ring_capacity = source(self._checked(ring)), ring.shape[1]
            params.lengths, params.fresh = _int32(lengths, "lengths"), fresh
            layers.append(params)
        for first in range(0, len(layers), self.at_once):
            self._launch(self.kernel, self.plan, layers[first : first + self.at_once], table.shape[0], 1)

    def _check_step(self, pools: Sequence[PagePool], table: Tensor, lengths: Tensor, fresh: int) -> None:
        window, t = self.geometry.format.window, self.geometry.shape.t
        for i, n in enumerate(lengths.tolist()):
            if (full := window.pages(n, t)) > window.pages(n - fresh, t):
                check_ids(table[i : i + 1, full - 1 : full], full - 1, min(pool.capacity for pool in pools), i)

    def check(self) -> None:
        """Waits for the kernels so far and raises KernelError if one of them met what it cannot pack."""
        if found := int(self.status):
            self.status.zero_()
            raise KernelError(_told(found))

    def _checked(self, x: Tensor) -> Tensor:
        shape = self.geometry.shape
        if x.dtype != self.dtype or x.device != self.status.device or tuple(x.shape[2:]) != (shape.h_kv, shape.d):
            raise KernelError(
                f"numbers {x.dtype} {tuple(x.shape)} on {x.device}: this packer takes {self.dtype} "
                f"[b, tokens, {shape.h_kv}, {shape.d}] on {self.status.device}"
            )
        return x

    def _bound(self, layer: int, pool: PagePool, table: Tensor, offsets: Tensor | None) -> Params:
        params = Params.from_buffer_copy(self._params[layer])
        params.table, params.table_stride = _int32(table, "block table"), table.stride(0)
        params.offsets = None if offsets is None else _int32(offsets, "offsets")
        params.heads, params.records = pool.heads.data_ptr(), pool.records.data_ptr()
        params.capacity_pages = pool.capacity
        return params

    def _launch(self, kernel: jit.Kernel, p: Plan, layers: Sequence[Params], b: int, pages: int) -> None:
        if not b or not pages:
            return
        if p.workspace:
            self.reserve(b, pages)
            for i, params in enumerate(layers):
                params.workspace = self._workspace.data_ptr() + i * p.ctas * pages * b * p.workspace
        argument = layers_type(kernel.params_size // ctypes.sizeof(Params))()
        for i, params in enumerate(layers):
            argument.layer[i] = params
        grid = (pages * p.ctas, b, len(layers))
        kernel.launch(grid, p.threads, p.shared, argument, jit.current_stream(self._index))
        if self._debug:
            self.check()

    def _with_factors(
        self, params: Params, pool: PagePool, table: Tensor, b: int, pages: int, segments: Tensor
    ) -> None:
        """One segment of each sequence: codes and outliers by the kernel, factors of what they left by torch, and the
        sketch of what these left by another kernel."""
        part, shape = self.geometry.format.lowrank, self.geometry.shape
        assert part is not None
        left = torch.empty(b, pages, shape.t, shape.h_kv, shape.d, device=self.device)
        params.residual = left.data_ptr()
        self._launch(self.kernel, self.plan, [params], b, pages)
        ids = table[:, params.first_page : params.first_page + pages].long()
        for i in range(b):
            fields, product = lowrank.encode(part, shape, left[i], None, {}, pages)
            pool.write(ids[i], fields, segments[i : i + 1])
            left[i] -= product
        if self._sketcher is not None:
            rest = Params.from_buffer_copy(params)
            # Sequences and pages in the order in which they were written out; no token comes from elsewhere.
            rest.prompt = source(left.flatten(1, 2))
            rest.prompt_first = params.first_page * shape.t + self.geometry.format.window.sinks
            rest.residual = None
            self._launch(self._sketcher, self._sketch_plan, [rest], b, pages)


def check_all(packers: Sequence[Packer]) -> None:
    """As `Packer.check` of all of them: waits once, and what any of them met is told once."""
    found = 0
    for bits in torch.cat([packer.status for packer in packers]).tolist() if packers else ():
        found |= bits
    if found:
        forget_all(packers)
        raise KernelError(_told(found))


def forget_all(packers: Sequence[Packer]) -> None:
    """What kernels have met so far is nobody's any more."""
    for packer in packers:
        packer.status.zero_()


def _told(bits: int) -> str:
    return "; ".join(text for bit, text in STATUS.items() if bits & bit)


def check_ids(ids: Tensor, first_page: int, capacity: int, first_sequence: int = 0) -> None:
    """Raises KernelError where ids [sequences, pages] of a block table are not in a pool of `capacity` pages."""
    wrong = ((ids < 0) | (ids >= capacity)).nonzero()
    if len(wrong):
        i, page = wrong[0].tolist()
        raise KernelError(
            f"block table: page {first_page + page} of sequence {first_sequence + i} has id {int(ids[i, page])}, the "
            f"pool has pages 0 to {capacity - 1}: give every page that is packed one of them"
        )


def _int32(x: Tensor, what: str) -> int:
    if x.dtype != torch.int32 or x.stride(-1) != 1:
        raise KernelError(f"{what}: int32 whose entries lie side by side, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


def scalings(rope: Rope) -> tuple[float, float]:
    """RoPE's factor on cos and sin, and what un-rotation multiplies by: as torch on CUDA divides by a Python number."""
    squared = torch.tensor(rope.scaling**2)
    return rope.scaling, float(1.0 / squared)


def device_tables(codec: Codec, rotation: Rotation | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the kernel for numbers of `dtype` reads, contiguous, by the names in `Params`.

    float32 but for masks (uint8) and for matrices, which are fragments of pieces (int16) as `cuda/pack_matrix.cuh` has
    them. Raises KernelError where a head has more outlier channels than the format allows.
    """
    fmt, tables = codec.geometry.format, codec.tables
    direct = is_direct(codec.geometry, dtype)
    piece = dtype if direct else torch.bfloat16
    found: dict[str, Tensor] = {}
    if fmt.dense:
        values = dense.codebook(fmt.dense, codec.geometry.shape.d, tables, codec.device)
        found |= {"values": values.float(), "edges": dense.edges(fmt.dense, values, tables).float()}
    found |= {name: tables[name].float() for name in ("scale", "zero", "lower", "upper", "mean") if name in tables}
    if "scale" in found:
        found["inverse"] = torch.where(found["scale"] > 0, 1 / found["scale"], 0.0)
    if rotation is not None:
        found["inv_freq"] = rotation.inv_freq.float()
    if fmt.rotate:
        first = direct and codec.geometry.shape.side == "value"
        found["rotation"] = fragments(tables["rotation"], piece, MATRIX_SCALE, first_operand=first)
    if fmt.sketch:
        found["sketch"] = fragments(tables["sketch"].T, piece)
    if fmt.sketch and fmt.sketch.outliers:
        found["outlier_mask"] = tables["outlier_mask"]
        if direct:
            found |= _outlier_tables(tables["outlier_mask"], tables["outlier_sketch"].T.float(), piece, codec.geometry)
        else:
            found["outlier_sketch"] = fragments(tables["outlier_sketch"].T, piece)
    return {name: x.contiguous() for name, x in found.items()}


def _outlier_tables(mask: Tensor, matrix: Tensor, piece: torch.dtype, geometry: PageGeometry) -> dict[str, Tensor]:
    """The products of each head's outlier channels alone: channels int16 [h_kv, 16 steps], -1 for none, their rows of
    matrix [d, m] as fragments, and words of two bytes [h_kv, d] with all bits set where a channel is none of them."""
    room = 16 * outlier_steps(geometry)
    if (most := int(mask.bool().sum(1).max())) > room:
        raise KernelError(f"outlier_mask has {most} channels of one head, the format has room for {room}")
    order = torch.sort(mask.bool().int(), dim=1, descending=True, stable=True).indices
    order = torch.nn.functional.pad(order, (0, max(0, room - order.shape[1])))[:, :room]
    there = torch.arange(room, device=mask.device) < mask.bool().sum(1, keepdim=True)
    rows = matrix[order] * there[..., None]
    return {
        "outlier_channels": torch.where(there, order, -1).to(torch.int16),
        "outlier_sketch": torch.stack([fragments(x, piece, order=torch.arange(room)) for x in rows]),
        "kept_words": (mask.bool().to(torch.int16) - 1),
    }


def fragments(
    matrix: Tensor,
    piece: torch.dtype,
    scale: float | None = None,
    order: Tensor | None = None,
    first_operand: bool = False,
) -> Tensor:
    """A matrix [k, n] as `cuda/pack_matrix.cuh` reads it: int16 [n / 16, k / 16, pieces, 32 lanes, 8].

    piece: of which dtype its pieces are, float16 (two, times `scale`, by default a power of two near 512 over the
    largest number) or bfloat16 (three). order: int64 [k], the row that each place of the steps multiplies; by default
    that which makes 16 bytes of a vector two steps of a lane. first_operand: of the matrix instruction.
    """
    k, n = matrix.shape
    if order is None:
        step, lane, i = torch.meshgrid(torch.arange(k // 16), torch.arange(4), torch.arange(4), indexing="ij")
        order = (step // 2 * 32 + lane * 8 + step % 2 * 4 + i).flatten()
    rest = matrix.float()[order.to(matrix.device)]
    if piece == torch.float16:
        rest = rest * (scale if scale is not None else 2.0 ** (9 - ceil(log2(max(float(rest.abs().max()), 2**-100)))))
    pieces = []
    for _ in range(2 if piece == torch.float16 else 3):
        pieces.append(rest.to(piece))
        rest = rest - pieces[-1].float()
    # [pieces, steps, lanes of a row, halves of 8 channels, 2, sixteens, halves of 8 columns, columns]
    found = torch.stack(pieces).view(torch.int16).view(len(pieces), k // 16, 4, 2, 2, n // 16, 2, 8)
    in_turn = (3, 6) if first_operand else (6, 3)
    return found.permute(5, 1, 0, 7, 2, *in_turn, 4).reshape(n // 16, k // 16, len(pieces), 32, 8).contiguous()
