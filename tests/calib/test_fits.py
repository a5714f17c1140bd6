"""Statistics are exact and mergeable; thresholds, ranges and signposts follow from the raw numbers alone."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Dense, Sparse
from artifacts.errors import SignpostError
from calib.fits.dense import RangeFit, SignpostFit, q_norm
from calib.fits.sparse import ThresholdFit
from calib.signposts import WeightedHistogram, fit_signposts, quantization_cost
from calib.statistics import Extremes
from tests.oracles.fits import thresholds, weighted_numbers

T, H, D = 8, 2, 32  # of the pages in these tests
numbers = st.lists(st.integers(-9, 9).map(float) | st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)


def chunked(x, cuts):
    """x in pieces, cut at any places."""
    edges = sorted({0, len(x), *(cut % (len(x) + 1) for cut in cuts)})
    return [x[a:b] for a, b in pairwise(edges)]


def extremes(k, chunks):
    found = Extremes(k)
    for chunk in chunks:
        found.observe(chunk)
    return found


def same(a, b):
    return torch.equal(a.low, b.low) and torch.equal(a.high, b.high)


def pages(p, seed=0, spread=1.0):
    """Pages [p, t, h_kv, d] of distinct numbers whose channels differ in mean and spread."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(p, T, H, D)) * rng.uniform(0.1, 3, (H, D)) + spread * rng.normal(size=(H, D))
    return torch.from_numpy(x.astype(np.float32))


@given(numbers, st.integers(1, 50), st.lists(st.integers(0, 100), max_size=5))
def test_extremes_are_those_of_a_sort_however_the_numbers_come(values, k, cuts):
    x = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 3).clone()
    x[:, 1] *= -1
    x[:, 2] = x[:, 2].flip(0)
    found = extremes(k, chunked(x, cuts))
    ordered = x.sort(0).values
    assert torch.equal(found.low, ordered[:k])
    assert torch.equal(found.high, ordered.flip(0)[:k])


@given(numbers, numbers, numbers, st.integers(1, 20))
def test_extremes_merge_in_any_order(a, b, c, k):
    tensors = [torch.tensor(x, dtype=torch.float32)[:, None] for x in (a, b, c)]

    def merged(*order):
        found = [extremes(k, [tensors[i]]) for i in order]
        return reduce(lambda one, other: one.merge(other) or one, found)

    left = merged(0, 1, 2)
    right = extremes(k, [tensors[0]])
    inner = extremes(k, [tensors[1]])
    inner.merge(extremes(k, [tensors[2]]))
    right.merge(inner)
    assert same(left, merged(2, 0, 1))
    assert same(left, right)
    assert same(left, extremes(k, tensors))


def test_extremes_of_nothing_are_neutral():
    x = torch.arange(5.0)[:, None]
    found, empty = extremes(2, [x]), Extremes(2)
    found.merge(Extremes(2))
    empty.merge(extremes(2, [x]))
    assert same(found, extremes(2, [x]))
    assert same(empty, found)


def test_extremes_of_different_settings_do_not_merge():
    with pytest.raises(ValueError, match="k=3 do not merge with k=2"):
        Extremes(2).merge(Extremes(3))


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.25])
@pytest.mark.parametrize("p", [1, 3, 16])
def test_channel_thresholds_are_quantiles(fraction, p):
    x, n = pages(p), p * T
    fit = ThresholdFit(Sparse(fraction, "channel", "bundle"), n, H, D)
    for page in x:
        fit.observe(page[None], None, None)
    tables = fit.result()
    lower, upper = thresholds(x.flatten(0, 1).double().numpy(), fraction)
    assert tables["lower"].dtype == torch.float32
    assert np.array_equal(tables["lower"].numpy(), lower.astype(np.float32))
    assert np.array_equal(tables["upper"].numpy(), upper.astype(np.float32))
    outside = int(np.ceil(fraction / 2 * n))
    assert ((x < tables["lower"]).sum((0, 1)) == outside).all()
    assert ((x > tables["upper"]).sum((0, 1)) == outside).all()


def test_matrix_thresholds_are_quantiles_of_the_layer():
    x, fraction = pages(3), 0.013
    fit = ThresholdFit(Sparse(fraction, "matrix", "bundle"), 3 * T, H, D)
    fit.observe(x[:1], None, None)
    fit.observe(x[1:], None, None)
    tables = fit.result()
    lower, upper = thresholds(x.flatten().double().numpy(), fraction)
    assert tables["lower"].shape == tables["upper"].shape == (1, 1)
    assert (tables["lower"].item(), tables["upper"].item()) == (np.float32(lower), np.float32(upper))


def test_thresholds_of_constant_channels_are_the_constant():
    fit = ThresholdFit(Sparse(0.1, "channel", "bundle"), 2 * T, H, D)
    fit.observe(torch.full((2, T, H, D), 3.5), None, None)
    assert {x.unique().item() for x in fit.result().values()} == {3.5}


@pytest.mark.parametrize("axis", ["channel", "matrix"])
def test_thresholds_need_a_middle(axis):
    with pytest.raises(
        SignpostError, match=r"1 calibration tokens are too few for outliers=0.25: raise samples or seqlen"
    ):
        ThresholdFit(Sparse(0.25, axis, "bundle"), 1, 1, 1)
    ThresholdFit(Sparse(0.25, axis, "bundle"), 3, 1, 1)


def test_ranges_cover_what_is_no_outlier():
    x = pages(4)
    outliers = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    outliers[..., 0, 5] = True  # a channel of nothing else
    x[..., 1, 7] = -2.25  # one without range
    outliers[..., 1, 7] = False
    fit = RangeFit()
    for page, outside in zip(x, outliers, strict=True):
        fit.observe(page[None], outside[None], None)
    found = fit.result()
    inside = np.ma.masked_array(x.double().numpy(), outliers.numpy())
    low, high = inside.min((0, 1)), inside.max((0, 1))
    for name, expected in (("scale", (high - low) / 2), ("zero", (high + low) / 2)):
        # A difference or sum of two float32 numbers, rounded once; halving is exact.
        assert np.allclose(found[name].numpy(), expected.filled(0), rtol=2**-24, atol=0), name
    assert found["scale"][0, 5] == found["zero"][0, 5] == 0
    assert (found["scale"][1, 7], found["zero"][1, 7]) == (0, -2.25)


def test_ranges_without_outliers_are_extremes():
    x, fit = pages(2), RangeFit()
    fit.observe(x, None, None)
    found = fit.result()
    ends = torch.stack([found["zero"] - found["scale"], found["zero"] + found["scale"]])
    # Three roundings of numbers up to twice the largest: scale, zero, and their sum.
    assert (ends - torch.stack([x.amin((0, 1)), x.amax((0, 1))])).abs().max() <= 3 * 2**-24 * 2 * x.abs().max()


def token_fit(kind, bins=8192):
    return SignpostFit(Dense(3, "token", 0, "nuq"), kind, bins, {}, "layers.1.value")


def channel_fit(kind, tables, bins=8192):
    return SignpostFit(Dense(3, "channel", 0, "nuq", "bundle"), kind, bins, tables, "layers.1.key")


def gradients_like(x, seed=1):
    """Gradients that differ by orders of magnitude between tokens and channels."""
    rng = np.random.default_rng(seed)
    scale = 10 ** rng.uniform(-3, 1, (*x.shape[:2], 1, 1)) * 10 ** rng.uniform(-1, 1, x.shape[2:])
    return torch.from_numpy((rng.normal(size=x.shape) * scale).astype(np.float32))


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("kind", ["none", "fisher", "fisher_scaled"])
def test_signposts_are_optimal_for_the_raw_numbers(axis, kind):
    x = pages(12) * torch.logspace(-1, 1, T)[:, None, None]  # tokens, too, differ in size
    gradient = gradients_like(x)
    outliers = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.05
    x[3, 2] = 0.75  # a token without range: nothing to learn from
    tables = {}
    if axis == "channel":
        ranges = RangeFit()
        ranges.observe(x, outliers, None)
        tables = ranges.result()

    def fit(weights):
        found = token_fit(weights) if axis == "token" else channel_fit(weights, tables)
        for i in range(0, 12, 5):
            found.observe(x[i : i + 5], outliers[i : i + 5], gradient[i : i + 5] if found.gradients else None)
        return found.result()["signposts"]

    channels = [tables[name].double().numpy() if tables else None for name in ("scale", "zero")]
    raw, weights = weighted_numbers(x.double().numpy(), gradient.double().numpy(), outliers.numpy(), *channels, kind)
    found = fit(kind)
    assert found.dtype == torch.float32
    assert (found.diff() > 0).all()
    cost = quantization_cost(raw, weights, found.double().numpy())
    best = fit_signposts(WeightedHistogram.of(raw, weights, 8192), 8)
    # A token's scale is rounded to float16 (relative 2^-11), which moves its numbers, and the optimum, that little.
    assert cost == pytest.approx(best.cost, rel=2e-3 if axis == "token" else 1e-5)
    others = {"none", "fisher", "fisher_scaled"} - {kind}
    assert all(quantization_cost(raw, weights, fit(other).double().numpy()) > 1.01 * cost for other in others)


@pytest.mark.parametrize("kind", ["none", "fisher_scaled"])
def test_outliers_and_vectors_without_range_do_not_matter(kind):
    x = pages(4)
    gradient = gradients_like(x)
    outliers = torch.zeros(x.shape, dtype=torch.bool)
    outliers[1, 3, 0, 4] = outliers[2, 0, 1, 9] = True
    flat = x.clone()
    flat[2, 5] = 7.0
    base, changed = token_fit(kind), token_fit(kind)
    base.observe(flat, outliers, gradient)
    other, other_gradient = flat.clone(), gradient.clone()
    other[outliers], other_gradient[outliers] = -1e6, 1e6
    other[2, 5], other_gradient[2, 5] = -3.0, 1e6
    changed.observe(other, outliers, other_gradient)
    assert torch.equal(base.result()["signposts"], changed.result()["signposts"])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_evenly_spaced_signposts(bits):
    """Found in what signposts are found in; they cost what the best of all do, and what even spacing costs."""
    x = pages(12)
    gradient = gradients_like(x)
    fits = [SignpostFit(Dense(bits, "token", 0, name), "fisher", 8192, {}, "v") for name in ("uniform-fit", "nuq")]
    for fit in fits:
        fit.observe(x, None, gradient)
    even, best = (fit.result() for fit in fits)
    assert (even["spacing"].dtype, even["spacing"].shape) == (torch.int16, (2,))
    start, step = even["spacing"].tolist()
    raw, weights = weighted_numbers(
        x.double().numpy(), gradient.double().numpy(), np.zeros(x.shape, bool), None, None, "fisher"
    )
    costs = [quantization_cost(raw, weights, values) for values in (
        (start + step * np.arange(1 << bits)) / 2047, best["signposts"].double().numpy(), np.linspace(-1, 1, 1 << bits)
    )]  # fmt: skip
    assert 0.999 * costs[1] <= costs[0] < costs[2]


def test_signposts_without_any_weight_are_refused():
    fit = token_fit("fisher")
    fit.observe(pages(1), None, torch.zeros(1, T, H, D))
    with pytest.raises(SignpostError, match=r"layers.1.value: no number has any weight .* gradients are zero"):
        fit.result()
    fit = token_fit("none")
    fit.observe(torch.ones(1, T, H, D), None, None)
    with pytest.raises(SignpostError, match=r"method\.weights=none"):
        fit.result()


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("kind", ["none", "fisher_scaled"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_q_norm_gives_decoded_numbers_the_moments_of_the_data(axis, kind, bits):
    """Codes as before; mean and standard deviation over all normalized numbers that are no outliers, each counting once
    whatever its weight. A number may be taken for a neighbour of its code where an edge lies in its bin: both moments
    move by that share of the numbers times a gap (of values, and of their squares)."""
    x = pages(12)
    gradient = gradients_like(x)
    outliers = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.05
    tables = {}
    if axis == "channel":
        ranges = RangeFit()
        ranges.observe(x, outliers, None)
        tables = ranges.result()

    def fitted(codebook):
        part = Dense(bits, axis, 0, codebook, "bundle" if axis == "channel" else "online")
        fit = SignpostFit(part, kind, 4096, tables, "layers.1.key")
        for i in range(0, 12, 5):
            fit.observe(x[i : i + 5], outliers[i : i + 5], gradient[i : i + 5])
        return {name: table.double().numpy() for name, table in fit.result().items()}

    before, after = fitted("nuq")["signposts"], fitted("nuq-qnorm")
    np.testing.assert_allclose(after["edges"], (before[1:] + before[:-1]) / 2, atol=2**-23)
    channels = [tables[name].double().numpy() if tables else None for name in ("scale", "zero")]
    numbers, _ = weighted_numbers(x.double().numpy(), gradient.double().numpy(), outliers.numpy(), *channels, "none")
    near = (np.abs(numbers[:, None] - after["edges"]) < 2 / 4096).any(1).mean() + 2**-11
    decoded = after["signposts"][np.searchsorted(after["edges"], numbers)]
    gap = np.diff(after["signposts"]).max()
    assert abs(decoded.mean() - numbers.mean()) <= near * gap
    assert abs((decoded**2).mean() - (numbers**2).mean()) <= near * 2 * gap * np.abs(after["signposts"]).max()
    plain = before[np.searchsorted(after["edges"], numbers)]
    assert abs(plain.std() - numbers.std()) > 3 * abs(decoded.std() - numbers.std()), "otherwise this shows nothing"


def test_q_norm_by_hand():
    """Two codes, each for half of the numbers: they come to stand one standard deviation on either side of the mean."""
    numbers = np.array([-1.0, -1.0, 0.5, 1.0])
    counts = WeightedHistogram.of(numbers, np.ones(4), 256)
    found = q_norm(np.array([-1.0, 0.8]), np.array([-0.1]), counts)
    deviation = numbers.std()
    assert found == pytest.approx([numbers.mean() - deviation, numbers.mean() + deviation])


def test_q_norm_of_a_single_code_moves_and_does_not_stretch():
    counts = WeightedHistogram.of(np.array([0.5, 0.7]), np.ones(2), 256)
    assert q_norm(np.array([-1.0, 0.5]), np.array([-0.2]), counts) == pytest.approx([-0.9, 0.6])


def test_only_weighted_signposts_ask_for_gradients():
    assert [token_fit(kind).gradients for kind in ("none", "fisher", "fisher_scaled")] == [False, True, True]
    assert not RangeFit.gradients
    assert not ThresholdFit.gradients
