"""Oracles of codebooks: NormalFloat after the authors' script (quantiles of two unequal halves, bisecting the error
function), and signposts as they are decoded."""

from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray


def rounded(signposts: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Signposts on the grid that their bits have, in float32, one after the other; ties go to the even number."""
    if bits == 8:
        return signposts
    steps = np.float32({1: 127, 2: 127, 3: 127, 4: 63}[bits])
    return np.array([np.float32(round(float(x * steps))) / steps for x in signposts.astype(np.float32)])


def _quantile(p: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + erf(middle / sqrt(2))) / 2 < p else (low, middle)
    return low


def normal_float(bits: int) -> list[float]:
    """2**bits values, ascending, float64; bits at least 2."""
    half = 2 ** (bits - 1)
    # The script has 0.9677083 for 4 bits: one minus the mean of 1/32 and 1/30.
    offset = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2
    positive = [_quantile(offset + (0.5 - offset) * i / half) for i in range(half)]
    negative = [-_quantile(offset + (0.5 - offset) * i / (half - 1)) for i in range(half - 1)]
    return [value / positive[0] for value in sorted([*negative, 0.0, *positive])]


def evenly_spaced(spacing: NDArray[np.int16], bits: int) -> NDArray[np.float32]:
    """The values of 2**bits codes whose lowest one and distance the bundle has in units of 1 / 2047."""
    start, step = (int(x) for x in spacing)
    return np.array([np.float32(start + step * code) / np.float32(2047) for code in range(1 << bits)])
