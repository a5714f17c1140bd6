"""Quantiles of the columns of a stream: exact while that is cheap, else from a histogram with a stated error."""

from collections.abc import Mapping

import torch
from torch import Tensor

from calib.statistics import Extremes, Merging, Statistic

CHANNEL_BINS = 1024  # of a column where there are many: 4 KiB each, quantiles to 1/1023 of the range
LONE_BINS = 65536  # of a lone column
_AT_ONCE = 1 << 22  # numbers whose bins are found together, in float64
_FLOOR = -149  # exponent of the smallest float32


class BinaryHistogram(Merging):
    """Counts of the numbers of each column in bins [j 2^e, (j + 1) 2^e), j at most `bins` in a row.

    e is the least exponent at which all numbers of the column fit, so it follows from the smallest and the largest of
    them. When they spread, e grows, and pairs of bins become one: bins of powers of two nest, so what is counted never
    depends on the order, and merging is exact.

    A bin is at most 2 / (bins - 1) of the column's range wide, so a quantile, the middle of its bin, is off by at most
    1 / (bins - 1) of the range.
    """

    def __init__(self, bins: int):
        if bins < 2 or bins & (bins - 1):
            raise ValueError(f"bins={bins} must be a power of two, at least 2")
        self.bins = bins
        self.low: Tensor | None = None  # float32 [columns]
        self.high: Tensor | None = None
        self.counts: Tensor | None = None  # [columns, bins], bin j at place j mod bins; int64 if a column is alone

    def observe(self, x: Tensor) -> None:
        """Takes in x, float32 [n, columns], finite."""
        self._widen(x.amin(0), x.amax(0))
        assert self.low is not None
        assert self.high is not None
        assert self.counts is not None
        e = exponents(self.low, self.high, self.bins)
        one, width = torch.ones_like(self.counts[:1, :1]), max(1, _AT_ONCE // x.shape[0])
        for start in range(0, x.shape[1], width):
            some = slice(start, start + width)
            index = _bins(x[:, some].T, e[some]) % self.bins
            self.counts[some].scatter_add_(1, index, one.expand_as(index))

    def tensors(self) -> dict[str, Tensor]:
        if self.low is None or self.high is None or self.counts is None:
            return {}
        return {"low": self.low, "high": self.high, "counts": self.counts}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        other = BinaryHistogram(self.bins)
        other.low, other.high, other.counts = tensors["low"], tensors["high"], tensors["counts"].clone()
        self._widen(other.low, other.high)
        other._widen(*self._bounds())
        assert self.counts is not None
        self.counts += other.counts

    def smallest(self, rank: int) -> Tensor:
        """About the number at place `rank` from below (0: the smallest) of each column, float32 [columns]."""
        low, high = self._bounds()
        e = exponents(low, high, self.bins)
        assert self.counts is not None
        first = _bins(low[:, None], e)
        order = (first + torch.arange(self.bins, device=low.device)) % self.bins
        below = self.counts.gather(1, order).cumsum(1)
        place = (below <= rank).sum(1, keepdim=True)
        middle = ((first + place).double() + 0.5).squeeze(1) * _power(e)
        return middle.clamp(low.double(), high.double()).float()

    def largest(self, rank: int) -> Tensor:
        """About the number at place `rank` from above."""
        assert self.counts is not None
        return self.smallest(int(self.counts[0].sum()) - 1 - rank)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def _widen(self, low: Tensor, high: Tensor) -> None:
        """Makes room for numbers from low to high, float32 [columns]."""
        if self.low is None or self.high is None or self.counts is None:
            self.low, self.high = low.clone(), high.clone()
            dtype = torch.int64 if low.numel() == 1 else torch.int32
            self.counts = torch.zeros(low.numel(), self.bins, dtype=dtype, device=low.device)
            return
        old = self.low.to(low.device), self.high.to(low.device)
        self.low, self.high = torch.minimum(old[0], low), torch.maximum(old[1], high)
        before, after = (exponents(*bounds, self.bins) for bounds in (old, (self.low, self.high)))
        moved = (after > before).nonzero()[:, 0]
        self.counts = self.counts.to(low.device)
        if moved.numel():
            first = _bins(old[0][moved, None], before[moved])
            place = torch.arange(self.bins, device=low.device)
            index = first + (place - first) % self.bins  # the bin that stands at each place
            coarser = index >> (after - before)[moved, None].clamp_max(62)
            counts = torch.zeros_like(self.counts[moved])
            self.counts[moved] = counts.scatter_add_(1, coarser % self.bins, self.counts[moved])


def exponents(low: Tensor, high: Tensor, bins: int) -> Tensor:
    """The least e at which the bins of `low` and `high` (float32 [columns]) are less than `bins` apart, int64."""
    bits = bins.bit_length() - 1
    spread = high.double() - low.double()
    # A lone number gets bins below the spacing of float32 around it: no second number ever fits e better.
    alone = torch.frexp(torch.maximum(low.abs(), high.abs()).double().clamp_min(2.0**_FLOOR)).exponent - 24
    # One less than the spread says, which may have been rounded up to a power of two; then as much more as it takes.
    e = torch.where(spread > 0, torch.frexp(spread).exponent - 1, alone.clamp_min(_FLOOR)).long() - bits
    for _ in range(2):
        e = e + ((_bins(high[:, None], e) - _bins(low[:, None], e)).squeeze(1) >= bins)
    return e


def _bins(x: Tensor, e: Tensor) -> Tensor:
    """floor(x / 2^e), int64, for x float32 [columns, n] and e int64 [columns]. Exact: a power of two scales float64."""
    return (x.double() * _power(-e)[:, None]).floor().long()


def _power(e: Tensor) -> Tensor:
    """2^e, float64, for int64 |e| < 1022: its bits, because no `exp2` promises to be exact."""
    return ((e + 1023) << 52).view(torch.float64)


def tails(k: int, columns: int) -> "Extremes | BinaryHistogram":
    """What finds the k-th smallest and k-th largest of each column: lists where they take less memory than bins."""
    bins = LONE_BINS if columns == 1 else CHANNEL_BINS
    return Extremes(k) if 2 * k <= bins else BinaryHistogram(bins)


def ends(statistic: Statistic, k: int) -> tuple[Tensor, Tensor]:
    """The k-th smallest and the k-th largest number of each column that `tails(k, ...)` has seen, float32 [columns]."""
    if isinstance(statistic, Extremes):
        assert statistic.low is not None
        assert statistic.high is not None
        return statistic.low[k - 1], statistic.high[k - 1]
    assert isinstance(statistic, BinaryHistogram)
    return statistic.smallest(k - 1), statistic.largest(k - 1)
