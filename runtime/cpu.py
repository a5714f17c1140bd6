"""Attention over packed pages on the CPU: numba kernels that read the pages' bytes.

Two passes, because keys and values may be packed up to different tokens: scores of all paged keys, then, after the
softmax, the weighted sum of all paged values. A page of one head is decoded once and serves all query rows.
Numbers are float32; a kernel's tile is one head's page, [t, d]. Every format runs through the same compiled kernels.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from artifacts.codes import RUN
from artifacts.fields import PageShape
from artifacts.order import (
    LANES,
    TILE,
    band_code_order,
    band_order,
    channel_order,
    code_order,
    fragment_order,
    word_order,
)
from artifacts.parts import Dense
from artifacts.parts.sparse import BLOCK, block_bits
from runtime.codec import PagePool
from runtime.cpu_sketch import SketchReader
from runtime.parts import rotate
from runtime.parts.banded import signposts
from runtime.parts.dense import codebook
from runtime.rope import Rotation

# float16 bits -> float32: numba has no float16 arithmetic on the CPU.
_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_SPLIT = 16  # pages whose values one task adds up; fixed, so that results do not depend on the number of cores
_NO_TABLE = np.zeros((0, 0), np.float32)
_NO_WIDTHS = np.zeros((0, 0), np.uint8)
_NO_BOOKS = np.zeros((0, 0, 0), np.float32)
_NO_PLACES = np.zeros(0, np.uint32)


class Pages(NamedTuple):
    """A pool as the kernels take it: its bytes, what turns them into numbers, and where in them the fields stand.

    heads, records           uint8 [pages, h_kv, head bytes], [pages, record bytes]
    values                   float32 [2**bits], the codebook
    half                     float32 [65536], float16 bits to numbers
    scale_table, zero_table  float32 [h_kv, d] from the bundle; empty where pages hold their own
    tokens, channels         tokens and channels that share a scale
    scales_in_record         1 where all heads share the scales, else 0
    words                    uint32 [d / 2 * bits], where the words of a tile's runs stand
    lanes, places            uint32 [16] and [d], where a tile's numbers go: each two lanes hold d codes (whole runs);
                             where the first of them goes, and how far from it the others
    scale_places             uint32 [rows * columns], where scales stand
    outlier_places           uint32 [256], where the numbers of a tile's first block of outliers stand; those of the
                             next stand `outlier_step` further on
    block_mask               lowest bits of an outlier's correction: its block
    widths                   uint8 [h_kv, bands], bits of each band; empty where all codes are equally wide
    band_values              float32 [h_kv, bands, codes], their codebooks
    band_lanes, band_places  uint32 [16] and [5, 32], as `lanes` and `places` for the codes of a band of each width
    band_step                from a band's first number to the next one's
    codes ... band_codes     offsets in bytes from the start of a head's page or of a record; -1: no such field
    factors                  uint8 [segments, h_kv, bytes], what pages of a segment share
    rank                     of the factors; left, segment: offsets as above
    """

    heads: NDArray[np.uint8]
    records: NDArray[np.uint8]
    values: NDArray[np.float32]
    half: NDArray[np.float32]
    scale_table: NDArray[np.float32]
    zero_table: NDArray[np.float32]
    bits: int
    tokens: int
    channels: int
    scales_in_record: int
    codes: int
    scales: int
    zeros: int
    starts: int
    indices: int
    corrections: int
    factors: NDArray[np.uint8]
    rank: int
    left: int
    segment: int
    words: NDArray[np.uint32]
    lanes: NDArray[np.uint32]
    places: NDArray[np.uint32]
    scale_places: NDArray[np.uint32]
    outlier_places: NDArray[np.uint32]
    outlier_step: int
    block_mask: int
    widths: NDArray[np.uint8]
    band_values: NDArray[np.float32]
    band_lanes: NDArray[np.uint32]
    band_places: NDArray[np.uint32]
    band_step: int
    band_codes: int

    @classmethod
    def of(cls, pool: PagePool, tables: dict[str, Tensor]) -> "Pages":
        """The pool's bytes and layout; `tables` are the bundle's tensors of this side."""
        part, shape, fields = pool.geometry.format.dense, pool.geometry.shape, pool.geometry.fields
        rows, _, columns = part.scale_shape(shape) if part else (1, 1, 1)
        banded = pool.geometry.format.banded
        from_bundle = banded is not None or (part is not None and part.scales == "bundle")
        values = codebook(part, shape.d, tables, torch.device("cpu")).numpy() if part else _NO_TABLE[0:0].reshape(0)
        masked = pool.geometry.format.masked
        words, lanes, places = _places(part, shape, masked) if part else (_NO_PLACES, _NO_PLACES, _NO_PLACES)
        band_lanes, band_places = _band_places(shape) if banded else (_NO_PLACES, _NO_PLACES.reshape(1, -1))

        def offset(name: str) -> int:
            return fields[name].offset if name in fields else -1

        return cls(
            heads=pool.heads.numpy(),
            records=pool.records.numpy(),
            values=values,
            half=_HALF,
            scale_table=tables["scale"].numpy() if from_bundle else _NO_TABLE,
            zero_table=tables["zero"].numpy() if from_bundle else _NO_TABLE,
            bits=part.bits if part else 0,
            tokens=shape.t // rows,
            channels=shape.d // columns,
            scales_in_record=int("scale" in fields and fields["scale"].field.scope == "layer"),
            codes=offset("codes"),
            scales=offset("scale"),
            zeros=offset("zero"),
            starts=offset("start"),
            indices=offset("index"),
            corrections=offset("correction"),
            factors=pool.segments.numpy(),
            rank=pool.geometry.format.lowrank.rank if pool.geometry.format.lowrank else 0,
            left=offset("left"),
            segment=offset("segment"),
            words=words,
            lanes=lanes,
            places=places,
            scale_places=_scale_places(part, shape) if part and not from_bundle else _NO_PLACES,
            outlier_places=fragment_order(TILE, shape.d, shape.side)[:BLOCK].astype(np.uint32),
            outlier_step=8 if shape.side == "key" else 16,
            block_mask=(1 << block_bits(shape.d)) - 1,
            widths=tables["widths"].numpy() if banded else _NO_WIDTHS,
            band_values=signposts(tables).numpy() if banded else _NO_BOOKS,
            band_lanes=band_lanes,
            band_places=band_places,
            band_step=RUN // 2 if shape.side == "key" else RUN,
            band_codes=offset("band_codes"),
        )


def _places(
    part: Dense, shape: PageShape, masked: bool
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """words, lanes and places of `Pages`. masked: of the format."""
    order = code_order(TILE, shape.d, shape.side, part.bits, masked).reshape(LANES // 2, shape.d)
    words = np.argsort(word_order(shape.d, part.bits))
    return words.astype(np.uint32), order[:, 0].astype(np.uint32), (order[0] - order[0, 0]).astype(np.uint32)


def _band_places(shape: PageShape) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """band_lanes and band_places of `Pages`."""
    channels = band_order(shape.d, shape.side)[:RUN]
    places = []
    for bits in range(1, 5):
        token, place = np.divmod(band_code_order(TILE, shape.side, bits)[0], RUN)
        places.append(token * shape.d + channels[place])
    lanes = places[0][:, 0]
    return lanes.astype(np.uint32), np.stack([places[0][0], *(x[0] for x in places)]).astype(np.uint32)


def _scale_places(part: Dense, shape: PageShape) -> NDArray[np.uint32]:
    """Where the scale of (row of tokens, column of channels) stands: uint32 [rows * columns]."""
    rows, _, columns = part.scale_shape(shape)
    places = np.arange(rows * columns).reshape(rows, columns)
    if shape.side == "value" and part.axis == "token":
        places = np.arange(rows * columns).reshape(columns, rows).T
    elif shape.side == "key" and part.axis == "channel":
        places = places[:, np.argsort(channel_order(shape.d))]
    return places.reshape(-1).astype(np.uint32)


@dataclass(frozen=True)
class PageReader:
    """Kernels over one pool: pages of t tokens, heads of d channels."""

    t: int
    d: int
    pages: Pages
    undo: Tensor | None  # inverse of the format's own rotation P, float32 [d, d] or [h_kv, d, d]: pages hold x P
    mean: Tensor | None  # float32 [h_kv, d]: pages hold (x - mean) P
    sketch: SketchReader | None

    @classmethod
    def of(cls, pool: PagePool, tables: dict[str, Tensor]) -> "PageReader":
        """Reader of `pool`; `tables` are the bundle's tensors of this side."""
        shape, part = pool.geometry.shape, pool.geometry.format.sketch
        sketch = SketchReader(pool, part, tables) if part else None
        undo = rotate.inverse_matrix(tables) if pool.geometry.format.rotate else None
        return cls(shape.t, shape.d, Pages.of(pool, tables), undo, tables.get("mean"), sketch)

    def scores(self, q: Tensor, ids: Tensor, rotation: Rotation | None, position: int) -> Tensor:
        """Unscaled scores of every paged key.

        q         float32 [h_kv, rows, d], after RoPE
        ids       int32 [p], page ids of one sequence in token order
        rotation  for keys stored before RoPE, whose first paged token stands at `position`; None for keys stored after
        Returns float32 [h_kv, rows, p * t].
        """
        tokens = ids.numel() * self.t
        out = torch.empty(q.shape[0], q.shape[1], tokens)
        # <q, mean + y P^-1> = <q, mean> + <q P^-T, y>: the query is transformed once, pages never.
        shift = None if self.mean is None else q @ self.mean[:, :, None]
        if self.undo is not None:
            q = q @ self.undo.mT
        cos, sin, interleaved = _NO_TABLE, _NO_TABLE, False
        if rotation is not None:
            cos, sin = (x[position : position + tokens].numpy() for x in rotation.table(position + tokens))
            interleaved = rotation.rope.layout == "interleaved"
        _scores(self.pages, ids.numpy(), q.contiguous().numpy(), cos, sin, interleaved, self.t, out.numpy())
        if self.sketch:
            self.sketch.add_scores(q, ids, out)
        return out if shift is None else out + shift

    def weighted_sum(self, weights: Tensor, ids: Tensor) -> Tensor:
        """Sum over paged values: weights float32 [h_kv, rows, p * t], ids int32 [p] -> float32 [h_kv, rows, d]."""
        h_kv, rows, _ = weights.shape
        partial = torch.zeros(-(-ids.numel() // _SPLIT), h_kv, rows, self.d)
        _weighted_sum(self.pages, ids.numpy(), weights.contiguous().numpy(), self.t, partial.numpy())
        out = partial.sum(0)
        if self.undo is not None:
            out = out @ self.undo
        return out if self.mean is None else out + weights.sum(-1, keepdim=True) * self.mean[:, None]


def set_threads(n: int) -> None:
    """Limits the kernels to n cores; raises ValueError outside 1 ... the number of cores numba was started with."""
    numba.set_num_threads(n)


@njit(cache=True)
def _decode(pages: Any, page: int, head: int, tile: Any) -> None:
    """Fills tile [t, d] with the sum of the parts of one head's page, sketches left out."""
    t, d = tile.shape
    if pages.band_codes >= 0:
        widths = pages.widths[head]
        words = pages.heads[page, head, pages.band_codes : pages.band_codes + 4 * t * widths.sum()].view(np.uint32)
        places = pages.band_lanes, pages.band_places, pages.band_step
        _look_up_bands(words, widths, pages.band_values[head], *places, tile)
        _rescale(tile, pages.scale_table[head], pages.zero_table[head], 1)
    elif pages.codes < 0:
        tile[:] = 0
    else:
        words = pages.heads[page, head, pages.codes : pages.codes + t * d * pages.bits // 8].view(np.uint32)
        places = pages.words, pages.lanes, pages.places
        _look_up(words, pages.bits, pages.values, *places, tile.reshape(-1))
        if pages.scales < 0:
            _rescale(tile, pages.scale_table[head], pages.zero_table[head], 1)
        else:
            _rescale_by_page(pages, page, head, tile)
    if pages.starts >= 0:
        _correct(pages, page, head, tile)
    if pages.rank:
        _add_factors(pages, page, head, tile)


@njit(cache=True)
def _add_factors(pages: Any, page: int, head: int, tile: Any) -> None:
    """tile [t, d] += left [t, rank] right^T; right [d, rank] belongs to the page's segment."""
    t, d = tile.shape
    rank = pages.rank
    left = pages.heads[page, head, pages.left : pages.left + 2 * t * rank].view(np.uint16)
    number = pages.records[page, pages.segment : pages.segment + 4].view(np.uint32)[0]
    stored = pages.factors[number, head, : 2 * d * rank].view(np.uint16)
    right = np.empty((rank, d), np.float32)
    for c in range(d):
        for r in range(rank):
            right[r, c] = pages.half[stored[c * rank + r]]
    for j in range(t):
        for r in range(rank):
            _add(tile[j], pages.half[left[j * rank + r]], right[r])


def _readers(bits: int) -> tuple[Any, Any]:
    """Kernels that look up codes of one width, in tiles and in a band of 32 channels.

    Each width has kernels of its own, of few loops, all of constant length: in one kernel for all widths the compiler
    stops unrolling at some point, and whether it does, only time shows: 5 us for 64 x 128 numbers, or 20.
    """
    stride = 4 if bits == 3 else bits
    per_word = 32 // stride

    @njit(cache=True, inline="always")
    def look_up(word: int, values: Any, out: Any, places: Any) -> None:
        for i in range(per_word):
            out[places[i]] = values[(word >> np.uint32(stride * i)) & np.uint32((1 << bits) - 1)]

    @njit(cache=True)
    def tiles(words: Any, values: Any, at: Any, lanes: Any, places: Any, out: Any) -> None:
        runs = places.size // RUN  # of two lanes
        for tile in range(words.size // at.size):
            of_tile = words[tile * at.size : (tile + 1) * at.size]
            for run in range(runs):
                to = places[run * RUN : (run + 1) * RUN]
                for pair in range(lanes.size):
                    i = (pair * runs + run) * bits
                    first = out[tile * lanes.size * places.size + lanes[pair] :]
                    for w in range(bits):
                        look_up(of_tile[at[i + w]], values, first, to[per_word * w :])
                    if bits == 3:
                        last = _last_codes(of_tile[at[i]], of_tile[at[i + 1]], of_tile[at[i + 2]])
                        look_up(last, values, first, to[per_word * 3 :])

    @njit(cache=True)
    def band(words: Any, step: int, values: Any, lanes: Any, places: Any, d: int, t: int, out: Any) -> None:
        for tile in range(t // TILE):
            rows = words[tile * step : tile * step + LANES // 2 * bits]
            for pair in range(LANES // 2):
                first = out[tile * TILE * d + lanes[pair] :]
                for w in range(bits):
                    look_up(rows[w * (LANES // 2) + pair], values, first, places[per_word * w :])
                if bits == 3:
                    last = _last_codes(rows[pair], rows[LANES // 2 + pair], rows[LANES + pair])
                    look_up(last, values, first, places[per_word * 3 :])

    return tiles, band


@njit(cache=True, inline="always")
def _last_codes(a: int, b: int, c: int) -> Any:
    """The last eight codes of a run of 3 bits, one in each nibble, from the top bits of its words' nibbles."""
    low, middle, high = np.uint32(0x11111111), np.uint32(0x22222222), np.uint32(0x44444444)
    return np.uint32(((a >> np.uint32(3)) & low) | ((b >> np.uint32(2)) & middle) | ((c >> np.uint32(1)) & high))


_tiles1, _band1 = _readers(1)
_tiles2, _band2 = _readers(2)
_tiles3, _band3 = _readers(3)
_tiles4, _band4 = _readers(4)
_tiles8, _ = _readers(8)


@njit(cache=True)
def _look_up(words: Any, bits: int, values: Any, at: Any, lanes: Any, places: Any, out: Any) -> None:
    """out = values[codes], codes packed as `artifacts.codes` and `artifacts.order` say; at: `words` of `Pages`."""
    if bits == 1:
        _tiles1(words, values, at, lanes, places, out)
    elif bits == 2:
        _tiles2(words, values, at, lanes, places, out)
    elif bits == 3:
        _tiles3(words, values, at, lanes, places, out)
    elif bits == 4:
        _tiles4(words, values, at, lanes, places, out)
    else:
        _tiles8(words, values, at, lanes, places, out)


@njit(cache=True)
def _look_up_bands(words: Any, widths: Any, values: Any, lanes: Any, places: Any, band_step: int, tile: Any) -> None:
    """tile [t, d] = values[band, codes]; words: of a tile after the other, in each band after band."""
    t, d = tile.shape
    step, at, flat = words.size * TILE // t, 0, tile.reshape(-1)
    for band in range(widths.size):
        of_band, out, book, bits = words[at:], flat[band * band_step :], values[band], widths[band]
        to = places[bits]
        if bits == 0:
            _same(book[0], lanes, to, d, t, out)
        elif bits == 1:
            _band1(of_band, step, book, lanes, to, d, t, out)
        elif bits == 2:
            _band2(of_band, step, book, lanes, to, d, t, out)
        elif bits == 3:
            _band3(of_band, step, book, lanes, to, d, t, out)
        else:
            _band4(of_band, step, book, lanes, to, d, t, out)
        at += LANES // 2 * bits


@njit(cache=True)
def _same(value: float, lanes: Any, places: Any, d: int, t: int, out: Any) -> None:
    """All numbers of a band."""
    for tile in range(t // TILE):
        for pair in range(lanes.size):
            first = out[tile * TILE * d + lanes[pair] :]
            for i in range(places.size):
                first[places[i]] = value


@njit(cache=True)
def _rescale_by_page(pages: Any, page: int, head: int, tile: Any) -> None:
    """tile = zero + scale * tile with the page's own float16 scales, [t / tokens, d / channels]."""
    t, d = tile.shape
    columns = d // pages.channels
    count = t // pages.tokens * columns
    stored = pages.records[page] if pages.scales_in_record else pages.heads[page, head]
    scales = stored[pages.scales : pages.scales + 2 * count].view(np.uint16)
    zeros = stored[max(0, pages.zeros) : max(0, pages.zeros) + 2 * count].view(np.uint16)
    scale, zero, places = np.empty(columns, np.float32), np.zeros(columns, np.float32), pages.scale_places
    for row in range(t // pages.tokens):
        for c in range(columns):
            place = places[row * columns + c]
            scale[c] = pages.half[scales[place]]
            if pages.zeros >= 0:
                zero[c] = pages.half[zeros[place]]
        _rescale(tile[row * pages.tokens : (row + 1) * pages.tokens], scale, zero, pages.channels)


@njit(cache=True)
def _rescale(tile: Any, scale: Any, zero: Any, channels: int) -> None:
    """tile [tokens, d] = zero + scale * tile; each of the scales [d / channels] belongs to so many channels."""
    for j in range(tile.shape[0]):
        row = tile[j]
        if channels == 1:
            for c in range(row.size):
                row[c] = zero[c] + scale[c] * row[c]
        else:
            for group in range(scale.size):
                s, z, part = scale[group], zero[group], row[group * channels : (group + 1) * channels]
                for c in range(part.size):
                    part[c] = z + s * part[c]


@njit(cache=True)
def _correct(pages: Any, page: int, head: int, tile: Any) -> None:
    """Adds the outliers' corrections of one head's page."""
    t, d = tile.shape
    tiles, mask, step = t // TILE, np.uint32(pages.block_mask), np.uint32(pages.outlier_step)
    numbers, record, places, half = tile.reshape(-1), pages.records[page], pages.outlier_places, pages.half
    starts = record[pages.starts : pages.indices].view(np.uint32)[head * tiles :]
    indices, corrections = record[pages.indices :], record[pages.corrections :].view(np.uint16)
    for j in range(tiles):
        for slot in range(np.int64(starts[j]), np.int64(starts[j + 1])):
            correction = corrections[slot]
            first = np.uint32(j * TILE * d) + (np.uint32(correction) & mask) * step
            numbers[first + places[indices[slot]]] += half[correction]


@njit(cache=True)
def _rotate(tile: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    """Rotates keys tile [t, d] by the angles of cos and sin [t, dim / 2]."""
    half = cos.shape[1]
    spare = np.empty(half, np.float32)
    for j in range(tile.shape[0]):
        row = tile[j]
        if interleaved:
            _turn(row[0 : 2 * half : 2], row[1 : 2 * half : 2], cos[j], sin[j], spare)
        else:
            _turn(row[:half], row[half : 2 * half], cos[j], sin[j], spare)


@njit(cache=True)
def _turn(a: Any, b: Any, cos: Any, sin: Any, spare: Any) -> None:
    """(a, b) = (a cos - b sin, b cos + a sin); one store a loop, which the compiler can vectorize."""
    for i in range(a.size):
        spare[i] = a[i]
    for i in range(a.size):
        a[i] = spare[i] * cos[i] - b[i] * sin[i]
    for i in range(a.size):
        b[i] = b[i] * cos[i] + spare[i] * sin[i]


@njit(cache=True, fastmath={"reassoc", "contract"})
def _dot(a: Any, b: Any) -> Any:
    """Dot product in whichever order of additions vectorizes."""
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@njit(cache=True)
def _add(total: Any, weight: float, row: Any) -> None:
    """total += weight * row."""
    for c in range(total.size):
        total[c] += weight * row[c]


@njit(cache=True, parallel=True)
def _scores(pages: Any, ids: Any, q: Any, cos: Any, sin: Any, interleaved: bool, t: int, out: Any) -> None:
    h_kv, rows, d = q.shape
    for work in prange(h_kv * ids.size):
        head, p = work // ids.size, work % ids.size
        tile = np.empty((t, d), np.float32)
        _decode(pages, ids[p], head, tile)
        if cos.size:
            _rotate(tile, cos[p * t : (p + 1) * t], sin[p * t : (p + 1) * t], interleaved)
        for j in range(t):
            for r in range(rows):
                out[head, r, p * t + j] = _dot(q[head, r], tile[j])


@njit(cache=True, parallel=True)
def _weighted_sum(pages: Any, ids: Any, weights: Any, t: int, partial: Any) -> None:
    splits, h_kv, rows, d = partial.shape
    for work in prange(splits * h_kv):
        split, head = work // h_kv, work % h_kv
        tile = np.empty((t, d), np.float32)
        for p in range(split * _SPLIT, min((split + 1) * _SPLIT, ids.size)):
            _decode(pages, ids[p], head, tile)
            for r in range(rows):
                for j in range(t):
                    _add(partial[split, head, r], weights[head, r, p * t + j], tile[j])
