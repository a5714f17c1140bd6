"""Who owns which page: free lists, block tables and reference counts. Plain Python, no memory of its own.

Pages of sides that fill at the same tokens (equal page size, sinks and window) are taken together and have the same
id in the pool of each, so one `PageBook` serves them all. Packed pages are never written again: sequences that begin
alike share them by count, and a sequence that goes on takes pages of its own (copy on write without any copy).
"""

from collections.abc import Sequence
from itertools import pairwise

from artifacts.errors import SignpostError
from artifacts.geometry import SEGMENT_PAGES


class CacheFullError(SignpostError, RuntimeError):
    """The cache has no room for the tokens that would come. Nothing of what it holds has changed."""


class PageBook:
    """Pages of `sequences` sequences out of `capacity` ids, and segments of pages that were packed together.

    segments  ids of segments; None where the formats have no segments
    grows     whether ids beyond the capacity may be taken: then the owner of the memory follows with its pools
    Raises CacheFullError, before anything changes, where ids run out.
    """

    def __init__(self, sequences: int, capacity: int, segments: int | None = None, grows: bool = False):
        self.grows, self.grouped = grows, segments is not None
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        self.promised, self.promised_segments = [0] * sequences, [0] * sequences
        self.users: list[int] = []  # sequences that hold a page
        self.segment_of: list[int] = []  # of a page; -1 without segments
        self.pages_in: list[int] = []  # pages in use of a segment
        self.free: list[int] = []
        self.free_segments: list[int] = []
        self.grow(capacity, segments or 0)

    @property
    def capacity(self) -> int:
        """Page ids that exist."""
        return len(self.users)

    @property
    def segments(self) -> int:
        """Segment ids that exist."""
        return len(self.pages_in)

    @property
    def room(self) -> int:
        """Pages that are neither held nor promised."""
        return len(self.free) - sum(self.promised)

    @property
    def segment_room(self) -> int:
        """Segments that are neither held nor promised."""
        return len(self.free_segments) - sum(self.promised_segments)

    def grow(self, capacity: int, segments: int) -> None:
        """Lets there be at least so many ids."""
        more, more_segments = range(self.capacity, capacity), range(self.segments, segments)
        self.users += [0 for _ in more]
        self.segment_of += [-1 for _ in more]
        self.pages_in += [0 for _ in more_segments]
        # The lists end with the ids that go first: new ones go last, lowest first.
        self.free = [*reversed(more), *self.free]
        self.free_segments = [*reversed(more_segments), *self.free_segments]

    def promise(self, sequence: int, pages: int, segments: int = 0) -> None:
        """Keeps room for a sequence until it holds so many pages in all, with so many more segments."""
        pages = max(0, pages - len(self.tables[sequence]))
        segments = segments if self.grouped else 0
        more, more_segments = pages - self.promised[sequence], segments - self.promised_segments[sequence]
        self._require(more, more_segments)
        self.promised[sequence], self.promised_segments[sequence] = pages, segments

    def check(self, wanted: dict[int, int]) -> None:
        """Raises CacheFullError if sequences cannot all hold as many pages as `wanted` says, by sequence."""
        pages = segments = 0
        for sequence, count in wanted.items():
            more = max(0, count - len(self.tables[sequence]))
            pages += max(0, more - self.promised[sequence])
            if self.grouped:
                segments += max(0, -(-more // SEGMENT_PAGES) - self.promised_segments[sequence])
        self._require(pages, segments)

    def _require(self, pages: int, segments: int) -> None:
        """Raises where there is not so much room; grows, by doubling, where that is allowed."""
        if max(pages, segments) <= 0:
            return
        missing, missing_segments = pages - max(0, self.room), segments - max(0, self.segment_room)
        if max(missing, missing_segments) <= 0:
            return
        if not self.grows:
            have, what = (self.room, "pages") if missing > 0 else (self.segment_room, "segments")
            raise CacheFullError(
                f"{max(pages, 0) if missing > 0 else segments} more {what} are needed, {max(0, have)} of "
                f"{self.capacity if missing > 0 else self.segments} are free: wait until sequences end, "
                "or give the cache a larger budget"
            )
        capacity = max(self.capacity + missing, 2 * self.capacity) if missing > 0 else self.capacity
        count = max(self.segments + missing_segments, 2 * self.segments) if missing_segments > 0 else self.segments
        self.grow(capacity, count)

    def take(self, sequence: int, pages: int) -> list[int]:
        """Ids of the pages that the sequence gets so that it holds `pages`; none if it holds them already.

        They are packed together: each 64 of them form a segment.
        """
        self.check({sequence: pages})
        taken: list[int] = []
        for i in range(pages - len(self.tables[sequence])):
            page = self.free.pop()
            self.users[page] = 1
            if self.grouped:
                self.segment_of[page] = self.segment_of[taken[-1]] if i % SEGMENT_PAGES else self._segment(sequence)
                self.pages_in[self.segment_of[page]] += 1
            taken.append(page)
        self.tables[sequence] += taken
        left = self.promised[sequence] = max(0, self.promised[sequence] - len(taken))
        self.promised_segments[sequence] = min(self.promised_segments[sequence], left)
        return taken

    def _segment(self, sequence: int) -> int:
        self.promised_segments[sequence] = max(0, self.promised_segments[sequence] - 1)
        return self.free_segments.pop()

    def groups(self, pages: Sequence[int]) -> list[int]:
        """Segments of pages that follow each other, each once."""
        found = [self.segment_of[page] for page in pages]
        return found[:1] + [b for a, b in pairwise(found) if a != b]

    def trim(self, sequence: int, pages: int) -> None:
        """Gives back all but the first `pages` pages of a sequence."""
        table = self.tables[sequence]
        while len(table) > pages:
            self._drop(table.pop())

    def release(self, sequence: int) -> None:
        """Ends a sequence: its pages, unless shared, and what was promised to it are free again."""
        self.trim(sequence, 0)
        self.promised[sequence] = self.promised_segments[sequence] = 0

    def share(self, source: int, sequence: int, pages: int) -> None:
        """Lets an empty sequence hold the first pages of another one."""
        if self.tables[sequence]:
            raise ValueError(f"sequence {sequence} holds {len(self.tables[sequence])} pages: release it first")
        self.tables[sequence] = self.tables[source][:pages]
        for page in self.tables[sequence]:
            self.users[page] += 1

    def select(self, sequences: Sequence[int]) -> None:
        """Makes the sequences the given old ones, any of them repeated (sharing pages) or left out."""
        old, promised = self.tables, self.promised
        promised_segments = self.promised_segments
        self.tables = [list(old[i]) for i in sequences]
        for page in (page for table in self.tables for page in table):
            self.users[page] += 1
        for page in (page for table in old for page in table):
            self._drop(page)
        kept = [i if i not in sequences[:at] else None for at, i in enumerate(sequences)]  # a promise is kept once
        self.promised = [0 if i is None else promised[i] for i in kept]
        self.promised_segments = [0 if i is None else promised_segments[i] for i in kept]

    def _drop(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page]:
            return
        self.free.append(page)
        if self.grouped:
            segment, self.segment_of[page] = self.segment_of[page], -1
            self.pages_in[segment] -= 1
            if not self.pages_in[segment]:
                self.free_segments.append(segment)
