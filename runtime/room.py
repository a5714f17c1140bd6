"""The room that all layers of a cache share: block tables of every way to fill pages, admission, and its limits."""

from math import lcm

import torch
from torch import Tensor

from artifacts import CacheGeometry, PageGeometry
from runtime.attention import Workspace
from runtime.pages import CacheFullError, PageBook
from runtime.side import BlockTables, Filling, Side, filling
from runtime.step import StepInputs
from runtime.transfer import to_device
from runtime.units import spans


class Room:
    """Block tables for `b` sequences; parameters as of `runtime.cache.KVCache`. work: bytes of the budget that packing
    takes for a moment.

    Layers see a pass one after the other. What they must agree on is decided at the first: positions, pages.
    """

    def __init__(
        self, geometry: CacheGeometry, b: int, max_tokens: int | None, prompt: int, budget: int | None,
        full_bytes: int, device: torch.device, work: int = 0,
    ):  # fmt: skip
        self.b, self.max_tokens, self.prompt, self.device, self.budget = b, max_tokens, prompt, device, budget
        self.geometries: dict[Filling, list[PageGeometry]] = {}
        for side in geometry.sides:
            self.geometries.setdefault(filling(side.format), []).append(side)
        exact = b * geometry.exact_bytes(max_tokens or 0, full_bytes)
        share = 1.0 if budget is None else self._share(budget, exact, full_bytes, work)
        self.tables = {key: self._tables(sides, share) for key, sides in self.geometries.items()}
        self.sides: list[Side] = []
        self.workspace = Workspace(device)  # of decode steps: layers take turns
        self.checks = True  # what is appended, layer by layer; see `KVCache.checked_once`
        self._inputs: StepInputs | None = None
        self._set: tuple[list[int], list[int]] | None = None  # what the inputs were set to
        self._which: tuple[tuple[int, int, int], Tensor] | None = None  # the last one asked for
        self._asked: tuple[Tensor, Tensor | None, list[int], list[int]] | None = None
        self._admitted: tuple[list[Tensor | None], list[int]] = [], []

    def _reserved(self, side: PageGeometry) -> tuple[int, int]:
        """Pages and segments that a sequence of `max_tokens` needs."""
        if self.max_tokens is None:
            return 0, 0
        fmt = side.format
        pages = fmt.window.pages(self.max_tokens, fmt.t)
        return pages, side.segments(pages, fmt.window.pages(min(self.prompt, self.max_tokens), fmt.t))

    def _share(self, budget: int, exact: int, full_bytes: int, work: int) -> float:
        """Which part of the pages for b full sequences fits the budget behind `exact` and `work` bytes, at most 1."""
        fixed, pages = exact + work, 0
        for sides in self.geometries.values():
            for side in sides:
                fmt, shape = side.format, side.shape
                count, segments = self._reserved(side)
                exact = fmt.window.sinks + fmt.window.recent + fmt.t
                fixed += self.b * (exact * shape.h_kv * shape.d * full_bytes + side.table_bytes * count)
                pages += self.b * (count * side.page_bytes + segments * shape.h_kv * side.segment_bytes)
        share = (budget - fixed) / pages if pages else 1.0
        each = [int(share * self.b * self._reserved(sides[0])[0]) for sides in self.geometries.values() if pages]
        if budget < fixed or min(each, default=1) < 1:
            raise CacheFullError(
                f"budget={budget}: full precision and tables of {self.b} sequences take {fixed} bytes"
                f"{f', {work} of them work space for factors' if work else ''}, and a page of "
                f"each side must fit behind them: give more, or fewer sequences (b={self.b})"
            )
        return min(1.0, share)

    def _tables(self, sides: list[PageGeometry], share: float) -> BlockTables:
        pages, segments = self._reserved(max(sides, key=lambda side: side.segment_bytes))
        grouped = any(side.segment_bytes for side in sides)
        book = PageBook(
            self.b, int(share * self.b * pages), int(share * self.b * segments) if grouped else None,
            grows=self.budget is None,
        )  # fmt: skip
        count = sum(bool(side.segment_bytes) for side in sides)
        return BlockTables(sides[0].format, len(sides), count, self.b, pages, book, self.device)

    def next_rows(self, geometry: PageGeometry) -> tuple[int, int | None]:
        """Where the next side of a geometry has page ids in the tables that it shares, and segment ids if any."""
        key = filling(geometry.format)
        alike = [side for side in self.sides if filling(side.format) == key]
        grouped = sum(bool(side.geometry.segment_bytes) for side in alike)
        return len(alike), len(self.geometries[key]) + grouped if geometry.segment_bytes else None

    def join(self, side: Side) -> Side:
        """Counts a side in; returns it."""
        self.sides.append(side)
        return side

    def admit(
        self, lengths: list[int], offsets: list[int], positions: Tensor, valid: Tensor | None,
        sequences: list[int], m: int,
    ) -> tuple[list[Tensor | None], list[int]]:  # fmt: skip
        """Takes pages for m new tokens at `positions` [b or 1, m], of which `valid` [b, m] are real.

        Returns for each sequence which of the m are real, int64 on the CPU (None: all), and the position of its token
        0. Raises as `LayerCache.attend`. Layers of one pass ask alike: only the first asks the device.
        """
        asked = (positions, valid, list(lengths), sequences)
        if self._asked and positions is self._asked[0] and valid is self._asked[1] and asked[2:] == self._asked[2:]:
            return self._admitted
        places = positions.cpu().expand(len(sequences), m)
        real: list[Tensor | None] = [None] * len(sequences)
        if valid is not None:
            real = [row.nonzero()[:, 0] for row in valid.cpu()]
        starts: list[int] = []
        wanted = {}
        for i, at, row in zip(sequences, places, real, strict=True):
            given = at if row is None else at[row]
            wanted[i] = lengths[i] + given.numel()
            starts.append(self._start(i, lengths[i], offsets[i], given))
        self.take(wanted)
        self._asked, self._admitted = asked, (real, starts)
        return self._admitted

    def _start(self, i: int, n: int, offset: int, positions: Tensor) -> int:
        """Position of token 0 of sequence i of n tokens. Raises where tokens at `positions` cannot come next."""
        more = positions.numel()
        if self.max_tokens is not None and n + more > self.max_tokens:
            raise CacheFullError(
                f"sequence {i} holds {n} tokens and would get {more} more, but {self.max_tokens} were reserved: "
                "reserve more (max_tokens=), or leave max_tokens out to let the cache grow"
            )
        if not more:
            return offset
        start = offset + n if n else int(positions[0])
        if not torch.equal(positions, torch.arange(start, start + more)):
            raise ValueError(
                f"sequence {i}: positions {positions.tolist()[:8]}... do not continue at {start}: "
                "tokens of a sequence must follow each other. Pad batches on the left (tokenizer.padding_side='left') "
                "and pass their attention mask; leave use_cache on; begin another text with a new cache"
            )
        return start - n

    def take(self, lengths: dict[int, int]) -> None:
        """Pages for sequences of these lengths, of all sides or, raising CacheFullError, of none."""
        wanted = [(tables, tables.wanted(lengths)) for tables in self.tables.values()]
        for tables, pages in wanted:
            tables.book.check(pages)
        for tables, pages in wanted:
            tables.take(pages)

    def trim(self) -> None:
        """Gives back pages that were taken for tokens that did not come."""
        for key, tables in self.tables.items():
            members = [side for side in self.sides if filling(side.format) == key]
            for i in range(self.b):
                tables.book.trim(i, max(side.used[i] for side in members))
        self._asked = None

    def promise(self, sequence: int, tokens: int, prompt: int, shared: int = 0) -> None:
        """Keeps room for an empty sequence of so many tokens, `shared` of them another's, `prompt` behind these.

        Raises CacheFullError where there is none.
        """
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise CacheFullError(f"{tokens} tokens, but a sequence of this cache holds at most {self.max_tokens}")
        try:
            for key, tables in self.tables.items():
                side = max(self.geometries[key], key=lambda side: side.segment_bytes)
                held = tables.window.pages(shared, tables.t)
                pages = tables.window.pages(tokens, tables.t) - held
                first = tables.window.pages(min(shared + prompt, tokens), tables.t) - held
                tables.book.promise(sequence, pages, side.segments(pages, first))
        except CacheFullError:
            self.release(sequence)
            raise

    def promises(self) -> list[tuple[list[int], list[int]]]:
        """Pages and segments promised to each sequence, by book."""
        books = [tables.book for tables in self.tables.values()]
        return [(list(book.promised), list(book.promised_segments)) for book in books]

    def promise_again(self, promises: list[tuple[list[int], list[int]]]) -> None:
        """Promises what `promises` said, when the pages that were taken since have been given back."""
        for tables, (pages, segments) in zip(self.tables.values(), promises, strict=True):
            tables.book.promised, tables.book.promised_segments = list(pages), list(segments)

    def free_tokens(self) -> int:
        """Tokens that one more sequence can be sure of."""
        most = self.max_tokens if self.max_tokens is not None else 1 << 31
        for tables in self.tables.values():
            book = tables.book
            if not book.grows:
                pages = min(book.room, book.segment_room) if book.grouped else book.room
                most = min(most, tables.window.sinks + tables.window.recent + (max(0, pages) + 1) * tables.t - 1)
        return most

    def span(self, tokens: int) -> int:
        """Tokens that a step is dealt out for whose sequences hold at most so many."""
        return next(n for n in spans(self.max_tokens) if n >= tokens)

    def inputs(self, lengths: list[int], offsets: list[int]) -> StepInputs:
        """Inputs of a device step of all sequences, set to these numbers; layers of one pass share them."""
        if self._inputs is None or self._inputs.lengths.numel() != len(lengths):
            self._inputs, self._set = StepInputs(len(lengths), self.device), None
        if self._set != (lengths, offsets):
            self._inputs.set(lengths, offsets)
            self._set = list(lengths), list(offsets)
        return self._inputs

    def which(self, sequence: int, n: int, offset: int) -> Tensor:
        """A sequence, its tokens and the position of token 0 where kernels read them, int32 [3]; the last one is kept,
        because layers of a pass over one sequence ask alike."""
        if self._which is None or self._which[0] != (sequence, n, offset):
            self._which = (sequence, n, offset), to_device([sequence, n, offset], torch.int32, self.device)
        return self._which[1]

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences."""
        old, self.b, self._asked = self.b, len(sequences), None
        self._inputs = None
        for key, tables in self.tables.items():
            tables.select(sequences)
            pages, segments = self._reserved(max(self.geometries[key], key=lambda side: side.segment_bytes))
            if self.b > old and self.budget is None:
                tables.book.grow(self.b * pages, self.b * segments)

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the pages of another's first n tokens."""
        self._asked = None
        for tables in self.tables.values():
            tables.share(source, sequence, n)

    def whole_pages(self, n: int) -> int:
        """The most tokens of n that sinks and whole pages hold on all sides, none of them in a window; 0 if never, or
        where a window always has some."""
        if any(tables.window.recent for tables in self.tables.values()):
            return 0
        kinds = {(tables.t, tables.window.sinks) for tables in self.tables.values()}
        (t, sinks), whole = max(kinds, default=(1, 0)), lcm(*(t for t, _ in kinds))
        for m in range(n - (n - sinks) % t, max(0, n - whole), -t):
            if all(m >= sinks and (m - sinks) % t == 0 for t, sinks in kinds):
                return m
        return 0

    def release(self, sequence: int) -> None:
        """Ends a sequence."""
        self._asked = None
        for tables in self.tables.values():
            tables.book.release(sequence)
