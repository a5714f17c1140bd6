"""Ranks of `lowrank` by layer, where a recipe leaves them open (`rank: {mean: 4}`); the factors are found online.

The r-th singular value of what the parts before leave, squared, is what a rank of r saves over one of r - 1. These
savings fall with r, so taking the largest ones of all layers until the budget is spent is the optimum. A layer has one
rank for all its heads (pages of heads have one size), so a layer's saving is the sum over its heads. GEAR leaves the
question open (section 6.1); where the budget goes is decided by `method.weights`: with gradients, a head's savings
count times the mean squared gradient of its numbers, which is what an error there costs the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from artifacts import LowRank
from artifacts.geometry import SEGMENT_PAGES
from calib.fits import Fit, Side
from calib.statistics import LaneSums
from runtime.parts import MODULES

SPECTRA = {"lowrank.rank": "spectrum", "lowrank.block_rank": "block_spectrum"}  # open number: table


def pending(side: Side) -> Fit | None:
    """Spectra, if a rank is open. They come after the tables of the parts before."""
    if side.format.lowrank and side.open.keys() & SPECTRA.keys() and "spectrum" not in side.tables:
        return SpectrumFit(side)
    return None


class SpectrumFit(Fit):
    """Squared singular values of what the parts before leave, per head, added up over segments: of prompts (up to 64
    pages of a sample together, as a prompt is packed) and of single pages. Sums, so parts of the samples merge."""

    title = "spectra"

    def __init__(self, side: Side):
        super().__init__(spectrum=LaneSums(), block_spectrum=LaneSums())
        self.side = side
        self.gradients = side.method.weights != "none"
        if self.gradients:
            self.statistics["gradient"] = LaneSums()

    def sees(self) -> dict[str, Any]:
        parts = {name: asdict(part) for name, part in self.side.format.parts.items() if name != "lowrank"}
        return {"parts": parts, "gradients": self.gradients}

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        left = self._left(pages, outliers)
        for segment in left.split(SEGMENT_PAGES):
            self._add("spectrum", segment.flatten(0, 1).transpose(0, 1), lane)
        self._add("block_spectrum", left.transpose(1, 2), lane)
        if gradient is not None and self.gradients:
            self.statistics["gradient"].add(gradient.double().square().sum((0, 1, 3)), lane)

    def collected(self) -> dict[str, Tensor]:
        return {name: sums.total().cpu() for name, sums in self.statistics.items()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """spectrum, block_spectrum: float64 [d], descending, summed over heads."""
        weight = collected["gradient"][:, None] if self.gradients else 1.0
        return {name: (collected[name] * weight).sum(0) for name in SPECTRA.values()}

    def _left(self, pages: Tensor, outliers: Tensor | None) -> Tensor:
        """Pages [p, t, h_kv, d] less the parts that come before the factors."""
        tables = {name: table.to(pages.device) for name, table in self.side.tables.items()}
        left = pages
        for name, part in self.side.format.parts.items():
            if name == "lowrank":
                break
            left = left - MODULES[name].encode(part, self.side.shape, left, outliers, tables)[1]
        return left

    def _add(self, name: str, matrices: Tensor, lane: int) -> None:
        """Adds squared singular values of matrices [..., h_kv, n, d] to the sums, [h_kv, d]."""
        found = squares(matrices)
        self.statistics[name].add(found.view(-1, *found.shape[-2:]).sum(0), lane)


def squares(matrices: Tensor) -> Tensor:
    """Squared singular values of matrices [..., n, d], float64 [..., d], descending, zeros behind the n-th.

    From the smaller Gram matrix: off by a few 2^-53 of the largest, which is nothing where it is large enough to count.
    """
    x = matrices.double()
    n, d = x.shape[-2:]
    gram = x @ x.transpose(-1, -2) if n < d else x.transpose(-1, -2) @ x
    values = torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)
    return torch.nn.functional.pad(values, (0, d - values.shape[-1]))


def chosen(sides: Sequence[Side]) -> list[Side]:
    """Keys (or values) of all layers with their ranks. A layer that gets none has no factors at all.

    Where there are factors, `block_rank` is at least 1 and at most `rank`, a fixed one included.
    """
    ranks = _numbers(sides, "rank", [min(side.shape.t, side.shape.d) for side in sides])
    blocks = _numbers(sides, "block_rank", ranks)
    parts = [LowRank(rank, max(1, block)) if rank else None for rank, block in zip(ranks, blocks, strict=True)]
    return [side._replace(format=replace(side.format, lowrank=part)) for side, part in zip(sides, parts, strict=True)]


def _numbers(sides: Sequence[Side], field: str, most: list[int]) -> list[int]:
    """`rank` or `block_rank` of every side, at most `most`: as the format says, or chosen; 0 without the part."""
    parts = [side.format.lowrank for side in sides]
    found = [min(getattr(part, field), limit) if part else 0 for part, limit in zip(parts, most, strict=True)]
    name = f"lowrank.{field}"
    layers = [layer for layer, side in enumerate(sides) if parts[layer] and name in side.open]
    if layers:
        gains = torch.stack([sides[layer].tables[SPECTRA[name]] for layer in layers])
        for row, layer in zip(gains, layers, strict=True):
            row[most[layer] :] = 0
        budget = round(sum(sides[layer].open[name] for layer in layers))
        for layer, number in zip(layers, allocate(gains, budget), strict=True):
            found[layer] = number
    return found


def allocate(gains: Tensor, budget: int) -> list[int]:
    """How many of each row's gains [n, k], which fall along the row, make the largest sum with `budget` in all.

    Gains of 0 are not worth anything: then fewer are taken.
    """
    best = gains.flatten().topk(min(budget, int((gains > 0).sum()))).indices
    return torch.bincount(best // gains.shape[1], minlength=gains.shape[0]).tolist()
