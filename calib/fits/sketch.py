"""Fits `sketch`: random matrices, and which channels of a head have their own sketch (QJL, sections 3 and 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from artifacts.matrices import eight_bits
from artifacts.parts import Sketch
from calib.fits import Fit, Side
from calib.statistics import LaneSums


def pending(side: Side) -> Fit | None:
    """The matrices at once; then the mask, if there may be outlier channels."""
    part = side.format.sketch
    if part is None:
        return None
    if "sketch" not in side.tables:
        generator = torch.Generator().manual_seed(crc32(f"{side.name} sketch {side.method.seed}".encode()))
        side.tables["sketch"] = matrix(part.m, side.shape.d, part.rows, generator)
        if part.outliers:
            side.tables["outlier_sketch"] = matrix(part.outlier_m, side.shape.d, part.rows, generator)
    if not part.outliers or "outlier_mask" in side.tables:
        return None
    return MaskFit(part, side.open.get("sketch.outliers"))


def matrix(m: int, d: int, rows: str, generator: torch.Generator) -> Tensor:
    """S, float32 [m, d]: Gaussian rows, or blocks of at most d orthogonal rows of norm sqrt(d), in eight bits.

    Each block is d rows of a uniformly random orthogonal matrix, so every single row is uniform on the sphere.
    """
    if rows == "gaussian":
        return coarse(torch.randn(m, d, dtype=torch.float64, generator=generator))
    blocks = []
    for start in range(0, m, d):
        square = torch.randn(d, d, dtype=torch.float64, generator=generator)
        q, r = torch.linalg.qr(square)
        blocks.append((q * r.diagonal().sign())[: min(d, m - start)] * d**0.5)
    return coarse(torch.cat(blocks))


def coarse(x: Tensor) -> Tensor:
    """`artifacts.matrices.eight_bits` of a tensor on the CPU."""
    return torch.from_numpy(eight_bits(x.numpy()))


class MaskFit(Fit):
    """The channels of each head with the largest root mean square: `outliers` of them or, with a share, all that hold
    at least that share of the head's squared norm (a channel that is like the others holds 1 / d), at most d - 1."""

    title = "outlier channels"

    def __init__(self, part: Sketch, share: float | None = None):
        super().__init__(squares=LaneSums())
        self.part, self.share = part, share

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        self.statistics["squares"].add(pages.double().square().sum((0, 1)), lane)

    def collected(self) -> dict[str, Tensor]:
        return {"squares": self.statistics["squares"].total().cpu()}

    def fit(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """outlier_mask: uint8 [h_kv, d]."""
        squares = collected["squares"]
        order = squares.argsort(dim=1, descending=True, stable=True)
        places = torch.arange(order.shape[1]).expand_as(order)
        mask = torch.zeros_like(order).scatter(1, order, (places < self._counts(squares)).long())
        return {"outlier_mask": mask.to(torch.uint8)}

    def _counts(self, squares: Tensor) -> Tensor:
        """Outlier channels of each head, [h_kv, 1]."""
        if self.share is None:
            return torch.full_like(squares[:, :1], self.part.outliers)
        enough = (squares >= self.share * squares.sum(1, keepdim=True)) & (squares > 0)
        return enough.sum(1, keepdim=True).clamp_max(squares.shape[1] - 1)


def chosen(sides: Sequence[Side]) -> list[Side]:
    """Keys of all layers with as many outlier channels as the head that has most; with none at all, a layer has no
    second sketch either. Heads differ in how many of them their masks use."""
    return [_chosen(side) if "sketch.outliers" in side.open else side for side in sides]


def _chosen(side: Side) -> Side:
    assert side.format.sketch is not None
    outliers = int(side.tables["outlier_mask"].sum(1).max())
    part = replace(side.format.sketch, outliers=outliers, outlier_m=side.format.sketch.outlier_m if outliers else 0)
    return side._replace(format=replace(side.format, sketch=part))
