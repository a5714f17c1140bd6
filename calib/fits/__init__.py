"""Fits, one file per part: from observed pages to the tensors that the part declares for the bundle.

A file offers `pending`, which says what the part still needs, and the fits themselves (see `Fit`). Where a recipe may
leave a number of the format open, the file also offers `chosen`, which puts it in as soon as all is observed.
"""

from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from artifacts import Format
from artifacts.fields import PageShape
from calib.choices import Open
from calib.config import MethodConfig


class Fit(Protocol):
    """Something that observes all pages of one side of one layer, and then knows some of its tensors.

    title      what is being found, for the progress display
    gradients  whether it needs the loss's gradients
    """

    title: str
    gradients: bool

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None:
        """Takes in pages float32 [p, t, h_kv, d]; outliers (bool) and gradient have the same shape or are None."""

    def result(self) -> dict[str, Tensor]:
        """Tensors by the names that the part declares, or that its `chosen` reads."""


class Side(NamedTuple):
    """One side (keys or values) of one layer: what fits have to know before they observe.

    name    for error messages
    tokens  how many will be observed in all
    tables  tensors found so far
    open    numbers of the format that calibration has yet to choose; in the format stand-ins take their place
    """

    name: str
    format: Format
    shape: PageShape
    tokens: int
    method: MethodConfig
    tables: dict[str, Tensor]
    open: Open = MappingProxyType({})
