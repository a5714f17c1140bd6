"""Texts whose cache is kept when their requests have ended, for prompts that begin as they do."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from runtime.cache import KVCache
from runtime.requests import Generation, Prefix

LEAST = 256  # tokens: a GPU processes fewer in about the time that it takes to come behind others


class Reuse:
    """Texts in sequences of a cache that are theirs; the least recently used goes when another needs its place.

    A prompt may begin as a text does, and come behind all of it. Or it comes behind the first pages of a text, or of a
    request that runs, where formats keep no newest tokens in full precision (`KVCache.cut`): these pages become a text
    of their own.
    """

    def __init__(self, kv: KVCache, sequences: range):
        self.kv, self.sequences = kv, sequences
        self._texts: dict[Prefix, NDArray[np.int64]] = {}  # the least recently used first
        self._stems: set[Prefix] = set()  # those that are beginnings of others
        self._news = 0  # counts texts, and requests that have begun: what prompts may begin as

    def begun(self) -> None:
        """A request runs that others may begin as."""
        self._news += 1

    @property
    def texts(self) -> list[Prefix]:
        """What is kept, the least recently used first."""
        return list(self._texts)

    def find(self, request: Generation, running: Iterable[Generation]) -> Prefix | None:
        """The text that has most of what the request begins with, more than its prefix; it is kept until the request
        has begun (`Prefix.wanted`). None where that is less than `LEAST` tokens."""
        if not self.sequences or request.looked >= self._news:
            return None
        wanted = request.text[:-1]  # one token at least is the request's own
        # How many tokens each has of it, and whether these are all of a text.
        found: list[tuple[int, bool, Prefix | int]] = []
        for text, tokens in self._texts.items():
            alike = begins_alike(tokens, wanted)
            whole = alike == len(tokens)
            found.append((alike if whole else self.kv.cut(alike), whole, text))
        for other in running:
            assert other.sequence is not None
            alike = min(begins_alike(other.text, wanted), self.kv.lengths[other.sequence])
            found.append((self.kv.cut(alike), False, other.sequence))
        most, whole, source = max(found, key=lambda each: each[:2], default=(0, False, 0))
        if most < LEAST or most <= (request.prefix.total if request.prefix else 0):
            request.looked = self._news  # who waits for room does not look again at every step
            return None
        chosen = source if isinstance(source, Prefix) and whole else self._stem(source, wanted[:most])
        if chosen is not None:
            self._texts[chosen] = self._texts.pop(chosen)  # the most recently used
            chosen.wanted[request] = None
        return chosen

    def _stem(self, source: Prefix | int, tokens: NDArray[np.int64]) -> Prefix | None:
        """The first tokens of a text or of a sequence as a text of their own; None where no place is free for it."""
        sequence = source.sequence if isinstance(source, Prefix) else source
        assert sequence is not None
        stem = self._add(sequence, tokens)
        if stem is not None:
            self._stems.add(stem)
        return stem

    def keep(self, request: Generation) -> None:
        """Keeps the text of a request that ends, if its prompt is in the cache and a place is free for it; in the place
        of the text that it came behind, if that is another request's whole one."""
        if request.sequence is None or not self.sequences:
            return
        known = np.concatenate([request.text, np.array(request.tokens, dtype=np.int64)])
        n = self.kv.lengths[request.sequence]
        if n < LEAST or n < len(request.text):
            return
        before = request.kept
        if before in self._texts and before not in self._stems and set(before.wanted) <= {request}:
            self._forget(before)
        self._add(request.sequence, known[:n])

    def _add(self, source: int, tokens: NDArray[np.int64]) -> Prefix | None:
        """Tokens that a sequence begins with as a text; None where no place is free for it."""
        if len(self._texts) == len(self.sequences) and not self.give_up(but=source):
            return None
        taken = {text.sequence for text in self._texts}
        free = next(i for i in self.sequences if i not in taken)
        self.kv.fork(source, free, len(tokens))
        self._news += 1
        text = Prefix(tuple(tokens.tolist()), 0, free)
        self._texts[text] = tokens
        return text

    def give_up(self, but: int | None = None) -> bool:
        """Forgets the least recently used text that no request is to come behind, but one in this sequence; whether
        there was one."""
        for text in self._texts:
            if not text.wanted and text.sequence != but:
                self._forget(text)
                return True
        return False

    def clear(self) -> None:
        """Forgets all texts that no request is to come behind."""
        while self.give_up():
            pass

    def _forget(self, text: Prefix) -> None:
        assert text.sequence is not None
        self.kv.release(text.sequence)
        del self._texts[text]
        self._stems.discard(text)
        text.sequence, text.dropped = None, True


def begins_alike(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """With how many equal tokens two texts begin."""
    n = min(len(a), len(b))
    for end in (min(n, LEAST), n):  # most differ soon
        differ = a[:end] != b[:end]
        if differ.any():
            return int(differ.argmax())
    return n
