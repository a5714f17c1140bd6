"""Matrices of a bundle in the order in which the kernels' matrix instructions take them (cuda/pack_matrix.cuh)."""

from math import ceil, log2

import torch
from torch import Tensor


def of_heads(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Fragments of a matrix [k, n], or of one each [h_kv, k, n], that numbers of `dtype` meet."""
    each = matrix if matrix.dim() == 3 else matrix[None]
    return torch.stack([fragments(x, torch.bfloat16, count=pieces_of(dtype)) for x in each])


def pieces_of(dtype: torch.dtype) -> int:
    """bfloat16 pieces that numbers of `dtype`, and matrices that they meet, are taken in."""
    return 3 if dtype == torch.float32 else 2


def fragments(
    matrix: Tensor,
    piece: torch.dtype,
    scale: float | None = None,
    order: Tensor | None = None,
    first_operand: bool = False,
    count: int | None = None,
) -> Tensor:
    """A matrix [k, n] as `cuda/pack_matrix.cuh` reads it: int16 [n / 16, k / 16, pieces, 32 lanes, 8].

    piece: of which dtype its pieces are, float16 (two, times `scale`, by default a power of two near 512 over the
    largest number) or bfloat16 (three). order: int64 [k], the row that each place of the steps multiplies; by default
    that which makes 16 bytes of a vector two steps of a lane. first_operand: of the matrix instruction. count: of
    pieces, if fewer are enough.
    """
    k, n = matrix.shape
    if order is None:
        step, lane, i = torch.meshgrid(torch.arange(k // 16), torch.arange(4), torch.arange(4), indexing="ij")
        order = (step // 2 * 32 + lane * 8 + step % 2 * 4 + i).flatten()
    rest = matrix.float()[order.to(matrix.device)]
    if piece == torch.float16:
        rest = rest * (scale if scale is not None else 2.0 ** (9 - ceil(log2(max(float(rest.abs().max()), 2**-100)))))
    pieces = []
    for _ in range(count or (2 if piece == torch.float16 else 3)):
        pieces.append(rest.to(piece))
        rest = rest - pieces[-1].float()
    # [pieces, steps, lanes of a row, halves of 8 channels, 2, sixteens, halves of 8 columns, columns]
    found = torch.stack(pieces).view(torch.int16).view(len(pieces), k // 16, 4, 2, 2, n // 16, 2, 8)
    in_turn = (3, 6) if first_operand else (6, 3)
    return found.permute(5, 1, 0, 7, 2, *in_turn, 4).reshape(n // 16, k // 16, len(pieces), 32, 8).contiguous()
