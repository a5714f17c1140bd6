"""Histograms of powers of two: their state follows from the numbers alone, and quantiles are as near as they say."""

from functools import reduce

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calib.quantiles import CHANNEL_BINS, LONE_BINS, BinaryHistogram, ends, exponents, tails
from calib.statistics import Extremes

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.integers(-40, 40).map(lambda i: 1.0 + i * 2.0**-23)
batch = st.lists(floats | near | st.sampled_from([0.0, 3.0, -3.0]), min_size=1, max_size=12)
batches = st.lists(batch, min_size=1, max_size=5)


def columns(numbers):
    """Three columns that spread at different times: the numbers, their negatives in reverse, their squares."""
    x = torch.tensor(numbers, dtype=torch.float32)
    return torch.stack([x, -x.flip(0), x.clamp(-1e18, 1e18).square()], 1)


def histogram(bins, *parts):
    found = BinaryHistogram(bins)
    for part in parts:
        found.observe(part)
    return found


def assert_same(one, other):
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@settings(deadline=None)
@given(batches, st.sampled_from([2, 8, 64]), st.randoms(use_true_random=False))
def test_the_state_depends_on_the_numbers_alone(numbers, bins, random):
    parts = [columns(batch) for batch in numbers]
    whole = histogram(bins, torch.cat(parts))
    assert_same(histogram(bins, *parts), whole)
    shuffled = torch.cat(parts)[torch.tensor(random.sample(range(sum(map(len, parts))), sum(map(len, parts))))]
    assert_same(histogram(bins, *shuffled.split(3)), whole)


@settings(deadline=None)
@given(batches, st.sampled_from([2, 8, 64]))
def test_merging_is_associative_and_commutative_and_nothing_is_neutral(numbers, bins):
    def made():
        return [histogram(bins, columns(batch)) for batch in numbers]

    whole = histogram(bins, *[columns(batch) for batch in numbers])
    left = reduce(lambda one, other: one.merge(other) or one, made())
    right = reduce(lambda one, other: other.merge(one) or other, made())
    inner = reduce(lambda one, other: other.merge(one) or other, reversed([*made(), BinaryHistogram(bins)]))
    for found in (left, right, inner):
        assert_same(found, whole)


@settings(deadline=None)
@example([[2.0**-149, 1.0]], 8)  # their difference is 1 in float64
@given(batches, st.sampled_from([8, 64, 2048]))
def test_every_number_is_counted_in_its_bin(numbers, bins):
    x = torch.cat([columns(batch) for batch in numbers])
    found = histogram(bins, x)
    for column, counts, low, high in zip(x.T.double(), found.counts, found.low, found.high, strict=True):
        e = int(exponents(low[None], high[None], bins))
        index = [int(v // 2.0**e) for v in column.tolist()]
        expected = torch.zeros(bins, dtype=counts.dtype)
        for i in index:
            expected[i % bins] += 1
        assert torch.equal(counts, expected)
        assert max(index) - min(index) < bins
        if high > low:  # and the next finer bins would not do
            finer = [int(v // 2.0 ** (e - 1)) for v in column.tolist()]
            assert max(finer) - min(finer) >= bins


DISTRIBUTIONS = {
    "normal": lambda g, n: torch.randn(n, 6, generator=g),
    "shifted": lambda g, n: 100 + 0.01 * torch.randn(n, 6, generator=g),
    "heavy tails": lambda g, n: torch.randn(n, 6, generator=g) / torch.rand(n, 6, generator=g),
    "few values": lambda g, n: torch.randint(-2, 3, (n, 6), generator=g).float(),
    "exponential": lambda g, n: torch.empty(n, 6).exponential_(generator=g),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles_are_within_a_thousandth_of_the_range(name):
    x = DISTRIBUTIONS[name](torch.Generator().manual_seed(0), 20_000)
    found = histogram(CHANNEL_BINS, *x.split(777))
    ordered = x.sort(0).values.double()
    spread = ordered[-1] - ordered[0]
    bound = 1 / (CHANNEL_BINS - 1)
    assert bound < 1e-3
    for rank in (0, 1, 100, 999, 9999):
        for estimate, exact in ((found.smallest(rank), ordered[rank]), (found.largest(rank), ordered[-1 - rank])):
            # The estimate is stored in float32.
            assert ((estimate.double() - exact).abs() <= bound * spread + 2**-24 * exact.abs()).all(), rank


@pytest.mark.parametrize("value", [0.0, 2.0**-149, -3.25, 3e38])
def test_a_column_of_one_value_is_that_value(value):
    found = histogram(64, torch.full((5, 2), value), torch.full((3, 2), value))
    assert found.smallest(4).tolist() == found.largest(0).tolist() == [torch.tensor(value).item()] * 2


@pytest.mark.parametrize("bins", [0, 1, 3, 1000])
def test_bins_are_a_power_of_two(bins):
    with pytest.raises(ValueError, match=f"bins={bins} must be a power of two, at least 2"):
        BinaryHistogram(bins)


@pytest.mark.parametrize(("columns", "bins"), [(1, LONE_BINS), (512, CHANNEL_BINS)])
def test_lists_as_long_as_they_are_smaller_than_bins(columns, bins):
    assert isinstance(tails(bins // 2, columns), Extremes)
    assert isinstance(tails(bins // 2 + 1, columns), BinaryHistogram)


def test_both_kinds_of_tails_agree():
    x = torch.randn(5000, 3, generator=torch.Generator().manual_seed(1))
    exact, binned = Extremes(40), BinaryHistogram(CHANNEL_BINS)
    exact.observe(x)
    binned.observe(x)
    for one, other in zip(ends(exact, 40), ends(binned, 40), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-3 * float(x.max() - x.min()))


def test_memory_does_not_grow_with_the_numbers():
    found, sizes = BinaryHistogram(256), set()
    for seed in range(20):
        found.observe(10**seed * torch.randn(300, 4, generator=torch.Generator().manual_seed(seed)).clamp(-1e18, 1e18))
        sizes.add(sum(t.nbytes for t in found.tensors().values()))
    assert len(sizes) == 1
    assert int(found.counts.sum()) == 20 * 300 * 4
