"""Out of GPU memory: which setting to lower, and to what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from artifacts.errors import SignpostError


class MemoryExhaustedError(SignpostError):
    """The GPU has no room for what was asked for."""


@contextmanager
def within_memory(what: str, way_out: str) -> Iterator[None]:
    """Raises MemoryExhaustedError in the place of torch's error. what: was being done; way_out: what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryExhaustedError(f"out of GPU memory {what}: {way_out}") from error
