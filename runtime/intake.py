"""Prompts on their way into a cache: attended elsewhere, layer by layer, and packed several layers at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor

from artifacts import Format
from runtime.keep import keep
from runtime.side import Filling, Side, filling, has_kernels
from runtime.transfer import to_device

if TYPE_CHECKING:
    from runtime.cache import KVCache
    from runtime.exact_layer import ExactLayer

HELD = 128 << 20  # bytes that keys and values keep allocated, after which they are packed on a GPU


@dataclass(frozen=True)
class PromptRows:
    """Where tokens of several prompts go, each into its own sequence: the same for all sides that fill pages alike.

    packed       pages: the rows that fill as many, int32 [some], and the same of their sequences, int64; without rows
                 that fill none
    offsets      positions of token 0, int32 [rows]
    used         pages of each of the sequences
    exact        row, number and place in `Side.buffer` of tokens that stay exact, int32 [exact, 3]
    source       the sequence that all of them come behind
    first_page   pages that they share with it
    first_token  its tokens
    shared       0, and places of tokens that stay exact, of the source and of those behind it, int32 [shared, 3]
    """

    packed: dict[int, tuple[Tensor, Tensor]]
    offsets: Tensor
    used: dict[int, int]
    exact: Tensor
    source: int | None
    first_page: int
    first_token: int
    shared: Tensor

    @classmethod
    def of(
        cls, fmt: Format, b: int, sequences: Sequence[int], counts: Sequence[int], device: torch.device,
        source: int | None = None, start: int = 0, offset: int = 0,
    ) -> Self:  # fmt: skip
        """Prompts of counts[row] tokens into `sequences` of a cache that has b.

        source: a sequence of `start` tokens that they come behind, the first of them at position `offset`
        """
        sinks, capacity = fmt.window.sinks, fmt.window.recent + fmt.t
        before = fmt.window.pages(start, fmt.t)
        filled = [fmt.window.pages(start + n, fmt.t) for n in counts]

        def place(i: int, token: int) -> int:
            return i * sinks + token if token < sinks else b * sinks + i * capacity + (token - sinks) % capacity

        exact, shared = [], []
        for row, (i, n, pages) in enumerate(zip(sequences, counts, filled, strict=True)):
            tokens = [*range(min(start + n, sinks)), *range(sinks + pages * fmt.t, start + n)]
            exact += [(row, token - start, place(i, token)) for token in tokens if token >= start]
            shared += [
                (0, place(source, token), place(i, token)) for token in tokens if token < start and source is not None
            ]
        packed = {}
        for pages in sorted(set(filled) - {before}):
            rows = [row for row, of_row in enumerate(filled) if of_row == pages]
            of_sequences = [sequences[row] for row in rows]
            packed[pages - before] = to_device(rows, torch.int32, device), to_device(of_sequences, torch.int64, device)
        offsets = torch.full((len(counts),), offset, dtype=torch.int32, device=device)
        places = (to_device(x, torch.int32, device).view(-1, 3) for x in (exact, shared))
        used = dict(zip(sequences, filled, strict=True))
        return cls(packed, offsets, used, next(places), source, before, start, next(places))


class Intake:
    """Prompts that a pass brings into empty sequences of a cache, from position 0 on or behind another sequence.

    sequences  of the cache
    counts     tokens of each of them
    source     the sequence of which each becomes a fork before its prompt comes
    """

    def __init__(self, kv: "KVCache", sequences: Sequence[int], counts: Sequence[int], source: int | None = None):
        self.kv, self.sequences, self.counts, self.source = kv, list(sequences), list(counts), source
        first = kv.layers[0]
        self._start, self._offset = (0, 0) if source is None else (first.lengths[source], first.offsets[source])
        self._forked = source is None
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self._bytes = 0  # of their storages: a model may cut keys and values out of one tensor with its queries
        self._rows: dict[Filling, PromptRows] = {}
        self._ring_rows: dict[int, tuple[Tensor, Tensor]] = {}  # by capacity of the ring

    def give(self, layer: int, k: Tensor, v: Tensor, stays: bool = False) -> None:
        """Keys after RoPE and values [rows, h_kv, n, d] of a layer, of each row the first counts[row]; on a GPU they
        are held until `finish` at the latest, and must not change. Layers come in their order. stays: their memory is
        not free when they have been packed, so that to pack them early would be of no use.

        Raises as `CacheLayer.append`, and so does `finish`. On a GPU numbers that cannot be packed are told by
        `KVCache.checked_once`.
        """
        if not has_kernels(self.kv.room.device):
            self._fork(self.kv.fork)
            self.kv.layers[layer].append_prompts(self.sequences, k, v, self.counts)
            return
        self._held[layer] = k, v
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (k, v) if not stays}
        self._bytes += sum(storages.values())
        if self._bytes >= HELD:
            self.finish()

    def finish(self) -> None:
        """Packs what is held."""
        if not self._held:
            return
        self._fork(lambda source, i: self.kv.room.share(source, i, self._start))
        self.kv.room.take({i: self._start + n for i, n in zip(self.sequences, self.counts, strict=True)})
        sides: dict[Side, Tensor] = {}
        rings: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of layers in full precision: numbers, and where they go
        for number, pair in self._held.items():
            layer, given = self.kv.layers[number], [x.transpose(1, 2) for x in pair]
            if layer.sides:
                sides |= zip(layer.sides, given, strict=True)
            else:
                ring = cast("ExactLayer", layer).ring(self._start + max(self.counts))
                numbers = (x.to(to.dtype) for x, to in zip(given, ring, strict=True))
                rings.setdefault(len(ring[0]) // self.kv.b, []).extend(zip(numbers, ring, strict=True))
            for i, n in zip(self.sequences, self.counts, strict=True):
                layer.offsets[i], layer.lengths[i] = self._offset, self._start + n
        self._held, self._bytes = {}, 0
        self.kv.prompt_packers.prompts(self.rows, sides)
        for capacity, numbers_to in rings.items():
            own, shared = self._in_ring(capacity)
            keep([(to[None], to) for _, to in numbers_to], shared)
            keep(numbers_to, own)

    def _fork(self, fork: Callable[[int, int], None]) -> None:
        if not self._forked and self.source is not None:
            for i in self.sequences:
                fork(self.source, i)
        self._forked = True

    def _in_ring(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Row, number and place of tokens that a layer in full precision keeps, and 0, place of the source's and place
        of those that a fork has of it, int32 [some, 3] each: the newest `capacity` of each sequence."""
        if capacity not in self._ring_rows:
            own, shared = [], []
            for row, (i, n) in enumerate(zip(self.sequences, self.counts, strict=True)):
                tokens = torch.arange(max(0, self._start + n - capacity), self._start + n)
                places = tokens % capacity
                mine, before = places[tokens >= self._start], places[tokens < self._start]
                numbers = tokens[tokens >= self._start] - self._start
                own.append(torch.stack([torch.full_like(mine, row), numbers, i * capacity + mine], 1))
                if self.source is not None:
                    to = i * capacity + before
                    shared.append(torch.stack([torch.zeros_like(to), self.source * capacity + before, to], 1))
            empty, device = torch.empty(0, 3, dtype=torch.int64), self.kv.room.device
            of_own, of_shared = (to_device(torch.cat([empty, *some]), torch.int32, device) for some in (own, shared))
            self._ring_rows[capacity] = of_own, of_shared
        return self._ring_rows[capacity]

    def rows(self, fmt: Format) -> PromptRows:
        """Where prompts go in sides that fill their pages as `fmt` does."""
        key = filling(fmt)
        if key not in self._rows:
            behind = self.source, self._start, self._offset
            self._rows[key] = PromptRows.of(fmt, self.kv.b, self.sequences, self.counts, self.kv.room.device, *behind)
        return self._rows[key]
