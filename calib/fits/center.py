"""Fits `center`: the mean of every channel."""

from collections.abc import Mapping

import torch
from torch import Tensor

from calib.fits import Fit, Side
from calib.statistics import LaneSums


def pending(side: Side) -> Fit | None:
    """The means, if the format takes them off."""
    return MeanFit() if side.format.center and "mean" not in side.tables else None


class MeanFit(Fit):
    """Mean of each channel over all tokens, added up in float64."""

    title = "means"

    def __init__(self) -> None:
        super().__init__(total=LaneSums(), count=LaneSums())

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        self.statistics["total"].add(pages.sum((0, 1), dtype=torch.float64), lane)
        tokens = pages.shape[0] * pages.shape[1]
        self.statistics["count"].add(torch.tensor(tokens, dtype=torch.float64, device=pages.device), lane)

    def collected(self) -> dict[str, Tensor]:
        return {name: sums.total().cpu() for name, sums in self.statistics.items()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """mean: float32 [h_kv, d]."""
        return {"mean": (collected["total"] / collected["count"]).float()}
