"""`rotate` in torch. A learned matrix is of whole numbers, one a head, and not orthogonal: see `prepared`."""

import torch
from torch import Tensor

from artifacts.errors import FormatError


def prepared(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tables with the matrix's inverse as `unrotation`, float32, unless it is orthogonal.

    Inverses are found in float64. Raises FormatError for a matrix that has none.
    """
    matrix = tables["rotation"]
    if matrix.dim() == 2 or "unrotation" in tables:
        return tables
    inverse, info = torch.linalg.inv_ex(matrix.double())
    if info.any() or not torch.isfinite(inverse).all():
        raise FormatError("a head's learned rotation is singular: calibrate again")
    return tables | {"unrotation": inverse.float().contiguous()}


def inverse_matrix(tables: dict[str, Tensor]) -> Tensor:
    """P^-1 of prepared tables, float32 [d, d] or [h_kv, d, d]."""
    return tables["unrotation"] if "unrotation" in tables else tables["rotation"].T


def forward(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Row vectors x [..., h_kv, d] times P, which calibration makes on the CPU, wherever the model is."""
    matrix = tables["rotation"].to(x.device)
    return _times(x, matrix if matrix.is_floating_point() else matrix.to(x.dtype))


def forward_gradient(gradient: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Gradients with respect to x as gradients with respect to x P: times P^-T, which is P if P is orthogonal."""
    if tables["rotation"].dim() == 2:
        return forward(gradient, tables)
    known = tables if "unrotation" in tables else prepared(tables)
    return _times(gradient, inverse_matrix(known).mT.to(gradient.device))


def inverse(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Row vectors x [..., h_kv, d] times P^-1."""
    return _times(x, inverse_matrix(tables))


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., h_kv, d] times one matrix [d, d], or a head's own each [h_kv, d, d]."""
    return x @ matrix if matrix.dim() == 2 else torch.einsum("...hc,hcd->...hd", x, matrix)
