"""Matrices of random numbers (rotations, sketches), whose numbers have eight bits: matrix instructions take them so.

What they are good for does not depend on their last bits. Entries are off by at most 2^-8 of themselves; a vector that
is rotated and rotated back is off by 0.24% of its length, where codes of 3 bits are off by 18%
(`benchmarks/eight_bits.py`). A number that float16 and bfloat16 both hold is exact in products with either type
(`cuda/pack_matrix.cuh`).
"""

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import FormatError


def eight_bits(matrix: NDArray[np.generic]) -> NDArray[np.float32]:
    """The nearest numbers of eight significant bits, ties to even, below 2^-14 whole multiples of 2^-24: float32 of the
    same shape. Raises FormatError for numbers from 65408 on, which become more than float16 holds."""
    bits = np.ascontiguousarray(matrix, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    with np.errstate(over="ignore"):
        found = rounded.view(np.float32).astype(np.float16).astype(np.float32)
    if not np.isfinite(found).all():
        raise FormatError(
            f"a matrix holds {np.abs(matrix).max():.6g}, beyond float16 in eight bits: below 65408 is allowed"
        )
    return found.reshape(matrix.shape)
