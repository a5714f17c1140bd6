"""Fits `sparse`: thresholds between outliers and the rest, from exact quantiles."""

from math import ceil

from torch import Tensor

from artifacts.errors import SignpostError
from artifacts.parts import Sparse
from calib.fits import Fit, Side
from calib.statistics import Extremes


def pending(side: Side) -> Fit | None:
    """Thresholds, if they come from the bundle and are not found yet."""
    part = side.format.sparse
    if part and part.thresholds == "bundle" and "lower" not in side.tables:
        return ThresholdFit(part, side.tokens, side.shape.h_kv, side.shape.d)
    return None


class ThresholdFit:
    """Outlier thresholds such that ceil(fraction/2 * N) of each vector's N distinct numbers lie outside, at each end.

    KVQuant: per vector (axis channel), or one pair for the layer (axis matrix). tokens: how many will be observed.
    Raises SignpostError where they are too few to have a middle.
    """

    title = "thresholds"
    gradients = False

    def __init__(self, part: Sparse, tokens: int, h_kv: int, d: int):
        self.part = part
        numbers = tokens if part.axis == "channel" else tokens * h_kv * d
        outside = ceil(part.fraction / 2 * numbers)
        if 2 * outside >= numbers:
            raise SignpostError(
                f"{tokens} calibration tokens are too few for outliers={part.fraction:g}: raise samples or seqlen"
            )
        self.extremes = Extremes(outside + 1)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        self.extremes.observe(pages.flatten(0, 1) if self.part.axis == "channel" else pages.reshape(-1, 1, 1))

    def result(self) -> dict[str, Tensor]:
        """lower, upper: float32 [h_kv, d] or [1, 1]; the first number inside at each end."""
        low, high = self.extremes.low, self.extremes.high
        assert low is not None
        assert high is not None
        return {"lower": low[-1].clone(), "upper": high[-1].clone()}
