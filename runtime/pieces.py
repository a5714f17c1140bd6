"""Views as the kernels take them: vectors of neighbouring numbers that begin at multiples of 16 bytes."""

import functools

from torch import Tensor

PIECE = 16  # bytes


def strides(x: Tensor) -> tuple[int, ...] | None:
    """Pieces from entry to entry of every dimension of x but the last, 0 where there is one entry.

    None where numbers of the last dimension are not neighbours, or vectors do not begin at multiples of 16 bytes.
    """
    return None if x.data_ptr() % PIECE else _strides(x.shape, x.stride(), x.itemsize)


@functools.lru_cache(maxsize=1024)  # the same ones in every layer and step
def _strides(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    # PyTorch gives dimensions of one entry any stride.
    apart = [by * itemsize if size > 1 else 0 for by, size in zip(stride[:-1], shape[:-1], strict=True)]
    if (stride[-1] != 1 and shape[-1] > 1) or any(by % PIECE for by in apart):
        return None
    return tuple(by // PIECE for by in apart)
