"""Makes the matrix of `rotate`: random, from the recipe's seed; nothing is observed."""

from zlib import crc32

import torch
from torch import Tensor

from calib.fits import Side


def pending(side: Side) -> None:
    """Puts the matrix into the tables at once."""
    if side.format.rotate and "rotation" not in side.tables:
        generator = torch.Generator().manual_seed(crc32(f"{side.name} {side.method.seed}".encode()))
        make = haar if side.format.rotate.kind == "haar" else hadamard
        side.tables["rotation"] = make(side.shape.d, generator).float()


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
