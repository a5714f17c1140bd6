"""Keys or values of one layer in a cache: sinks and newest tokens in full precision, packed pages, block tables."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts import Format, PageGeometry
from artifacts.geometry import SEGMENT_PAGES
from runtime.attention import PagedSide
from runtime.codec import Codec, PagePool, join_fields
from runtime.cpu import PageReader
from runtime.pack import Packer
from runtime.pages import PageBook
from runtime.rope import Rotation
from runtime.transfer import to_device

Filling = tuple[int, int, int]  # page size, sinks, recent: when pages fill


def filling(fmt: Format) -> Filling:
    """Sides of which this is equal fill their pages at the same tokens."""
    return fmt.t, fmt.window.sinks, fmt.window.recent


def has_kernels(device: torch.device) -> bool:
    """Whether decode steps and packing on this device are CUDA kernels."""
    return device.type == "cuda"


class BlockTables:
    """Pages of all sides that fill them at the same tokens: one book, and a copy of its tables for each side's kernels.

    window of `fmt`, b sequences with room for `width` pages each in the tables, which grow as need be. ids int32
    [sides + grouped, b, width]: of pages for each side and, behind these, of the pages' segments for each of the
    `grouped` sides that have any.
    """

    def __init__(self, fmt: Format, sides: int, grouped: int, b: int, width: int, book: PageBook, device: torch.device):
        self.window, self.t, self.book, self.sides = fmt.window, fmt.t, book, sides
        self.ids = torch.zeros(sides + grouped, b, width, dtype=torch.int32, device=device)

    def wanted(self, lengths: dict[int, int]) -> dict[int, int]:
        """Pages behind so many tokens, by sequence, of those that do not hold them yet: in most steps few."""
        held, behind, t = self.book.tables, self.window.sinks + self.window.recent, self.t
        return {i: (n - behind) // t for i, n in lengths.items() if (n - behind) // t > len(held[i])}

    def take(self, wanted: dict[int, int]) -> None:
        """Lets sequences hold so many pages. Raises as `PageBook.take`."""
        new: list[tuple[int, int, int, int]] = []  # (sequence, place, page, segment)
        for sequence, pages in wanted.items():
            taken = self.book.take(sequence, pages)
            first = len(self.book.tables[sequence]) - len(taken)
            new += [(sequence, first + k, page, self.book.segment_of[page]) for k, page in enumerate(taken)]
        if not new:
            return
        held, width = max(place for _, place, *_ in new) + 1, self.ids.shape[2]
        if held > width:
            self.ids = F.pad(self.ids, (0, max(held, 2 * width) - width))
        sequences, places, pages, segments = to_device(new, torch.int64, self.ids.device).T.contiguous()
        self.ids[: self.sides, sequences, places] = pages.int()
        if self.ids.shape[0] > self.sides:
            self.ids[self.sides :, sequences, places] = segments.int()

    def select(self, sequences: list[int]) -> None:
        """Makes the sequences the given old ones; pages of nobody become free."""
        self.book.select(sequences)
        self.ids = self.ids[:, torch.tensor(sequences, dtype=torch.int64, device=self.ids.device)]

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the pages of another's first n tokens."""
        self.book.share(source, sequence, self.window.pages(n, self.t))
        self.ids[:, sequence] = self.ids[:, source]


class Side:
    """Keys or values of one layer for `b` sequences.

    Sinks and window are kept as the model made them (keys after RoPE, dtype of the model); the window is cyclic: token
    n behind the sinks stands at n % (recent + t). Keys of a `pre_rope` format are un-rotated when their page is packed:
    by numba and torch on the CPU, by the pack kernel on CUDA devices.

    rotation  the model's, for keys stored before RoPE; else None
    rows      of the tables' ids: which are this side's pages, and which these pages' segments (None: it has none)
    """

    def __init__(
        self,
        codec: Codec,
        rotation: Rotation | None,
        tables: BlockTables,
        rows: tuple[int, int | None],
        b: int,
        dtype: torch.dtype,
    ):
        self.codec, self.rotation, self.tables, self.rows = codec, rotation, tables, rows
        self.geometry: PageGeometry = codec.geometry
        self.format = self.geometry.format
        shape, window = self.geometry.shape, self.format.window
        self.capacity = window.recent + self.format.t
        # One buffer for sinks and, behind those of all sequences, windows: a step writes to either with one copy.
        size = (b * (window.sinks + self.capacity), shape.h_kv, shape.d)
        self.buffer = torch.zeros(size, dtype=dtype, device=codec.device)
        self.used = [0] * b  # pages packed
        self._pool = PagePool(self.geometry, tables.book.capacity, codec.device, tables.book.segments)
        self._reader: PageReader | None = None
        self._packer: Packer | None = None
        self._place: tuple[int, Tensor] | None = None  # the last offset, and where the device has it

    def __getstate__(self) -> dict[str, Any]:
        """A copied cache makes what looks at the memory of this one anew."""
        return self.__dict__ | {"_reader": None, "_packer": None, "_place": None}

    @property
    def sinks(self) -> Tensor:
        """First tokens [b, sinks, h_kv, d]."""
        b, count = len(self.used), self.format.window.sinks
        return self.buffer[: b * count].view(b, count, *self.buffer.shape[1:])

    @property
    def window(self) -> Tensor:
        """Newest tokens [b, recent + t, h_kv, d], cyclic."""
        b = len(self.used)
        return self.buffer[b * self.format.window.sinks :].view(b, self.capacity, *self.buffer.shape[1:])

    @property
    def pool(self) -> PagePool:
        """Memory of the pages; follows the book where that has grown."""
        book = self.tables.book
        segments = book.segments if self.geometry.segment_bytes else 0
        if self._pool.capacity < book.capacity or self._pool.segments.shape[0] < segments:
            self._pool = self._pool.grown(book.capacity, book.segments)
            self._reader = None
        return self._pool

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All that kernels read of it: pages, tables, sinks and newest tokens. As long as these are the same tensors,
        what is cut out of them is where it was."""
        pool = self.pool
        return pool.heads, pool.records, pool.segments, self.tables.ids, self.buffer

    def paged(self, b: int) -> PagedSide:
        """The first b sequences, as kernels take them."""
        pool = self.pool
        return PagedSide(pool.heads, pool.records, pool.segments, self.table[:b], self.sinks[:b], self.window[:b])

    @property
    def table(self) -> Tensor:
        """Page ids int32 [b, pages]."""
        return self.tables.ids[self.rows[0]]

    @property
    def segments(self) -> Tensor | None:
        """Segment ids of those pages, int32 [b, pages]; None for formats without segments."""
        return None if self.rows[1] is None else self.tables.ids[self.rows[1]]

    @property
    def nbytes(self) -> int:
        """Bytes allocated: sinks, window, pages, records, segments, tables."""
        return self.buffer.nbytes + self.pool.nbytes + self.table.numel() * self.geometry.table_bytes

    @property
    def reader(self) -> PageReader:
        """CPU view of the pages; made anew when the pool grows."""
        pool = self.pool
        if self._reader is None:
            self._reader = PageReader.of(pool, self.codec.tables)
        return self._reader

    @property
    def packer(self) -> Packer:
        """Pack kernels on the GPU. Raises KernelError for formats without them."""
        if self._packer is None:
            self._packer = Packer(self.codec, self.rotation, self.buffer.dtype)
        return self._packer

    @property
    def loaded_packer(self) -> Packer | None:
        """Those kernels, if `packer` has loaded them."""
        return self._packer

    def pages_of(self, sequence: int) -> Tensor:
        """Page ids of a sequence in token order, int32."""
        return self.table[sequence, : self.used[sequence]]

    def exact(self, sequence: int, n: int) -> tuple[Tensor, Tensor]:
        """Sinks and newest tokens of a sequence of n tokens, each [tokens, h_kv, d]."""
        sinks, packed = self.format.window.sinks, self.used[sequence] * self.format.t
        start, count = packed % self.capacity, max(0, n - sinks - packed)
        window = self.window[sequence]
        newest = window[start : start + count]
        if start + count > self.capacity:
            newest = torch.cat([newest, window[: start + count - self.capacity]])
        return self.sinks[sequence, : min(n, sinks)], newest

    def dense(self, sequence: int) -> Tensor:
        """Paged tokens decoded by the torch codec, float32 [tokens, h_kv, d] in the format's domain."""
        return self.codec.decode(self.pool.read(self.pages_of(sequence).long())).flatten(0, 1)

    def pack(self, sequence: int, x: Tensor, n: int, offset: int, check: bool = True) -> None:
        """Packs the pages that fill when x [m, h_kv, d] comes behind n tokens, the first of them at position `offset`.

        The tables hold their ids already. Until `append` counts them, nobody sees them. Raises ValueError or
        KernelError for numbers that cannot be packed; on a GPU only with `check`, which waits for it.
        """
        used, t = self.used[sequence], self.format.t
        count = self.format.window.pages(n + x.shape[0], t) - used
        if count <= 0:
            return
        if has_kernels(self.codec.device):
            if self._place is None or self._place[0] != offset:
                self._place = offset, torch.tensor([offset], dtype=torch.int32).to(x.device)
            one = slice(sequence, sequence + 1)
            segments = None if self.segments is None else self.segments[one]
            x, ring = x.to(self.buffer.dtype)[None], self.window[one]
            self.packer.prompt(self.pool, self.table[one], x, used, count, n, ring, self._place[1], segments)
            if check:
                self.packer.check()
            return
        first = self.format.window.sinks + used * t
        newest = self.exact(sequence, n)[1]
        leaving = torch.cat([newest, x[max(0, self.format.window.sinks - n) :].to(newest.dtype)])[: count * t]
        if self.rotation is not None:
            positions = torch.arange(offset + first, offset + first + leaving.shape[0], device=x.device)
            leaving = self.rotation.unrotate(leaving.transpose(0, 1), positions).transpose(0, 1)
        # Pages are encoded so many at a time, which also bounds the work space of a long prompt.
        parts = [part.unflatten(0, (-1, t)) for part in leaving.split(SEGMENT_PAGES * t)]
        fields = join_fields([self.codec.encode(part, part.shape[0])[0] for part in parts])
        book = self.tables.book
        held = book.tables[sequence][used : used + count]
        segments = torch.tensor(book.groups(held)) if self.geometry.segment_bytes else None
        self.pool.write(torch.tensor(held), fields, segments)

    def append(self, sequence: int, x: Tensor, n: int) -> None:
        """Appends x [m, h_kv, d] behind n tokens, when `pack` has packed the pages that this fills."""
        window, m = self.format.window, x.shape[0]
        if n < window.sinks:
            sinks = x[: window.sinks - n]
            self.sinks[sequence, n : n + sinks.shape[0]] = sinks
        self.used[sequence] = window.pages(n + m, self.format.t)
        first = max(n, window.sinks + self.used[sequence] * self.format.t)
        if first < n + m:
            write_ring(self.window[sequence], first - window.sinks, x[first - n :])

    def advance(self, lengths: Sequence[int], sequences: Iterable[int]) -> None:
        """Counts the pages of these sequences, which hold so many tokens now."""
        for i in sequences:
            self.used[i] = self.format.window.pages(lengths[i], self.format.t)

    def select(self, sequences: list[int]) -> None:
        """Makes the sequences the given old ones; `tables` are selected by their owner."""
        index = torch.tensor(sequences, dtype=torch.int64, device=self.buffer.device)
        self.buffer = torch.cat([self.sinks[index].flatten(0, 1), self.window[index].flatten(0, 1)])
        self.used = [self.used[i] for i in sequences]

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the first n tokens of another, all of them or such as leave no newest ones
        behind sinks and pages; `tables` are shared by their owner."""
        window, t = self.format.window, self.format.t
        self.used[sequence] = window.pages(n, t)
        self.sinks[sequence] = self.sinks[source]
        if n > window.sinks + self.used[sequence] * t:
            self.window[sequence] = self.window[source]


def write_ring(ring: Tensor, first: int, x: Tensor) -> None:
    """Writes x [n, ...], n at most capacity, to ring [capacity, ...]: number first + i to (first + i) % capacity."""
    if not x.shape[0]:
        return
    capacity = ring.shape[0]
    start = first % capacity
    fit = min(x.shape[0], capacity - start)
    ring[start : start + fit] = x[:fit]
    if fit < x.shape[0]:
        ring[: x.shape[0] - fit] = x[fit:]
