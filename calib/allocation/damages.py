"""Damages of candidates, as they are measured (`calib.allocation.damage`) and kept."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Damages(NamedTuple):
    """Nats per token, float64: of each variant at the first filling, key and value [l, variants]; and of each filling
    with the variant of middling size, [l, 2, fillings]. Layers that stay in full precision have the least there is.
    """

    key: NDArray[np.float64]
    value: NDArray[np.float64]
    fillings: NDArray[np.float64]

    def of(self, side: int) -> NDArray[np.float64]:
        """float64 [l, variants, fillings]: every variant of keys (0) or values (1) at every filling."""
        ratio = self.fillings[:, side] / self.fillings[:, side, :1]
        return (self.key, self.value)[side][:, :, None] * ratio[:, None, :]
