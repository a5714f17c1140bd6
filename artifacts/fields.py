"""Words that parts use to say what they store."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from artifacts.errors import FormatError

SideName = Literal["key", "value"]
MAX_NUMBERS = (1 << 31) - 1  # numbers of a page: positions and counts are 32-bit


@dataclass(frozen=True)
class PageShape:
    """t tokens x h_kv kv heads x d channels: what one page of one layer's keys (or values, as `side` says) covers."""

    t: int
    h_kv: int
    d: int
    side: SideName

    def __post_init__(self) -> None:
        for name in ("t", "h_kv", "d"):
            if getattr(self, name) < 1:
                raise FormatError(f"page shape {self}: {name} must be at least 1")
        if self.numbers > MAX_NUMBERS:
            raise FormatError(f"{self} holds more than {MAX_NUMBERS} numbers: take pages of fewer tokens")

    @property
    def numbers(self) -> int:
        """Numbers in the page, all heads."""
        return self.t * self.h_kv * self.d


@dataclass(frozen=True)
class TensorSpec:
    """dtype (numpy name) and shape of a tensor. coarse: its numbers have eight bits (`artifacts/matrices.py`)."""

    dtype: str
    shape: tuple[int, ...]
    coarse: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class Field:
    """One field of a page. Scope `head`: one in each kv head's page; `layer`: one in the layer's record of the page;
    `segment`: one per kv head in the entry of the segment (pages packed together) that the page belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scope: Literal["head", "layer", "segment"]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return TensorSpec(self.dtype, self.shape).nbytes
