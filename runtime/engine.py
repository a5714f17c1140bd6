"""Continuous batching: requests of any lengths share one cache of fixed size and one decode step.

    engine = Engine(HFDecoder(model, bundle), bundle, sequences=8, max_tokens=4096)
    for token in engine.stream(engine.submit([1, 450, 3681], max_new_tokens=64)):
        ...

A step admits what finds room, works on one prompt for a chunk, and decodes one token for every running request. Room
for all of a request's tokens is reserved when it is admitted, so nothing that runs is broken off for want of pages.
"""

import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal

import torch

from artifacts import Bundle
from artifacts.errors import SignpostError
from runtime.cache import CacheFullError, KVCache
from runtime.decoding import Decoder, Prompt, steps_of
from runtime.sampling import Sampling, choose

Reason = Literal["length", "stop", "cancelled", "failed"]


class RequestError(SignpostError, ValueError):
    """A request that can never be served."""


@dataclass(eq=False)
class Generation:
    """A request and what has come of it.

    tokens  new ones so far, the stop token or sequence that ended them included
    reason  why it ended; None while it has not. `failed`: `error` says how
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[tuple[int, ...], ...]
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    error: Exception | None = None
    sequence: int | None = None  # of the cache, while it runs
    draws: torch.Generator = field(default_factory=torch.Generator)

    @property
    def total(self) -> int:
        """Tokens that the cache must have room for: the last new one is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1

    def draw_again(self) -> None:
        """Sets the draws to where they were before the next token: a step that broke off may have drawn for it."""
        self.draws.manual_seed(self.sampling.seed)
        for _ in self.tokens if self.sampling.temperature else ():
            torch.rand((), generator=self.draws, dtype=torch.float64)

    def take(self, token: int) -> None:
        """Appends a token and sees whether it is the last."""
        self.tokens.append(token)
        if any(tuple(self.tokens[-len(stop) :]) == stop for stop in self.stop):
            self.reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens:
            self.reason = "length"


class Engine:
    """Serves requests on one model and one cache. Not for several threads at once.

    decoder     the model, see `runtime.decoding.Decoder`; several engines may use one model in turn
    bundle      calibrated for it
    sequences   the most requests that run at once
    max_tokens  the most that one of them may hold, prompt and new tokens
    budget      bytes of the cache; None: room for all sequences at full length
    chunk       tokens of a prompt that are processed between two decode steps; None: whole prompts. Chunks make others
                wait less, but the prompt's keys and values are held in full precision until it is complete
    capture     on the GPU, decode steps as CUDA graphs
    Raises CacheFullError for a budget that does not hold a page of each side, BundleMismatchError for a bundle of
    another model.
    """

    def __init__(
        self,
        decoder: Decoder,
        bundle: Bundle,
        sequences: int = 8,
        max_tokens: int = 4096,
        budget: int | None = None,
        chunk: int | None = None,
        capture: bool = True,
    ):
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: must be at least 1 token, or None for whole prompts")
        decoder.require(bundle)
        self.decoder, self.chunk = decoder, chunk
        self.kv = KVCache(bundle, sequences, max_tokens, decoder.dtype, decoder.device, budget=budget)
        self.max_tokens = min(max_tokens, decoder.positions or max_tokens, self.kv.free_tokens())
        self.steps = steps_of(decoder, self.kv, capture)
        self.waiting: deque[Generation] = deque()
        self.running: dict[int, Generation] = {}  # by sequence, the prompt complete
        self.prompt: tuple[Generation, Prompt] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waiting or self.running or self.prompt)

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[int | Sequence[int]] = (),
    ) -> Generation:
        """Queues a request; `stop` are tokens, or sequences of tokens, that end it.

        Raises RequestError for what can never be served: an empty prompt, tokens that the model does not have, more
        tokens than the model or the cache holds.
        """
        if not len(prompt):
            raise RequestError("the prompt is empty: give at least one token")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        ends = tuple((s,) if isinstance(s, int) else tuple(s) for s in stop)
        if () in ends:
            raise RequestError("an empty stop sequence: name at least one token in each")
        request = Generation(self._known(prompt), max_new_tokens, sampling or Sampling(), ends)
        if request.total > self.max_tokens:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones: a sequence of this engine holds "
                f"{self.max_tokens} (max_tokens=, budget=, and the model has {self.decoder.positions} positions)"
            )
        request.draws.manual_seed(request.sampling.seed)
        self.waiting.append(request)
        return request

    def cancel(self, request: Generation) -> None:
        """Ends a request wherever it is, and frees what it holds; nothing happens to one that has ended."""
        if request.reason is None:
            self._end(request, "cancelled")

    def step(self) -> list[Generation]:
        """Some work for everybody: those requests that got a token or ended.

        What fails in a decode step (memory that somebody else took) is raised, and the requests that run are as they
        were before it: step again, or cancel some first.
        """
        served = self._advance_prompt()
        if not self.running:
            return served
        try:
            return served + self._decode(dict(self.running))
        except (SignpostError, ValueError):
            if not self.steps.any_of_them:
                raise
            return served + self._decode_one_by_one()

    def _decode(self, going: dict[int, Generation]) -> list[Generation]:
        """A token for each of these requests, by sequence; where that fails, nothing has changed."""
        requests = list(going.values())
        try:
            with self.kv.transaction(list(going)):
                logits = self.steps.run({i: request.tokens[-1] for i, request in going.items()})
                tokens = choose(logits, [r.sampling for r in requests], [r.draws for r in requests])
        except BaseException:
            for request in requests:
                request.draw_again()
            raise
        for request, token in zip(requests, tokens, strict=True):
            self._take(request, token)
        return requests

    def _decode_one_by_one(self) -> list[Generation]:
        """A token for every running request but those whose numbers cannot be packed: these end."""
        requests = dict(self.running)
        for i, request in requests.items():
            try:
                self._decode({i: request})
            except (SignpostError, ValueError) as error:
                self._fail(request, error)
        return list(requests.values())

    def run(self) -> None:
        """Steps until everything has ended."""
        while not self.idle:
            self.step()

    def stream(self, request: Generation) -> Iterator[int]:
        """Tokens of a request as they come; others go on meanwhile. Raises what the request failed with."""
        seen = 0
        while True:
            while seen < len(request.tokens):
                yield request.tokens[seen]
                seen += 1
            if request.error is not None:
                raise request.error
            if request.reason is not None:
                return
            self.step()

    def _advance_prompt(self) -> list[Generation]:
        """Admits the next request if there is room, and processes a chunk of its prompt."""
        if self.prompt is None:
            failed = self._admit()
            if self.prompt is None:
                return failed
        request, prompt = self.prompt
        try:
            logits = prompt.advance()
            if logits is None:
                return []
            token = choose(logits[None], [request.sampling], [request.draws])[0]
        except (SignpostError, ValueError, torch.OutOfMemoryError) as error:
            # Numbers that cannot be packed, or memory that somebody else took: this request ends, the others do not.
            self._fail(request, error)
            return [request]
        assert request.sequence is not None
        self.prompt, self.running[request.sequence] = None, request
        self._take(request, token)
        return [request]

    def _admit(self) -> list[Generation]:
        """Gives the first of the waiting requests a sequence and room for all of its tokens, if there are.

        Returns it if that failed for good.
        """
        free = [i for i in range(self.kv.b) if i not in self.running]
        if not self.waiting or not free:
            return []
        request = self.waiting[0]
        try:
            self.kv.reserve(free[0], request.total, len(request.prompt))
        except CacheFullError:
            return []  # those that run will end
        self.waiting.popleft()
        request.sequence = free[0]
        try:
            self.prompt = request, Prompt(self.decoder, self.kv, free[0], request.prompt, self.chunk)
        except torch.OutOfMemoryError as error:
            self._fail(request, error)
            return [request]
        return []

    def _known(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """A prompt's tokens. Raises RequestError for what the model has no embedding of."""
        for place, token in enumerate(prompt):
            if not hasattr(token, "__index__") or not 0 <= index(token) < self.decoder.vocabulary:
                raise RequestError(
                    f"token {token!r} at place {place} of the prompt: must be an integer from 0 to "
                    f"{self.decoder.vocabulary - 1}, what the model has embeddings of"
                )
        return tuple(index(token) for token in prompt)

    def _fail(self, request: Generation, error: Exception) -> None:
        # The error lives on in the request; what the frames of its traceback hold (work space, the cache) must not.
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        request.error = error.with_traceback(None)
        self._end(request, "failed")

    def _take(self, request: Generation, token: int) -> None:
        request.take(token)
        if request.reason is not None:
            self._end(request, request.reason)

    def _end(self, request: Generation, reason: Reason) -> None:
        request.reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
        if self.prompt and self.prompt[0] is request:
            self.prompt = None
        if request.sequence is not None:
            self.running.pop(request.sequence, None)
            self.kv.release(request.sequence)
            request.sequence = None
