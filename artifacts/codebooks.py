"""Codebooks that follow from a formula. All lie in [-1, 1], the range of normalized numbers, ascending."""

from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from artifacts.codes import check_bits
from artifacts.errors import FormatError


def uniform(bits: int) -> NDArray[np.float32]:
    """2**bits equally spaced values from -1 to 1, float32: the integer codes of asymmetric quantization."""
    check_bits(bits)
    return np.linspace(-1.0, 1.0, 1 << bits, dtype=np.float64).astype(np.float32)


def normal_float(bits: int) -> NDArray[np.float32]:
    """NormalFloat (QLoRA, arXiv 2305.14314, appendix E): quantiles of N(0, 1) scaled to [-1, 1], zero exactly a value.

    2**(bits-1) - 1 values below zero, zero, and 2**(bits-1) above; the outermost probability is the mean of the two
    sides' half steps, as in QLoRA's 4-bit table. 1 bit: -1 and 1, without zero. float32 [2**bits].
    """
    check_bits(bits)
    if bits == 1:
        return np.array([-1.0, 1.0], np.float32)
    above = 1 << (bits - 1)
    tail = 0.5 * (1 / (4 * above) + 1 / (4 * above - 2))
    quantile = NormalDist().inv_cdf
    low = [quantile(float(p)) for p in np.linspace(tail, 0.5, above)[:-1]]
    high = [-quantile(float(p)) for p in np.linspace(tail, 0.5, above + 1)[:-1]]
    values = np.array(sorted([*low, 0.0, *high]))
    return (values / np.abs(values).max()).astype(np.float32)


@cache
def _lloyd_max(bits: int, d: int) -> tuple[float, ...]:
    """Lloyd-Max by fixed-point iteration on a fine grid of the coordinate's law, density (1 - u^2)^((d-3)/2)."""
    # The law has standard deviation 1/sqrt(d); beyond eight of them nothing is left of it.
    reach = min(1.0, 8 / np.sqrt(d))
    grid = np.linspace(-reach, reach, 1 << 16)
    weight = np.maximum(1 - grid**2, 0) ** ((d - 3) / 2)
    total = np.concatenate([[0.0], np.cumsum(weight)])
    first = np.concatenate([[0.0], np.cumsum(weight * grid)])
    values = np.array([NormalDist().inv_cdf((i + 0.5) / (1 << bits)) for i in range(1 << bits)]) / np.sqrt(d)
    for _ in range(20_000):
        cuts = np.concatenate([[0], np.searchsorted(grid, 0.5 * (values[:-1] + values[1:])), [grid.size]])
        mass = np.diff(total[cuts])
        moved = np.where(mass > 0, np.diff(first[cuts]) / np.where(mass > 0, mass, 1), values)
        if np.abs(moved - values).max() < 1e-9:
            break
        values = moved
    return tuple(0.5 * (values - values[::-1]))  # the law is symmetric, so are its optima; rounding is not


def lloyd_max(bits: int, d: int) -> NDArray[np.float32]:
    """The 2**bits values that lose least on one coordinate of a uniformly random unit vector in d dimensions.

    Lloyd-Max quantizer of the law with density proportional to (1 - u^2)^((d-3)/2) (TurboQuant, arXiv 2504.19874,
    lemma 1). float32, ascending. Raises FormatError for d < 4 and widths without a layout.
    """
    check_bits(bits)
    if d < 4:
        raise FormatError(f"a Lloyd-Max codebook needs vectors of at least 4 dimensions, not {d}")
    return np.array(_lloyd_max(bits, d)).astype(np.float32)
