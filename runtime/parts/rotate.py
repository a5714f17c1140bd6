"""`rotate` in torch."""

from torch import Tensor


def forward(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Row vectors x [..., d] times P, which calibration makes on the CPU, wherever the model is."""
    return x @ tables["rotation"].to(x.device)


def forward_gradient(gradient: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Gradients with respect to x as gradients with respect to x P: P is orthogonal, so they turn alike."""
    return forward(gradient, tables)


def inverse(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Row vectors x [..., d] times P^T."""
    return x @ tables["rotation"].T
