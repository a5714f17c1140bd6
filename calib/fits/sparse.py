"""Fits `sparse`: thresholds between outliers and the rest, from quantiles."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from torch import Tensor

from artifacts.errors import SignpostError
from artifacts.parts import Sparse
from calib.fits import Fit, Side
from calib.quantiles import BinaryHistogram, ends, tails


def pending(side: Side) -> Fit | None:
    """Thresholds, if they come from the bundle and are not found yet."""
    part = side.format.sparse
    if part and part.thresholds == "bundle" and "lower" not in side.tables:
        return ThresholdFit(part, side.tokens, side.shape.h_kv, side.shape.d)
    return None


class ThresholdFit(Fit):
    """Outlier thresholds such that ceil(fraction/2 * N) of each vector's N distinct numbers lie outside, at each end.

    KVQuant: per vector (axis channel), or one pair for the layer (axis matrix). tokens: how many will be observed.
    Exact where lists of the outliers are short (up to 511 at an end of a channel, 32767 of a layer); beyond, at most
    1/1023 (1/65535) of the vector's range off, see `calib.quantiles`.
    Raises SignpostError where they are too few to have a middle.
    """

    title = "thresholds"

    def __init__(self, part: Sparse, tokens: int, h_kv: int, d: int):
        self.part, self.shape = part, (h_kv, d) if part.axis == "channel" else (1, 1)
        numbers = tokens if part.axis == "channel" else tokens * h_kv * d
        outside = ceil(part.fraction / 2 * numbers)
        if 2 * outside >= numbers:
            raise SignpostError(
                f"{tokens} calibration tokens are too few for outliers={part.fraction:g}: raise samples or seqlen"
            )
        self.inside = outside + 1  # the first number inside, counted from the end
        super().__init__(tails=tails(self.inside, self.shape[0] * self.shape[1]))

    def sees(self) -> dict[str, Any]:
        kept = self.statistics["tails"]
        bins = kept.bins if isinstance(kept, BinaryHistogram) else 0
        return {"axis": self.part.axis, "inside": self.inside, "bins": bins}

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        self.statistics["tails"].observe(pages.reshape(-1, self.shape[0] * self.shape[1]))

    def collected(self) -> dict[str, Tensor]:
        found = ends(self.statistics["tails"], self.inside)
        return {name: x.view(self.shape).cpu() for name, x in zip(("lower", "upper"), found, strict=True)}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """lower, upper: float32 [h_kv, d] or [1, 1]; the first number inside at each end."""
        return dict(collected)
