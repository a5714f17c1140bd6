"""Attention over packed pages on the CPU: numba kernels that read the pages' bytes.

Two passes, because keys and values may be packed up to different tokens: scores of all paged keys, then, after the softmax,
the weighted sum of all paged values. A page of one head is decoded once and serves all query rows.
Numbers are float32; a kernel's tile is one head's page, [t, d].
"""

from dataclasses import dataclass

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from artifacts import PageGeometry
from artifacts.codes import pieces
from artifacts.parts.sparse import BLOCK
from runtime.codec import PagePool
from runtime.parts.dense import codebook

# float16 bits -> float32: numba has no float16 arithmetic on the CPU.
_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_SPLITS = 8  # parts of the value sum that run in parallel; fixed, so that results do not depend on the number of cores


@dataclass(frozen=True)
class PageReader:
    """Typed numpy views of a pool's fields, in the order in which the kernels take them."""

    t: int
    d: int
    dense: tuple[NDArray, ...]
    sparse: tuple[NDArray, ...]

    @classmethod
    def of(cls, pool: PagePool, tables: dict[str, Tensor]) -> "PageReader":
        """Views of `pool`; `tables` are the bundle's tensors of this side."""
        return cls(pool.geometry.shape.t, pool.geometry.shape.d, _dense_views(pool, tables), _sparse_views(pool))

    def scores(self, q: Tensor, pages: Tensor, cos: Tensor, sin: Tensor, pairs: tuple[Tensor, Tensor] | None) -> Tensor:
        """Unscaled scores of every paged key.

        q      float32 [h_kv, rows, d], after RoPE
        pages  int32 [p], page ids of one sequence in token order
        cos, sin  float32 [p * t, dim / 2] at the tokens' positions, and pairs int64 ([dim / 2], [dim / 2]) of channels, for
                  keys stored before RoPE; pairs None for keys stored after it
        Returns float32 [h_kv, rows, p * t].
        """
        out = torch.empty(q.shape[0], q.shape[1], pages.numel() * self.t)
        none = np.zeros(0, np.int64)
        first, second = (none, none) if pairs is None else (pairs[0].numpy(), pairs[1].numpy())
        _scores(self.dense, self.sparse, q.contiguous().numpy(), pages.numpy(), cos.numpy(), sin.numpy(), first, second,
                self.t, out.numpy())  # fmt: skip
        return out

    def weighted_sum(self, weights: Tensor, pages: Tensor) -> Tensor:
        """Sum over paged values: weights float32 [h_kv, rows, p * t], pages int32 [p] -> float32 [h_kv, rows, d]."""
        h_kv, rows, _ = weights.shape
        partial = np.zeros((_SPLITS, h_kv, rows, self.d), np.float32)
        _weighted_sum(self.dense, self.sparse, weights.contiguous().numpy(), pages.numpy(), self.t, partial)
        return torch.from_numpy(partial).sum(0)


def _words(view: Tensor) -> NDArray:
    return view.numpy().view(np.uint32)


def _halves(view: Tensor) -> NDArray:
    return view.numpy().view(np.uint16)


def _dense_views(pool: PagePool, tables: dict[str, Tensor]) -> tuple[NDArray, ...]:
    """codes, pieces, codebook, then scale and zero as float16 bits [pages, T, H, C] and as float32 [1, T, H, C]."""
    geometry: PageGeometry = pool.geometry
    part, shape = geometry.format.dense, geometry.shape
    layout = np.array([(p.code, p.word, p.shift, p.width, p.low) for p in pieces(part.bits)], np.int64)
    values = codebook(part, tables, torch.device("cpu")).numpy()
    sizes = part.scale_shape(shape)
    half = [np.zeros((1, 1, 1, 1), np.uint16)] * 2
    full = [np.zeros((1, 1, 1, 1), np.float32)] * 2
    if part.scales == "bundle":
        full = [tables[name].numpy().reshape(1, *sizes) for name in ("scale", "zero")]
    else:
        views = [pool.field(name) for name in ("scale", "zero")]
        half = [_halves(v.unsqueeze(2) if v.dim() == 3 else v.transpose(1, 2)) for v in views]
    online = np.array([part.scales == "online"])
    return (_words(pool.field("codes")), layout, values, *half, *full, online, _HALF)


def _sparse_views(pool: PagePool) -> tuple[NDArray, ...]:
    """start, count, index, correction (float16 bits) and the table that turns them into numbers; empty without the part."""
    if pool.geometry.format.sparse is None:
        return (np.zeros((0, 0), np.uint32), np.zeros((0, 0, 0), np.uint8), np.zeros((0, 0), np.uint8),
                np.zeros((0, 0), np.uint16), _HALF)  # fmt: skip
    index, count = pool.field("index").numpy(), pool.field("count").numpy()
    return (_words(pool.field("start")), count, index, _halves(pool.field("correction")), _HALF)


@njit(cache=True)
def _decode(dense, sparse, page, head, tile):  # type: ignore[no-untyped-def]
    """Fills tile [t, d] with one head's page."""
    codes, layout, values, scale16, zero16, scale32, zero32, online, half = dense
    t, d = tile.shape
    chosen = np.empty(32, np.int64)
    for j in range(t):
        for run in range(d // 32):
            chosen[:] = 0
            for p in range(layout.shape[0]):
                word = np.int64(codes[page, head, j, run, layout[p, 1]])
                bits = (word >> layout[p, 2]) & ((1 << layout[p, 3]) - 1)
                chosen[layout[p, 0]] |= bits << layout[p, 4]
            for i in range(32):
                tile[j, run * 32 + i] = values[chosen[i]]
    if online[0]:
        _apply_half(tile, scale16, zero16, half, page, head)
    else:
        _apply(tile, scale32, zero32, head)
    if sparse[0].shape[0]:
        _correct(tile, sparse, page, head)


@njit(cache=True)
def _apply(tile, scale, zero, head):  # type: ignore[no-untyped-def]
    """tile = zero + scale * tile, float32 scales [1, 1, h_kv, d] from the bundle."""
    for j in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            tile[j, c] = zero[0, 0, head, c] + scale[0, 0, head, c] * tile[j, c]


@njit(cache=True)
def _apply_half(tile, scale, zero, half, page, head):  # type: ignore[no-untyped-def]
    """tile = zero + scale * tile, float16 scales [pages, T, H, C] of the page, each for a block of the tile."""
    t, d = tile.shape
    tokens, channels = t // scale.shape[1], d // scale.shape[3]
    h = min(head, scale.shape[2] - 1)
    for j in range(t):
        for group in range(scale.shape[3]):
            s = half[scale[page, j // tokens, h, group]]
            z = half[zero[page, j // tokens, h, group]]
            for c in range(group * channels, (group + 1) * channels):
                tile[j, c] = z + s * tile[j, c]


@njit(cache=True)
def _correct(tile, sparse, page, head):  # type: ignore[no-untyped-def]
    """Adds the outliers' corrections of one head's page."""
    start, count, index, correction, half = sparse
    d = tile.shape[1]
    slot = np.int64(start[page, head])
    for block in range(count.shape[2]):
        for _ in range(count[page, head, block]):
            position = block * BLOCK + np.int64(index[page, slot])
            tile[position // d, position % d] += half[correction[page, slot]]
            slot += 1


@njit(cache=True)
def _rotate(tile, cos, sin, token, first, second):  # type: ignore[no-untyped-def]
    """Rotates keys tile[j] by the angle of token + j."""
    for j in range(tile.shape[0]):
        for i in range(first.shape[0]):
            a, b = tile[j, first[i]], tile[j, second[i]]
            tile[j, first[i]] = a * cos[token + j, i] - b * sin[token + j, i]
            tile[j, second[i]] = b * cos[token + j, i] + a * sin[token + j, i]


@njit(cache=True, parallel=True)
def _scores(dense, sparse, q, pages, cos, sin, first, second, t, out):  # type: ignore[no-untyped-def]
    h_kv, rows, d = q.shape
    for work in prange(h_kv * pages.shape[0]):
        head, p = work // pages.shape[0], work % pages.shape[0]
        tile = np.empty((t, d), np.float32)
        _decode(dense, sparse, pages[p], head, tile)
        if first.shape[0]:
            _rotate(tile, cos, sin, p * t, first, second)
        for r in range(rows):
            for j in range(t):
                total = np.float32(0)
                for c in range(d):
                    total += q[head, r, c] * tile[j, c]
                out[head, r, p * t + j] = total


@njit(cache=True, parallel=True)
def _weighted_sum(dense, sparse, weights, pages, t, partial):  # type: ignore[no-untyped-def]
    splits, h_kv, rows, d = partial.shape
    for work in prange(splits * h_kv):
        split, head = work // h_kv, work % h_kv
        tile = np.empty((t, d), np.float32)
        for p in range(split, pages.shape[0], splits):
            _decode(dense, sparse, pages[p], head, tile)
            for r in range(rows):
                for j in range(t):
                    w = weights[head, r, p * t + j]
                    for c in range(d):
                        partial[split, head, r, c] += w * tile[j, c]


def set_threads(n: int) -> None:
    """Limits the kernels to n cores; raises ValueError outside 1 ... the number of cores numba was started with."""
    numba.set_num_threads(n)
