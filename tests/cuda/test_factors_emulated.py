"""The kernels that find low-rank factors on the CPU (tests/cuda/emulator.h) against numpy's SVD in float64."""

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from artifacts import Dense, Format, LowRank, PageGeometry, Sketch, Window
from artifacts.geometry import SEGMENT_PAGES
from runtime import pack_factors
from runtime.jit import KernelError
from runtime.pack_params import Params, layers_type
from runtime.parts import lowrank
from tests.cuda import emulated
from tests.cuda.emulated import Module, stand_in
from tests.packing import poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HALF = 2.0**-11  # what a number loses at most when it becomes a half


def geometry_of(d, rank=4, block_rank=2, h_kv=2, t=16, sketch=False):
    dense = Dense(2, "token")
    fmt = Format(
        t, dense, window=Window(1, 3), lowrank=LowRank(rank, block_rank), sketch=Sketch(64) if sketch else None
    )
    return PageGeometry.of(fmt, h_kv, d, "key")


@dataclass
class Found:
    """Pools of each layer behind the kernels, ids of pages and segments [b, pages], what is left, status bits."""

    pools: list
    table: torch.Tensor
    segments: torch.Tensor
    left: torch.Tensor
    status: int


def find(geometry, residual, lengths=None, splits=None, first_page=3, wrong_segment=None, races=False):
    """residual [layers, b, pages, t, h_kv, d]. Pools are poisoned; ids go backwards, first and last are nobody's.
    races: fails if there are any in shared memory."""
    layers, b, pages = residual.shape[:3]
    residual = residual.half().contiguous()
    each = -(-pages // SEGMENT_PAGES)
    table = torch.full((b, first_page + pages + 1), 99, dtype=torch.int32)
    segments = table.clone()
    number = first_page if lengths is None else 1  # of the page that fills
    table[:, number : number + pages] = torch.arange(b * pages).flip(0).view(b, pages).int() + 1
    in_turn = torch.arange(b * each).flip(0).view(b, each) + 1
    segments[:, number : number + pages] = in_turn.repeat_interleave(SEGMENT_PAGES, 1)[:, :pages].int()
    if wrong_segment is not None:
        segments[0, number] = wrong_segment
    pools = [poisoned(geometry, b * pages + 2, segments=b * each + 2) for _ in range(layers)]
    start = lowrank.starting(geometry.shape.d, pack_factors.columns(geometry)).T.contiguous()
    status = torch.zeros(1, dtype=torch.int32)
    argument = layers_type(layers)()
    for i, pool in enumerate(pools):
        argument.layer[i] = Params(
            table=table.data_ptr(), segment_ids=segments.data_ptr(), table_stride=table.stride(0),
            segment_stride=segments.stride(0), lengths=None if lengths is None else lengths.data_ptr(), fresh=1,
            first_page=first_page, heads=pool.heads.data_ptr(), records=pool.records.data_ptr(),
            segments=pool.segments.data_ptr(), capacity_pages=pool.capacity, status=status.data_ptr(),
            capacity_segments=pool.segments.shape[0], start=start.data_ptr(), residual=residual[i].data_ptr(),
        )  # fmt: skip

    def launch(kernel, plan, params, grid):
        for i, one in enumerate(params):
            argument.layer[i] = one
        kernel.launch(grid, plan.threads, plan.shared, argument)

    module = Module(pack_factors.factor_unit("factors", geometry, layers), races)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        if splits:
            patch.setattr(pack_factors, "splits", lambda matrices, tokens: splits)
        factors = pack_factors.Factors(geometry, module, torch.device("cpu"))
        factors.run(list(argument.layer), b, pages, launch)
    assert not races or module.races_found() == 0
    there = slice(number, number + pages)
    return Found(pools, table[:, there].long(), segments[:, there].long(), residual, int(status))


def matrix(n, d, decay, seed, size=1.0):
    """[n, d] with singular values size * k ** -decay."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(length, min(n, d))))[0] for length in (n, d))
    return torch.from_numpy(size * (u * np.arange(1.0, min(n, d) + 1) ** -decay) @ v.T).float()


def check(geometry, pool, pages, segment, numbers, rank):
    """One head's matrix numbers [n, d], halves, of pages in a segment: near the SVD's, orthonormal, zeros behind the
    rank."""
    head = numbers.head
    x = numbers.x.double()
    left = pool.field("left")[pages, head].double().flatten(0, 1)
    right = pool.field("right")[segment, head].double()
    assert (pool.field("segment")[pages, 0] == segment).all()
    assert not left[:, rank:].any()
    assert not right[:, rank:].any()
    least = torch.linalg.svdvals(x)[rank:].norm()
    # Factors are rounded to halves' 11 bits, and directions are told apart as well as those tell them.
    assert (x - left @ right.T).norm() <= 1.02 * least + 2 * HALF * x.norm()
    values = torch.linalg.svdvals(x)[:rank]
    told = values > 0.01 * values[0]  # of others, the rounding of G decides how long they are
    products = left.T @ left
    assert ((products[:rank, :rank] - torch.eye(rank))[told][:, told].abs() <= 0.01).all()
    return left @ right.T


@dataclass
class Numbers:
    x: torch.Tensor
    head: int


def check_all(geometry, residual, found, due=None):
    layers, b, pages, _, h_kv, _ = residual.shape
    assert found.status == 0
    for layer in range(layers):
        pool = found.pools[layer]
        for i in range(b):
            if due is not None and not due[i]:
                assert torch.equal(found.left[layer, i], residual[layer, i].half())
                assert (pool.heads[found.table[i]] == 0xFF).all()
                assert (pool.segments[found.segments[i]] == 0xFF).all()
                continue
            for first in range(0, pages, SEGMENT_PAGES):
                part = slice(first, min(first + SEGMENT_PAGES, pages))
                fmt = geometry.format.lowrank
                rank = fmt.rank if part.stop - first > 1 else fmt.block_rank
                for head in range(h_kv):
                    x = residual[layer, i, part, :, head].flatten(0, 1).half().float()
                    segment = int(found.segments[i, first])
                    product = check(geometry, pool, found.table[i, part], segment, Numbers(x, head), rank)
                    left = found.left[layer, i, part, :, head].flatten(0, 1).float()
                    expected = x - product.float() if geometry.format.sketch else x
                    assert ((left - expected).abs() <= HALF * expected.abs() + 2**-18 * x.abs().max()).all()
        nobodys = [name for name in geometry.fields if name not in ("left", "right", "segment")]
        for name in nobodys:  # codes and scales
            assert (pool.field(name).contiguous().view(torch.uint8) == 0xFF).all()
        for store in (pool.heads, pool.segments, pool.records):
            assert (store[0] == 0xFF).all()
            assert (store[-1] == 0xFF).all()


def residual_of(geometry, layers, b, pages, decay, size=1.0):
    shape, each = geometry.shape, SEGMENT_PAGES
    out = torch.empty(layers, b, pages, shape.t, shape.h_kv, shape.d)
    seed = 0
    for layer in range(layers):
        for i in range(b):
            for first in range(0, pages, each):
                count = min(each, pages - first)
                for head in range(shape.h_kv):
                    x = matrix(count * shape.t, shape.d, decay, seed, size)
                    out[layer, i, first : first + count, :, head] = x.unflatten(0, (count, shape.t))
                    seed += 1
    return out


@pytest.mark.parametrize("decay", [0.0, 0.15, 1.0, 3.0])
@pytest.mark.parametrize("d, rank, block_rank", [(64, 4, 2), (128, 8, 8), (256, 1, 1)])
def test_near_the_svd(d, rank, block_rank, decay):
    """Spectra from flat, the hardest, to steep; a segment of several pages and several heads."""
    geometry = geometry_of(d, rank, block_rank)
    residual = residual_of(geometry, 1, 1, 5, decay)
    check_all(geometry, residual, find(geometry, residual))


HARD = {
    "rank 3": lambda k: np.where(k <= 3, 4 - k, 0),
    "one": lambda k: np.where(k == 1, 100, 1),
    "one of four": lambda k: np.where(k == 1, 300, 1) * (k <= 4),
    "one of eight": lambda k: np.where(k == 1, 800, 1) * (k <= 8),
    "two": lambda k: np.where(k <= 2, 1e4, 1) * k**-0.2,
    "six": lambda k: np.where(k <= 6, 1e3, 1) * k**-0.2,
    "halves": lambda k: 0.5**k,
    "powers": lambda k: k**-4.0,
}


@pytest.mark.parametrize("axes", [False, True])
@pytest.mark.parametrize("spectrum", HARD)
@pytest.mark.parametrize("d, rank, pages", [(64, 8, 2), (128, 4, 2)])
def test_spectra_that_span_more_than_rounding_tells(d, rank, pages, spectrum, axes):
    """Columns that are iterated depend on each other nearly; or differ in size by more than halves tell."""
    geometry = geometry_of(d, rank, rank, h_kv=1)
    n, rng = 16 * pages, np.random.default_rng(rank)
    k = min(n, d)
    u, v = (np.linalg.qr(rng.normal(size=(length, k)))[0] for length in (n, d))
    v = np.eye(d)[:, rng.permutation(d)[:k]] if axes else v
    x = torch.from_numpy((u * HARD[spectrum](np.arange(1.0, k + 1))) @ v.T).float()
    residual = x.view(1, 1, pages, 16, 1, d)
    check_all(geometry, residual, find(geometry, residual))


@pytest.mark.parametrize("sketch", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_sequences_segments_and_parts_of_them(splits, sketch):
    """The second segment is one page: of a lower rank, and some parts of it are empty."""
    geometry = geometry_of(64, 5, 1, h_kv=3, sketch=sketch)
    residual = residual_of(geometry, 1, 2, SEGMENT_PAGES + 1, 0.3)
    check_all(geometry, residual, find(geometry, residual, splits=splits))


@pytest.mark.parametrize("sketch", [False, True])
@pytest.mark.parametrize("t", [16, 64])
def test_pages_that_fill_in_a_step(t, sketch):
    """Of layers at once, in those sequences alone whose page has filled."""
    geometry = geometry_of(128, 4, 3, t=t, sketch=sketch)
    full = 4 + 2 * t
    lengths = torch.tensor([full, full - 1, full + 1, 0, full], dtype=torch.int32)
    due = (lengths == full).tolist()
    residual = residual_of(geometry, 2, 5, 1, 0.2)
    residual[:, [not x for x in due]] = 7.0
    check_all(geometry, residual, find(geometry, residual, lengths), due)


@pytest.mark.parametrize("size", [1e-3, 1e5])
def test_small_and_large_numbers(size):
    geometry = geometry_of(64, 4, 2)
    residual = residual_of(geometry, 1, 1, 3, 0.2, size)
    check_all(geometry, residual, find(geometry, residual))


def test_beyond_what_halves_hold():
    """Factors end at the largest half or at zero; nothing is NaN."""
    geometry = geometry_of(64, 4, 2)
    for size in (1e-30, 1e-6, 1e6, 1e18):
        found = find(geometry, residual_of(geometry, 1, 1, 2, 0.2, size).clamp(-65504, 65504))
        for name in ("left", "right"):
            assert torch.isfinite(found.pools[0].field(name)[1:-1].float()).all(), (size, name)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_numbers_that_are_none_harm_nobody_else(broken, monkeypatch):
    """The pack kernel has reported them. Whatever is in shared memory, kernels go on, and other heads have factors."""
    monkeypatch.setattr(emulated, "POISON", 0x7F)  # as an index, far away
    geometry = geometry_of(64, 4, 2)
    residual = residual_of(geometry, 1, 2, 2, 0.2)
    whole = find(geometry, residual)
    residual[0, 0, 1, 3, 0, 5] = broken
    found = find(geometry, residual)
    for name in ("left", "right"):
        mine, theirs = (pool.field(name) for pool in (found.pools[0], whole.pools[0]))
        for i in range(2):
            places = found.table[i] if name == "left" else found.segments[i, :1]
            heads = slice(1 - i, None)  # of the first sequence all but the first
            assert torch.equal(mine[places, heads], theirs[places, heads])


def test_less_rank_than_asked_for():
    """Columns behind the matrix's own rank are zeros, or as small as rounding; a matrix of zeros has no others."""
    geometry = geometry_of(64, 4, 2, h_kv=4)
    residual = torch.zeros(1, 1, 2, 16, 4, 64)
    g = torch.Generator().manual_seed(0)
    for head in range(1, 4):  # of rank 0, 1, 2, 3
        x = torch.randn(32, head, generator=g) @ torch.randn(head, 64, generator=g)
        residual[0, 0, :, :, head] = x.unflatten(0, (2, 16))
    found = find(geometry, residual)
    pool = found.pools[0]
    for head in range(4):
        left = pool.field("left")[found.table[0], head].float().flatten(0, 1)
        right = pool.field("right")[1, head].float()
        x = residual[0, 0, :, :, head].flatten(0, 1)
        assert (left @ right.T - x).norm() <= 2 * HALF * x.norm()
        assert torch.isfinite(left).all()
        assert left.norm(dim=0).max() <= 1.01
        assert right[:, head:].abs().max() <= 0.01 * right.abs().max()


def test_the_torch_codecs_factors():
    """The same start and the same steps: where directions are told apart, factors agree but for signs."""
    geometry = geometry_of(128, 4, 2)
    residual = residual_of(geometry, 1, 1, 4, 1.0)
    found = find(geometry, residual)
    fields, product = lowrank.encode(geometry.format.lowrank, geometry.shape, residual[0, 0], None, {}, 4)
    pool = found.pools[0]
    left, right = pool.field("left")[found.table[0]].float(), pool.field("right")[1].float()
    mine = (left @ right.mT[None]).transpose(1, 2)
    assert (mine - product).abs().max() <= 4 * HALF * product.abs().max()
    assert (right.abs() - fields["right"][0].float().abs()).abs().max() <= 4 * HALF * right.abs().max()


@pytest.mark.parametrize("d, rank, splits", [(64, 8, 1), (128, 4, 3), (256, 1, 1)])
def test_no_races(d, rank, splits):
    """Of CTAs that sum up by themselves, and where others have; with G in shared memory, and not."""
    geometry = geometry_of(d, rank, 1)
    residual = residual_of(geometry, 1, 1, 5, 2.0)
    check_all(geometry, residual, find(geometry, residual, splits=splits, races=True))


def test_a_segment_id_outside_the_pool_is_reported():
    geometry = geometry_of(64)
    for wrong in (-1, 3):
        found = find(geometry, torch.ones(1, 1, 2, 16, 2, 64), wrong_segment=wrong)
        assert found.status == 8
        assert (found.pools[0].segments == 0xFF).all()
        assert (found.pools[0].heads == 0xFF).all()


def test_ranks_without_a_kernel():
    with pytest.raises(KernelError, match=r"lowrank\.rank=9: the kernels take at most 8"):
        pack_factors.factor_unit("factors", geometry_of(64, 9, 2))
    with pytest.raises(KernelError, match="65 layers in one launch: parameters of 64 fit"):
        pack_factors.factor_unit("factors", geometry_of(64), 65)


def test_how_tokens_are_divided():
    assert pack_factors.splits(1, 64) == 1  # a page
    assert pack_factors.splits(1, 4096) == 16
    assert pack_factors.splits(32, 4096) == 16
    assert pack_factors.splits(256, 4096) == 3
    assert pack_factors.splits(10000, 4096) == 1
