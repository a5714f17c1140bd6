"""Codebooks that follow from a formula. All lie in [-1, 1], the range of normalized numbers, ascending."""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from artifacts.codes import check_bits


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
