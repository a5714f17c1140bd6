"""Oracles of outlier selection: plain loops over one page `[t, h_kv, d]` in float64."""

from math import ceil

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def online(x: Array, fraction: float, axis: str) -> Mask:
    """Of each vector's n numbers the ceil(fraction/2 * n) smallest and as many largest.

    token: a vector is a token's numbers of all heads (KVQuant's values); channel: a channel's tokens in the page.
    """
    numbers = x.reshape(x.shape[0], -1)
    vectors = numbers if axis == "token" else numbers.T
    per_end = ceil(fraction / 2 * vectors.shape[1])
    mask = np.zeros(vectors.shape, bool)
    for vector, row in zip(vectors, mask, strict=True):
        order = sorted(range(vector.size), key=lambda i: vector[i])
        row[order[:per_end] + order[-per_end:]] = True
    return (mask if axis == "token" else mask.T).reshape(x.shape)


def outside(x: Array, lower: Array, upper: Array, slots: int) -> Mask:
    """Numbers strictly outside [lower, upper] (which broadcast over the page); with more than `slots` of them, those
    that lie outside by the largest multiple of half the range's width."""
    mask = (x < lower) | (x > upper)
    if mask.sum() <= slots:
        return mask
    excess = np.maximum(lower - x, x - upper) / ((upper - lower) / 2)
    ranked = sorted(zip(*np.nonzero(mask), strict=True), key=lambda at: -excess[at])
    kept = np.zeros_like(mask)
    for at in ranked[:slots]:
        kept[at] = True
    return kept


def corrections(x: Array, block: NDArray[np.int64], d: int) -> NDArray[np.float16]:
    """Of the finite float16 numbers of the same sign whose lowest bits are an outlier's block, the one that is fewest
    places from x rounded to float16; of two that are as near the larger. As many bits as number the d / 16 blocks."""
    step = 1
    while step < d // 16:
        step *= 2
    found = []
    for number, ending in zip(np.clip(x, -65504, 65504).astype(np.float16), block, strict=True):
        options = np.arange(ending, 0x7C00, step)
        distance = np.abs(options - int(np.abs(number).view(np.uint16)))
        nearest = options[distance == distance.min()].max()
        found.append(np.copysign(np.uint16(nearest).view(np.float16), number))
    return np.array(found, np.float16)
