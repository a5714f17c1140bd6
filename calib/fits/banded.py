"""Fits `banded`: ranges of channels, then what every width would cost every band, and the widths that cost least."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
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

WIDEST = 4  # bits: of all bands there are
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

    def common(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """values: float64 [h_kv, bands, 5, 16], the signposts of every band at widths of 0 to 4 bits, the last one
        again behind them; costs: float64 [h_kv, bands, 5].

        Raises SignpostError where no number has any weight.
        """
        sums = collected["weighted"]
        if not sums[0].any():
            raise SignpostError(
                f"{self.name}: no number has any weight for the bands, because all gradients are zero or all numbers "
                "are equal: check that the model uses this layer, or set method.weights=none"
            )
        _, h_kv, bands, _ = sums.shape
        values, costs = np.zeros((h_kv, bands, WIDEST + 1, 1 << WIDEST)), np.zeros((h_kv, bands, WIDEST + 1))
        for head, band in np.ndindex(h_kv, bands):
            counted = histogram(sums[:, head, band])
            for width in range(WIDEST + 1) if (counted.weight > 0).any() else ():  # else it is 0 and costs nothing
                found = fit_signposts(counted, 1 << width)
                values[head, band, width] = np.pad(found.values, (0, (1 << WIDEST) - found.values.size), "edge")
                costs[head, band, width] = found.cost
        return {"values": torch.from_numpy(values), "costs": torch.from_numpy(costs)}

    def fit(self, common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """widths: uint8 [h_kv, bands]; signposts: float32 [h_kv, bands, 2**most]. See `artifacts.parts.Banded`."""
        values, costs = common["values"], common["costs"][..., : self.part.most + 1]
        words = round(self.part.bits * costs.shape[1])
        widths = torch.tensor([cheapest(of_head, words) for of_head in costs.tolist()])
        head, band = (torch.arange(n) for n in widths.shape)
        chosen = values[head[:, None], band, widths, : 1 << self.part.most]
        return {"widths": widths.to(torch.uint8), "signposts": chosen.float()}


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
