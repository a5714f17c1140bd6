"""`lowrank` in torch: subspace iteration (GEAR, algorithm 1)."""

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.parts.lowrank import LowRank

ITERATIONS = 4
SPARE = 4  # columns iterated beyond the rank: with them four iterations come within 2% of the SVD on any spectrum


def encode(
    part: LowRank,
    shape: PageShape,
    residual: Tensor,
    outliers: Tensor | None,
    tables: dict[str, Tensor],
    segment: int = 1,
) -> tuple[dict[str, Tensor], Tensor]:
    """Factors of residual, float32 [p, t, h_kv, d]; `segment` pages form a segment and divide p.

    Returns left [p, h_kv, t, rank], right [p / segment, h_kv, d, rank], segment [p, 1] (counted from 0), and the
    product of the stored float16 factors.
    """
    p, t, h_kv, d = residual.shape
    rank = part.rank if segment > 1 else part.block_rank
    matrices = residual.reshape(-1, segment * t, h_kv, d).transpose(1, 2)  # [s, h_kv, n, d]
    left, right = (_padded(x, part.rank).half() for x in factorize(matrices, rank))
    product = left.float() @ right.float().transpose(2, 3)
    pages = left.unflatten(2, (segment, t)).transpose(1, 2).flatten(0, 1)
    number = torch.arange(p, device=residual.device)[:, None] // segment
    fields = {"left": pages, "right": right, "segment": number.int()}
    return fields, product.transpose(1, 2).reshape(p, t, h_kv, d)


def decode(part: LowRank, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Numbers float32 [p, t, h_kv, d]; `segment` says which entry of `right` belongs to a page."""
    right = fields["right"][fields["segment"][:, 0].long()]
    return (fields["left"].float() @ right.float().transpose(2, 3)).transpose(1, 2)


def factorize(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r approximation of matrices [..., n, d]: left [..., n, r] (orthonormal columns), right [..., d, r].

    Subspace iteration (GEAR, algorithm 1) on a few columns more than the rank, of which the r best directions are kept.
    The start is random but fixed, so that the same numbers give the same factors.
    """
    columns = min(rank + SPARE, *matrices.shape[-2:])
    start = torch.randn(matrices.shape[-1], columns, generator=torch.Generator().manual_seed(0)).to(matrices)
    right = start.expand(*matrices.shape[:-2], -1, -1)
    for _ in range(ITERATIONS):
        left = _orthonormal(matrices @ right)
        right = matrices.transpose(-1, -2) @ left
    # right^T right holds the energy of each direction within the subspace; eigh sorts it upwards.
    best = torch.linalg.eigh(right.transpose(-1, -2) @ right).eigenvectors[..., -rank:].flip(-1)
    return left @ best, right @ best


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt on the r columns of [..., n, r], twice, which is enough; a column that depends on others becomes 0.

    r is small, and a batched QR would run matrix by matrix on a GPU.
    """
    for _ in range(2):
        done: list[Tensor] = []
        for column in columns.unbind(-1):
            for other in done:
                column = column - (other * column).sum(-1, keepdim=True) * other
            norm = column.norm(dim=-1, keepdim=True)
            done.append(torch.where(norm > 0, column / norm, 0.0))
        columns = torch.stack(done, -1)
    return columns


def _padded(x: Tensor, rank: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, rank - x.shape[-1]))
