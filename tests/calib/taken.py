"""What a tap shows of one sample."""

from torch import Tensor

from calib.tap import Activations, Tap


def taken(tap: Tap, ids: Tensor, gradients: bool) -> list[Activations]:
    """Of all layers, in the order in which they come."""
    found: list[Activations] = []
    tap.run(ids, gradients, found.append)
    return found
