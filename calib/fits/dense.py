"""Fits `dense`: ranges of channels, and signposts (KVQuant section 3.2)."""

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.parts import Dense
from calib.signposts import Signposts, WeightedHistogram, fit_signposts
from calib.statistics import Extremes
from runtime.parts import dense


class RangeFit:
    """Scale and zero point of each channel from the extremes of its numbers, outliers left out."""

    gradients = False

    def __init__(self) -> None:
        self.extremes = Extremes(1)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        """Takes in pages float32 [p, t, h_kv, d]; outliers is a mask of the same shape or None."""
        x = pages.flatten(0, 1)
        if outliers is None:
            self.extremes.observe(x)
            return
        hidden = outliers.flatten(0, 1)
        side = Extremes(1)
        side.low = torch.where(hidden, torch.inf, x).amin(0, keepdim=True)
        side.high = torch.where(hidden, -torch.inf, x).amax(0, keepdim=True)
        self.extremes.merge(side)

    def result(self) -> dict[str, Tensor]:
        """scale, zero: float32 [h_kv, d]. A channel that has nothing but outliers gets 0 for both."""
        assert self.extremes.low is not None and self.extremes.high is not None
        return ranges(self.extremes.low[0], self.extremes.high[0])


def ranges(lower: Tensor, upper: Tensor) -> dict[str, Tensor]:
    """Scale and zero point of ranges [lower, upper], 0 where a range is empty."""
    some = lower <= upper
    return {
        "scale": torch.where(some, 0.5 * (upper - lower), 0.0),
        "zero": torch.where(some, 0.5 * (upper + lower), 0.0),
    }


class SignpostFit:
    """Signposts of one layer and side: the k-means of normalized numbers a_i that minimizes sum_i w_i (a_i - Q(a_i))^2.

    weights: none (w = 1), fisher (w = F_ii, the squared gradient) or fisher_scaled (w = F_ii * s_i^2, KVQuant equation 5 with
    the scales of normalization; without s_i a step counts the same in a wide and in a narrow vector).
    """

    def __init__(self, part: Dense, weights: str, bins: int, tables: dict[str, Tensor]):
        self.part, self.weights, self.tables = part, weights, tables
        self.gradients = weights != "none"
        self.histogram = WeightedHistogram.empty(bins)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        """Takes in pages and gradients, float32 [p, t, h_kv, d]; outliers is a mask of the same shape or None."""
        normalized, scale = dense.normalize(self.part, PageShape(*pages.shape[1:]), pages, outliers, self.tables)
        weight = torch.ones_like(pages) if gradient is None or self.weights == "none" else gradient.square()
        if self.weights == "fisher_scaled":
            weight = weight * scale.square()
        kept = (scale > 0).expand_as(pages)
        kept = kept if outliers is None else kept & ~outliers
        numbers, weights = (x[kept].cpu().numpy() for x in (normalized.clamp(-1, 1), weight))
        self.histogram = self.histogram.merge(WeightedHistogram.of(numbers, weights, self.histogram.bins))

    def fit(self) -> Signposts:
        """The optimum. Raises ValueError where no number has any weight."""
        return fit_signposts(self.histogram, 1 << self.part.bits)

    def result(self) -> dict[str, Tensor]:
        """signposts: float32 [2**bits], ascending."""
        return {"signposts": torch.from_numpy(self.fit().values).float()}
