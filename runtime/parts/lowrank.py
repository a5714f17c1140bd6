"""`lowrank` in torch: subspace iteration (GEAR, algorithm 1) on channels' products, as `cuda/pack_factors.cuh`."""

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.parts.lowrank import LowRank

ITERATIONS = 5
SPARE = 4  # columns iterated beyond the rank: with them five iterations come within 2% of the SVD on any spectrum
HALF_MAX = 65504.0


def encode(
    part: LowRank,
    shape: PageShape,
    residual: Tensor,
    outliers: Tensor | None,
    tables: dict[str, Tensor],
    segment: int = 1,
) -> tuple[dict[str, Tensor], Tensor]:
    """Factors of residual, float32 [p, t, h_kv, d], taken as halves; `segment` pages form a segment and divide p.

    Returns left [p, h_kv, t, rank], right [p / segment, h_kv, d, rank], segment [p, 1] (counted from 0), and the
    product of the stored float16 factors.
    """
    p, t, h_kv, d = residual.shape
    rank = part.rank if segment > 1 else part.block_rank
    halves = residual.clamp(-HALF_MAX, HALF_MAX).half().float()
    matrices = halves.reshape(-1, segment * t, h_kv, d).transpose(1, 2)  # [s, h_kv, n, d]
    left, right = (_padded(x.clamp(-HALF_MAX, HALF_MAX), part.rank).half() for x in factorize(matrices, rank))
    product = left.float() @ right.float().transpose(2, 3)
    pages = left.unflatten(2, (segment, t)).transpose(1, 2).flatten(0, 1)
    number = torch.arange(p, device=residual.device)[:, None] // segment
    fields = {"left": pages, "right": right, "segment": number.int()}
    return fields, product.transpose(1, 2).reshape(p, t, h_kv, d)


def decode(part: LowRank, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Numbers float32 [p, t, h_kv, d]; `segment` says which entry of `right` belongs to a page."""
    right = fields["right"][fields["segment"][:, 0].long()]
    return (fields["left"].float() @ right.float().transpose(2, 3)).transpose(1, 2)


def starting(d: int, columns: int) -> Tensor:
    """What iteration starts from, float32 [d, columns]: random but fixed, so that equal numbers give equal factors."""
    return torch.randn(columns, d, generator=torch.Generator().manual_seed(0)).T


def factorize(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r approximation of matrices R [..., n, d]: left [..., n, r] (orthonormal columns), right [..., d, r].

    Subspace iteration (GEAR, algorithm 1) on G = R^T R, with a few columns more than the rank; of their span V the best
    directions are those of the largest eigenvalues s^2 of V^T G V (Rayleigh and Ritz). left = R v / s, right = v s, so
    that their product is R v v^T. Directions in which R has less than the rounding of G shows have zeros in both.
    """
    n, d = matrices.shape[-2:]
    columns = min(rank + SPARE, n, d)
    gram = matrices.transpose(-1, -2) @ matrices
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    gram = torch.where(trace > 0, gram / trace, 0.0)
    span = starting(d, columns).to(matrices).expand(*matrices.shape[:-2], -1, -1)
    for _ in range(ITERATIONS):
        span = _orthonormal(gram @ span)
    span = _orthonormal(span, least=0.5)
    energy, vectors = torch.linalg.eigh(span.transpose(-1, -2) @ (gram @ span))  # upwards
    energy, vectors = energy[..., -rank:].flip(-1)[..., None, :], vectors[..., -rank:].flip(-1)
    there = energy > torch.finfo(energy.dtype).eps * energy[..., :1]
    size = torch.where(there, energy * trace, 1.0).sqrt()
    best = torch.where(there, span @ vectors, 0.0)
    return matrices @ (best / size), best * size


def _orthonormal(columns: Tensor, least: float = 0.0) -> Tensor:
    """Gram-Schmidt on the r columns of [..., n, r]; one that is not longer than `least` behind those before it becomes
    zero.

    Twice makes columns orthonormal that nearly depend on each other: what the first pass leaves of one that does depend
    on them is rounding, which may lie where they do, and the second one leaves less than half of it. r is small, and a
    batched QR would run matrix by matrix on a GPU.
    """
    rest = list(columns.unbind(-1))
    for k, column in enumerate(rest):
        norm = column.norm(dim=-1, keepdim=True)
        rest[k] = column = torch.where(norm > least, column / norm, 0.0)
        rest[k + 1 :] = [other - (column * other).sum(-1, keepdim=True) * column for other in rest[k + 1 :]]
    return torch.stack(rest, -1)


def _padded(x: Tensor, rank: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, rank - x.shape[-1]))
