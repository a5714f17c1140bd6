"""Oracle of rotary embedding: pairs of channels are complex numbers, a position turns them (RoFormer, equation 16)."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rotate(x: Array, positions: Array, inv_freq: Array, layout: str, scaling: float) -> Array:
    """x `[..., n, d]` at positions `[n]` (broadcasting); the first 2 * inv_freq.size channels are turned and scaled.

    half: channel i goes with i + dim/2; interleaved: 2i with 2i + 1. The angle is rounded to float32, as models do.
    """
    out = np.array(x, np.float64)
    half = inv_freq.size
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if layout == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    angles = np.asarray(positions, np.float32)[..., None] * np.asarray(inv_freq, np.float32)
    turned = (out[..., first] + 1j * out[..., second]) * scaling * np.exp(1j * angles.astype(np.float64))
    out[..., first], out[..., second] = turned.real, turned.imag
    return out
