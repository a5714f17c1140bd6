"""The compressed KV cache: sinks and newest tokens in full precision, everything between them in packed pages.

One query step is `attend`: exact attention over what is cached and the step's own tokens, then the tokens are appended.
A number is quantized once, when its page fills, and never again. Sequences own lists of page ids, so batches of
different lengths, reordering and freeing are edits of tables.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts import Bundle, Format, PageGeometry
from artifacts.errors import SignpostError
from artifacts.fields import SideName
from artifacts.geometry import SEGMENT_PAGES, TABLE_BYTES
from runtime.codec import Codec, PagePool, join_fields
from runtime.cpu import PageReader
from runtime.rope import Rotation

FUSED_QUERIES = 8  # up to this many new tokens are attended by the page kernels; more make decoding to dense cheaper


class CacheFullError(SignpostError, RuntimeError):
    """The cache holds as many tokens as were reserved."""


class Side:
    """Keys or values of one layer for `b` sequences: sinks, newest tokens, pages.

    Sinks and window are kept as the model made them (keys after RoPE, dtype of the model). Keys of a `pre_rope` format
    are un-rotated when their page is packed.
    """

    def __init__(self, fmt: Format, codec: Codec, b: int, reserved: int | None, dtype: torch.dtype, prompt: int = 0):
        self.format, self.codec = fmt, codec
        self.geometry: PageGeometry = codec.geometry
        shape, device = self.geometry.shape, codec.device
        pages = 0 if reserved is None else fmt.window.pages(reserved, fmt.t)
        self.reserved_pages = pages  # per sequence
        self.reserved_segments = self.geometry.segments(pages, fmt.window.pages(min(prompt, reserved or 0), fmt.t))
        self.sinks = torch.zeros(b, fmt.window.sinks, shape.h_kv, shape.d, dtype=dtype, device=device)
        self.window = torch.zeros(b, fmt.window.recent + fmt.t, shape.h_kv, shape.d, dtype=dtype, device=device)
        self.filled = [0] * b  # tokens in the window
        self.pool = PagePool(self.geometry, b * pages, device, b * self.reserved_segments)
        self.table = torch.zeros(b, pages, dtype=torch.int32, device=device)
        self.used = [0] * b  # pages in the table
        self.free = list(range(b * pages - 1, -1, -1))
        self.free_segments = list(range(self.pool.segments.shape[0] - 1, -1, -1))
        self._reader: PageReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied cache makes its own reader: this one looks at the memory of this pool."""
        return self.__dict__ | {"_reader": None}

    @property
    def nbytes(self) -> int:
        """Bytes allocated: sinks, window, pages, records, table."""
        return self.sinks.nbytes + self.window.nbytes + self.pool.nbytes + self.table.numel() * TABLE_BYTES

    @property
    def reader(self) -> PageReader:
        """CPU view of the pages; made anew when the pool grows."""
        if self._reader is None:
            self._reader = PageReader.of(self.pool, self.codec.tables)
        return self._reader

    def pages_of(self, sequence: int) -> Tensor:
        """Page ids of a sequence in token order, int32."""
        return self.table[sequence, : self.used[sequence]]

    def exact(self, sequence: int, n: int) -> tuple[Tensor, Tensor]:
        """Sinks and newest tokens of a sequence of n tokens, each [tokens, h_kv, d]."""
        return self.sinks[sequence, : min(n, self.format.window.sinks)], self.window[sequence, : self.filled[sequence]]

    def dense(self, sequence: int) -> Tensor:
        """Paged tokens decoded by the torch codec, float32 [tokens, h_kv, d] in the format's domain."""
        return self.codec.decode(self.pool.read(self.pages_of(sequence).long())).flatten(0, 1)

    def encode(self, sequence: int, x: Tensor, n: int, rotation: Rotation | None, offset: int) -> dict[str, Tensor]:
        """Fields of the pages that fill when x [m, h_kv, d] comes behind n tokens; none if none does. Changes nothing.

        rotation: un-rotates what is packed, or None; the position of token 0 is `offset`. Raises as `Codec.encode`.
        """
        window, t, packed = self.format.window, self.format.t, self.used[sequence]
        count = window.pages(n + x.shape[0], t) - packed
        if not count:
            return {}
        leaving = self._behind_pages(sequence, x, n)[: count * t]
        if rotation is not None:
            first = offset + window.sinks + packed * t
            positions = torch.arange(first, first + leaving.shape[0], device=x.device)
            leaving = rotation.unrotate(leaving.transpose(0, 1), positions).transpose(0, 1)
        # Pages are encoded so many at a time, which also bounds the work space of a long prompt.
        groups = [group.unflatten(0, (-1, t)) for group in leaving.split(SEGMENT_PAGES * t)]
        return join_fields([self.codec.encode(group, group.shape[0])[0] for group in groups])

    def append(self, sequence: int, x: Tensor, n: int, fields: dict[str, Tensor]) -> None:
        """Appends x [m, h_kv, d] behind n tokens; `fields` is what `encode` made of them."""
        window, t, used = self.format.window, self.format.t, self.used[sequence]
        rest = self._behind_pages(sequence, x, n)
        sinks = x[: max(0, window.sinks - n)]
        self.sinks[sequence, n : n + sinks.shape[0]] = sinks
        if count := window.pages(n + x.shape[0], t) - used:
            segments = fields["right"].shape[0] if "segment" in fields else 0
            self._make_room(used + count, count, segments)
            ids = torch.tensor([self.free.pop() for _ in range(count)], device=x.device)
            places = torch.tensor([self.free_segments.pop() for _ in range(segments)], dtype=torch.int64)
            self.pool.write(ids, fields, places.to(x.device))
            self.table[sequence, used : used + count] = ids.int()
            self.used[sequence] += count
            rest = rest[count * t :]
        self.window[sequence, : rest.shape[0]] = rest
        self.filled[sequence] = rest.shape[0]

    def _behind_pages(self, sequence: int, x: Tensor, n: int) -> Tensor:
        """The window's tokens and the new ones x, which come behind n tokens, without sinks."""
        newest = self.window[sequence, : self.filled[sequence]]
        return torch.cat([newest, x[max(0, self.format.window.sinks - n) :].to(newest.dtype)])

    def _make_room(self, per_sequence: int, more: int, segments: int) -> None:
        """Lets every table hold `per_sequence` pages, the pool `more` pages and so many more segments.

        What was reserved is never too small for pages, nor for segments if the prompt came as it was announced.
        """
        if per_sequence > self.table.shape[1]:
            width = max(per_sequence, 2 * self.table.shape[1])
            self.table = F.pad(self.table, (0, width - self.table.shape[1]))
        if more > len(self.free):
            self._grow(max(self.pool.capacity + more, 2 * self.pool.capacity), self.pool.segments.shape[0])
        if segments > len(self.free_segments):
            have = self.pool.segments.shape[0]
            self._grow(self.pool.capacity, max(have + segments, 2 * have))

    def _grow(self, capacity: int, segments: int) -> None:
        self.free = list(range(capacity - 1, self.pool.capacity - 1, -1)) + self.free
        self.free_segments = list(range(segments - 1, self.pool.segments.shape[0] - 1, -1)) + self.free_segments
        self.pool = self.pool.grown(capacity, segments)
        self._reader = None

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences (any may be repeated or left out). Pages of nobody become free.

        A repeated sequence gets its own copy of the table but shares full pages, which are never written again.
        """
        index = torch.tensor(sequences, dtype=torch.int64, device=self.table.device)
        self.sinks, self.window = self.sinks[index], self.window[index]
        self.filled = [self.filled[i] for i in sequences]
        self.table = self.table[index]
        self.used = [self.used[i] for i in sequences]
        if (reserved := len(sequences) * self.reserved_pages) > self.pool.capacity:
            self._grow(reserved, max(len(sequences) * self.reserved_segments, self.pool.segments.shape[0]))
        owned = {page for i in range(len(sequences)) for page in self.pages_of(i).tolist()}
        self.free = [page for page in range(self.pool.capacity - 1, -1, -1) if page not in owned]
        if self.geometry.segment_bytes:
            pointed = set(self.pool.field("segment")[sorted(owned)].flatten().tolist())
            self.free_segments = [s for s in range(self.pool.segments.shape[0] - 1, -1, -1) if s not in pointed]


class LayerCache:
    """Cache of one layer for `b` sequences. Query heads h_q = g * h_kv; tensors as transformers hands them out."""

    def __init__(
        self,
        bundle: Bundle,
        layer: int,
        b: int,
        reserved: int | None,
        dtype: torch.dtype,
        rotation: Rotation,
        prompt: int = 0,
    ):
        formats, model = bundle.layers[layer], bundle.model
        self.device, self.reserved = rotation.inv_freq.device, reserved
        self.lengths, self.offsets = [0] * b, [0] * b

        def side(name: SideName, fmt: Format) -> Side:
            geometry = PageGeometry.of(fmt, model.h_kv, model.d, name)
            return Side(fmt, Codec(geometry, bundle.side_tensors(layer, name), self.device), b, reserved, dtype, prompt)

        self.key, self.value = side("key", formats.key), side("value", formats.value)
        self.rotation = rotation if formats.key.domain == "pre_rope" else None  # of packed keys

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.key.nbytes + self.value.nbytes

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """Causal attention of m new tokens over the cache and themselves; then they are appended.

        q [b, h_q, m, d], k and v [b, h_kv, m, d] after RoPE; positions int64 [b or 1, m]; valid bool [b, m] marks real
        tokens (None: all are). Returns [b, m, h_q, d] in q's dtype, zero in rows that are not valid.
        Raises ValueError where a sequence's positions do not follow each other and CacheFullError where it would
        outgrow the reserve, both before anything has changed.
        """
        b, m = q.shape[0], q.shape[2]
        everything = torch.arange(m, device=q.device)
        rows = [everything if valid is None else valid[i].nonzero()[:, 0] for i in range(b)]
        positions = positions.expand(b, m)
        for i in range(b):
            self._check(i, positions[i][rows[i]])
        if valid is None and not any(self.lengths):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            out = out.transpose(1, 2)
            for i in range(b):
                self._append(i, k[i], v[i], positions[i])
            return out
        out = q.new_zeros(b, m, q.shape[1], q.shape[3])
        for i in range(b):
            if not rows[i].numel():
                continue
            qi, ki, vi = q[i][:, rows[i]], k[i][:, rows[i]], v[i][:, rows[i]]
            out[i, rows[i]] = self._attend_one(i, qi, ki, vi, scaling).transpose(0, 1).to(out.dtype)
            self._append(i, ki, vi, positions[i][rows[i]])
        return out

    def _check(self, i: int, positions: Tensor) -> None:
        """Raises where tokens at `positions` cannot come next in sequence i."""
        n, more = self.lengths[i], positions.numel()
        if self.reserved is not None and n + more > self.reserved:
            raise CacheFullError(
                f"sequence {i} holds {n} tokens and would get {more} more, but {self.reserved} were reserved: "
                "reserve more (max_tokens=), or leave max_tokens out to let the cache grow"
            )
        if not more:
            return
        start = self.offsets[i] + n if n else int(positions[0])
        if not torch.equal(positions, torch.arange(start, start + more, device=positions.device)):
            raise ValueError(
                f"sequence {i}: positions {positions.tolist()[:8]}... do not continue at {start}: "
                "tokens of a sequence must follow each other (pass an attention mask with padded batches)"
            )

    def _append(self, i: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Appends k and v [h_kv, m, d] to sequence i: both or, if one cannot be encoded, neither."""
        n = self.lengths[i]
        offset = self.offsets[i] if n else int(positions[0])
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        key_fields = self.key.encode(i, k, n, self.rotation, offset)
        value_fields = self.value.encode(i, v, n, None, offset)
        self.key.append(i, k, n, key_fields)
        self.value.append(i, v, n, value_fields)
        self.offsets[i], self.lengths[i] = offset, n + k.shape[0]

    def _attend_one(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [h_q, m, d], k and v [h_kv, m, d] of sequence i -> [h_q, m, d]."""
        m = q.shape[1]
        if m > FUSED_QUERIES or self.device.type != "cpu" or not self.lengths[i]:
            return self._attend_dense(i, q, k, v, scaling)
        h_kv, d = k.shape[0], k.shape[2]
        rows = q.float().reshape(h_kv, -1, d)  # query heads of a kv head are neighbours: [h_kv, g * m, d]
        weights = (self._scores(i, rows, k.float(), m) * scaling).softmax(-1)
        return self._values(i, weights, v.float()).reshape(q.shape)

    def _scores(self, i: int, rows: Tensor, k: Tensor, m: int) -> Tensor:
        """Unscaled scores float32 [h_kv, g * m, n + m] of all cached and the m new tokens, causal."""
        sinks, newest = (x.float().permute(1, 2, 0) for x in self.key.exact(i, self.lengths[i]))
        fresh = (rows @ k.transpose(1, 2)).unflatten(1, (-1, m))
        later = torch.ones(m, m, dtype=torch.bool).triu(1)
        fresh = fresh.masked_fill(later, -torch.inf).flatten(1, 2)
        return torch.cat([rows @ sinks, self._paged_scores(i, rows), rows @ newest, fresh], -1)

    def _paged_scores(self, i: int, rows: Tensor) -> Tensor:
        pages = self.key.pages_of(i)
        if not pages.numel():
            return rows.new_empty(*rows.shape[:2], 0)
        position = self.offsets[i] + self.key.format.window.sinks
        return self.key.reader.scores(rows, pages, self.rotation, position)

    def _values(self, i: int, weights: Tensor, v: Tensor) -> Tensor:
        """Weighted sum float32 [h_kv, g * m, d] of all cached and the new values."""
        sinks, newest = (x.float().transpose(0, 1) for x in self.value.exact(i, self.lengths[i]))
        pages, t = self.value.pages_of(i), self.value.format.t
        sizes = [sinks.shape[1], pages.numel() * t, newest.shape[1], v.shape[1]]
        to_sinks, to_pages, to_newest, to_fresh = weights.split(sizes, -1)
        out = to_sinks @ sinks + to_newest @ newest + to_fresh @ v
        return out + self.value.reader.weighted_sum(to_pages, pages) if pages.numel() else out

    def _attend_dense(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The same by decoding all pages first: for many queries at once, and for devices without page kernels."""
        m, n = q.shape[1], self.lengths[i]
        keys = self._dense_side(i, self.key, k, q.dtype)
        values = self._dense_side(i, self.value, v, q.dtype)
        visible = torch.ones(m, n + m, dtype=torch.bool, device=q.device).tril(n)
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=visible, scale=scaling, enable_gqa=True
        )[0]

    def _dense_side(self, i: int, side: Side, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """All tokens of a side after RoPE, [h_kv, n + m, d]."""
        sinks, newest = (x.transpose(0, 1).to(dtype) for x in side.exact(i, self.lengths[i]))
        if not side.used[i]:
            return torch.cat([sinks, newest, fresh], 1)
        paged = side.dense(i).transpose(0, 1)
        if side is self.key and self.rotation is not None:
            first = self.offsets[i] + side.format.window.sinks
            paged = self.rotation.rotate(paged, torch.arange(first, first + paged.shape[1], device=paged.device))
        return torch.cat([sinks, paged.to(dtype), newest, fresh], 1)

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences, in this order."""
        self.lengths = [self.lengths[i] for i in sequences]
        self.offsets = [self.offsets[i] for i in sequences]
        self.key.select(sequences)
        self.value.select(sequences)


class KVCache:
    """Compressed cache of a whole model for `b` sequences.

    bundle      loaded by `artifacts.load`
    b           sequences
    max_tokens  tokens to reserve for, per sequence, and the most that one may hold: `nbytes` is
                `b * bundle.geometry.cache_bytes(max_tokens, itemsize)` from the start and no step allocates any more.
                None: pages are allocated by doubling
    prompt      with max_tokens, how many of them will come as one prompt: formats with factors per segment need less
                room then, and `nbytes` is `b * bundle.geometry.cache_bytes(max_tokens, itemsize, prompt)`
    dtype       of sinks and window: the model's
    device      where the cache lives. On the CPU decode steps run on the page kernels (numba), elsewhere on the codec
    """

    def __init__(
        self,
        bundle: Bundle,
        b: int,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt: int = 0,
    ):
        if b < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"b={b}, max_tokens={max_tokens}: both must be at least 1")
        self.bundle = bundle
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], device)
        self.layers = [
            LayerCache(bundle, layer, b, max_tokens, dtype, self.rotation, prompt) for layer in range(bundle.model.l)
        ]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    @property
    def b(self) -> int:
        """Sequences."""
        return len(self.layers[0].lengths)

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence."""
        return list(self.layers[-1].lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers. The table of rotation angles, shared by all layers, is work space on top."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bits(self) -> float:
        """Bits per cached number with everything counted: `nbytes` and the bundle's tensors over the numbers held."""
        model = self.bundle.model
        shared = sum(side.geometry.bundle_bytes for layer in self.layers for side in (layer.key, layer.value))
        numbers = 2 * model.l * model.h_kv * model.d * sum(self.lengths)
        return 8 * (self.nbytes + shared) / numbers if numbers else float("nan")

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences: reorders, repeats (sharing pages) or drops them."""
        for layer in self.layers:
            layer.select(sequences)
