"""Packing on the GPU: numbers of a prompt or of the window become pages, by one kernel, without asking the host.

`runtime.pack_units` decides how a format's pages are cut among CTAs and writes the unit over `cuda/pack.cuh`; `Packer`
launches it on PyTorch's current stream: nothing is allocated and nothing is waited for, so a step can be captured in a
CUDA graph. The bytes are those of the torch codec (`runtime.codec`) on the same device, with these exceptions, where a
sum is rounded in another order: norms (`normalize: norm`, sketches) by one unit of float16 in the last place, and what
follows from them; signs of a sketch's products that are within rounding of zero; all of a rotated format's numbers in
the last bits of float32; and which of two zeros the middle of a range of zeros is.

Formats with low-rank factors: the kernel packs codes and outliers and writes out what they leave (`residual`, float16),
from which three more find the factors (`runtime.pack_factors`); then a sketch of what is left is packed, if the format
has one. All of them run one after the other on work space that torch allocates, which a graph keeps as its own. Factors
are the torch codec's up to rounding, and so is what follows from them.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from artifacts import PageGeometry, Rope
from artifacts.geometry import SEGMENT_PAGES
from runtime import jit, pack_codebook, pieces
from runtime.codec import Codec, PagePool
from runtime.fragments import as_they_stand, cores, whole
from runtime.jit import KernelError
from runtime.pack_factors import Factors, Launch, columns, layers_together
from runtime.pack_params import LAYERS_AT_ONCE, Params, Source, layers_type
from runtime.pack_units import (
    Plan,
    bounds_with_scales,
    factor_units,
    is_direct,
    outlier_steps,
    pack_unit,
    plan,
    sketch_plan,
    sketched_together,
)
from runtime.parts import banded, dense, lowrank
from runtime.rope import Rotation

NO_PROMPT = (1 << 31) - 1


def source(x: Tensor) -> Source:
    """x [b, tokens, h_kv, d] as a kernel takes it. Raises KernelError where 16 bytes of channels lie apart."""
    strides, each = pieces.strides(x), pieces.PIECE // x.itemsize
    if x.dim() != 4 or strides is None:
        raise KernelError(
            f"numbers {tuple(x.shape)} with strides {x.stride()}: the pack kernel reads [b, tokens, h_kv, d] in pieces "
            "of 16 bytes of neighbouring channels; make them contiguous"
        )
    if strides[2] * pieces.PIECE >= 1 << 32:
        raise KernelError(
            f"numbers with strides {x.stride()}: a head's begin 4 GiB or more behind the last one's; "
            "make them contiguous"
        )
    return Source(x.data_ptr(), *(each * stride for stride in strides))


STATUS = {
    1: "a block table holds a page id outside the pool",
    2: "a scale or zero point does not fit float16 (largest 65504): is the model sound?",
    4: "keys or values hold NaN or infinity: check the model's dtype and weights",
    8: "a segment table holds an id outside the pool",
}


def _rope_of(geometry: PageGeometry, rotation: Rotation | None) -> Rope | None:
    """The rotary embedding that packing undoes."""
    return rotation.rope if rotation and geometry.format.domain == "pre_rope" else None


class Packer:
    """Packs pages of one side of a layer, or of several layers with the same format and shape.

    Makes its tables and kernels once; `prompt`, `prompts` and `step` only launch. codecs: of the layers, on a CUDA
    device. rotation: of the model, for keys stored before RoPE, or None. dtype: of the numbers. name: of the unit.

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
        self.tables = [device_tables(codec, rotation if rope else None, dtype, arch) for codec in self.codecs]
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._debug = jit.switch("SIGNPOST_DEBUG")
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        behind = [jit.load(unit, self.device) for unit in factor_units(name, geometry, arch, self.at_once)]
        self._factors = Factors(geometry, behind[0], self.device) if behind else None
        self._sketcher = behind[1].kernel("pack") if behind[1:] else None
        self._sketch_plan = sketch_plan(geometry, arch) if self._sketcher else self.plan
        self._processors = jit.processors(self.device)
        self._index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self._params = [self._of_layer(tables, rope) for tables in self.tables]

    def _of_layer(self, tables: dict[str, Tensor], rope: Rope | None) -> Params:
        params = Params(status=self.status.data_ptr(), scaling=1.0, unscaling=1.0, prompt_first=NO_PROMPT)
        for field, tensor in tables.items():
            setattr(params, field, tensor.data_ptr())
        if rope:
            params.scaling, params.unscaling = scalings(rope)
        return params

    def reserve(self, b: int, pages: int = 1, layers: int | None = None) -> None:
        """Work space for launches of so many pages of b sequences, which few formats need (`plan.workspace`).
        layers: of a launch; None: as many as one takes.

        To be called before a step is captured in a graph; launches that need more take it themselves.
        """
        size = (layers or self.at_once) * self.plan.ctas * pages * b * self.plan.workspace
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
        positions of token 0, or None. segments: for formats with factors, the id of each page's segment, int32 like
        table: SEGMENT_PAGES pages from `first_page` on are one, and so on. layer: number of the codec.
        """
        params = self._bound(layer, pool, self._tables(table, offsets, segments))
        params.prompt, params.prompt_first = source(self._checked(x)), first_token
        if ring is not None:
            params.ring, params.ring_capacity = source(self._checked(ring)), ring.shape[1]
        self._require_ring(first_page, first_token, ring)
        if self._debug:
            check_ids(table[:, first_page : first_page + pages], first_page, pool.capacity)
        self._pack_prompts([params], table.shape[0], first_page, pages)

    def prompts(
        self,
        layers: Sequence[int],
        pools: Sequence[PagePool],
        table: Tensor,
        numbers: Sequence[Tensor],
        pages: int,
        offsets: Tensor | None = None,
        segments: Tensor | None = None,
        rows: Tensor | None = None,
        first_page: int = 0,
        first_token: int = 0,
        rings: Sequence[Tensor] | None = None,
    ) -> None:
        """As `prompt` in several layers: LAYERS_AT_ONCE in a launch, or as many as `pack_factors.layers_together` says,
        or where else it takes work space one.

        layers: numbers of the codecs; pools, numbers, rings: of each of these. rows: int32 [b], which row of the
        numbers each sequence of the tables has; None: in their order. A ring of one row is all sequences'.
        """
        self._require_ring(first_page, first_token, rings)
        if self._debug:
            check_ids(table[:, first_page : first_page + pages], first_page, min(pool.capacity for pool in pools))
        alike, made = self._tables(table, offsets, segments, rows), []
        for layer, pool, x in zip(layers, pools, numbers, strict=True):
            params = self._bound(layer, pool, alike)
            params.prompt, params.prompt_first = source(self._checked(x)), first_token
            made.append(params)
        for params, ring in zip(made, rings, strict=True) if rings is not None else ():
            params.ring, params.ring_capacity = source(self._checked(ring)), ring.shape[1]
        together = self._together(table.shape[0], pages)
        for first in range(0, len(made), together):
            self._pack_prompts(made[first : first + together], table.shape[0], first_page, pages)

    def _require_ring(self, first_page: int, first_token: int, given: object | None) -> None:
        oldest = first_page * self.geometry.shape.t + self.geometry.format.window.sinks
        if oldest < first_token and given is None:
            raise KernelError(
                f"page {first_page} begins at token {oldest}, before the first given one ({first_token}): pass the ring"
            )

    def _together(self, b: int, pages: int) -> int:
        """Layers that are packed at once, so many pages of prompts in b sequences."""
        if self.plan.workspace or not pages:
            return 1
        return layers_together(self.geometry, self.at_once, b, pages) if self._factors else self.at_once

    def _pack_prompts(self, layers: Sequence[Params], b: int, first_page: int, pages: int) -> None:
        at_once = SEGMENT_PAGES * self._factors.fit(b, SEGMENT_PAGES) if self._factors else max(pages, 1)
        for first in range(0, pages, at_once):
            for params in layers:
                params.first_page = first_page + first
            self._pack(layers, b, min(at_once, pages - first))

    def step(
        self,
        pools: PagePool | Sequence[PagePool],
        table: Tensor,
        rings: Tensor | Sequence[Tensor],
        lengths: Tensor,
        fresh: int = 1,
        offsets: Tensor | None = None,
        segments: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Packs the page that has just filled, of each sequence where one has: lengths, int32 [b] on the device, say.

        All layers in one launch (of LAYERS_AT_ONCE each; for formats with factors, as many as have work space), so that
        a step in which no page fills costs next to nothing. pools, rings: of each layer; lengths: cached tokens, the
        last `fresh` (at most t) of them new since the last call. rings, table, offsets, segments: as in `prompt`, all
        layers have the same; a page that fills is a segment of its own. rows: int32 [b], where the rings have each
        sequence's tokens; None: in the order of the others.
        """
        pools = [pools] if isinstance(pools, PagePool) else pools
        rings = [rings] if isinstance(rings, Tensor) else rings
        if not len(pools) == len(rings) == len(self.codecs):
            raise KernelError(f"{len(pools)} pools and {len(rings)} rings for {len(self.codecs)} layers")
        if self._debug:
            self._check_step(pools, table, lengths, fresh)
        alike, layers = self._tables(table, offsets, segments, rows), []
        for i, (pool, ring) in enumerate(zip(pools, rings, strict=True)):
            params = self._bound(i, pool, alike)
            params.ring, params.ring_capacity = source(self._checked(ring)), ring.shape[1]
            params.lengths, params.fresh = _int32(lengths, "lengths"), fresh
            layers.append(params)
        b = table.shape[0]
        at_once = min(self.at_once, self._factors.fit(b, 1)) if self._factors else self.at_once
        for first in range(0, len(layers), at_once):
            self._pack(layers[first : first + at_once], b, 1)

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

    def _tables(
        self, table: Tensor, offsets: Tensor | None, segments: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, int]:
        """What layers have alike of their parameters."""
        found = {"table": _int32(table, "block table"), "table_stride": table.stride(0)}
        if offsets is not None:
            found["offsets"] = _int32(offsets, "offsets")
        if rows is not None:
            found["rows"] = _int32(rows, "rows")
        if self._factors:
            if segments is None or segments.shape != table.shape:
                given = "none" if segments is None else list(segments.shape)
                raise KernelError(f"segments of pages: a table like that of pages, {list(table.shape)}, not {given}")
            found |= {"segment_ids": _int32(segments, "segment table"), "segment_stride": segments.stride(0)}
        return found

    def _bound(self, layer: int, pool: PagePool, alike: dict[str, int]) -> Params:
        params = Params.from_buffer_copy(self._params[layer])
        for field, number in alike.items():
            setattr(params, field, number)
        params.heads, params.records = pool.heads.data_ptr(), pool.records.data_ptr()
        params.capacity_pages = pool.capacity
        if self._factors:
            params.segments, params.capacity_segments = pool.segments.data_ptr(), pool.segments.shape[0]
        return params

    def _pack(self, layers: Sequence[Params], b: int, pages: int) -> None:
        """So many pages of b sequences of each layer; for formats with factors those of a prompt begin with a segment,
        and as many sequences are packed at once as have work space."""
        if not b or not pages:
            return
        if not self._factors:
            self._launch_pages(self.kernel, self.plan, layers, b, pages)
            return
        at_once = self._factors.fit(len(layers), pages)
        for first in range(0, b, at_once):
            some = [params.from_sequence(first, self.dtype.itemsize) for params in layers]
            self._pack_factors(some, min(at_once, b - first), pages)

    def _pack_factors(self, layers: Sequence[Params], b: int, pages: int) -> None:
        """Codes and outliers, then factors of what they left, then the sketch of what these left."""
        assert self._factors
        shape = self.geometry.shape
        size = len(layers), b, pages, shape.t, shape.h_kv, shape.d
        left = torch.empty(*size, dtype=torch.float16, device=self.device)
        for params, numbers in zip(layers, left, strict=True):
            params.residual = numbers.data_ptr()
        self._launch_pages(self.kernel, self.plan, layers, b, pages)
        self._factors.run(layers, b, pages, self._launch)
        if self._sketcher:
            rest = [_sketched(self.geometry, *pair) for pair in zip(layers, left, strict=True)]
            self._launch_pages(self._sketcher, self._sketch_plan, rest, b, pages)

    def _launch_pages(self, kernel: jit.Kernel, p: Plan, layers: Sequence[Params], b: int, pages: int) -> None:
        if p.workspace:
            self.reserve(b, pages, len(layers))
            for i, params in enumerate(layers):
                params.workspace = self._workspace.data_ptr() + i * p.ctas * pages * b * p.workspace
        grid, each = p.launch(self.geometry.shape.h_kv, pages, b, len(layers), self._processors)
        for params in layers:
            params.pages, params.sequences, params.heads_each = pages, b, each
        self._launch(kernel, p, layers, grid)

    def _launch(
        self, kernel: jit.Kernel, p: Plan | Launch, layers: Sequence[Params], grid: tuple[int, int, int]
    ) -> None:
        argument = layers_type(kernel.params_size // ctypes.sizeof(Params))()
        for i, params in enumerate(layers):
            argument.layer[i] = params
        kernel.launch(grid, p.threads, p.shared, argument, jit.current_stream(self._index))
        if self._debug:
            self.check()


def _sketched(geometry: PageGeometry, params: Params, left: Tensor) -> Params:
    """Parameters for the sketch of what factors have left, [b, pages, t, h_kv, d]: sequences and pages are in the order
    in which they were written out, and no token comes from elsewhere."""
    shape, rest = geometry.shape, Params.from_buffer_copy(params)
    rest.residual = rest.rows = None
    if params.lengths:
        rest.ring, rest.ring_capacity = source(left[:, 0]), shape.t  # token n behind the sinks is at n % t
    else:
        rest.prompt = source(left.flatten(1, 2))
        rest.prompt_first = params.first_page * shape.t + geometry.format.window.sinks
    return rest


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


def device_tables(codec: Codec, rotation: Rotation | None, dtype: torch.dtype, arch: str) -> dict[str, Tensor]:
    """What the kernel of `arch` for numbers of `dtype` reads, contiguous, by the names in `Params`.

    float32 but for masks, codebooks and bands (uint8), for matrices, which are fragments or cores (int16) as
    `cuda/pack_matrix.cuh` has them, and for outlier channels and words of masks (int16). They are made once. Raises
    KernelError where a head has more outlier channels than the format allows.
    """
    key = rotation, dtype, arch
    if key not in codec.derived:
        codec.derived[key] = _device_tables(codec, rotation, dtype, arch)
    return codec.derived[key]


def _device_tables(codec: Codec, rotation: Rotation | None, dtype: torch.dtype, arch: str) -> dict[str, Tensor]:
    fmt, tables = codec.geometry.format, codec.tables
    direct = is_direct(codec.geometry, dtype)
    piece, order = (dtype, as_they_stand(codec.geometry.shape.d)) if direct else (torch.bfloat16, None)
    found: dict[str, Tensor] = {}
    if fmt.dense:
        values = dense.codebook(fmt.dense, codec.geometry.shape.d, tables, codec.device)
        found["codebook"] = pack_codebook.codebook(values.float(), dense.edges(fmt.dense, values, tables).float())
    found |= {name: tables[name].float() for name in ("scale", "mean") if name in tables}
    most = torch.finfo(torch.float32).max  # bounds beyond which every number that is not finite lies, NaN included
    found |= {name: tables[name].float().clamp(-most, most) for name in ("lower", "upper") if name in tables}
    if "scale" in found:
        inverse = torch.where(found["scale"] > 0, 1 / found["scale"], 0.0)
        beside = [found["lower"], found["upper"]] if bounds_with_scales(codec.geometry) else []
        zero = tables["zero"].float()
        found["factors"] = torch.stack([inverse, -zero * inverse if direct else zero, *beside], -1)
    if rotation is not None:
        found["inv_freq"] = rotation.inv_freq.float()
    if fmt.banded:
        found["bands"] = banded.pack_tables(tables)
    if fmt.lowrank:
        found["start"] = lowrank.starting(codec.geometry.shape.d, columns(codec.geometry)).T.to(codec.device)
    if fmt.rotate:
        of_heads = tables["rotation"] if tables["rotation"].dim() == 3 else tables["rotation"][None]
        first = direct and codec.geometry.shape.side == "value"
        found["rotation"] = torch.stack([whole(matrix, piece, order, first) for matrix in of_heads])
    if fmt.sketch:
        # What factors leave are halves, which go another way.
        if fmt.lowrank:
            direct, piece, order = True, torch.float16, as_they_stand(codec.geometry.shape.d)
        together = sketched_together(codec.geometry, dtype, arch)
        found["sketch"] = cores(tables["sketch"].T, piece) if together else whole(tables["sketch"].T, piece, order)
    if fmt.sketch and fmt.sketch.outliers:
        found["outlier_mask"] = tables["outlier_mask"]
        if direct:
            found |= _outlier_tables(tables["outlier_mask"], tables["outlier_sketch"].T.float(), piece, codec.geometry)
        else:
            found["outlier_sketch"] = whole(tables["outlier_sketch"].T, piece)
    return {name: x.contiguous() for name, x in found.items()}


def _outlier_tables(mask: Tensor, matrix: Tensor, piece: torch.dtype, geometry: PageGeometry) -> dict[str, Tensor]:
    """The products of each head's outlier channels alone: channels int16 [h_kv, 16 steps], -1 for none, their rows of
    matrix [d, m] as fragments, and words of two bytes [h_kv, 4, d / 4] with all bits set where a channel is none of
    them, those of each of four lanes together (`Vectors::keep`)."""
    room = 16 * outlier_steps(geometry)
    if (most := int(mask.bool().sum(1).max())) > room:
        raise KernelError(f"outlier_mask has {most} channels of one head, the format has room for {room}")
    order = torch.sort(mask.bool().int(), dim=1, descending=True, stable=True).indices
    order = torch.nn.functional.pad(order, (0, max(0, room - order.shape[1])))[:, :room]
    there = torch.arange(room, device=mask.device) < mask.bool().sum(1, keepdim=True)
    rows = matrix[order] * there[..., None]
    kept = mask.bool().to(torch.int16) - 1
    return {
        "outlier_channels": torch.where(there, order, -1).to(torch.int16),
        "outlier_sketch": torch.stack([whole(x, piece, torch.arange(room)) for x in rows]),
        "kept_words": kept.unflatten(1, (-1, 2, 4, 2)).permute(0, 3, 1, 2, 4),  # steps, halves of 8, lanes, 2
    }
