"""Matrices of a bundle in the order in which the kernels' matrix instructions take them (cuda/pack_matrix.cuh)."""

import torch
from torch import Tensor

from artifacts import Rotate
from runtime.jit import KernelError


def of_heads(matrix: Tensor, count: int) -> Tensor:
    """Fragments of a matrix [k, n], or of one each [h_kv, k, n], in `count` bfloat16 pieces. Raises KernelError as
    `whole` where that is one."""
    each = matrix if matrix.dim() == 3 else matrix[None]
    made = [whole(x, torch.bfloat16) if count == 1 else fragments(x, torch.bfloat16, count=count) for x in each]
    return torch.stack(made)


def pieces_of_matrix(part: Rotate | None, dtype: torch.dtype) -> int:
    """bfloat16 pieces of what numbers of `dtype` are multiplied by to bring them to a side rotated so, or back, and of
    its sketches: a number of eight bits is one. Of inverses of learned matrices the kernels take as many as of the
    numbers they meet."""
    if part is None or part.kind != "learned":
        return 1
    return 3 if dtype == torch.float32 else 2


def whole(matrix: Tensor, piece: torch.dtype, order: Tensor | None = None, first_operand: bool = False) -> Tensor:
    """`fragments` of a matrix [k, n] whose numbers are one piece each. Raises KernelError for numbers of more than
    eight bits, which a bundle's matrices do not have."""
    return fragments(_one_piece(matrix, piece), piece, order, first_operand, 1)


def _one_piece(matrix: Tensor, piece: torch.dtype) -> Tensor:
    if not torch.equal(matrix.to(piece).float(), matrix.float()):
        raise KernelError(
            f"a matrix holds numbers that are not {piece}: bundles' have eight bits (artifacts/matrices.py)"
        )
    return matrix.to(piece).contiguous()


def cores(matrix: Tensor, piece: torch.dtype) -> Tensor:
    """A matrix [k, n] as `wgmma` reads its second operand from shared memory, without a swizzle: [n / 8, k / 8, 8, 8]
    numbers of `piece` as int16, a column's eight rows next to each other. Raises KernelError as `whole`."""
    k, n = matrix.shape
    return _one_piece(matrix, piece).view(torch.int16).view(k // 8, 8, n // 8, 8).permute(2, 0, 3, 1).contiguous()


def as_they_stand(k: int) -> Tensor:
    """An order of `fragments`: step s multiplies rows 16 s to 16 s + 15 as the matrix instruction numbers them."""
    return torch.arange(k).view(-1, 2, 4, 2).transpose(1, 2).flatten()  # steps, halves of 8, lanes, 2


def fragments(
    matrix: Tensor,
    piece: torch.dtype,
    order: Tensor | None = None,
    first_operand: bool = False,
    count: int = 3,
) -> Tensor:
    """A matrix [k, n] as kernels read it: int16 [n / 16, k / 16, count, 32 lanes, 8].

    piece: of which dtype its pieces are, that many. order: int64 [k], the row that each place of the steps multiplies;
    by default that which makes 16 bytes of a vector of two-byte numbers two steps of a lane. first_operand: of the
    matrix instruction.
    """
    k, n = matrix.shape
    if order is None:
        step, lane, i = torch.meshgrid(torch.arange(k // 16), torch.arange(4), torch.arange(4), indexing="ij")
        order = (step // 2 * 32 + lane * 8 + step % 2 * 4 + i).flatten()
    rest = matrix.float()[order.to(matrix.device)]
    pieces = []
    for _ in range(count):
        pieces.append(rest.to(piece))
        rest = rest - pieces[-1].float()
    # [pieces, steps, lanes of a row, halves of 8 channels, 2, sixteens, halves of 8 columns, columns]
    found = torch.stack(pieces).view(torch.int16).view(len(pieces), k // 16, 4, 2, 2, n // 16, 2, 8)
    in_turn = (3, 6) if first_operand else (6, 3)
    return found.permute(5, 1, 0, 7, 2, *in_turn, 4).reshape(n // 16, k // 16, len(pieces), 32, 8).contiguous()
