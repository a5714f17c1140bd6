"""Pack kernels on the CPU (tests/cuda/emulator.h) against the torch codec, byte for byte. Needs g++, no GPU."""

import ctypes
import shutil

import numpy as np
import pytest
import torch

import tests.packing
from artifacts import Banded, Dense, Format, LowRank, PageGeometry, Rope, Sketch, Sparse
from runtime import pack, pack_factors, pack_units
from runtime.codec import Codec
from runtime.keep import AT_ONCE, keep
from runtime.pack_params import LAYERS_AT_ONCE, Params, layers_type
from runtime.rope import Rotation
from tests.cuda.emulated import Module, stand_in
from tests.packing import (
    check_factors,
    differences,
    direct_sides,
    exact_tensors,
    leaving,
    numbers,
    poisoned,
    reference,
    ring_of,
    sides,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SIDES = sides()
PROCESSORS = 3  # so few that a CTA takes several heads


class HostRotation(Rotation):
    """Sines and cosines of the C library, as emulated kernels have them, and products as torch on CUDA rounds them."""

    def _angles(self, positions):
        angles = (positions.float()[..., None] * self.inv_freq).numpy()
        found = (np.array([f(x) for x in angles.ravel()], np.float32) for f in (_libm.cosf, _libm.sinf))
        cos, sin = (torch.from_numpy(x.reshape(angles.shape)) for x in found)
        return cos * self.rope.scaling, sin * self.rope.scaling

    def unrotate(self, keys, positions):
        cos, sin = self._angles(positions)
        unscaling = pack.scalings(self.rope)[1]
        return self._turn(keys, cos * unscaling, -sin * unscaling)


_libm = ctypes.CDLL("libm.so.6")
for _name in ("sinf", "cosf"):
    getattr(_libm, _name).argtypes, getattr(_libm, _name).restype = [ctypes.c_float], ctypes.c_float


class Emulated:
    """`runtime.pack.Packer` without a GPU."""

    def __init__(self, codec, rotation, dtype, arch, races=False):
        geometry, self.h_kv = codec.geometry, codec.geometry.shape.h_kv
        rope = rotation.rope if geometry.format.domain == "pre_rope" else None
        self.plan = pack_units.plan(geometry, rope, dtype, arch)
        self.module = Module(pack_units.pack_unit("pack", geometry, rope, dtype, arch), races)
        self.kernel = self.module.kernel("pack")
        self.tables = pack.device_tables(codec, rotation if rope else None, dtype, arch)
        self.status = torch.zeros(1, dtype=torch.int32)
        self.params = Params(scaling=1.0, unscaling=1.0, prompt_first=pack.NO_PROMPT)
        self.params.status = self.status.data_ptr()
        for field, tensor in self.tables.items():
            setattr(self.params, field, tensor.data_ptr())
        if rope:
            self.params.scaling, self.params.unscaling = pack.scalings(rope)

    def run(self, pool, table, b, pages, at_once=None, **fields):
        for name, value in fields.items():
            setattr(self.params, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        self.params.table, self.params.table_stride = table.data_ptr(), table.stride(0)
        self.params.heads, self.params.records = pool.heads.data_ptr(), pool.records.data_ptr()
        self.params.capacity_pages = pool.capacity
        workspace = torch.empty(self.plan.ctas * pages * b * self.plan.workspace, dtype=torch.uint8)
        self.params.workspace = workspace.data_ptr()
        argument = layers_type(1)()
        for first in range(0, b, at_once or b):
            some = min(at_once or b, b - first)
            grid, each = self.plan.launch(self.h_kv, pages, some, 1, PROCESSORS)
            self.params.pages, self.params.sequences, self.params.heads_each = pages, some, each
            argument.layer[0] = self.params.from_sequence(first, 2) if at_once else self.params
            self.kernel.launch(grid, self.plan.threads, self.plan.shared, argument)


# What the first kernel packs of formats with factors.
PACKED = ("codes", "band_codes", "scale", "zero", "start", "index", "correction")


def loose(geometry: PageGeometry) -> list[str]:
    return [name for name in ("norm", "outlier_norm") if name in geometry.fields]


def made(geometry: PageGeometry, rope: Rope, dtype, arch, races=False):
    shape = geometry.shape
    codec = Codec(geometry, exact_tensors(geometry.format, shape.h_kv, shape.d))
    inv_freq = (10000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
    rotation = HostRotation(rope, inv_freq)
    return codec, rotation, Emulated(codec, rotation, dtype, arch, races)


def check_prompt(geometry, rope, dtype, arch, kind, b=1, pages=2, first_page=1, races=False):
    codec, rotation, packer = made(geometry, rope, dtype, arch, races)
    shape, sinks = geometry.shape, geometry.format.window.sinks
    n = sinks + (first_page + pages) * shape.t + 3
    x = numbers(kind, (b, n, shape.h_kv, shape.d), 1, dtype)
    table = torch.full((b, first_page + pages + 1), 99, dtype=torch.int32)
    ids = torch.randperm(b * pages + 2)[: b * pages].view(b, pages)
    table[:, first_page : first_page + pages] = ids
    offsets = torch.arange(b, dtype=torch.int32) * 1000 + 7
    got, wanted = (poisoned(geometry, b * pages + 2) for _ in range(2))
    packer.run(got, table, b, pages, prompt=pack.source(x), prompt_first=0, first_page=first_page, offsets=offsets)
    for i in range(b):
        fields = reference(codec, rotation, x[i], first_page, pages, int(offsets[i]))
        if "segment" in fields:  # the rest comes from other kernels
            fields = {k: v for k, v in fields.items() if k in PACKED}
        wanted.write(ids[i], fields)
    assert packer.status.item() == 0
    problems = differences(got, wanted, [] if geometry.format.lowrank else loose(geometry))
    assert not problems, f"{packer.plan}\n" + "\n".join(problems)
    return packer


OTHERS = ["smooth", "equal", "huge"]
SMALL = [geometry for _, geometry, _ in SIDES if geometry.shape.h_kv * geometry.shape.d <= 512]  # thread after thread


# Keys of every fourth format and values of others: on a GPU both sides of all are packed (tests/gpu).
ALTERNATE = [i for i in range(len(SIDES)) if (i // 2 + 2 * i) % 4 == 0]


@pytest.mark.parametrize("index", ALTERNATE, ids=[SIDES[i][0] for i in ALTERNATE])
def test_prompts(index):
    """Numbers on a grid; of half of the small ones also like a cache's, equal ones, or too many outliers."""
    _, geometry, rope = SIDES[index]
    small = geometry in SMALL
    pages = 2 if small else 1
    check_prompt(geometry, rope, torch.float16, "sm_90a", "grid", pages=pages)
    # Norms of other numbers are rounded in another order than torch's.
    norms = geometry.format.dense is not None and geometry.format.dense.normalize == "norm"
    if ALTERNATE.index(index) // 2 % 2 or not small:  # keys and values alike
        return
    check_prompt(geometry, rope, torch.float16, "sm_90a", OTHERS[index % 3 or int(norms)], pages=pages)


DIRECT = direct_sides()


@pytest.mark.parametrize("index", range(len(DIRECT)), ids=[side[0] for side in DIRECT])
def test_numbers_through_registers(index):
    """What needs no shared memory; numbers of four bytes take the other way."""
    _, geometry, rope = DIRECT[index]
    for place, dtype in enumerate(pack_units.INPUTS):
        assert pack_units.is_direct(geometry, dtype) == (dtype.itemsize == 2)
        if index % 5 == 0 or (index + index // 2) % 2 == place:
            check_prompt(geometry, rope, dtype, "sm_90a", "grid")


def test_widths_by_band_and_a_sketch_of_the_rest():
    """No rotation: codes come first, and the sketch is of what they leave."""
    geometry = PageGeometry.of(Format(16, banded=Banded(2.0), sketch=Sketch(32)), 2, 64, "key")
    assert not pack_units.is_direct(geometry, torch.float16)
    check_prompt(geometry, SIDES[0][2], torch.float16, "sm_90a", "grid")


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_numbers_without_codes_are_reported(broken):
    """Factors alone find directions in them; halves of what is left do not show them."""
    geometry = PageGeometry.of(Format(16, lowrank=LowRank(2, 1), sketch=Sketch(32)), 2, 64, "key")
    _, _, packer = made(geometry, SIDES[0][2], torch.float16, "sm_90a")
    pool, table = poisoned(geometry, 1), torch.zeros(1, 1, dtype=torch.int32)
    for value, status in ((1.0, 0), (broken, 4)):
        x = numbers("grid", (1, 16, 2, 64), 1, torch.float16)
        x[0, 3, 1, 5] = value
        left = torch.empty(1, 16, 2, 64, dtype=torch.float16)
        packer.run(pool, table, 1, 1, prompt=pack.source(x), prompt_first=0, first_page=0, residual=left)
        assert packer.status.item() == status


OUTLIERS = [side for side in SIDES[-6:] if side[1].format.sparse]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dtype", list(pack_units.INPUTS))
@pytest.mark.parametrize("name, geometry, rope", OUTLIERS, ids=[side[0] for side in OUTLIERS])
def test_outliers_of_recipes(name, geometry, rope, dtype, kind):
    check_prompt(geometry, rope, dtype, "sm_90a", kind, b=2)


NARROW = [side for side in SIDES if side[1].shape.d < 256]


@pytest.mark.parametrize("index", range(0, len(NARROW), 8))
def test_without_clusters(index):
    """One CTA packs all slices of a page where there are outliers; what does not fit shared memory stays there."""
    _, geometry, rope = NARROW[index]
    check_prompt(
        geometry, rope, [torch.bfloat16, torch.float32][index // 8 % 2], ["sm_80", "sm_86"][index // 8 % 2], "grid"
    )


ENDS = Sparse(0.25, "token", "online")
BOUNDS = Sparse(0.25, "matrix", "bundle", capacity=4)
SOME = Sparse(0.25, "matrix", "bundle", capacity=1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86"])
@pytest.mark.parametrize("h_kv, d, half_tiles", [(11, 256, True), (4, 128, False)])
@pytest.mark.parametrize("part", [ENDS, BOUNDS, SOME], ids=["ends", "bounds", "limited"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_blocks_of_outliers_alone(side, part, h_kv, d, half_tiles, arch):
    """All numbers of a block may be outliers, also where two blocks of threads share it, as far as there are slots."""
    geometry = PageGeometry.of(Format(32, Dense(2, "token"), part), h_kv, d, side)
    plan = pack_units.plan(geometry, None, torch.float16, arch)
    assert plan.cluster == (arch == "sm_90a")
    # CTAs that may split heads have whole tiles of some.
    assert (plan.tokens == 8) == (half_tiles and (part is ENDS or not plan.cluster))
    check_prompt(geometry, SIDES[0][2], torch.float16, arch, "full", pages=1)


FEW = SIDES[-6:] + [
    side
    for i, side in enumerate(SIDES[:-6])
    if (i % 9 == 0 or (not side[1].format.lowrank and i % 6 == 0)) and side[1].shape.d < 256
]


# New tokens of a step: one, several; recipes with both.
STEPS = [(side, fresh) for i, side in enumerate(FEW) for fresh in (1, 5) if i < 6 or i % 2 == fresh // 5]


@pytest.mark.parametrize("side, fresh", STEPS, ids=[f"{side[0]}-{fresh}" for side, fresh in STEPS])
def test_steps(side, fresh):
    """Sequences of different lengths: a page is packed in the step in which it fills, from a wrapped window. With
    several new tokens, windows are in another order than sequences, with others between them. Some are packed in two
    launches."""
    _, geometry, rope = side
    codec, rotation, packer = made(geometry, rope, torch.float16, "sm_90a")
    shape, window = geometry.shape, geometry.format.window
    full = window.sinks + window.recent + 2 * shape.t
    lengths = [full, full - 1, full + fresh - 1, full + fresh, window.sinks, 0]  # two, none, two, none, none, none
    due = [1 if full <= n < full + fresh else None for n in lengths]
    capacity = window.recent + shape.t + fresh + 2
    x = numbers("grid", (len(lengths), full + fresh, shape.h_kv, shape.d), 1, torch.float16)
    ring = torch.stack([ring_of(x[i], n, capacity, window.sinks) for i, n in enumerate(lengths)])
    table = torch.full((len(lengths), 5), 77, dtype=torch.int32)
    table[:, 1] = torch.arange(len(lengths)).flip(0)
    got, wanted = (poisoned(geometry, len(lengths)) for _ in range(2))
    device_lengths = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(len(lengths), dtype=torch.int32) if fresh == 1 else torch.tensor([4, 0, 6, 2, 1, 7]).int()
    windows = torch.full((8, *ring.shape[1:]), torch.nan, dtype=ring.dtype)
    windows[rows] = ring
    window_of = {"ring": pack.source(windows), "ring_capacity": capacity, "rows": None if fresh == 1 else rows}
    at_once = 4 if fresh == 5 or geometry.shape.d == 128 else None
    packer.run(got, table, len(lengths), 1, at_once, **window_of, lengths=device_lengths, fresh=fresh)
    for i, page in enumerate(due):
        if page is not None:
            fields = reference(codec, rotation, x[i], page, 1, 0)
            if "segment" in fields:
                fields = {k: v for k, v in fields.items() if k in PACKED}
            wanted.write(table[i, page : page + 1].long(), fields)
    assert packer.status.item() == 0
    problems = differences(got, wanted, [] if geometry.format.lowrank else loose(geometry))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("index", [0, 1])
def test_layers_at_once(index):
    """Each with tables, a window and pages of its own; one launch."""
    _, geometry, rope = SIDES[-6 + index]
    shape, window = geometry.shape, geometry.format.window
    codec, rotation, first = made(geometry, rope, torch.float16, "sm_90a")
    codecs = [codec, Codec(geometry, exact_tensors(geometry.format, shape.h_kv, shape.d, seed=5))]
    unit = pack_units.pack_unit(
        "pack", geometry, rotation.rope if index == 0 else None, torch.float16, "sm_90a", layers=2
    )
    layers, kept = layers_type(2)(), []
    n = window.sinks + window.recent + shape.t
    lengths, table = torch.tensor([n], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    pools = [[poisoned(geometry, 2) for _ in codecs] for _ in range(2)]
    for i, (codec, pool) in enumerate(zip(codecs, pools[0], strict=True)):
        x = numbers("grid", (n, shape.h_kv, shape.d), i, torch.float16)
        ring = ring_of(x, n, window.recent + shape.t, window.sinks)[None]
        tables = pack.device_tables(codec, rotation if index == 0 else None, torch.float16, "sm_90a")
        kept.append((tables, ring))
        params = Params.from_buffer_copy(first.params)
        for name, tensor in (tables | {"table": table, "heads": pool.heads, "records": pool.records}).items():
            setattr(params, name, tensor.data_ptr())
        params.ring, params.ring_capacity, params.capacity_pages = pack.source(ring), ring.shape[1], 2
        params.lengths, params.fresh, params.table_stride = lengths.data_ptr(), 1, 1
        layers.layer[i] = params
        pools[1][i].write(table[0].long(), reference(codec, rotation, x, 0, 1, 0))
    grid, _ = first.plan.launch(shape.h_kv, 1, 1, 2, PROCESSORS)
    Module(unit).kernel("pack").launch(grid, first.plan.threads, first.plan.shared, layers)
    assert first.status.item() == 0
    for got, wanted in zip(*pools, strict=True):
        assert not differences(got, wanted)
    assert not torch.equal(pools[0][0].heads, pools[0][1].heads)


def test_more_layers_than_parameters_have_room_for():
    _, geometry, rope = SIDES[-6]
    with pytest.raises(pack.KernelError, match="65 layers in one launch: parameters of 64 fit"):
        pack_units.pack_unit("pack", geometry, rope, torch.float16, "sm_90a", layers=65)
    assert ctypes.sizeof(layers_type(LAYERS_AT_ONCE)) <= 32764


def test_page_ids_are_named():
    ids = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    pack.check_ids(ids, 10, 5)
    message = "block table: page 11 of sequence 1 has id 4, the pool has pages 0 to 3: give every"
    with pytest.raises(pack.KernelError, match=message):
        pack.check_ids(ids, 10, 4)
    with pytest.raises(pack.KernelError, match="page 10 of sequence 7 has id -1"):
        pack.check_ids(torch.tensor([[-1]]), 10, 4, 7)


def test_heads_far_apart():
    """Strides of heads have 32 bits in the kernel; where there is one head, they mean nothing."""
    strides = (64, 64, 1 << 31, 1)
    with pytest.raises(pack.KernelError, match="a head's begin 4 GiB or more behind the last one's"):
        pack.source(torch.empty_strided((1, 1, 2, 64), strides, dtype=torch.float16, device="meta"))
    pack.source(torch.empty_strided((1, 1, 1, 64), strides, dtype=torch.float16, device="meta"))


def test_more_outlier_channels_than_the_format_has():
    _, geometry, _ = DIRECT[-1]
    tensors = exact_tensors(geometry.format, geometry.shape.h_kv, geometry.shape.d)
    tensors["outlier_mask"] = np.ones_like(tensors["outlier_mask"])
    with pytest.raises(pack.KernelError, match="outlier_mask has 256 channels of one head, the format has room for 32"):
        pack.device_tables(Codec(geometry, tensors), None, torch.float16, "sm_90a")


def test_a_page_from_window_and_prompt():
    """A chunk of a prompt: the first page begins in the window and ends in the chunk."""
    _, geometry, rope = SIDES[-6]
    codec, rotation, packer = made(geometry, rope, torch.float16, "sm_90a")
    shape, sinks = geometry.shape, geometry.format.window.sinks
    x = numbers("grid", (1, sinks + 3 * shape.t, shape.h_kv, shape.d), 1, torch.float16)
    before = sinks + shape.t + 20
    ring = ring_of(x[0], before, shape.t, sinks)[None]
    table = torch.arange(3, dtype=torch.int32)[None]
    got, wanted = (poisoned(geometry, 3) for _ in range(2))
    chunk = x[:, before:].contiguous()
    sources = {"prompt": pack.source(chunk), "ring": pack.source(ring), "ring_capacity": shape.t}
    packer.run(got, table, 1, 2, **sources, prompt_first=before, first_page=1)
    wanted.write(torch.tensor([1, 2]), reference(codec, rotation, x[0], 1, 2, 0))
    assert not differences(got, wanted)


FACTORS = [side for side in SIDES if side[1].format.lowrank and side[1] in SMALL]
FACTORS = FACTORS[:2] + [side for side in FACTORS[2:] if side[1].format.sketch][:3]


def factorizing(geometry, rope, monkeypatch, layers=1):
    """`runtime.pack.Packer` itself over emulated kernels, its codec, and the model's rotation."""
    stand_in(monkeypatch)
    shape = geometry.shape
    codecs = [Codec(geometry, exact_tensors(geometry.format, shape.h_kv, shape.d, i)) for i in range(layers)]
    inv_freq = (10000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
    rotation = HostRotation(rope, inv_freq)
    return pack.Packer(codecs, rotation, torch.float16), codecs, rotation


@pytest.mark.parametrize("name, geometry, rope", FACTORS, ids=[side[0] for side in FACTORS])
def test_prompts_with_factors(name, geometry, rope, monkeypatch):
    """Codes, outliers, factors of what these leave, sketches of what those leave; in the end a segment of one page, and
    work space for one segment at a time."""
    packer, codecs, rotation = factorizing(geometry, rope, monkeypatch)
    monkeypatch.setattr(pack, "SEGMENT_PAGES", 2)
    monkeypatch.setattr(pack_factors, "SEGMENT_PAGES", 2)
    monkeypatch.setattr(tests.packing, "SEGMENT_PAGES", 2)
    monkeypatch.setattr(pack_factors, "ROOM", 1)
    packer, codecs, rotation = factorizing(geometry, rope, monkeypatch)
    shape, (b, pages, first) = geometry.shape, (2, 3, 1)
    x = numbers("grid", (b, geometry.format.window.sinks + 4 * shape.t + 3, shape.h_kv, shape.d), 1, torch.float16)
    table = torch.full((b, 5), 99, dtype=torch.int32)
    table[:, first:4] = torch.arange(b * pages).flip(0).view(b, pages)
    segments = torch.full_like(table, 99)
    segments[:, first:4] = torch.tensor([[3, 3, 2], [1, 1, 0]])
    offsets = torch.tensor([7, 1007], dtype=torch.int32)
    got, wanted = (poisoned(geometry, b * pages, segments=4) for _ in range(2))
    packer.prompt(got, table, x, first, pages, offsets=offsets, segments=segments)
    packer.check()
    for i in range(b):
        fields = reference(codecs[0], rotation, x[i], first, pages, int(offsets[i]))
        wanted.write(table[i, first:4].long(), fields, segments[i, [1, 3]].long())
        groups = leaving(codecs[0], rotation, x[i], first, pages, int(offsets[i]))
        check_factors(codecs[0], got, wanted, table[i, first:4].long(), groups)


@pytest.mark.parametrize("room", [pack_factors.ROOM, 1], ids=["together", "one-by-one"])
@pytest.mark.parametrize("name, geometry, rope", FACTORS, ids=[side[0] for side in FACTORS])
def test_steps_with_factors(name, geometry, rope, room, monkeypatch):
    """Two layers, three sequences, of which two have a page that fills: it becomes a segment of its own. There
    is work space for all, or for one layer of one sequence."""
    monkeypatch.setattr(pack_factors, "ROOM", room)
    packer, codecs, rotation = factorizing(geometry, rope, monkeypatch, layers=2)
    shape, window = geometry.shape, geometry.format.window
    full = window.sinks + window.recent + 2 * shape.t
    lengths = [full, full - 1, full + 1]
    x = numbers("grid", (2, 3, full + 1, shape.h_kv, shape.d), 1, torch.float16)
    capacity = window.recent + shape.t + 3
    rings = [torch.stack([ring_of(x[k, i], n, capacity, window.sinks) for i, n in enumerate(lengths)]) for k in (0, 1)]
    table = torch.tensor([[9, 2, 9], [9, 1, 9], [9, 0, 9]], dtype=torch.int32)
    segments = torch.tensor([[9, 0, 9], [9, 1, 9], [9, 2, 9]], dtype=torch.int32)
    pools = [[poisoned(geometry, 3, segments=3) for _ in codecs] for _ in range(2)]
    packer.step(pools[0], table, rings, torch.tensor(lengths, dtype=torch.int32), 2, None, segments)
    packer.check()
    for k, (got, wanted) in enumerate(zip(*pools, strict=True)):
        for i in (0, 2):
            fields = reference(codecs[k], rotation, x[k, i], 1, 1, 0)
            wanted.write(table[i, 1:2].long(), fields, segments[i, 1:2].long())
            groups = leaving(codecs[k], rotation, x[k, i], 1, 1, 0)
            check_factors(codecs[k], got, wanted, table[i, 1:2].long(), groups)
        for store in (got.heads, got.records, got.segments):
            assert (store[1] == 0xFF).all()


SMALLEST = [side for side in SIDES if side[1].shape.h_kv * side[1].shape.d <= 256]
TOGETHER = list(dict.fromkeys([*SMALLEST[::8], *[side for side in SMALLEST if side in FACTORS][:2]]))


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=[side[0] for side in TOGETHER])
def test_prompts_of_several_layers(index, monkeypatch):
    """Two of three layers, two of three rows in another order: as each layer by itself. A launch takes all of the
    layers or one, and there is work space for all sequences or one."""
    _, geometry, rope = TOGETHER[index]
    if index % 2:
        monkeypatch.setattr(pack, "LAYERS_AT_ONCE", 1)
        monkeypatch.setattr(pack_factors, "ROOM", 1)
    packer, _, _ = factorizing(geometry, rope, monkeypatch, layers=3)
    shape, pages = geometry.shape, 2
    size = (2, 3, geometry.format.window.sinks + pages * shape.t + 3, shape.h_kv, shape.d)
    x = numbers("grid", size, 1, torch.float16)
    table, rows = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    segments = torch.tensor([[1, 1], [0, 0]], dtype=torch.int32)
    got, wanted = ([poisoned(geometry, 4, segments=2) for _ in range(2)] for _ in range(2))
    packer.prompts([2, 0], got, table, list(x), pages, None, segments, rows)
    for k, (layer, pool) in enumerate(zip([2, 0], wanted, strict=True)):
        packer.prompt(pool, table, x[k][rows.long()], 0, pages, segments=segments, layer=layer)
    packer.check()
    for mine, alone in zip(got, wanted, strict=True):
        for store in ("heads", "records", "segments"):
            assert torch.equal(getattr(mine, store), getattr(alone, store))


@pytest.mark.parametrize("name, geometry, rope", TOGETHER, ids=[side[0] for side in TOGETHER])
def test_prompts_behind_a_sequence_that_they_share(name, geometry, rope, monkeypatch):
    """Their first pages begin with tokens of its ring: as each prompt behind a ring of its own."""
    packer, _, _ = factorizing(geometry, rope, monkeypatch, layers=2)
    shape, sinks, pages = geometry.shape, geometry.format.window.sinks, 2
    start, capacity = sinks + shape.t + 5, shape.t + 16  # a page and some tokens behind it
    x = numbers("grid", (2, 3, start + pages * shape.t, shape.h_kv, shape.d), 1, torch.float16)
    rings = [ring_of(layer[0], start, capacity, sinks)[None] for layer in x]
    table, rows = torch.tensor([[4, 1, 0], [4, 3, 2]], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    segments = torch.tensor([[0, 1, 1], [0, 2, 2]], dtype=torch.int32)
    offsets = torch.full((2,), 7, dtype=torch.int32)
    got, wanted = ([poisoned(geometry, 5, segments=3) for _ in range(2)] for _ in range(2))
    behind = list(x[:, :, start:])
    packer.prompts([0, 1], got, table, behind, pages, offsets, segments, rows, 1, start, rings)
    for layer, pool in enumerate(wanted):
        own, ring = behind[layer][rows.long()], rings[layer].expand(2, -1, -1, -1).contiguous()
        packer.prompt(pool, table, own, 1, pages, start, ring, offsets, segments, layer)
    packer.check()
    for mine, alone in zip(got, wanted, strict=True):
        for store in ("heads", "records", "segments"):
            assert torch.equal(getattr(mine, store), getattr(alone, store))
    with pytest.raises(pack.KernelError, match=r"before the first given one .*: pass the ring"):
        packer.prompts([0, 1], got, table, behind, pages, offsets, segments, rows, 1, start)


def test_tokens_of_prompts_are_kept(monkeypatch):
    """Of more sides than a launch takes, from views whose heads lie apart; nothing else is touched."""
    stand_in(monkeypatch)
    x = torch.randn(AT_ONCE + 2, 2, 4, 5, 64).half()  # sides, rows, heads, tokens
    sides = [(some.transpose(1, 2), torch.zeros(9, 4, 64).half()) for some in x]
    keep(sides, torch.zeros(0, 3, dtype=torch.int32))
    tokens = torch.tensor([[1, 4, 0], [0, 0, 8], [1, 2, 3]], dtype=torch.int32)
    keep(sides, tokens)
    for mine, to in sides:
        wanted = torch.zeros_like(to)
        wanted[tokens[:, 2].long()] = mine[tokens[:, 0].long(), tokens[:, 1].long()]
        assert torch.equal(to, wanted)


@pytest.mark.parametrize(
    ("x", "to"),
    [
        (torch.zeros(1, 3, 2, 64).half(), torch.zeros(4, 2, 64)),
        (torch.zeros(1, 3, 2, 64).half(), torch.zeros(4, 4, 64).half()),
        (torch.zeros(1, 3, 2, 128).half()[..., ::2], torch.zeros(4, 2, 64).half()),
        (torch.zeros(1, 3, 2, 68).half()[..., 4:], torch.zeros(4, 2, 64).half()),
    ],
    ids=["dtype", "heads", "channels-apart", "eight-bytes"],
)
def test_tokens_that_cannot_be_kept(x, to):
    with pytest.raises(pack.KernelError, match="begin at multiples of 16 bytes; make them contiguous"):
        keep([(x, to)], torch.zeros(1, 3, dtype=torch.int32))


def test_segments_are_a_table(monkeypatch):
    _, geometry, rope = FACTORS[0]
    packer, _, _ = factorizing(geometry, rope, monkeypatch)
    shape = geometry.shape
    x = numbers("grid", (1, shape.t + 8, shape.h_kv, shape.d), 1, torch.float16)
    table, pool = torch.zeros(1, 1, dtype=torch.int32), poisoned(geometry, 1, segments=1)
    with pytest.raises(pack.KernelError, match=r"a table like that of pages, \[1, 1\], not none"):
        packer.prompt(pool, table, x, 0, 1)
    with pytest.raises(pack.KernelError, match="segment table: int32"):
        packer.prompt(pool, table, x, 0, 1, segments=table.long())
    packer.prompt(pool, table, x, 0, 1, segments=table + 1)
    with pytest.raises(pack.KernelError, match="a segment table holds an id outside the pool"):
        packer.check()


def test_bad_input_is_reported():
    _, geometry, rope = SIDES[-6]
    _, _, packer = made(geometry, rope, torch.float16, "sm_90a")
    shape = geometry.shape
    x = numbers("grid", (1, 1 + shape.t, shape.h_kv, shape.d), 1, torch.float16)
    pool = poisoned(geometry, 2)
    for page in (-1, 2):
        packer.run(pool, torch.tensor([[page]], dtype=torch.int32), 1, 1, prompt=pack.source(x), prompt_first=0)
        assert packer.status.item() == 1
        assert (pool.heads == 0xFF).all()
        assert (pool.records == 0xFF).all()
        packer.status.zero_()
    x[0, 5, 1, 3] = torch.nan
    packer.run(pool, torch.tensor([[1]], dtype=torch.int32), 1, 1, prompt=pack.source(x), prompt_first=0)
    assert packer.status.item() & 4
    _, geometry, rope = SIDES[-1]  # KIVI's values: a range of more than float16 holds
    _, _, packer = made(geometry, rope, torch.float32, "sm_90a")
    x = numbers("grid", (1, shape.t, shape.h_kv, shape.d), 1, torch.float32)
    x[0, 5, 1, 3] = 3e5
    table = torch.tensor([[1]], dtype=torch.int32)
    packer.run(poisoned(geometry, 2), table, 1, 1, prompt=pack.source(x), prompt_first=0)
    assert packer.status.item() == 2


def told(packer: Emulated, geometry: PageGeometry, dtype: torch.dtype, bad: float) -> list[int]:
    """What is reported of a page of numbers, and of the same page with a bad one."""
    shape, said = geometry.shape, []
    x = numbers("smooth", (1, 1 + shape.t, shape.h_kv, shape.d), 1, dtype)
    for value in (x[0, 60, 1, 3].item(), bad):
        x[0, 60, 1, 3] = value
        table = torch.tensor([[1]], dtype=torch.int32)
        packer.run(poisoned(geometry, 2), table, 1, 1, prompt=pack.source(x), prompt_first=0)
        said.append(packer.status.item())
    return said


@pytest.mark.parametrize("bad", [-torch.nan, torch.inf])
@pytest.mark.parametrize("crowded", [False, True])
def test_what_is_not_finite_is_told_among_outliers(bad, crowded):
    """Also where it is one of many more than a page has room for."""
    _, geometry, rope = OUTLIERS[0]
    _, _, packer = made(geometry, rope, torch.float16, "sm_90a")
    if crowded:
        for name in ("lower", "upper"):
            packer.tables[name].zero_()
    else:  # no bounds at all
        packer.tables["lower"].fill_(-torch.inf)
        packer.tables["upper"].fill_(torch.inf)
    assert told(packer, geometry, torch.float16, bad) == [0, 4]


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", list(pack_units.INPUTS))
def test_what_is_not_finite_is_told_of_tokens(bad, dtype):
    """The search for a token's outliers meets it, where it goes by pairs."""
    _, geometry, rope = next(side for side in OUTLIERS if side[1].format.sparse.axis == "token")
    _, _, packer = made(geometry, rope, dtype, "sm_90a")
    assert told(packer, geometry, dtype, bad) == [0, 4]
