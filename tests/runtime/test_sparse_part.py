"""`sparse` in torch: which numbers are outliers, against plain loops, and the lists that hold them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from artifacts import PageShape, Sparse
from artifacts.errors import FormatError
from artifacts.parts.sparse import BLOCK, block_bits
from runtime.parts import sparse
from tests.formats import SIDES, cache_numbers, random_tensors
from tests.oracles import order
from tests.oracles.sparse import corrections, online, outside

SMALL = PageShape(16, 2, 16, "key")  # two blocks of 256 numbers, one for each head
WITH_OUTLIERS = [side for side in SIDES if side[1].sparse]


def select(part, x, **tables):
    """Outliers of one page x [t, h_kv, d]."""
    tables = {name: torch.from_numpy(np.asarray(table, np.float32)) for name, table in tables.items()}
    return sparse.select(part, PageShape(*x.shape, "key"), torch.from_numpy(x)[None], tables)[0].numpy()


def encode(part, residual, outliers, side="key"):
    """Fields and approximation of one page [t, h_kv, d]."""
    shape, mask = PageShape(*residual.shape, side), torch.from_numpy(outliers)[None]
    fields, approximation = sparse.encode(part, shape, torch.from_numpy(residual)[None], mask, {})
    return {name: field[0].numpy() for name, field in fields.items()}, approximation[0].numpy()


def decode(part, fields, shape):
    fields = {name: torch.from_numpy(field)[None] for name, field in fields.items()}
    return sparse.decode(part, shape, fields, {})[0].numpy()


@pytest.mark.parametrize("name, fmt, h_kv, d, side", WITH_OUTLIERS, ids=[side[0] for side in WITH_OUTLIERS])
def test_outliers_are_the_oracles(name, fmt, h_kv, d, side):
    part, tables = fmt.sparse, random_tensors(fmt, h_kv, d, 0)
    x = cache_numbers((fmt.t, h_kv, d), 1)
    if part.thresholds == "online":
        expected = online(x, part.fraction, part.axis)
    else:
        bounds = [tables[name].astype(np.float64) for name in ("lower", "upper")]
        expected = outside(x, *bounds, part.slots(PageShape(*x.shape, side)))
    np.testing.assert_array_equal(select(part, x, **tables), expected)


@given(
    arrays(np.float32, (16, 2, 16), elements=st.integers(-3, 3)),
    st.sampled_from([0.01, 0.1, 0.25]),
    st.sampled_from(["token", "channel"]),
)
def test_online_outliers_with_ties(x, fraction, axis):
    """Which of equal numbers is taken may be chosen; how many, and that none beyond them is left, may not."""
    part = Sparse(fraction, axis, "online")
    mask, per_end = select(part, x), part.per_end(SMALL)
    x, mask = (y.reshape(16, -1) if axis == "token" else y.reshape(16, -1).T for y in (x, mask))
    for numbers, taken in zip(x, mask, strict=True):
        assert taken.sum() == 2 * per_end
        rest, ends = np.sort(numbers[~taken]), np.sort(numbers[taken])
        assert ends[per_end - 1] <= rest[0]
        assert rest[-1] <= ends[per_end]


@given(arrays(np.float32, (16, 2, 16), elements=st.integers(-4, 4)), st.integers(-4, 0), st.integers(0, 4))
def test_thresholds_themselves_are_no_outliers(x, lower, upper):
    part = Sparse(0.25, "matrix", "bundle", capacity=4)  # room for every number
    mask = select(part, x, lower=[[lower]], upper=[[upper]])
    expected = (x < lower) | (x > upper)
    np.testing.assert_array_equal(mask, expected)


def test_a_threshold_that_is_the_largest_number():
    x = np.full((16, 2, 16), -3e38, np.float32)
    x[0, 0, :3] = [-3.2e38, 3e38, 3.2e38]
    mask = select(Sparse(0.25, "matrix", "bundle", capacity=4), x, lower=[[-3e38]], upper=[[3e38]])
    assert np.argwhere(mask).tolist() == [[0, 0, 0], [0, 0, 2]]  # the width of the range overflows


def test_a_full_page_keeps_the_furthest_outside():
    """In units of the half width: channel 0 has width 2 and channel 1 width 20, so 3 and 30 lie outside equally far."""
    part = Sparse(0.01, "channel", "bundle", capacity=1)
    assert part.slots(SMALL) == 6
    lower, upper = np.full((2, 16), -1.0), np.full((2, 16), 1.0)
    lower[:, 1], upper[:, 1] = -10, 10
    x = np.zeros((16, 2, 16), np.float32)
    x[:8, 0, 0] = [0, 1.5, 4.0, -2.5, 0, 0, 0, 1.25]  # outside by 0.5, 3, 1.5, 0.25 half widths
    x[:8, 1, 1] = [-60, 11, 12, 0, 0, 30, 0, -26]  # outside by 5, 0.1, 0.2, 2, 1.6
    mask = select(part, x, lower=lower, upper=upper)
    assert np.argwhere(mask).tolist() == [[0, 1, 1], [1, 0, 0], [2, 0, 0], [3, 0, 0], [5, 1, 1], [7, 1, 1]]


def test_equally_far_outside_the_first_ones_stay():
    part = Sparse(0.01, "matrix", "bundle", capacity=1)
    x = np.full((16, 2, 16), 2.0, np.float32)
    x[0, 0, 1] = 0
    mask = select(part, x, lower=[[-1]], upper=[[1]])
    assert np.argwhere(mask).tolist() == [[0, 0, channel] for channel in (0, 2, 3, 4, 5, 6)]


def test_channels_without_range_come_first():
    part = Sparse(0.01, "channel", "bundle", capacity=1)
    lower, upper = np.full((2, 16), -1.0), np.full((2, 16), 1.0)
    lower[1, 5] = upper[1, 5] = 0.25
    x = np.full((16, 2, 16), 1e6, np.float32)
    x[:, 1, 5] = np.float32(0.25) + np.float32(2**-24)
    x[6:, 1, 5] = 0.25
    mask = select(part, x, lower=lower, upper=upper)
    assert np.argwhere(mask).tolist() == [[token, 1, 5] for token in range(6)]


@pytest.mark.parametrize("name, fmt, h_kv, d, side", WITH_OUTLIERS, ids=[side[0] for side in WITH_OUTLIERS])
def test_lists_are_sorted_and_near(name, fmt, h_kv, d, side):
    part, shape = fmt.sparse, PageShape(fmt.t, h_kv, d, side)
    x = cache_numbers((fmt.t, h_kv, d), 1)
    mask = select(part, x, **random_tensors(fmt, h_kv, d, 0))
    fields, approximation = encode(part, x, mask, side)
    for field in part.page_fields(shape):
        assert fields[field.name].shape == field.shape
    listed = order.listed(mask, side)
    position = np.concatenate([np.flatnonzero(row) for row in listed])
    used = position.size
    assert used > 0
    per_tile = listed.reshape(-1, 16 * d).sum(-1)
    np.testing.assert_array_equal(fields["start"], np.cumsum([0, *per_tile]))
    np.testing.assert_array_equal(fields["index"][:used], position % BLOCK)
    stored = corrections(order.listed(x, side)[listed], position // BLOCK % (d // 16), d)
    np.testing.assert_array_equal(fields["correction"][:used].view(np.uint16), stored.view(np.uint16))
    step = 2.0 ** block_bits(d)
    assert (np.abs(approximation - x) <= (0.5 * step + 0.5) * np.maximum(2.0**-10 * np.abs(x), 2.0**-24))[mask].all()
    assert not approximation[~mask].any()
    np.testing.assert_array_equal(decode(part, fields, shape), approximation)


@given(
    st.sampled_from([16, 48]),
    st.sampled_from([16, 64, 96, 128]),
    st.sampled_from(["key", "value"]),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_positions_rise_from_where_tiles_start(t, d, side, share, seed):
    """Any reader may begin at any tile: its list ends where the next one's begins, and goes up."""
    shape, rng = PageShape(t, 3, d, side), np.random.default_rng(seed)
    x, mask = rng.normal(size=(t, 3, d)).astype(np.float32), rng.random((t, 3, d)) < share
    part = Sparse(0.25, "matrix", "bundle", capacity=4)
    fields, approximation = encode(part, x, mask, side)
    counts = np.diff(fields["start"].astype(int))
    np.testing.assert_array_equal(counts, order.listed(mask, side).reshape(-1, 16 * d).sum(-1))
    block = fields["correction"][: mask.sum()].view(np.uint16) % (1 << block_bits(d))
    position = np.repeat(np.arange(counts.size), counts) * (16 * d) + block * BLOCK + fields["index"][: mask.sum()]
    assert (np.diff(position) > 0).all()
    np.testing.assert_array_equal(decode(part, fields, shape), approximation)
    assert not approximation[~mask].any()


@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
def test_corrections_of_every_size(d):
    """Every float16 number in some block, the smallest and the largest in each."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    blocks = d // 16
    x = np.zeros((16, -(-halves.size // (8 * d)), d), np.float32)
    x.reshape(-1)[: 2 * halves.size] = np.concatenate([halves, -halves])
    for shift in range(blocks) if blocks <= 4 else (0, blocks - 1):
        shifted = np.roll(x, 16 * shift, -1)
        fields, approximation = encode(
            Sparse(0.25, "matrix", "bundle", capacity=4), shifted, np.ones(x.shape, bool), "value"
        )
        listed = order.listed(shifted, "value").reshape(-1)
        block = np.arange(listed.size) // BLOCK % blocks
        some = np.random.default_rng(0).permutation(listed.size)[:500]
        some = np.concatenate(
            [some, np.argsort(np.abs(listed))[: 8 * blocks], np.argsort(np.abs(listed))[-8 * blocks :]]
        )
        expected = corrections(listed[some], block[some], d)
        np.testing.assert_array_equal(
            fields["correction"][some].view(np.uint16) & 0x7FFF, expected.view(np.uint16) & 0x7FFF
        )
        assert np.isfinite(approximation).all()


def test_tiles_of_more_blocks_than_a_correction_can_tell():
    with pytest.raises(FormatError, match=r"head dimension 512 .* head dimension 256"):
        Sparse(0.01, "token", "online").check(PageShape(64, 1, 512, "value"))


def test_unused_slots_are_never_read():
    part = Sparse(0.25, "matrix", "bundle", capacity=4)
    x = cache_numbers((16, 2, 16), 1)
    fields, approximation = encode(part, x, x > 1)
    used = fields["start"][-1]
    fields["index"][used:], fields["correction"][used:] = 255, np.nan
    np.testing.assert_array_equal(decode(part, fields, SMALL), approximation)


def test_a_page_without_outliers():
    fields, approximation = encode(
        Sparse(0.01, "matrix", "bundle"), cache_numbers((16, 2, 16), 1), np.zeros((16, 2, 16), bool)
    )
    assert not fields["start"].any()
    assert not approximation.any()
    assert not decode(Sparse(0.01, "matrix", "bundle"), fields, SMALL).any()


def test_corrections_beyond_float16_saturate():
    x = np.zeros((16, 2, 16), np.float32)
    x[3, 0, 4], x[3, 1, 4] = 1e30, -65519
    _, approximation = encode(Sparse(0.01, "matrix", "bundle"), x, x != 0)
    assert approximation[3, 0, 4] == 65504  # one block: no bits say which
    assert approximation[3, 1, 4] == -65504
    wide = np.zeros((16, 1, 128), np.float32)
    wide[3, 0, ::16] = 1e30
    _, approximation = encode(Sparse(0.01, "matrix", "bundle"), wide, wide != 0, "value")
    assert approximation[3, 0, ::16].tolist() == [65504 - 32 * (7 - block) for block in range(8)]
