"""Statistics that merge: what passes over the samples collect. Memory does not grow with the number of samples."""

import torch
from torch import Tensor


class Extremes:
    """The k smallest and k largest numbers of each column, exactly, whatever the order in which they come.

    k is known beforehand (a share of all numbers that will come), so the buffers are bounded.
    """

    def __init__(self, k: int):
        self.k = k
        self.low: Tensor | None = None  # [at most k, columns...], ascending
        self.high: Tensor | None = None  # [at most k, columns...], descending

    def observe(self, x: Tensor) -> None:
        """Takes in x, float32 [n, columns...]."""
        self.low = self._extreme(self.low, x, largest=False)
        self.high = self._extreme(self.high, x, largest=True)

    def merge(self, other: "Extremes") -> None:
        """Takes in what `other` has seen. Raises ValueError if it kept another number of extremes."""
        if other.k != self.k:
            raise ValueError(
                f"extremes of k={other.k} do not merge with k={self.k}: collect both with the same settings"
            )
        if other.low is not None and other.high is not None:
            self.low = self._extreme(self.low, other.low, largest=False)
            self.high = self._extreme(self.high, other.high, largest=True)

    def _extreme(self, kept: Tensor | None, x: Tensor, largest: bool) -> Tensor:
        both = x if kept is None else torch.cat([kept, x])
        return both.topk(min(self.k, both.shape[0]), dim=0, largest=largest, sorted=True).values
