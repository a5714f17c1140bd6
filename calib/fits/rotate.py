"""Makes the matrix of `rotate`: random, from the recipe's seed, or learned from second moments.

A learned matrix is the Karhunen-Loeve transform in the metric of the loss. With C the covariance of a head's vectors x
and F the second moment of the loss's gradients g, an error e of x costs e F e^T / 2, so plain squared error is right
for x F^(1/2), and the eigenvectors V of F^(1/2) C F^(1/2) split that into uncorrelated numbers: P = F^(1/2) V. Their
variances fall steeply, which is what `banded` needs. F gets a hundredth of its mean diagonal, so that P is invertible,
and each column of P, whose length means nothing to scales per channel, is rounded to eight bits.
"""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from artifacts.matrices import eight_bits
from calib.fits import Fit, Side
from calib.statistics import LaneSums

FLOOR = 0.01  # of F's mean diagonal, added to its diagonal


def pending(side: Side) -> Fit | None:
    """The second moments, if the matrix is to be learned; a random one comes into the tables at once."""
    part = side.format.rotate
    if part is None or "rotation" in side.tables:
        return None
    if part.kind == "learned":
        return MomentFit(side.method.weights)
    generator = torch.Generator().manual_seed(crc32(f"{side.name} {side.method.seed}".encode()))
    make = haar if part.kind == "haar" else hadamard
    side.tables["rotation"] = torch.from_numpy(eight_bits(make(side.shape.d, generator).numpy()))
    return None


def haar(d: int, generator: torch.Generator) -> Tensor:
    """A uniformly random orthogonal matrix, float64 [d, d]: Q of a Gaussian's QR with the signs of R's diagonal made
    positive, without which QR would favour some matrices (Mezzadri 2007)."""
    q, r = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def hadamard(d: int, generator: torch.Generator) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(d), its rows' signs random, float64 [d, d]; d is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < d:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = 2.0 * torch.randint(0, 2, (d, 1), generator=generator) - 1
    return signs * matrix / d**0.5


class MomentFit(Fit):
    """Mean and second moments of every head's vectors, and those of their gradients unless weights are none (F = 1).

    Memory: two float64 matrices d x d for every head and lane.
    """

    title = "second moments"

    def __init__(self, weights: str):
        super().__init__(count=LaneSums(), total=LaneSums(), second=LaneSums())
        self.gradients = weights != "none"
        if self.gradients:
            self.statistics["gradient"] = LaneSums()

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        x = pages.flatten(0, 1).double()
        self.statistics["count"].add(torch.tensor(x.shape[0], dtype=torch.float64, device=x.device), lane)
        self.statistics["total"].add(x.sum(0), lane)
        self.statistics["second"].add(torch.einsum("nhc,nhd->hcd", x, x), lane)
        if gradient is not None and self.gradients:
            g = gradient.flatten(0, 1).double()
            self.statistics["gradient"].add(torch.einsum("nhc,nhd->hcd", g, g), lane)

    def collected(self) -> dict[str, Tensor]:
        return {name: sums.total().cpu() for name, sums in self.statistics.items()}

    def common(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrix: nothing that recipes differ in has to do with it, and its eigenvectors take long."""
        mean = collected["total"] / collected["count"]
        covariance = collected["second"] / collected["count"] - mean[:, :, None] * mean[:, None, :]
        fisher = collected.get("gradient", torch.eye(mean.shape[1], dtype=torch.float64).expand_as(covariance))
        return {"rotation": learned(covariance, fisher)}

    def fit(self, common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """rotation: int8 [h_kv, d, d]."""
        return dict(common)


def learned(covariance: Tensor, fisher: Tensor) -> Tensor:
    """P in eight bits, int8 [h_kv, d, d], columns by falling variance; covariance and fisher float64 [h_kv, d, d]."""
    d = covariance.shape[-1]
    level = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, level, 1.0)[:, None, None]  # a head that the loss does not see: its own axes
    eye = torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(fisher / level + FLOOR * eye)
    root = (vectors * values.clamp_min(FLOOR / 2).sqrt()[:, None, :]) @ vectors.mT
    basis = torch.linalg.eigh(root @ covariance @ root).eigenvectors.flip(-1)
    matrix = root @ basis
    return (matrix / matrix.abs().amax(-2, keepdim=True) * 127).round().to(torch.int8)
