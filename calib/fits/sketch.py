"""Fits `sketch`: random matrices, and which channels of a head have their own sketch (QJL, sections 3 and 4)."""

from zlib import crc32

import torch
from torch import Tensor

from artifacts.parts import Sketch
from calib.fits import Fit, Side


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
    return MaskFit(part) if part.outliers and "outlier_mask" not in side.tables else None


def matrix(m: int, d: int, rows: str, generator: torch.Generator) -> Tensor:
    """S, float32 [m, d]: Gaussian rows, or blocks of at most d orthogonal rows of norm sqrt(d).

    Each block is d rows of a uniformly random orthogonal matrix, so every single row is uniform on the sphere.
    """
    if rows == "gaussian":
        return torch.randn(m, d, dtype=torch.float64, generator=generator).float()
    blocks = []
    for start in range(0, m, d):
        square = torch.randn(d, d, dtype=torch.float64, generator=generator)
        q, r = torch.linalg.qr(square)
        blocks.append((q * r.diagonal().sign())[: min(d, m - start)] * d**0.5)
    return torch.cat(blocks).float()


class MaskFit:
    """The `outliers` channels of each head with the largest root mean square."""

    title = "outlier channels"
    gradients = False

    def __init__(self, part: Sketch):
        self.part, self.total = part, torch.zeros((), dtype=torch.float64)

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        self.total = self.total.to(pages.device) + pages.double().square().sum((0, 1))

    def result(self) -> dict[str, Tensor]:
        """outlier_mask: uint8 [h_kv, d]."""
        mask = torch.zeros(self.total.shape, dtype=torch.uint8, device=self.total.device)
        return {"outlier_mask": mask.scatter_(1, self.total.topk(self.part.outliers, 1).indices, 1)}
