"""The book of pages: nothing is lost, nothing belongs to two who do not share it, promises hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from artifacts.geometry import SEGMENT_PAGES
from runtime.pages import CacheFullError, PageBook

SEQUENCES = 4
sequences = st.integers(0, SEQUENCES - 1)


class Books(RuleBasedStateMachine):
    """A book beside a model of it: each page is known by the moment at which it was taken, not by its id."""

    @initialize(capacity=st.integers(0, 150), grouped=st.booleans(), grows=st.booleans(), spare=st.integers(0, 6))
    def start(self, capacity, grouped, grows, spare):
        self.book = PageBook(SEQUENCES, capacity, spare if grouped else None, grows)
        self.held = [[] for _ in range(SEQUENCES)]  # of each sequence, (moment, id)
        self.promises = [0] * SEQUENCES  # pages that a sequence must still get
        self.together = {}  # moment and place in it -> the group that it was packed with
        self.moment = 0

    def state(self):
        book = self.book
        return (
            [list(table) for table in book.tables], sorted(book.free), sorted(book.free_segments),
            list(book.promised), list(book.promised_segments), list(book.users), list(book.segment_of),
        )  # fmt: skip

    @rule(sequence=sequences, more=st.integers(0, 2 * SEGMENT_PAGES + 3))
    def take(self, sequence, more):
        before, wanted = self.state(), len(self.held[sequence]) + more
        was_promised = self.book.promised[sequence]
        try:
            ids = self.book.take(sequence, wanted)
        except CacheFullError:
            assert self.state() == before
            assert not self.book.grows
            assert more > was_promised or self.book.grouped
            return
        assert len(ids) == more
        self.moment += 1
        for i, page in enumerate(ids):
            name = (self.moment, i)
            self.held[sequence].append((name, page))
            self.together[name] = (self.moment, i // SEGMENT_PAGES)
        self.promises[sequence] = max(0, self.promises[sequence] - more)

    @rule(sequence=sequences, pages=st.integers(0, 160))
    def promise(self, sequence, pages):
        before, segments = self.state(), pages  # every page alone: the worst case
        try:
            self.book.promise(sequence, pages, segments)
        except CacheFullError:
            assert self.state() == before
            return
        self.promises[sequence] = max(0, pages - len(self.held[sequence]))

    @rule(sequence=sequences)
    def a_promise_is_kept(self, sequence):
        """All at once, where segments were promised with the pages."""
        if self.promises[sequence]:
            self.take(sequence, self.promises[sequence])
            assert self.promises[sequence] == 0

    @rule(sequence=sequences)
    def release(self, sequence):
        self.book.release(sequence)
        self.held[sequence], self.promises[sequence] = [], 0

    @rule(sequence=sequences, keep=st.integers(0, 60))
    def trim(self, sequence, keep):
        self.book.trim(sequence, keep)
        self.held[sequence] = self.held[sequence][:keep]

    @precondition(lambda self: any(not held for held in self.held))
    @rule(source=sequences, pages=st.integers(0, 60))
    def share(self, source, pages):
        sequence = next(i for i, held in enumerate(self.held) if not held)
        self.book.share(source, sequence, pages)
        self.held[sequence] = self.held[source][:pages]

    @rule(chosen=st.lists(sequences, min_size=SEQUENCES, max_size=SEQUENCES))
    def select(self, chosen):
        self.book.select(chosen)
        self.held = [list(self.held[i]) for i in chosen]
        self.promises = [self.promises[i] if i not in chosen[:at] else 0 for at, i in enumerate(chosen)]

    @invariant()
    def tables_are_as_taken(self):
        assert self.book.tables == [[page for _, page in held] for held in self.held]

    @invariant()
    def a_page_has_one_content(self):
        """Two sequences have a page in common only where one took it from the other."""
        content = {}
        for held in self.held:
            for name, page in held:
                assert content.setdefault(page, name) == name

    @invariant()
    def every_page_is_free_or_used(self):
        book, used = self.book, [page for held in self.held for _, page in held]
        assert sorted(book.free + list(set(used))) == list(range(book.capacity))
        assert book.users == [used.count(page) for page in range(book.capacity)]

    @invariant()
    def segments_hold_what_was_packed_together(self):
        book = self.book
        if not book.grouped:
            assert not book.free_segments
            return
        group_of = {}
        for held in self.held:
            for name, page in held:
                segment = book.segment_of[page]
                assert group_of.setdefault(segment, self.together[name]) == self.together[name]
            names = [self.together[name] for name, _ in held]
            groups = book.groups([page for _, page in held])
            assert len(groups) == sum(a != b for a, b in zip(names, [None, *names], strict=False))
        assert sorted(book.free_segments + list(group_of)) == list(range(book.segments))

    @invariant()
    def promises_are_covered(self):
        assert self.book.promised == self.promises
        assert self.book.room >= 0
        assert self.book.segment_room >= 0


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestBooks = Books.TestCase


def test_pages_run_out():
    book = PageBook(2, 5)
    book.take(0, 3)
    with pytest.raises(CacheFullError, match="3 more pages are needed, 2 of 5 are free: wait until sequences end"):
        book.take(1, 3)
    assert book.tables == [[0, 1, 2], []]
    book.release(0)
    assert book.take(1, 5) == [0, 1, 2, 3, 4]


def test_segments_run_out():
    book = PageBook(2, 200, 1)
    book.take(0, 64)
    with pytest.raises(CacheFullError, match="1 more segments are needed, 0 of 1 are free"):
        book.take(0, 65)


def test_what_is_promised_is_not_given_to_others():
    book = PageBook(2, 5)
    book.promise(0, 4)
    with pytest.raises(CacheFullError, match="2 more pages are needed, 1 of 5"):
        book.take(1, 2)
    with pytest.raises(CacheFullError, match="2 more pages are needed, 1 of 5"):
        book.promise(1, 2)
    assert len(book.take(0, 4)) == 4
    assert len(book.take(1, 1)) == 1


def test_all_or_nothing():
    book = PageBook(3, 5)
    with pytest.raises(CacheFullError, match="6 more pages are needed, 5 of 5"):
        book.check({0: 2, 1: 2, 2: 2})
    book.check({0: 2, 1: 2, 2: 1})


def test_only_an_empty_sequence_begins_as_another():
    book = PageBook(2, 5)
    book.take(0, 2)
    book.take(1, 1)
    with pytest.raises(ValueError, match="sequence 1 holds 1 pages: release it first"):
        book.share(0, 1, 2)
