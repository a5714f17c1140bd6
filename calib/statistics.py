"""Statistics that merge: what passes over the samples collect. Memory does not depend on the number of samples.

What a statistic says follows from the numbers it has seen, bit for bit, and neither from their order nor from how they
were spread over ranks: extremes and counts are exact, and sums of floats are kept apart in `LANES` lanes that are added
up in order at the end. A lane's samples follow each other, and all of them are seen by one rank.
"""

from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

LANES = 16  # so many ranks can share a pass


class Statistic(Protocol):
    """Sums up numbers. `merge` is associative, and a statistic that has seen nothing is neutral."""

    def tensors(self) -> dict[str, Tensor]:
        """Its whole state, on the device of what it has seen; empty if that was nothing."""

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        """Merges with the state of another statistic of the same settings."""


class Merging:
    """`merge` in terms of states."""

    def merge(self: Statistic, other: Statistic) -> None:
        """Takes in what `other` has seen."""
        self.absorb(other.tensors())


def lane_of(sample: int, samples: int) -> int:
    """The lane in which a sample's sums are added up."""
    return sample * LANES // samples


class Extremes(Merging):
    """The k smallest and k largest numbers of each column, exactly. Memory: 2 k numbers a column."""

    def __init__(self, k: int):
        self.k = k
        self._low: Tensor | None = None  # [columns..., at most k], ascending
        self._high: Tensor | None = None  # [columns..., at most k], descending

    @property
    def low(self) -> Tensor | None:
        """float32 [at most k, columns...], ascending; None if nothing was observed."""
        return None if self._low is None else self._low.movedim(-1, 0)

    @property
    def high(self) -> Tensor | None:
        """float32 [at most k, columns...], descending; None if nothing was observed."""
        return None if self._high is None else self._high.movedim(-1, 0)

    def observe(self, x: Tensor) -> None:
        """Takes in x, float32 [n, columns...]."""
        x = x.movedim(0, -1)
        self._low = self._extreme(self._low, x, largest=False)
        self._high = self._extreme(self._high, x, largest=True)

    def tensors(self) -> dict[str, Tensor]:
        if self._low is None or self._high is None:
            return {}
        return {"low": self._low, "high": self._high}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            self._low = self._extreme(self._low, tensors["low"], largest=False)
            self._high = self._extreme(self._high, tensors["high"], largest=True)

    def merge(self, other: Self) -> None:  # type: ignore[override]
        """Takes in what `other` has seen. Raises ValueError if it kept another number of extremes."""
        if other.k != self.k:
            raise ValueError(
                f"extremes of k={other.k} do not merge with k={self.k}: collect both with the same settings"
            )
        self.absorb(other.tensors())

    def _extreme(self, kept: Tensor | None, x: Tensor, largest: bool) -> Tensor:
        both = x.contiguous() if kept is None else torch.cat([kept.to(x.device), x], -1)
        return both.topk(min(self.k, both.shape[-1]), largest=largest, sorted=True).values


class Bounds(Merging):
    """The smallest and the largest number of each column, exactly."""

    def __init__(self) -> None:
        self.low: Tensor | None = None  # float32 [columns...]
        self.high: Tensor | None = None

    def observe(self, low: Tensor, high: Tensor) -> None:
        """Takes in bounds of some numbers, float32 [columns...]; of no numbers infinity and minus infinity."""
        self.absorb({"low": low, "high": high})

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            low, high = tensors["low"], tensors["high"]
            self.low = low if self.low is None else torch.minimum(self.low.to(low.device), low)
            self.high = high if self.high is None else torch.maximum(self.high.to(high.device), high)


class LaneSums(Merging):
    """Sums of tensors, float64. Memory: `LANES` tensors.

    Lanes that another rank has seen are zero here, so that merging adds nothing to a number: every order gives the same
    bits, and they are the bits that one rank alone finds.
    """

    def __init__(self) -> None:
        self.lanes: Tensor | None = None  # float64 [LANES, ...]

    def add(self, x: Tensor, lane: int) -> None:
        """Adds x, float64, to the sum of a lane."""
        if self.lanes is None:
            self.lanes = torch.zeros(LANES, *x.shape, dtype=torch.float64, device=x.device)
        self.lanes[lane] += x

    def total(self) -> Tensor | None:
        """The sum of all lanes, in order; None if nothing was added."""
        if self.lanes is None:
            return None
        total = self.lanes[0].clone()
        for lane in self.lanes[1:]:
            total += lane
        return total

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.lanes is None else {"lanes": self.lanes}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            lanes = tensors["lanes"]
            self.lanes = lanes.clone() if self.lanes is None else self.lanes.to(lanes.device) + lanes
