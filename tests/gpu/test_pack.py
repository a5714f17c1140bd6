"""Packing on a GPU against the torch codec on the same GPU, byte for byte."""

import numpy as np
import pytest
import torch

from artifacts.geometry import SEGMENT_PAGES
from runtime import pack_factors
from runtime.codec import Codec
from runtime.jit import KernelError
from runtime.pack import Packer, source
from runtime.pack_units import LAYERS_AT_ONCE
from runtime.rope import Rotation
from tests.formats import random_tensors
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIDES = sides()
PLAIN = [side for side in SIDES if not side[1].format.lowrank]
FACTORS = [side for side in SIDES if side[1].format.lowrank]
SPARSE = [side for side in PLAIN if side[1].format.sparse]
RECIPES = SIDES[-6:]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DIRECT = direct_sides()
each_side = pytest.mark.parametrize("index", range(len(SIDES)), ids=[side[0] for side in SIDES])


def loose(geometry):
    return [name for name in ("norm", "outlier_norm") if name in geometry.fields]


def rounds(fmt):
    return fmt.rotate or fmt.sketch or (fmt.dense and fmt.dense.normalize == "norm")


class Bench:
    """A packer, the codec and a pool for b sequences of n tokens."""

    def __init__(self, geometry, rope, dtype, tensors=None):
        shape = geometry.shape
        self.geometry, self.dtype = geometry, dtype
        self.codec = Codec(geometry, tensors or exact_tensors(geometry.format, shape.h_kv, shape.d), "cuda")
        inv_freq = (10000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
        self.rotation = Rotation(rope, inv_freq, "cuda")
        self.packer = Packer(self.codec, self.rotation, dtype)

    def numbers(self, kind, b, n, seed=1):
        return numbers(kind, (b, n, self.geometry.shape.h_kv, self.geometry.shape.d), seed, self.dtype).cuda()

    def expected(self, pool, x, first_page, pages, ids, offsets, segments=None):
        for i in range(x.shape[0]):
            fields = reference(self.codec, self.rotation, x[i], first_page, pages, int(offsets[i]))
            pool.write(ids[i].long(), fields, None if segments is None else segments[i])


def check_prompt(geometry, rope, dtype, kind, b=2, pages=3, first_page=1):
    bench, window, t = Bench(geometry, rope, dtype), geometry.format.window, geometry.shape.t
    x = bench.numbers(kind, b, window.sinks + (first_page + pages) * t + 3)
    ids = torch.randperm(b * pages + 2, device="cuda", dtype=torch.int32)[: b * pages].view(b, pages)
    table = torch.full((b, first_page + pages + 1), 99, dtype=torch.int32, device="cuda")
    table[:, first_page : first_page + pages] = ids
    offsets = torch.arange(b, dtype=torch.int32, device="cuda") * 1000 + 7
    count = geometry.segments(pages, pages)
    segments = segments_like(table, first_page, pages) if count else None
    got, wanted = (poisoned(geometry, b * pages + 2, "cuda", b * count) for _ in range(2))
    bench.packer.prompt(got, table, x, first_page, pages, offsets=offsets, segments=segments)
    bench.packer.check()
    groups = None if segments is None else segments[:, first_page : first_page + pages : SEGMENT_PAGES].long()
    bench.expected(wanted, x, first_page, pages, ids, offsets, groups)
    return (
        bench,
        got,
        wanted,
        ids,
        [leaving(bench.codec, bench.rotation, x[i], first_page, pages, int(offsets[i])) for i in range(b)],
    )


def segments_like(table, first_page, pages):
    """Ids of the pages' segments, in no order, all others absurd."""
    b, each = table.shape[0], -(-pages // SEGMENT_PAGES)
    segments = torch.full_like(table, 99)
    ids = torch.arange(b * each, device=table.device, dtype=torch.int32).flip(0).view(b, each)
    segments[:, first_page : first_page + pages] = ids.repeat_interleave(SEGMENT_PAGES, 1)[:, :pages]
    return segments


@each_side
def test_prompt(index):
    """Several pages of several sequences into pages in any order, at different positions; every dtype in turn."""
    _, geometry, rope = SIDES[index]
    bench, got, wanted, ids, groups = check_prompt(geometry, rope, DTYPES[index % 3], "grid")
    if geometry.format.lowrank:
        for i, group in enumerate(groups):
            check_factors(bench.codec, got, wanted, ids[i].long(), group)
    elif geometry.format.domain == "pre_rope" and rounds(geometry.format):  # un-rotated numbers are off the grid
        assert (got.heads == wanted.heads).float().mean() > 0.999
        assert (got.records == wanted.records).float().mean() > 0.99
    else:
        problems = differences(got, wanted, loose(geometry))
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, geometry, rope", DIRECT, ids=[side[0] for side in DIRECT])
def test_numbers_through_registers(name, geometry, rope, dtype):
    _, got, wanted, *_ = check_prompt(geometry, rope, dtype, "grid")
    problems = differences(got, wanted, loose(geometry))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", ["smooth", "equal", "huge"])
@pytest.mark.parametrize("index", range(len(SPARSE)), ids=[side[0] for side in SPARSE])
def test_outliers(index, kind):
    """Like a cache's numbers, many equal ones, more outliers than a page or block has room for."""
    _, geometry, rope = SPARSE[index]
    norms = geometry.format.dense and geometry.format.dense.normalize == "norm"
    if norms and (kind != "equal" or geometry.format.domain == "pre_rope"):
        pytest.skip("norms of these are rounded in another order")
    _, got, wanted, *_ = check_prompt(geometry, rope, DTYPES[index % 3], kind)
    problems = differences(got, wanted, loose(geometry))
    assert not problems, "\n".join(problems)


ROUNDED = [side for side in PLAIN if rounds(side[1].format)] + DIRECT


@pytest.mark.parametrize("name, geometry, rope", ROUNDED, ids=[side[0] for side in ROUNDED])
def test_sums_that_round(name, geometry, rope):
    """Real rotations, sketches and norms: pages differ from the codec's by rounding and by codes on an edge."""
    shape = geometry.shape
    bench = Bench(geometry, rope, torch.float16, random_tensors(geometry.format, shape.h_kv, shape.d, 0))
    x = bench.numbers("smooth", 1, geometry.format.window.sinks + 4 * shape.t)
    table = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    got, wanted = (poisoned(geometry, 4, "cuda") for _ in range(2))
    bench.packer.prompt(got, table, x, 0, 4)
    bench.packer.check()
    bench.expected(wanted, x, 0, 4, table, [0])
    for name, placed in geometry.fields.items():
        mine, theirs = got.field(name), wanted.field(name)
        if placed.field.dtype == "float16" and name != "correction":
            near = (mine.float() - theirs.float()).abs() <= 2**-10 * theirs.float().abs() + 2**-12
            assert near.float().mean() > 0.99, name  # norms of what codes leave: a code on an edge moves one
        elif name in ("codes", "band_codes", "signs", "outlier_signs"):
            assert ((mine ^ theirs) != 0).float().mean() < 0.01, name


@pytest.mark.parametrize("name, geometry, rope", RECIPES, ids=[side[0] for side in RECIPES])
def test_many_pages(name, geometry, rope):
    _, got, wanted, *_ = check_prompt(geometry, rope, torch.float16, "smooth", pages=150, first_page=0)
    problems = differences(got, wanted)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("index", [0, len(FACTORS) // 2, len(FACTORS) - 1])
def test_many_pages_with_factors(index, monkeypatch):
    """Segments of 64 pages, one of 22; at once, and one after the other where work space is small."""
    _, geometry, rope = FACTORS[index]
    for room in (pack_factors.ROOM, 1):
        monkeypatch.setattr(pack_factors, "ROOM", room)
        bench, got, wanted, ids, groups = check_prompt(geometry, rope, torch.float16, "grid", pages=150, first_page=0)
        for i, group in enumerate(groups):
            check_factors(bench.codec, got, wanted, ids[i].long(), group)


@pytest.mark.parametrize("name, geometry, rope", FACTORS[::2], ids=[side[0] for side in FACTORS[::2]])
def test_steps_with_factors_in_a_graph(name, geometry, rope):
    """Captured and replayed for lengths at which pages of some sequences fill; the same bytes each time."""
    bench, shape, window = Bench(geometry, rope, torch.float16), geometry.shape, geometry.format.window
    full, capacity = window.sinks + window.recent + 2 * shape.t, window.recent + shape.t + 1
    starts = [full, full - 1, full]
    x = bench.numbers("grid", 3, full)
    ring = torch.stack([ring_of(x[i], n, capacity, window.sinks) for i, n in enumerate(starts)])
    lengths = torch.ones(3, dtype=torch.int32, device="cuda")
    table = torch.tensor([[9, 2, 9], [9, 1, 9], [9, 0, 9]], dtype=torch.int32, device="cuda")
    segments = torch.tensor([[9, 0, 9], [9, 1, 9], [9, 2, 9]], dtype=torch.int32, device="cuda")
    got, wanted = (poisoned(geometry, 3, "cuda", 3) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        bench.packer.step(got, table, ring, lengths, 1, None, segments)
    graph.replay()
    assert (got.heads == 0xFF).all()
    lengths.copy_(torch.tensor(starts, dtype=torch.int32))
    graph.replay()
    bench.packer.check()
    first = [store.clone() for store in (got.heads, got.records, got.segments)]
    for i in (0, 2):
        bench.expected(wanted, x[i : i + 1], 1, 1, table[i : i + 1, 1:2], [0], segments[i : i + 1, 1:2].long())
        groups = leaving(bench.codec, bench.rotation, x[i], 1, 1, 0)
        check_factors(bench.codec, got, wanted, table[i, 1:2].long(), groups)
    for store in first:
        assert (store[1] == 0xFF).all()
    graph.replay()
    for store, before in zip((got.heads, got.records, got.segments), first, strict=True):
        assert torch.equal(store, before)


STEPS = [side for i, side in enumerate(PLAIN) if i % 3 == 0] + RECIPES


@pytest.mark.parametrize("fresh", [1, 3])
@pytest.mark.parametrize("name, geometry, rope", STEPS, ids=[side[0] for side in STEPS])
def test_steps_in_a_graph(name, geometry, rope, fresh):
    """One captured step, replayed while lengths grow: pages are packed as they fill, from windows that wrap around."""
    bench, shape, window = Bench(geometry, rope, torch.float16), geometry.shape, geometry.format.window
    starts = [0, 5, window.sinks + shape.t - 2]
    capacity = window.recent + shape.t + fresh - 1
    steps = (window.sinks + window.recent + 2 * shape.t) // fresh + 1
    x = bench.numbers("grid", 3, max(starts) + steps * fresh)
    ids = torch.randperm(12, device="cuda", dtype=torch.int32).view(3, 4)
    lengths = torch.tensor(starts, dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 3, 11], dtype=torch.int32, device="cuda")
    got, wanted = (poisoned(geometry, 12, "cuda") for _ in range(2))
    ring = torch.stack([ring_of(x[i], n, capacity, window.sinks) for i, n in enumerate(starts)])
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        bench.packer.step(got, ids, ring, lengths, fresh, offsets)
    assert (got.heads == 0xFF).all()
    for step in range(steps):
        for i, start in enumerate(starts):
            for token in range(start + step * fresh, start + (step + 1) * fresh):
                if token >= window.sinks:
                    ring[i, (token - window.sinks) % capacity] = x[i, token]
        lengths += fresh
        graph.replay()
    bench.packer.check()
    for i, n in enumerate(lengths.tolist()):
        already, full = window.pages(starts[i], shape.t), window.pages(n, shape.t)
        assert full > already
        bench.expected(wanted, x[i : i + 1], already, full - already, ids[i : i + 1, already:full], offsets[i : i + 1])
    problems = differences(got, wanted, loose(geometry))
    assert not problems, "\n".join(problems)


def test_chunk_of_a_prompt():
    """The first page begins in the window and ends in the chunk."""
    _, geometry, rope = RECIPES[0]
    bench, shape, sinks = Bench(geometry, rope, torch.float16), geometry.shape, geometry.format.window.sinks
    x = bench.numbers("smooth", 1, sinks + 3 * shape.t)
    before = sinks + shape.t + 20
    ring = ring_of(x[0], before, shape.t, sinks)[None]
    table = torch.arange(3, dtype=torch.int32, device="cuda")[None]
    got, wanted = (poisoned(geometry, 3, "cuda") for _ in range(2))
    bench.packer.prompt(got, table, x[:, before:].contiguous(), 1, 2, before, ring)
    bench.expected(wanted, x, 1, 2, table[:, 1:], [0])
    assert not differences(got, wanted)
    with pytest.raises(KernelError, match="pass the ring"):
        bench.packer.prompt(got, table, x[:, before:].contiguous(), 1, 2, before)


@pytest.mark.parametrize("name, geometry, rope", [RECIPES[0], RECIPES[1], RECIPES[4], DIRECT[1]])
def test_layers_in_one_launch(name, geometry, rope):
    """More than parameters of one launch hold; each layer with numbers and tables of its own."""
    shape, window = geometry.shape, geometry.format.window
    layers, n = LAYERS_AT_ONCE + 2, window.sinks + window.recent + shape.t
    bench = Bench(geometry, rope, torch.float16)
    codecs = [Codec(geometry, exact_tensors(geometry.format, shape.h_kv, shape.d, i), "cuda") for i in range(layers)]
    packer = Packer(codecs, bench.rotation, torch.float16)
    x = bench.numbers("grid", layers, n)
    rings = [ring_of(x[i], n, window.recent + shape.t, window.sinks)[None] for i in range(layers)]
    lengths, table = (torch.tensor([k], dtype=torch.int32, device="cuda") for k in (n, 0))
    got, wanted = ([poisoned(geometry, 1, "cuda") for _ in codecs] for _ in range(2))
    packer.step(got, table[None], rings, lengths)
    packer.check()
    for i, codec in enumerate(codecs):
        bench.codec = codec
        bench.expected(wanted[i], x[i : i + 1], 0, 1, table[None], [0])
        problems = differences(got[i], wanted[i], loose(geometry))
        assert not problems, f"layer {i}: " + "\n".join(problems)
    with pytest.raises(KernelError, match="1 pools and 66 rings for 66 layers"):
        packer.step(got[:1], table[None], rings, lengths)


def test_layers_that_differ():
    codecs = [Bench(side[1], side[2], torch.float16).codec for side in RECIPES[:2]]
    with pytest.raises(KernelError, match="layers of different formats or shapes"):
        Packer(codecs, None, torch.float16)


def test_errors_where_they_are_made(monkeypatch):
    monkeypatch.setenv("SIGNPOST_DEBUG", "1")
    _, geometry, rope = RECIPES[-1]
    bench, shape, window = Bench(geometry, rope, torch.float16), geometry.shape, geometry.format.window
    pool, x = poisoned(geometry, 2, "cuda"), bench.numbers("smooth", 2, shape.t)
    table = torch.tensor([[0], [2]], dtype=torch.int32, device="cuda")
    message = "page 0 of sequence 1 has id 2, the pool has pages 0 to 1"
    with pytest.raises(KernelError, match=message):
        bench.packer.prompt(pool, table, x, 0, 1)
    lengths = torch.full((2,), window.sinks + window.recent + shape.t, dtype=torch.int32, device="cuda")
    with pytest.raises(KernelError, match=message):
        bench.packer.step(pool, table, x, lengths)
    bench.packer.step(pool, table, x, lengths - torch.tensor([0, 1], dtype=torch.int32, device="cuda"))  # not due
    x[0, 1, 1, 1] = torch.nan
    with pytest.raises(KernelError, match="NaN"):
        bench.packer.prompt(pool, table[:1], x[:1], 0, 1)


def test_what_cannot_be_packed():
    _, geometry, rope = RECIPES[-1]
    bench, shape = Bench(geometry, rope, torch.float16), geometry.shape
    x = bench.numbers("smooth", 1, shape.t)
    pool = poisoned(geometry, 2, "cuda")
    bench.packer.prompt(pool, torch.tensor([[2]], dtype=torch.int32, device="cuda"), x, 0, 1)
    with pytest.raises(KernelError, match="page id outside"):
        bench.packer.check()
    assert (pool.heads == 0xFF).all()
    x[0, 1, 1, 1] = torch.nan
    table = torch.tensor([[1]], dtype=torch.int32, device="cuda")
    bench.packer.prompt(pool, table, x, 0, 1)
    with pytest.raises(KernelError, match="NaN"):
        bench.packer.check()
    bench.packer.check()  # told once
    with pytest.raises(KernelError, match="this packer takes"):
        bench.packer.prompt(pool, table, x.float(), 0, 1)
    with pytest.raises(KernelError, match="int32"):
        bench.packer.prompt(pool, table.long(), x, 0, 1)
    with pytest.raises(KernelError, match="contiguous"):
        source(x.transpose(2, 3))


def test_launches_go_to_the_current_stream():
    """The stream is held up by a number in host memory, so that nothing here depends on time."""
    from cuda.bindings import driver

    _, geometry, rope = RECIPES[0]
    bench, shape, window = Bench(geometry, rope, torch.float16), geometry.shape, geometry.format.window
    ring = bench.numbers("smooth", 1, shape.t)
    lengths = torch.tensor([window.sinks + shape.t], dtype=torch.int32, device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    pool = poisoned(geometry, 1, "cuda")
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    reached = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    (code,) = driver.cuStreamWaitValue32(driver.CUstream(stream.cuda_stream), gate.data_ptr(), 1, reached)
    assert not code
    try:
        with torch.cuda.stream(stream):
            bench.packer.step(pool, table, ring, lengths)
        assert (pool.heads.cpu() == 0xFF).all()  # a copy on the default stream, which does not wait for the other
    finally:
        gate.fill_(1)
    stream.synchronize()
    assert not (pool.heads == 0xFF).all()
