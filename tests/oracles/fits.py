"""Oracles of what calibration fits: one sort of all numbers, and KVQuant's weights number by number."""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from tests.oracles.dense import middle_and_half, vectors

Array = NDArray[np.float64]


def thresholds(numbers: Array, fraction: float) -> tuple[Array, Array]:
    """Of each column of `[n, ...]` the first number inside at each end: ceil(fraction/2 * n) stand outside."""
    ordered = np.sort(numbers, axis=0)
    outside = ceil(fraction / 2 * len(numbers))
    return ordered[outside], ordered[-1 - outside]


def weighted_numbers(
    pages: Array, gradients: Array, outliers: NDArray[np.bool_], scale: Array | None, zero: Array | None, kind: str
) -> tuple[Array, Array]:
    """Numbers in [-1, 1] and their weights in the k-means of a page format whose vectors are tokens, or whole channels.

    pages, gradients, outliers `[p, t, h_kv, d]`; scale and zero `[h_kv, d]` of channels, or None: then each token is
    normalized by itself. kind: none (weight 1), fisher (squared gradient), fisher_scaled (times the squared scale).
    Outliers and vectors without range are left out.
    """
    numbers, weights = [], []
    for page, gradient, outside in zip(pages, gradients, outliers, strict=True):
        if scale is None or zero is None:
            middle, half = middle_and_half(page, vectors(*page.shape, axis="token", group=0), outside)
        else:
            middle, half = np.broadcast_to(zero, page.shape), np.broadcast_to(scale, page.shape)
        kept = ~outside & (half > 0)
        numbers.append(np.clip((page[kept] - middle[kept]) / half[kept], -1, 1))
        weight = {"none": 1.0, "fisher": gradient**2, "fisher_scaled": gradient**2 * half**2}[kind]
        weights.append(np.broadcast_to(weight, page.shape)[kept])
    return np.concatenate(numbers), np.concatenate(weights)
