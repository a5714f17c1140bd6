"""Signposts are the exact optimum, their cost is the numbers' own, and histograms are sums."""

import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from calib.signposts import WeightedHistogram, fit_signposts, fit_spacing, quantization_cost
from tests.oracles.kmeans import cost_over_all_assignments, optimal_cost

EPS = float(np.finfo(np.float64).eps)
Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def unit_range(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    return numbers / np.abs(numbers).max()


def uniform_weights(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.uniform(0.5, 1.5, n)


DATA: dict[str, Callable[[np.random.Generator, int], Pair]] = {
    "normal": lambda rng, n: (unit_range(rng.standard_normal(n)), uniform_weights(rng, n)),
    "laplace": lambda rng, n: (unit_range(rng.laplace(size=n)), uniform_weights(rng, n)),
    "uniform": lambda rng, n: (rng.uniform(-1, 1, n), uniform_weights(rng, n)),
    "bimodal": lambda rng, n: (rng.choice([-0.6, 0.6], n) + rng.uniform(-0.2, 0.2, n), uniform_weights(rng, n)),
    "heavy_weights": lambda rng, n: (unit_range(rng.standard_normal(n)), 10 ** rng.uniform(-8, 4, n)),
}


def one_number_a_bin(places: list[int], offsets: list[float], bins: int) -> NDArray[np.float64]:
    """Numbers in the bins `places`, at `offsets` in (0, 1) of the bin's width."""
    return np.array([2 * (place + offset) / bins - 1 for place, offset in zip(places, offsets, strict=False)])


def bin_indices(numbers: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    return np.clip(np.floor((numbers.astype(np.float64) + 1) * (bins / 2)), 0, bins - 1).astype(np.int64)


small_problems = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 63), min_size=n, max_size=n, unique=True),
        st.lists(st.floats(0.05, 0.95), min_size=n, max_size=n),
        st.lists(st.floats(-6, 6), min_size=n, max_size=n),
    )
)


@settings(max_examples=60, deadline=None)
@given(problem=small_problems, k=st.integers(1, 3))
def test_cost_is_the_least_over_all_assignments(problem: tuple[list[int], list[float], list[float]], k: int) -> None:
    places, offsets, exponents = problem
    numbers, weights = one_number_a_bin(places, offsets, 64), 10.0 ** np.array(exponents)
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 64), k)
    # the table of all assignments holds its means to a few eps: eps^2-sized squares of them, times the weights
    np.testing.assert_allclose(fit.cost, cost_over_all_assignments(numbers, weights, k), rtol=1e-9, atol=1e-24)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 150), share=st.floats(0, 1), decades=st.sampled_from([0, 2, 12]), seed=st.integers(0, 2**32))
def test_cost_is_the_optimum_at_every_size(n: int, share: float, decades: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    places, offsets = rng.permutation(512)[:n], rng.uniform(0.05, 0.95, n)
    numbers, weights = one_number_a_bin(list(places), list(offsets), 512), 10 ** rng.uniform(-decades, 0, n)
    k = 1 + int(share * (n - 1))
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 512), k)
    np.testing.assert_allclose(fit.cost, optimal_cost(numbers, weights, k), rtol=1e-9, atol=1e-24)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_restricting_boundaries_to_bin_edges_costs_under_a_thousandth(name: str, k: int) -> None:
    numbers, weights = DATA[name](np.random.default_rng(k), 400)
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 16384), k)
    optimum = optimal_cost(numbers, weights, k)
    on_numbers = quantization_cost(numbers, weights, fit.values)
    assert optimum * (1 - 1e-9) <= on_numbers <= fit.cost * (1 + 1e-9) <= 1.001 * optimum


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("k", [4, 16])
def test_never_above_scikit_learn(name: str, k: int) -> None:
    numbers, weights = DATA[name](np.random.default_rng(100 + k), 2000)
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 65536), k)
    rival = KMeans(k, n_init=10, random_state=0).fit(numbers[:, None], sample_weight=weights)
    rival_cost = quantization_cost(numbers, weights, np.sort(rival.cluster_centers_[:, 0]))
    assert quantization_cost(numbers, weights, fit.values) <= rival_cost * (1 + 1e-9)


@pytest.mark.parametrize("bins", [7, 64, 1000])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_cost_and_values_are_those_of_the_numbers_between_the_bounds(bins: int, k: int) -> None:
    numbers, weights = DATA["laplace"](np.random.default_rng(bins), 5000)
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, bins), k)
    assert (fit.values.shape, fit.bounds.shape) == ((k,), (k + 1,))
    assert (fit.bounds[0], fit.bounds[-1]) == (-1, 1)
    edges = np.rint((fit.bounds + 1) * bins / 2)
    np.testing.assert_allclose(fit.bounds, 2 * edges / bins - 1, rtol=0, atol=2 * EPS)
    cost = 0.0
    for cluster in range(k):
        inside = (edges[cluster] <= bin_indices(numbers, bins)) & (bin_indices(numbers, bins) < edges[cluster + 1])
        mean = np.average(numbers[inside], weights=weights[inside])
        np.testing.assert_allclose(fit.values[cluster], mean, rtol=0, atol=1e-12)
        cost += float((weights[inside] * (numbers[inside] - mean) ** 2).sum())
    np.testing.assert_allclose(fit.cost, cost, rtol=1e-9)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("k, grid", [(2, 5), (4, 9), (5, 20), (16, 13), (4, 90), (8, 120)])
def test_no_evenly_spaced_values_cost_less(name: str, k: int, grid: int) -> None:
    """By all of them, on the numbers themselves; boundaries at bin edges cost the little that they do."""
    numbers, weights = DATA[name](np.random.default_rng(3), 3000)
    start, step = fit_spacing(WeightedHistogram.of(numbers, weights, 1 << 14), k, grid)
    assert step >= 1
    assert -grid <= start <= start + step * (k - 1) <= grid
    costs = {
        (first, each): quantization_cost(numbers, weights, (first + each * np.arange(k)) / grid)
        for each in range(1, 2 * grid // (k - 1) + 1)
        for first in range(-grid, grid - each * (k - 1) + 1)
    }
    assert costs[start, step] <= 1.001 * min(costs.values())


def test_a_heavy_bin_does_not_wipe_out_the_cost_of_light_clusters() -> None:
    numbers = np.array([-0.9, -0.50013, -0.5, 0.3, 0.30011, 0.8])  # two close pairs, but every number has its own bin
    weights = np.array([1e16, 1.0, 1.0, 1.0, 1.0, 1e16])
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 65536), 4)
    np.testing.assert_allclose(fit.cost, (1.3e-4**2 + 1.1e-4**2) / 2, rtol=1e-9)
    np.testing.assert_allclose(fit.values, [-0.9, -0.500065, 0.300055, 0.8], rtol=1e-14)


@pytest.mark.parametrize("k", [4, 6, 256])
def test_fewer_occupied_bins_than_signposts(k: int) -> None:
    numbers, weights = np.array([-0.71, -0.705, 0.31, 0.9]), np.array([1.0, 3.0, 2.0, 1e-9])
    fit = fit_signposts(WeightedHistogram.of(numbers, weights, 16), k)  # the first two share a bin
    assert (fit.values.shape, fit.bounds.shape) == ((k,), (k + 1,))
    assert (np.diff(fit.values) > 0).all()
    assert (np.diff(fit.bounds) >= 0).all()
    for mean in (-0.70625, 0.31, 0.9):
        assert np.abs(fit.values - mean).min() <= 2 * EPS
    np.testing.assert_allclose(fit.cost, 0.75 * 0.005**2, rtol=1e-9)
    assert quantization_cost(numbers, weights, fit.values) <= fit.cost * (1 + 1e-9)
    unseen = np.linspace(-1, 1, 999)  # the widest gap is halved each time, so padding covers the range about evenly
    assert np.abs(unseen[:, None] - fit.values).min(axis=1).max() <= 4 / k


def test_as_many_signposts_as_lone_numbers_cost_exactly_nothing() -> None:
    rng = np.random.default_rng(3)
    numbers = one_number_a_bin(list(range(0, 256, 2)), list(rng.uniform(0.05, 0.95, 128)), 256)
    fit = fit_signposts(WeightedHistogram.of(numbers, 10 ** rng.uniform(-8, 4, 128), 256), 128)
    assert fit.cost == 0
    np.testing.assert_allclose(fit.values, numbers, rtol=2 * EPS)


def test_values_never_descend_when_rounded_means_swap() -> None:
    below, edge = np.nextafter(-0.75, -1), -0.75  # two floats in a row, in two bins of 8
    weights = np.random.default_rng(0).uniform(1, 2, 1000)
    w_below = next(w for w in weights if w * below / w > below)
    w_edge = next(w for w in weights if w * edge / w < edge)
    numbers, pair = np.array([below, edge]), np.array([w_below, w_edge])
    assert (pair * numbers / pair)[0] > (pair * numbers / pair)[1]
    assert (np.diff(fit_signposts(WeightedHistogram.of(numbers, pair, 8), 2).values) >= 0).all()


@pytest.mark.parametrize("exponent", [-200, -31, 1, 200])
def test_scaling_the_weights_scales_the_cost_and_nothing_else(exponent: int) -> None:
    numbers, weights = DATA["heavy_weights"](np.random.default_rng(5), 3000)
    scale = 2.0**exponent  # a power of two is exact, so equality is bitwise
    plain = fit_signposts(WeightedHistogram.of(numbers, weights, 1000), 8)
    scaled = fit_signposts(WeightedHistogram.of(numbers, scale * weights, 1000), 8)
    np.testing.assert_array_equal(scaled.values, plain.values)
    np.testing.assert_array_equal(scaled.bounds, plain.bounds)
    assert scaled.cost == scale * plain.cost
    assert quantization_cost(numbers, scale * weights, plain.values) == scale * quantization_cost(
        numbers, weights, plain.values
    )


def test_weightless_numbers_change_nothing() -> None:
    numbers, weights = DATA["normal"](np.random.default_rng(6), 500)
    with_zeros = WeightedHistogram.of(np.append(numbers, np.linspace(-1, 1, 77)), np.append(weights, np.zeros(77)), 256)
    plain = fit_signposts(WeightedHistogram.of(numbers, weights, 256), 8)
    np.testing.assert_array_equal(fit_signposts(with_zeros, 8).values, plain.values)


# The histogram


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float64])
def test_histogram_sums_every_number_once(dtype: type, weight_dtype: type) -> None:
    rng = np.random.default_rng(7)
    strided: NDArray[np.floating] = rng.uniform(-1, 1, (300, 2, 150)).astype(dtype)  # longer than one chunk
    numbers = strided[:, 0, ::2].T
    weights: NDArray[np.floating] = rng.exponential(size=(75, 300)).astype(weight_dtype)
    a, w = numbers.astype(np.float64).ravel(), weights.astype(np.float64).ravel()
    bins = 50
    histogram = WeightedHistogram.of(numbers, weights, bins)
    for got, terms in ((histogram.weight, w), (histogram.first, w * a), (histogram.second, w * a * a)):
        expected = np.bincount(bin_indices(a, bins), terms, minlength=bins)
        np.testing.assert_allclose(got, expected, rtol=0, atol=a.size * EPS * np.abs(terms).max())


def test_ends_and_numbers_outside_the_range_count_in_the_end_bins_with_their_own_values() -> None:
    numbers = np.array([-1.0, 1.0, -3.0, 1e30, np.nextafter(1.0, 0)])
    histogram = WeightedHistogram.of(numbers, np.ones(5), 4)
    np.testing.assert_array_equal(histogram.weight, [2, 0, 0, 3])
    assert (histogram.first[0], histogram.second[0]) == (-4, 10)
    np.testing.assert_allclose(histogram.first[3], 1e30)


def test_no_numbers_give_the_empty_histogram() -> None:
    histogram = WeightedHistogram.of(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), 8)
    for name in ("weight", "first", "second"):
        np.testing.assert_array_equal(getattr(histogram, name), getattr(WeightedHistogram.empty(8), name))


def test_memory_does_not_grow_with_the_numbers() -> None:
    numbers, weights = np.zeros(1 << 22, np.float16), np.ones(1 << 22, np.float16)
    fit = fit_signposts(WeightedHistogram.of(numbers[:10], weights[:10], 64), 2)  # compiled before anything is counted
    quantization_cost(numbers[:10], weights[:10], fit.values)
    tracemalloc.start()
    try:
        WeightedHistogram.of(numbers, weights, 64)
        quantization_cost(numbers, weights, fit.values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < numbers.nbytes // 4


def random_histogram(rng: np.random.Generator, n: int, bins: int) -> WeightedHistogram:
    return WeightedHistogram.of(rng.uniform(-1, 1, n), 10 ** rng.uniform(-8, 4, n), bins)


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(*[st.integers(0, 200)] * 3), bins=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_merge_is_associative_and_commutative(sizes: tuple[int, int, int], bins: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (random_histogram(rng, n, bins) for n in sizes)
    for name in ("weight", "first", "second"):
        left, right = getattr(a.merge(b).merge(c), name), getattr(a.merge(b.merge(c)), name)
        magnitude = sum(np.abs(getattr(part, name)) for part in (a, b, c))
        assert (np.abs(left - right) <= 2 * EPS * magnitude).all()
        np.testing.assert_array_equal(getattr(a.merge(b), name), getattr(b.merge(a), name))
        np.testing.assert_array_equal(getattr(a.merge(WeightedHistogram.empty(bins)), name), getattr(a, name))


def test_merged_histograms_fit_like_the_histogram_of_all_numbers() -> None:
    numbers, weights = DATA["laplace"](np.random.default_rng(8), 9000)
    whole = fit_signposts(WeightedHistogram.of(numbers, weights, 512), 8)
    parts = [WeightedHistogram.of(numbers[i::3], weights[i::3], 512) for i in range(3)]
    merged = fit_signposts(parts[0].merge(parts[1]).merge(parts[2]), 8)
    np.testing.assert_allclose(merged.values, whole.values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(merged.cost, whole.cost, rtol=1e-10)


# The cost of a codebook


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1))
def test_quantization_cost_takes_the_nearest_value(values: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    codebook = np.sort(np.array(values + values[:2]))  # repeated values are legal
    numbers = np.concatenate((rng.uniform(-2, 2, 300), codebook, 0.5 * (codebook[1:] + codebook[:-1])))
    weights = rng.exponential(size=numbers.size)
    expected = (weights * ((numbers[:, None] - codebook) ** 2).min(axis=1)).sum()
    np.testing.assert_allclose(quantization_cost(numbers, weights, codebook), expected, rtol=1e-12)


def test_quantization_cost_adds_up_arrays_of_many_chunks() -> None:
    rng = np.random.default_rng(9)
    numbers = rng.uniform(-1, 1, (2, 60_001)).astype(np.float32)[:, ::2]
    weights = rng.exponential(size=numbers.shape)
    codebook = np.array([-0.5, 0.25])
    expected = (weights * ((numbers.astype(np.float64)[..., None] - codebook) ** 2).min(axis=-1)).sum()
    np.testing.assert_allclose(quantization_cost(numbers, weights, codebook), expected, rtol=1e-12)


# Errors

ONES = np.ones(4)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "bins of empty": (lambda: WeightedHistogram.empty(0), ValueError, "bins is 0; a histogram needs at least 1 bin"),
    "bins of a field": (lambda: WeightedHistogram(-1, ONES, ONES, ONES), ValueError, "bins is -1"),
    "shape": (
        lambda: WeightedHistogram(4, ONES, np.ones(5), ONES),
        ValueError,
        "first is float64 (5,); it must be float64 (4,)",
    ),
    "dtype": (
        lambda: WeightedHistogram(4, ONES.astype(np.float32), ONES, ONES),
        ValueError,
        "weight is float32 (4,); it must be float64 (4,)",
    ),
    "NaN in a moment": (
        lambda: WeightedHistogram(4, ONES, ONES, np.array([0, np.nan, 1, 1])),
        ValueError,
        "second holds NaN or infinity",
    ),
    "overflow of a sum": (
        lambda: WeightedHistogram.of(np.ones(2), np.full(2, 1e308), 4),
        ValueError,
        "weight holds NaN or infinity; look for NaN in the numbers and for huge weights",
    ),
    "negative sum": (
        lambda: WeightedHistogram(4, np.array([1, -2.5, 1, 1]), ONES, ONES),
        ValueError,
        "weight holds -2.5; allowed is 0 or more",
    ),
    "merge": (
        lambda: WeightedHistogram.empty(4).merge(WeightedHistogram.empty(8)),
        ValueError,
        "cannot merge 4 with 8 bins",
    ),
    "integer numbers": (
        lambda: WeightedHistogram.of(np.ones(4, np.int32), ONES, 4),
        TypeError,
        "numbers are int32; allowed are float dtypes",
    ),
    "integer weights": (
        lambda: quantization_cost(ONES, np.ones(4, np.int64), ONES),
        TypeError,
        "weights are int64; allowed are float dtypes",
    ),
    "shapes differ": (
        lambda: WeightedHistogram.of(ONES, np.ones((4, 1)), 4),
        ValueError,
        "numbers are (4,) and weights (4, 1); every number needs its own weight",
    ),
    "NaN number": (
        lambda: WeightedHistogram.of(np.array([0, np.nan]), np.ones(2), 4),
        ValueError,
        "numbers hold nan; they must be finite",
    ),
    "infinite number": (
        lambda: quantization_cost(np.array([0, -np.inf]), np.ones(2), ONES),
        ValueError,
        "numbers hold -inf; they must be finite",
    ),
    "negative weight": (
        lambda: WeightedHistogram.of(np.zeros(2), np.array([1, -0.5]), 4),
        ValueError,
        "weights hold -0.5; they must be finite and not negative",
    ),
    "infinite weight": (
        lambda: WeightedHistogram.of(np.zeros(2, np.float16), np.array([1, np.inf], np.float16), 4),
        ValueError,
        "weights hold inf; they must be finite and not negative",
    ),
    "NaN weight past the first chunk": (
        lambda: WeightedHistogram.of(np.zeros(100_000), np.append(np.ones(99_999), np.nan), 4),
        ValueError,
        "weights hold nan; they must be finite and not negative",
    ),
    "k": (
        lambda: fit_signposts(WeightedHistogram.of(ONES, ONES, 4), 0),
        ValueError,
        "k is 0; a codebook needs at least 1 signpost",
    ),
    "k of evenly spaced values": (
        lambda: fit_spacing(WeightedHistogram.of(ONES, ONES, 4), 20, 9),
        ValueError,
        "k is 20; allowed are 2 to 19 values a step of 1 / 9 apart",
    ),
    "one evenly spaced value": (lambda: fit_spacing(WeightedHistogram.of(ONES, ONES, 4), 1, 9), ValueError, "k is 1;"),
    "no weight of evenly spaced values": (
        lambda: fit_spacing(WeightedHistogram.of(ONES, np.zeros(4), 16), 4, 9),
        ValueError,
        "the histogram holds no weight",
    ),
    "no weight": (
        lambda: fit_signposts(WeightedHistogram.of(ONES, np.zeros(4), 16), 4),
        ValueError,
        "the histogram's 16 bins hold no weight, so every codebook costs the same; collect numbers whose weights",
    ),
    "descending values": (
        lambda: quantization_cost(ONES, ONES, np.array([0.5, 0.25])),
        ValueError,
        "values are [0.5  0.25]; a codebook is one-dimensional, finite and ascending",
    ),
    "no values": (lambda: quantization_cost(ONES, ONES, np.zeros(0)), ValueError, "values are []; a codebook"),
    "NaN value": (
        lambda: quantization_cost(ONES, ONES, np.array([np.nan])),
        ValueError,
        "values are [nan]; a codebook",
    ),
    "values in two dimensions": (lambda: quantization_cost(ONES, ONES, np.eye(2)), ValueError, "a codebook is one-dim"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_illegal_input_is_refused_with_its_value(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=re.escape(message)):
        call()
