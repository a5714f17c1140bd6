"""Calibration with every number kept: thresholds by sorting, signposts by k-means over all numbers. What streaming is
held against.

Inside `kept()` fits keep what they see, and `kept(exact=True)` has them use it. Memory grows with the samples.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.fits import dense, sparse


class Kept(NamedTuple):
    """The fits of one run, in the order in which they were made; some were put off and have seen nothing."""

    thresholds: list["KeptThresholds"]
    signposts: list["KeptSignposts"]


@contextmanager
def kept(exact: bool = False) -> Iterator[Kept]:
    """Fits made inside keep all numbers. exact: and what they find follows from these, not from statistics."""
    found, real = Kept([], []), (sparse.ThresholdFit, dense.SignpostFit)

    def thresholds(*args: Any) -> KeptThresholds:
        found.thresholds.append(KeptThresholds(exact, *args))
        return found.thresholds[-1]

    def signposts(*args: Any) -> KeptSignposts:
        found.signposts.append(KeptSignposts(exact, *args))
        return found.signposts[-1]

    # Functions in the places of classes, which are only called there.
    sparse.ThresholdFit, dense.SignpostFit = thresholds, signposts  # type: ignore[assignment, misc]
    try:
        yield found
    finally:
        sparse.ThresholdFit, dense.SignpostFit = real  # type: ignore[misc]


class KeptThresholds(sparse.ThresholdFit):
    """samples: float32 [tokens, columns] of each; a layer's thresholds are of one column."""

    def __init__(self, exact: bool, *args: Any):
        super().__init__(*args)
        self.exact, self.samples = exact, list[Tensor]()

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        super().observe(pages, outliers, gradient, lane)
        self.samples.append(pages.reshape(-1, self.shape[0] * self.shape[1]))

    def collected(self) -> dict[str, Tensor]:
        if not self.exact:
            return super().collected()
        ascending = torch.cat(self.samples).sort(0).values
        lower, upper = ascending[self.inside - 1], ascending[-self.inside]
        return {"lower": lower.view(self.shape).cpu(), "upper": upper.view(self.shape).cpu()}


class KeptSignposts(dense.SignpostFit):
    """samples: normalized numbers, float32, and weights, float64, of each sample, outliers included with weight 0."""

    def __init__(self, exact: bool, *args: Any):
        super().__init__(*args)
        self.exact, self.samples = exact, list[tuple[Tensor, Tensor]]()
        self.excess: float | None = None  # cost of the signposts that streaming finds over the optimum's, minus 1

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        super().observe(pages, outliers, gradient, lane)
        normalized, weight, _ = self.weighed(pages, outliers, gradient)
        self.samples.append((normalized.flatten(), weight.flatten()))

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        streamed = super().fit(collected)
        if not self.exact or "signposts" not in streamed:  # evenly spaced ones have no exact counterpart
            return streamed
        numbers, weights = self.all()
        values = optimal_signposts(numbers, weights, 1 << self.part.bits)
        costs = [cost(numbers, weights, x.to(numbers.device)) for x in (streamed["signposts"], values)]
        self.excess = costs[0] / costs[1] - 1
        self.samples.clear()
        return {"signposts": values.float().cpu()}

    def all(self) -> tuple[Tensor, Tensor]:
        """Numbers, float32 [n], and weights, float64 [n], of all samples."""
        return torch.cat([numbers for numbers, _ in self.samples]), torch.cat([weights for _, weights in self.samples])


def cost(numbers: Tensor, weights: Tensor, values: Tensor) -> float:
    """Weighted sum of squared distances [n] to the nearest of the ascending values [k], in float64."""
    numbers, values = numbers.double(), values.double()
    nearest = values[torch.bucketize(numbers, 0.5 * (values[:-1] + values[1:]))]
    return float((weights * (numbers - nearest).square()).sum())


def optimal_signposts(numbers: Tensor, weights: Tensor, k: int) -> Tensor:
    """Means of the k clusters of the least weighted squared error, float64 [k]: cluster bounds between any two numbers.

    numbers [n] of which at least k have a weight, weights [n]. The dynamic program of `calib.signposts`, but over
    single numbers, with prefix sums in float64 instead of its table, all bounds of one depth at once.
    """
    some = weights > 0
    x, order = numbers[some].double().sort()
    w = weights[some].double()[order]
    sums = torch.stack([w, w * x, w * x * x]).cumsum(1)
    sums = torch.cat([sums.new_zeros(3, 1), sums], 1)
    n = x.numel()
    best = _costs(sums, torch.zeros(n + 1, dtype=torch.int64, device=x.device), torch.arange(n + 1, device=x.device))
    starts = []
    for clusters in range(2, k + 1):
        best, first = _with_one_more(sums, best, clusters)
        starts.append(first)
    bounds = [n]
    for first in reversed(starts):
        bounds.append(int(first[bounds[-1]]))
    parts = sums[:, [0, *bounds[::-1]]].diff()
    return parts[1] / parts[0]


def _costs(sums: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Squared error of numbers start to end (excluded) against their mean; infinite where there are none."""
    weight, first, second = sums[:, end] - sums[:, start]
    # Weights beyond the 53 bits of the sums before them cost nothing.
    error = torch.where(weight > 0, second - first.square() / weight, 0.0).clamp_min(0)
    return torch.where(end > start, error, torch.inf)


def _with_one_more(sums: Tensor, best: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Least cost of the first p numbers in so many clusters, and where the last of them starts, [n + 1] each.

    best: the same in one cluster fewer. The start never moves left as p grows, so a p is searched between the starts of
    its neighbours at twice the stride.
    """
    n, device = best.numel() - 1, best.device
    after, starts = torch.full_like(best, torch.inf), torch.zeros(n + 1, dtype=torch.int64, device=device)
    stride = 1 << (n.bit_length() - 1)
    while stride:
        p = torch.arange(stride, n + 1, 2 * stride, device=device)
        p = p[p >= clusters]
        left, right = p - stride, p + stride
        low = torch.where(left >= clusters, starts[left], clusters - 1)
        high = torch.where(right <= n, starts[right.clamp_max(n)].minimum(p - 1), p - 1)
        lengths = (high - low).clamp_min(0) + 1  # rounding may put neighbours in the wrong order
        which = torch.repeat_interleave(torch.arange(p.numel(), device=device), lengths)
        start = torch.arange(which.numel(), device=device) + (low - lengths.cumsum(0) + lengths)[which]
        costs = best[start] + _costs(sums, start, p[which])
        after[p] = _least(costs, which, p.numel())
        starts[p] = _least(torch.where(costs == after[p][which], start, n), which, p.numel())
        stride //= 2
    return after, starts


def _least(x: Tensor, which: Tensor, groups: int) -> Tensor:
    """The least number of each group, [groups]. which: of each x, its group.

    Through several places for each of a few groups: a GPU's atomic operations wait for each other.
    """
    spread = max(1, (1 << 16) // max(1, groups))
    place = which * spread + torch.arange(x.numel(), device=x.device) % spread
    most = torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).max
    return x.new_full((groups * spread,), most).scatter_reduce(0, place, x, "amin").view(groups, spread).amin(1)
