"""Fits `dense`: ranges of channels, signposts (KVQuant section 3.2), evenly spaced or not, and their Q-Norm (its first
version, 3.5)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from artifacts.errors import SignpostError
from artifacts.fields import PageShape
from artifacts.parts import Dense
from artifacts.parts.dense import GRID
from calib.fits import Fit, Side
from calib.histograms import histogram, moments
from calib.signposts import WeightedHistogram, fit_signposts, fit_spacing
from calib.statistics import Bounds, LaneSums
from runtime.parts import dense


def pending(side: Side) -> Fit | None:
    """Ranges, then signposts, as far as they come from the bundle and are not found yet."""
    part = side.format.dense
    if part is None:
        return None
    if part.scales == "bundle" and (fit := pending_ranges(side)):
        return fit
    fitted = {"signposts", "spacing"} & part.bundle_tensors(side.shape).keys()
    if not fitted <= side.tables.keys():
        return SignpostFit(part, side.method.weights, side.method.bins, side.tables, side.name)
    return None


def pending_ranges(side: Side) -> Fit | None:
    """Ranges of channels, unless they are found, or follow from thresholds."""
    if "scale" in side.tables:
        return None
    sparse = side.format.sparse
    if not sparse or (sparse.axis, sparse.thresholds) != ("channel", "bundle"):
        return RangeFit()
    # Thresholds of a channel are the first numbers inside: exactly the ends of its range.
    side.tables.update(ranges(side.tables["lower"], side.tables["upper"]))
    return None


class RangeFit(Fit):
    """Scale and zero point of each channel from the extremes of its numbers, outliers left out."""

    title = "ranges"

    def __init__(self) -> None:
        super().__init__(bounds=Bounds())

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        low = pages if outliers is None else pages.masked_fill(outliers, torch.inf)
        high = pages if outliers is None else pages.masked_fill(outliers, -torch.inf)
        self.statistics["bounds"].observe(low.amin((0, 1)), high.amax((0, 1)))

    def collected(self) -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in self.statistics["bounds"].tensors().items()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """scale, zero: float32 [h_kv, d]. A channel that has nothing but outliers gets 0 for both."""
        return ranges(collected["low"], collected["high"])


def ranges(lower: Tensor, upper: Tensor) -> dict[str, Tensor]:
    """Scale and zero point of ranges [lower, upper], 0 where a range is empty."""
    some = lower <= upper
    return {
        "scale": torch.where(some, 0.5 * (upper - lower), 0.0),
        "zero": torch.where(some, 0.5 * (upper + lower), 0.0),
    }


class SignpostFit(Fit):
    """Signposts of one side of one layer: they minimize sum_i w_i (a_i - Q(a_i))^2 over its normalized numbers a_i.

    weights: none (w = 1), fisher (w = F_ii, the squared gradient) or fisher_scaled (w = F_ii * s_i^2, KVQuant equation
    5 with the scales of normalization; without s_i a step counts the same in a wide and in a narrow vector).
    Of `uniform-fit` they are the best ones that are evenly spaced.
    """

    title = "signposts"

    def __init__(self, part: Dense, weights: str, bins: int, tables: dict[str, Tensor], name: str = "this side"):
        super().__init__(weighted=LaneSums())
        self.part, self.weights, self.bins, self.tables, self.name = part, weights, bins, tables, name
        self.gradients = weights != "none"
        if part.codebook == "nuq-qnorm":
            self.statistics["counts"] = LaneSums()

    def sees(self) -> dict[str, Any]:
        part = {name: getattr(self.part, name) for name in ("axis", "group", "scales", "normalize")}
        return part | {"weights": self.weights, "bins": self.bins, "counts": "counts" in self.statistics}

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        normalized, weight, kept = self.weighed(pages, outliers, gradient)
        self.statistics["weighted"].add(moments(normalized, weight, self.bins), lane)
        if "counts" in self.statistics:
            self.statistics["counts"].add(moments(normalized, kept, self.bins), lane)

    def weighed(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The pages' numbers normalized, float32, the weight of each, and 1 where it is no outlier, float64."""
        t, h_kv, d = pages.shape[1:]
        shape = PageShape(t, h_kv, d, "key")  # of values it would be the same: only storing knows the side
        normalized, scale = dense.normalize(self.part, shape, pages, outliers, self.tables)
        kept = (scale > 0).expand_as(pages)
        kept = (kept if outliers is None else kept & ~outliers).double()
        if gradient is None or self.weights == "none":
            return normalized, kept, kept
        size = gradient.double() if self.weights == "fisher" else gradient.double() * scale
        return normalized, kept * size.square(), kept

    def collected(self) -> dict[str, Tensor]:
        return {name: sums.total().cpu() for name, sums in self.statistics.items()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """signposts: float32 [2**bits], ascending; with Q-Norm also edges: float32 [2**bits - 1]. Evenly spaced ones:
        spacing, int16 [2], instead.

        Raises SignpostError where no number has any weight.
        """
        if not collected["weighted"][0].any():
            raise SignpostError(
                f"{self.name}: no number has any weight for the signposts, because all gradients are zero or all "
                "numbers are equal: check that the model uses this layer, or set method.weights=none"
            )
        weighted, codes = histogram(collected["weighted"]), 1 << self.part.bits
        if self.part.codebook == "uniform-fit":
            return {"spacing": torch.tensor(fit_spacing(weighted, codes, GRID), dtype=torch.int16)}
        values = fit_signposts(weighted, codes).values
        if self.part.codebook != "nuq-qnorm":
            return {"signposts": torch.from_numpy(values).float()}
        between = 0.5 * (values[:-1] + values[1:])
        found = {"signposts": q_norm(values, between, histogram(collected["counts"])), "edges": between}
        return {name: torch.from_numpy(numbers).float() for name, numbers in found.items()}


def q_norm(values: NDArray[np.float64], between: NDArray[np.float64], counts: WeightedHistogram) -> NDArray[np.float64]:
    """Codebook values [k] such that quantized numbers have the numbers' own mean and standard deviation.

    between [k - 1]: ascending edges between the codes; counts: the numbers, each with weight 1. KVQuant's Q-Norm,
    `(C - mu_2) sigma_1 / sigma_2 + mu_1` with the moments of the numbers (1) and of their quantized values (2). The
    numbers of a bin in which an edge lies all count for the code of their mean. One code alone keeps its width.
    """
    some = counts.weight > 0
    weight, first = counts.weight[some], counts.first[some]
    mean = first.sum() / weight.sum()
    variance = counts.second[some].sum() / weight.sum() - mean**2
    quantized = values[np.searchsorted(between, first / weight)]
    mean_quantized = weight @ quantized / weight.sum()
    variance_quantized = weight @ (quantized - mean_quantized) ** 2 / weight.sum()
    stretch = np.sqrt(max(variance, 0.0) / variance_quantized) if variance_quantized else 1.0
    return (values - mean_quantized) * stretch + mean
