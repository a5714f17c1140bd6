"""Fits `banded`: ranges of channels, then what every width would cost every band, and the widths that cost least."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from artifacts.errors import SignpostError
from artifacts.fields import SideName
from artifacts.order import band_order
from artifacts.parts import Banded
from artifacts.parts.banded import BAND
from calib.fits import Fit, Side
from calib.fits.dense import pending_ranges
from calib.histograms import histogram, moments
from calib.signposts import fit_signposts
from calib.statistics import LaneSums
from runtime.parts import banded

BINS = 512  # of a band's histogram at most: 16 codes need no finer edges, and there is a histogram for every band


def pending(side: Side) -> Fit | None:
    """Ranges, then widths and signposts, as far as they are not found yet."""
    part = side.format.banded
    if part is None:
        return None
    if fit := pending_ranges(side):
        return fit
    if "signposts" not in side.tables:
        return BandFit(part, side.shape.side, side.method.weights, min(BINS, side.method.bins), side.tables, side.name)
    return None


class BandFit(Fit):
    """Widths and signposts of all bands of one side of one layer: least sum_i w_i (x_i - Q(x_i))^2 for each head.

    weights: none (w = 1) or fisher, fisher_scaled (w = F_ii, the squared gradient); here numbers of different scales
    compete for the same bits, so scales always count.
    """

    title = "bands"

    def __init__(
        self, part: Banded, side: SideName, weights: str, bins: int, tables: dict[str, Tensor], name: str = "this side"
    ):
        super().__init__(weighted=LaneSums())
        self.part, self.side, self.bins, self.tables, self.name = part, side, bins, tables, name
        self.gradients = weights != "none"

    def sees(self) -> dict[str, Any]:
        return {"bands": BAND, "gradients": self.gradients, "bins": self.bins}

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        h_kv, d = pages.shape[2:]
        normalized, scale = banded.normalize(pages, self.tables), self.tables["scale"]
        weight = scale.double().square().expand_as(pages)
        if gradient is not None and self.gradients:
            weight = weight * gradient.double().square()
        if outliers is not None:
            weight = weight.masked_fill(outliers, 0.0)
        bands = d // BAND
        band = torch.from_numpy(band_order(d, self.side)).argsort().to(pages.device) // BAND
        group = torch.arange(h_kv, device=pages.device)[:, None] * bands + band
        sums = moments(normalized, weight, self.bins, group.expand_as(pages), h_kv * bands)
        self.statistics["weighted"].add(sums.view(3, h_kv, -1, self.bins), lane)

    def collected(self) -> dict[str, Tensor]:
        return {name: sums.total().cpu() for name, sums in self.statistics.items()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """widths: uint8 [h_kv, bands]; signposts: float32 [h_kv, bands, 2**most]. See `artifacts.parts.Banded`.

        Raises SignpostError where no number has any weight.
        """
        sums = collected["weighted"]
        if not sums[0].any():
            raise SignpostError(
                f"{self.name}: no number has any weight for the bands, because all gradients are zero or all numbers "
                "are equal: check that the model uses this layer, or set method.weights=none"
            )
        _, h_kv, bands, _ = sums.shape
        words = round(self.part.bits * bands)
        widths = np.zeros((h_kv, bands), np.uint8)
        signposts = np.zeros((h_kv, bands, 1 << self.part.most), np.float32)
        for head in range(h_kv):
            books = [self._books(sums[:, head, band]) for band in range(bands)]
            widths[head] = cheapest([[cost for _, cost in book] for book in books], words)
            for band, width in enumerate(widths[head]):
                values = books[band][width][0]
                signposts[head, band, : values.size] = values
                signposts[head, band, values.size :] = values[-1]
        return {"widths": torch.from_numpy(widths), "signposts": torch.from_numpy(signposts)}

    def _books(self, sums: Tensor) -> list[tuple[NDArray[np.float64], float]]:
        """Signposts and cost of a band at every width; a band without weight costs nothing."""
        counted = histogram(sums)
        if not (counted.weight > 0).any():
            return [(np.zeros(1), 0.0) for _ in range(self.part.most + 1)]
        found = [fit_signposts(counted, 1 << width) for width in range(self.part.most + 1)]
        return [(each.values, each.cost) for each in found]


def cheapest(costs: list[list[float]], words: int) -> list[int]:
    """The widths, one for each band, that add up to `words` and cost least; costs[band][width].

    Exact, by dynamic programming over bands and words. Where several cost the same, later bands are the narrower ones.
    """
    best: list[tuple[float, list[int]]] = [(0.0, []), *((float("inf"), []) for _ in range(words))]  # by words
    for of_band in costs:
        options = [
            [
                (best[total - width][0] + cost, [*best[total - width][1], width])
                for width, cost in enumerate(of_band[: total + 1])
            ]
            for total in range(words + 1)
        ]
        best = [min(each, key=lambda found: found[0]) for each in options]
    return best[words][1]
