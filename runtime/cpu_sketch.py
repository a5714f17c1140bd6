"""Scores from sketches on the CPU: sums of the projected query over sign bits, eight bits at a time.

The projected query q S^T, [m], is turned once into a table of the sums of every byte of signs, [m / 8, 256]; a key then
costs m / 8 look-ups.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from artifacts.parts import Sketch
from runtime.codec import PagePool
from runtime.parts.sketch import kept_channels, unbiasing

_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
# Signs (+1, -1) of the bits of every byte, the lowest bit first: [256, 8].
_SIGNS = torch.from_numpy(2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") - 1)


@dataclass(frozen=True)
class SketchReader:
    """Scores of one pool's sketches; pages of t tokens."""

    pool: PagePool
    part: Sketch
    tables: dict[str, Tensor]

    def add_scores(self, q: Tensor, ids: Tensor, out: Tensor) -> None:
        """Adds estimates of <q, k> to out, float32 [h_kv, rows, p * t]; q float32 [h_kv, rows, d], ids int32 [p]."""
        if self.part.outliers:
            kept = kept_channels(self.tables)
            self._add("", q * kept, ids, out)
            self._add("outlier_", q * (1 - kept), ids, out)
        else:
            self._add("", q, ids, out)

    def _add(self, prefix: str, q: Tensor, ids: Tensor, out: Tensor) -> None:
        s, fields, t = self.tables[f"{prefix}sketch"], self.pool.geometry.fields, self.pool.geometry.shape.t
        projected = (q @ s.T * (unbiasing(self.part, s.shape[1]) / s.shape[0])).unflatten(-1, (-1, 8))
        sums = (projected @ _SIGNS.float().T).contiguous()  # [h_kv, rows, m / 8, 256]
        signs, norm = fields[f"{prefix}signs"].offset, fields[f"{prefix}norm"].offset
        _add_estimates(self.pool.heads.numpy(), signs, norm, _HALF, ids.numpy(), sums.numpy(), t, out.numpy())


@njit(cache=True, parallel=True)
def _add_estimates(heads: Any, signs: int, norm: int, half: Any, ids: Any, sums: Any, t: int, out: Any) -> None:
    """heads uint8 [pages, h_kv, bytes]; signs, norm: offsets; sums float32 [h_kv, rows, m / 8, 256]."""
    h_kv, rows, size, _ = sums.shape
    for work in prange(h_kv * ids.size):
        head, p = work // ids.size, work % ids.size
        page = heads[ids[p], head]
        norms = page[norm : norm + 2 * t].view(np.uint16)
        for j in range(t):
            bits = page[signs + j * size : signs + (j + 1) * size]
            for r in range(rows):
                total = np.float32(0)
                for b in range(size):
                    total += sums[head, r, b, bits[b]]
                out[head, r, p * t + j] += total * half[norms[j]]
