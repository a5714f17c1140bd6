"""Fits, one file per part: from observed pages to the tensors that the part declares for the bundle.

A file offers `pending`, which says what the part still needs, and the fits themselves (see `Fit`). Where a recipe may
leave a number of the format open, the file also offers `chosen`, which puts it in as soon as all is observed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from artifacts import Format
from artifacts.fields import PageShape
from calib.choices import Open
from calib.config import MethodConfig
from calib.statistics import Statistic


class Fit:
    """Something that observes all pages of one side of one layer, and then knows some of its tensors.

    Observing is apart from fitting: several recipes may fit from what was collected once.

    title       what is being found, for the progress display
    gradients   whether it needs the loss's gradients
    statistics  what it has seen, by name
    """

    title: ClassVar[str]
    gradients: bool = False

    def __init__(self, **statistics: Any):
        self.statistics: dict[str, Any] = statistics

    def sees(self) -> dict[str, Any]:
        """Settings that its statistics depend on, besides the pages, outliers and gradients: plain data."""
        return {}

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None, lane: int = 0) -> None:
        """Takes in pages float32 [p, t, h_kv, d]; outliers (bool) and gradient have the same shape or are None.

        lane: to which of the ordered sums the pages belong, see `calib.statistics.LaneSums`.
        """
        raise NotImplementedError

    def collected(self) -> dict[str, Tensor]:
        """What `common` reads, of everything that was observed; small, and the same on any number of ranks."""
        raise NotImplementedError

    def common(self, collected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What `fit` reads, from what was collected: the part of the work that is the same for all fits that saw the
        same, so that one of them does it for all."""
        return collected

    def fit(self, common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names that the part declares, or that its `chosen` reads."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """What `fit` finds in what was observed."""
        return self.fit(self.common(self.collected()))

    def tensors(self) -> dict[str, Tensor]:
        """State of all statistics: `<statistic>.<tensor>`."""
        found: dict[str, Statistic] = self.statistics
        return {f"{name}.{t}": tensor for name, s in found.items() for t, tensor in s.tensors().items()}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        """Merges with the state of another fit of the same settings."""
        for name, statistic in self.statistics.items():
            prefix = f"{name}."
            statistic.absorb({t.removeprefix(prefix): x for t, x in tensors.items() if t.startswith(prefix)})


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
