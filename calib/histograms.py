"""Weighted moments of normalized numbers by bin, on the device where the numbers are; the same bits every time."""

import torch
from torch import Tensor

from calib.signposts import WeightedHistogram

_ROOM = 62  # bits of a sum, without its sign


def moments(numbers: Tensor, weights: Tensor, bins: int, group: Tensor | None = None, groups: int = 1) -> Tensor:
    """Sums of w, w u and w u^2 of the numbers in each bin over [-1, 1], float64 [3, groups * bins].

    u is a number's distance from the middle of its bin, in bins. numbers: float32, any shape; those outside [-1, 1]
    count as the nearer end. weights: float64 of the same shape, finite, not negative; 0 leaves a number out. group:
    int64 of the same shape, to which of `groups` histograms a number belongs; None: there is one.

    The terms are added up as integers, because a GPU adds floats of one bin in any order it likes. A term is rounded to
    2^-39 of the largest weight (with 2^23 numbers, one bit more for half as many), so a bin whose numbers together
    weigh less than that counts as empty.
    """
    largest = weights.max() if weights.numel() else torch.zeros((), dtype=torch.float64, device=weights.device)
    # Not one synchronization: the factor stays on the device. Without any weight all terms are 0, whatever the factor.
    exponent = torch.frexp(largest).exponent.clamp(-900, 900) + max(1, weights.numel()).bit_length() - _ROOM
    unit = torch.where(largest > 0, _power(exponent), 1.0)
    place = (numbers.double().clamp(-1, 1) + 1.0) * (0.5 * bins)
    index = place.floor().clamp_max(bins - 1)
    u = (place - index - 0.5).flatten()
    term = (weights / unit).flatten()
    index = (index.long() if group is None else index.long() + bins * group).flatten()
    sums = torch.zeros(3, groups * bins, dtype=torch.int64, device=numbers.device)
    for row in sums:
        row.index_add_(0, index, term.round().long())
        term = term * u
    return sums.double() * unit


def histogram(sums: Tensor) -> WeightedHistogram:
    """Added-up `moments` as what `fit_signposts` takes."""
    weight, first, second = sums.cpu().numpy()
    bins = weight.size
    width = 2.0 / bins
    middle = (torch.arange(bins, dtype=torch.float64).numpy() + 0.5) * width - 1.0
    return WeightedHistogram(
        bins,
        weight,
        middle * weight + width * first,
        # Rounded terms may leave a tiny negative sum where all weights are tiny.
        (middle * middle * weight + 2 * middle * width * first + width * width * second).clip(min=0.0),
    )


def _power(exponent: Tensor) -> Tensor:
    """2^exponent exactly, float64, for |exponent| < 1022."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
