"""Fits `center`: the mean of every channel."""

import torch
from torch import Tensor

from calib.fits import Fit, Side


def pending(side: Side) -> Fit | None:
    """The means, if the format takes them off."""
    return MeanFit() if side.format.center and "mean" not in side.tables else None


class MeanFit:
    """Mean of each channel over all tokens, added up in float64."""

    title = "means"
    gradients = False

    def __init__(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        self.total = self.total.to(pages.device) + pages.sum((0, 1), dtype=torch.float64)
        self.count += pages.shape[0] * pages.shape[1]

    def result(self) -> dict[str, Tensor]:
        """mean: float32 [h_kv, d]."""
        return {"mean": (self.total / self.count).float()}
