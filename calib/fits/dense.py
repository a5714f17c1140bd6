"""Fits `dense`: ranges of channels, and signposts (KVQuant section 3.2)."""

import torch
from torch import Tensor

from artifacts.errors import SignpostError
from artifacts.fields import PageShape
from artifacts.parts import Dense
from calib.fits import Fit, Side
from calib.signposts import WeightedHistogram, fit_signposts
from runtime.parts import dense


def pending(side: Side) -> Fit | None:
    """Ranges, then signposts, as far as they come from the bundle and are not found yet."""
    part = side.format.dense
    if part is None:
        return None
    if part.scales == "bundle" and "scale" not in side.tables:
        sparse = side.format.sparse
        if not sparse or (sparse.axis, sparse.thresholds) != ("channel", "bundle"):
            return RangeFit()
        # Thresholds of a channel are the first numbers inside: exactly the ends of its range.
        side.tables.update(ranges(side.tables["lower"], side.tables["upper"]))
    if part.codebook == "nuq" and "signposts" not in side.tables:
        return SignpostFit(part, side.method.weights, side.method.bins, side.tables, side.name)
    return None


class RangeFit:
    """Scale and zero point of each channel from the extremes of its numbers, outliers left out."""

    title = "ranges"
    gradients = False

    def __init__(self) -> None:
        self.low, self.high = torch.tensor(torch.inf), torch.tensor(-torch.inf)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        low = pages if outliers is None else pages.masked_fill(outliers, torch.inf)
        high = pages if outliers is None else pages.masked_fill(outliers, -torch.inf)
        self.low = torch.minimum(self.low.to(pages.device), low.amin((0, 1)))
        self.high = torch.maximum(self.high.to(pages.device), high.amax((0, 1)))

    def result(self) -> dict[str, Tensor]:
        """scale, zero: float32 [h_kv, d]. A channel that has nothing but outliers gets 0 for both."""
        return ranges(self.low, self.high)


def ranges(lower: Tensor, upper: Tensor) -> dict[str, Tensor]:
    """Scale and zero point of ranges [lower, upper], 0 where a range is empty."""
    some = lower <= upper
    return {
        "scale": torch.where(some, 0.5 * (upper - lower), 0.0),
        "zero": torch.where(some, 0.5 * (upper + lower), 0.0),
    }


class SignpostFit:
    """Signposts of one side of one layer: they minimize sum_i w_i (a_i - Q(a_i))^2 over its normalized numbers a_i.

    weights: none (w = 1), fisher (w = F_ii, the squared gradient) or fisher_scaled (w = F_ii * s_i^2, KVQuant equation
    5 with the scales of normalization; without s_i a step counts the same in a wide and in a narrow vector).
    """

    title = "signposts"

    def __init__(self, part: Dense, weights: str, bins: int, tables: dict[str, Tensor], name: str = "this side"):
        self.part, self.weights, self.tables, self.name = part, weights, tables, name
        self.gradients = weights != "none"
        self.histogram = WeightedHistogram.empty(bins)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        normalized, scale = dense.normalize(self.part, PageShape(*pages.shape[1:]), pages, outliers, self.tables)
        weight = torch.ones_like(pages) if gradient is None or self.weights == "none" else gradient.square()
        if self.weights == "fisher_scaled":
            weight = weight * scale.square()
        kept = (scale > 0).expand_as(pages)
        kept = kept if outliers is None else kept & ~outliers
        numbers, weights = (x[kept].cpu().numpy() for x in (normalized.clamp(-1, 1), weight))
        self.histogram = self.histogram.merge(WeightedHistogram.of(numbers, weights, self.histogram.bins))

    def result(self) -> dict[str, Tensor]:
        """signposts: float32 [2**bits], ascending. Raises SignpostError where no number has any weight."""
        if not self.histogram.weight.any():
            raise SignpostError(
                f"{self.name}: no number has any weight for the signposts, because all gradients are zero or all "
                "numbers are equal: check that the model uses this layer, or set method.weights=none"
            )
        return {"signposts": torch.from_numpy(fit_signposts(self.histogram, 1 << self.part.bits).values).float()}
