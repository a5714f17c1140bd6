"""Signposts: the exact optimum of weighted one-dimensional k-means, on a fine histogram.

KVQuant's nuq codebooks minimize `sum_i F_ii s_i^2 (a_i - Q(a_i))^2` over numbers `a_i` normalized to [-1, 1]
(equation 7, appendix E; the weight of a number here is `F_ii s_i^2`). In one dimension every cluster of an optimum is
an interval, so dynamic programming finds the global optimum where Lloyd's algorithm finds a local one: Wang and Song,
"Ckmeans.1d.dp", The R Journal 3(2), 2011; with divide and conquer over the monotone cluster starts, Groenlund et al.,
arXiv 1701.07204.

The numbers enter as sums per bin, so memory does not grow with them, and histograms of different samples or ranks
merge. Means and costs of clusters are those of the numbers; only their boundaries are restricted to bin edges.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

COARSE = 16  # units of the grid that a first look for evenly spaced values goes on by
_CHUNK = 1 << 14  # numbers converted to float64 at a time: two such buffers stay in the second-level cache


@dataclass(frozen=True, eq=False)
class WeightedHistogram:
    """Weighted moments of numbers in equal-width bins over the normalized range [-1, 1].

    A number `a` belongs to bin `floor((a + 1) * (bins / 2))` computed in float64, clamped to `[0, bins - 1]`: 1 and
    whatever lies outside the range count in the end bins, with their own values in the moments.

    Attributes:
        bins: number of bins, at least 1.
        weight: float64 `[bins]`, the sum of w of the numbers in each bin.
        first: float64 `[bins]`, the sum of w * a.
        second: float64 `[bins]`, the sum of w * a^2.

    Raises:
        ValueError: bins < 1, an array that is not float64 `[bins]`, a moment that is not finite, a negative sum of
            w or w * a^2.
    """

    bins: int
    weight: Float64s
    first: Float64s
    second: Float64s

    def __post_init__(self) -> None:
        _check_bins(self.bins)
        for name in ("weight", "first", "second"):
            moment = getattr(self, name)
            if moment.dtype != np.float64 or moment.shape != (self.bins,):
                raise ValueError(
                    f"{name} is {moment.dtype} {moment.shape}; it must be float64 ({self.bins},), one sum a bin"
                )
            if not np.isfinite(moment).all():
                raise ValueError(f"{name} holds NaN or infinity; look for NaN in the numbers and for huge weights")
        for name in ("weight", "second"):
            if (lowest := getattr(self, name).min()) < 0:
                raise ValueError(f"{name} holds {lowest}; allowed is 0 or more: look for negative weights")

    @classmethod
    def empty(cls, bins: int) -> "WeightedHistogram":
        """The histogram of no numbers: what merging starts from. Raises ValueError for bins < 1."""
        _check_bins(bins)
        return cls(bins, np.zeros(bins), np.zeros(bins), np.zeros(bins))

    @classmethod
    def of(cls, numbers: NDArray[np.floating], weights: NDArray[np.floating], bins: int) -> "WeightedHistogram":
        """The histogram of `numbers` in one pass.

        Args:
            numbers: any float dtype, any shape and strides, normally within [-1, 1].
            weights: any float dtype, the shape of `numbers`, non-negative.
            bins: number of bins.

        Raises:
            TypeError: an array that is not of a float dtype.
            ValueError: shapes differ, a number is NaN or infinite, a weight is negative, NaN or infinite, bins < 1.
        """
        histogram = cls.empty(bins)
        for chunk, chunk_weights in _chunks(numbers, weights):
            _accumulate(chunk, chunk_weights, histogram.weight, histogram.first, histogram.second)
        return cls(bins, histogram.weight, histogram.first, histogram.second)  # again: the sums may have overflowed

    def merge(self, other: "WeightedHistogram") -> "WeightedHistogram":
        """The histogram of both sets of numbers; commutative, and associative up to float64 rounding.

        Raises:
            ValueError: the two have different bins.
        """
        if self.bins != other.bins:
            raise ValueError(f"cannot merge {self.bins} with {other.bins} bins; collect both with the same bins")
        return WeightedHistogram(
            self.bins, self.weight + other.weight, self.first + other.first, self.second + other.second
        )


@dataclass(frozen=True, eq=False)
class Signposts:
    """A codebook and what it costs.

    Attributes:
        values: float64 `[k]`, ascending: the weighted means of the clusters.
        cost: weighted sum of squared errors of the histogram's numbers, each against the value of its own cluster.
        bounds: float64 `[k + 1]`, bin edges from -1 to 1: cluster i holds the bins of `[bounds[i], bounds[i + 1])`.
    """

    values: Float64s
    cost: float
    bounds: Float64s


def fit_signposts(histogram: WeightedHistogram, k: int) -> Signposts:
    """The codebook of `k` values with the least weighted squared error, of all whose cluster boundaries are bin edges.

    Fewer than `k` bins with weight: every such bin gets its mean, and each signpost left over halves the widest gap
    left between -1, the values and 1. So the values stay strictly ascending, numbers that calibration never saw still
    find a signpost nearby, and no error grows by it; the clusters of such signposts are empty (two equal bounds).

    `cost` is good to 1e-9 relative, plus the rounding of the stored sums: at worst eps times the count of numbers in a
    bin, of `second`. The latter is a constant of the histogram, so it moves the reported cost, not the signposts.

    Time `O(k m log m)` and memory `O(m (k + log m))` for m bins with weight: 7 MB for k = 16 and 16384 bins, 94 MB for
    k = 256 and 65536 bins.

    Raises:
        ValueError: k < 1, or a histogram without weight.
    """
    if k < 1:
        raise ValueError(f"k is {k}; a codebook needs at least 1 signpost (2^bits of them)")
    occupied = np.flatnonzero(histogram.weight > 0)
    if occupied.size == 0:
        raise ValueError(
            f"the histogram's {histogram.bins} bins hold no weight, so every codebook costs the same; collect numbers "
            "whose weights are not all zero (gradients of a loss that reaches this layer, or 1 for plain k-means)"
        )
    weight, first, second = (moment[occupied] for moment in (histogram.weight, histogram.first, histogram.second))
    clusters = min(k, occupied.size)
    starts, cost = _partition(weight, first / weight, _within_bins(weight, first, second), clusters)
    values = np.add.reduceat(first, starts) / np.add.reduceat(weight, starts)
    values = np.maximum.accumulate(values)  # numbers one ulp apart across an edge: their rounded means may swap
    edges = occupied[starts] * (2.0 / histogram.bins) - 1.0
    return Signposts(*_padded(values, edges, k - clusters, cost))


def fit_spacing(histogram: WeightedHistogram, k: int, grid: int) -> tuple[int, int]:
    """The evenly spaced codebook of `k` values with the least weighted squared error, (start, step): values are
    `(start + step * i) / grid`, all within [-1, 1]. Cluster boundaries are the bin edges nearest to their middles.

    Every `COARSE`th step and start is tried, then all around the best of these: so it is the best one of all unless
    another valley of the cost is as deep. Of equal ones the first, by step and then by start.

    Raises:
        ValueError: k < 2, no room for k values on the grid, or a histogram without weight.
    """
    if k < 2 or k > 2 * grid + 1:
        raise ValueError(f"k is {k}; allowed are 2 to {2 * grid + 1} values a step of 1 / {grid} apart, within [-1, 1]")
    if not histogram.weight.any():
        raise ValueError("the histogram holds no weight, so every codebook costs the same; collect other numbers")
    moments = (histogram.weight, histogram.first, histogram.second)
    below = [np.concatenate(([0.0], np.cumsum(moment))) for moment in moments]  # of all bins before each
    most = 2 * grid // (k - 1)
    steps, reach = range(1, most + 1, COARSE), range(-grid, grid + 1, COARSE)
    start, step = _best_spacing(below, k, grid, steps, reach)
    steps = range(max(1, step - COARSE), min(most, step + COARSE) + 1)
    around = COARSE * k  # where the first of k values goes when they move apart from the last one
    return _best_spacing(below, k, grid, steps, range(max(-grid, start - around), start + around + 1))


def _best_spacing(below: list[Float64s], k: int, grid: int, steps: range, reach: range) -> tuple[int, int]:
    """The best (start, step) of those. below: sums of weight, first and second moments of all bins before each."""
    bins = below[0].size - 1
    best, least = (0, 0), math.inf
    for step in steps:
        starts = np.array([start for start in reach if start + step * (k - 1) <= grid])
        if not starts.size:
            continue
        values = (starts[:, None] + step * np.arange(k)) / grid
        middles = 0.5 * (values[:, 1:] + values[:, :-1])
        inner = np.clip(np.rint((middles + 1) * (0.5 * bins)).astype(np.int64), 0, bins)
        cuts = np.pad(inner, ((0, 0), (1, 0)))
        ends = np.pad(inner, ((0, 0), (0, 1)), constant_values=bins)
        weight, first, second = (moment[ends] - moment[cuts] for moment in below)
        costs = (second - 2 * values * first + values * values * weight).sum(1)
        if costs.min() < least:
            best, least = (int(starts[costs.argmin()]), step), float(costs.min())
    return best


def quantization_cost(numbers: NDArray[np.floating], weights: NDArray[np.floating], values: Float64s) -> float:
    """Weighted sum of squared distances from each number to its nearest signpost, exact up to float64 rounding.

    Args:
        numbers: any float dtype and shape.
        weights: any float dtype, the shape of `numbers`, non-negative.
        values: `[k]`, any codebook, ascending (repeated values are allowed).

    Raises:
        TypeError: numbers or weights are not of a float dtype.
        ValueError: the cases of `WeightedHistogram.of`, or values that are not `[k]`, finite and ascending.
    """
    values = np.ascontiguousarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all() or (np.diff(values) < 0).any():
        raise ValueError(f"values are {values}; a codebook is one-dimensional, finite and ascending (sort it first)")
    return math.fsum(_nearest_cost(chunk, chunk_weights, values) for chunk, chunk_weights in _chunks(numbers, weights))


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins is {bins}; a histogram needs at least 1 bin (16384 is usual)")


def _chunks(numbers: NDArray[np.floating], weights: NDArray[np.floating]) -> Iterator[tuple[Float64s, Float64s]]:
    """Checked float64 `[at most _CHUNK]` pieces of both arrays, in the same order, without a copy of the whole."""
    for name, array in (("numbers", numbers), ("weights", weights)):
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError(f"{name} are {array.dtype}; allowed are float dtypes (convert with .astype(np.float32))")
    if numbers.shape != weights.shape:
        raise ValueError(f"numbers are {numbers.shape} and weights {weights.shape}; every number needs its own weight")
    pieces = np.nditer(
        [numbers, weights],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly"], ["readonly"]],
        op_dtypes=[np.float64, np.float64],
        casting="same_kind",
        buffersize=_CHUNK,
    )
    for chunk, chunk_weights in pieces:
        if (position := _first_illegal(chunk, chunk_weights)) >= 0:
            number, weight = chunk[position], chunk_weights[position]
            if not math.isfinite(number):
                raise ValueError(f"numbers hold {number}; they must be finite (a vector of zero range divides by zero)")
            raise ValueError(
                f"weights hold {weight}; they must be finite and not negative (did squared gradients overflow?)"
            )
        yield chunk, chunk_weights


@njit(cache=True)
def _first_illegal(numbers, weights):
    """Position of the first pair that is not (finite number, finite non-negative weight), or -1."""
    for position in range(numbers.size):
        if not (math.isfinite(numbers[position]) and 0.0 <= weights[position] < math.inf):
            return position
    return -1


@njit(cache=True)
def _accumulate(numbers, weights, weight, first, second):
    """Adds the pairs to the moments, float64 [bins], in place."""
    last = weight.size - 1.0
    for position in range(numbers.size):
        a, w = numbers[position], weights[position]
        b = int(min(max((a + 1.0) * (0.5 * weight.size), 0.0), last))  # clamped as a float: an int could overflow
        weight[b] += w
        first[b] += w * a
        second[b] += w * a * a


@njit(cache=True)
def _nearest_cost(numbers, weights, values):
    """Sum over the pairs of w times the squared distance to the nearest of the ascending values, float64 [k]."""
    cost = 0.0
    for position in range(numbers.size):
        a = numbers[position]
        low, high = 0, values.size - 1  # ends with values[low] the last one <= a, or low = 0
        while low < high:
            middle = (low + high + 1) // 2
            if values[middle] <= a:
                low = middle
            else:
                high = middle - 1
        distance = abs(a - values[low])
        if low + 1 < values.size:
            distance = min(distance, abs(values[low + 1] - a))
        cost += weights[position] * (distance * distance)
    return cost


def _within_bins(weight: Float64s, first: Float64s, second: Float64s) -> Float64s:
    """Weighted squared error of each bin's numbers against the bin's mean, float64 [m].

    `second - first^2 / weight` cancels, but within one bin only: it loses the rounding of the stored sums, a few eps of
    `second` and up, where the numbers of a bin of width h cost about `weight h^2 / 12` (10^5 times as much at 65536
    bins). Below 8 eps the difference is noise of either sign, and 0 the better estimate: exact for a lone number.
    """
    difference = second - first * (first / weight)
    return np.where(difference > 8 * np.finfo(np.float64).eps * second, difference, 0.0)


def _padded(values: Float64s, edges: Float64s, missing: int, cost: float) -> tuple[Float64s, float, Float64s]:
    """The fields of Signposts, from the values and left edges of the clusters, with `missing` empty clusters added."""
    edges = np.append(edges, 1.0)
    for _ in range(missing):
        fences = np.concatenate(([min(-1.0, values[0])], values, [max(1.0, values[-1])]))
        gap = int(np.argmax(np.diff(fences)))
        values = np.insert(values, gap, 0.5 * (fences[gap] + fences[gap + 1]))
        edges = np.insert(edges, gap, edges[gap])
    edges[0] = -1.0  # bins without weight belong to the cluster on their left, the first ones to the first
    return values, cost, edges


@njit(cache=True)
def _joined(weight_a, mean_a, error_a, weight_b, mean_b, error_b):
    """Weight, mean and squared error of two sets of numbers together (Chan, Golub and LeVeque, 1983)."""
    weight = weight_a + weight_b
    share = weight_b / weight
    gap = mean_b - mean_a
    return weight, mean_a + gap * share, error_a + error_b + gap * gap * (weight_a * share)


@njit(cache=True)
def _segments(weight, mean, error):
    """Table from which the weight, mean and squared error of any run of bins follow by one `_joined`.

    The usual prefix sums give the cost of a run as a difference of large sums: with Fisher weights over 12 orders of
    magnitude, one heavy bin wipes out the cost of every light cluster behind it. This table (a disjoint sparse table)
    only ever adds terms that are not negative, so each cost keeps its relative precision whatever the weights.

    Level l cuts the m bins into blocks of 2^(l+1); an entry holds the run from its bin to the middle of its block. The
    run [i, j], i < j, is the entries of i and j at the level of the highest bit in which i and j differ.
    Returns float64 [levels, 3, m].
    """
    m = weight.size
    levels = 1
    while (1 << levels) < m:
        levels += 1
    table = np.empty((levels, 3, m))
    for level in range(levels):
        half = 1 << level
        for block in range(0, m, 2 * half):
            w, mu, e = 0.0, 0.0, 0.0
            for i in range(min(block + half, m) - 1, block - 1, -1):  # leftwards from the middle
                w, mu, e = _joined(weight[i], mean[i], error[i], w, mu, e)
                table[level, 0, i], table[level, 1, i], table[level, 2, i] = w, mu, e
            w, mu, e = 0.0, 0.0, 0.0
            for j in range(block + half, min(block + 2 * half, m)):  # rightwards from the middle
                w, mu, e = _joined(weight[j], mean[j], error[j], w, mu, e)
                table[level, 0, j], table[level, 1, j], table[level, 2, j] = w, mu, e
    return table


@njit(cache=True)
def _best_start(table, before, low, high, last):
    """The start in [low, high], high <= last, of a cluster that ends with bin `last`, and the least cost with it.

    `before[i]`: least cost of the bins before i in one cluster fewer. The starts within one block share a level of the
    table, so the scan is a few plain loops.
    """
    best, best_start = math.inf, low
    level = table.shape[0] - 1
    start = low
    while start < min(high + 1, last):
        while (start ^ last) >> level == 0:
            level -= 1
        w, mu, e = table[level, 0, last], table[level, 1, last], table[level, 2, last]
        end = min(high + 1, (last >> level) << level)  # the middle of the block that holds both start and last
        for i in range(start, end):
            joined = _joined(table[level, 0, i], table[level, 1, i], table[level, 2, i], w, mu, e)
            cost = before[i] + joined[2]
            if cost < best:
                best, best_start = cost, i
        start = end
    if high == last and before[last] + table[0, 2, last] < best:  # the last bin alone
        best, best_start = before[last] + table[0, 2, last], last
    return best_start, best


@njit(cache=True)
def _add_cluster(table, before, c, after, starts):
    """A row of the dynamic program: the least cost of the first p bins in c >= 2 clusters, into after, float64 [m + 1].

    Into starts, int32 [m + 1], goes where the last of those clusters starts. It never moves left as p grows (the cost
    has the Monge property), so each p is searched between the starts of its neighbours at twice the stride: m log m
    costs in all. Entries p < c stay as they are: no later row reads them, since c clusters need c bins.
    """
    m = after.size - 1
    stride = 1
    while 2 * stride <= m:
        stride *= 2
    while stride >= 1:
        for p in range(stride, m + 1, 2 * stride):
            if p >= c:
                low = starts[p - stride] if p - stride >= c else c - 1
                high = min(p - 1, starts[p + stride]) if p + stride <= m else p - 1
                starts[p], after[p] = _best_start(table, before, low, high, p - 1)
        stride //= 2


@njit(cache=True)
def _partition(weight, mean, error, clusters):
    """First bins, int64 [clusters], and cost of the best partition of m >= clusters bins of positive weight."""
    m = weight.size
    table = _segments(weight, mean, error)
    before, after = np.full(m + 1, math.inf), np.full(m + 1, math.inf)
    w, mu, e = 0.0, 0.0, 0.0
    for p in range(1, m + 1):
        w, mu, e = _joined(w, mu, e, weight[p - 1], mean[p - 1], error[p - 1])
        before[p] = e
    starts = np.zeros((clusters + 1, m + 1), dtype=np.int32)
    for c in range(2, clusters + 1):
        _add_cluster(table, before, c, after, starts[c])
        before, after = after, before
    firsts = np.zeros(clusters, dtype=np.int64)
    end = m
    for c in range(clusters, 0, -1):
        firsts[c - 1] = starts[c, end]
        end = firsts[c - 1]
    return firsts, before[m]
