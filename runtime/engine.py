"""Continuous batching: requests of any lengths share one cache of fixed size and one decode step.

    engine = Engine(HFDecoder(model, bundle), bundle, sequences=8, max_tokens=4096)
    for token in engine.stream(engine.submit([1, 450, 3681], max_new_tokens=64)):
        ...

A step admits what finds room, works on one prompt for a chunk or on several short ones at once, and decodes one token
for every running request (but the first tokens of all are told before what decodes them is prepared). Room for all of
a request's tokens is reserved when it is admitted, so nothing that runs is broken off for want of pages. On a GPU a
decode step is queued before the tokens of the one before are known here: what the host does takes place meanwhile, and
a request that a stop token ends has taken part in one step too many.

What many requests begin with is processed once, and shared by those that are forked from it:

    engine = Engine(HFDecoder(model, bundle), bundle, sequences=8, max_tokens=4096, prefixes=1)
    system = engine.prefix(system_prompt)
    requests = [engine.submit(question, max_new_tokens=64, prefix=system) for question in questions]

Or the engine sees by itself what a prompt has in common with others, before it and beside it (a chat's next turn, say):

    engine = Engine(HFDecoder(model, bundle), bundle, sequences=8, max_tokens=4096, reuse=16)
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock

import torch
from torch import Tensor

from artifacts import Bundle
from artifacts.errors import SignpostError
from runtime.behind import most_behind
from runtime.cache import CacheFullError, KVCache
from runtime.decoding import Decoder, DeviceSteps, HostSteps, steps_of
from runtime.grouping import PADDED, sharing
from runtime.prefixes import Prefixes
from runtime.prompts import SHORT, Prompt, PromptGraphs, Prompts
from runtime.requests import Generation, Prefix, Reason, RequestError, ends, known, without_frames
from runtime.reuse import Reuse
from runtime.sampling import NONE, Sampling, choose, whole
from runtime.side import has_kernels
from runtime.transfer import Arriving


@dataclass(frozen=True)
class _Flight:
    """A decode step that is queued: of whom, and the tokens that they get."""

    requests: list[Generation]
    sequences: list[int]
    chosen: Tensor
    arriving: Arriving


class Engine:
    """Serves requests on one model and one cache. Not for several threads at once.

    Processes that share a model have an engine each. They must make it alike and submit, prepare, step and cancel
    alike; tokens are chosen by the first of them. What fails one of their passes is raised, because the others wait in
    that pass: the process must end, and with it the others.

    decoder     the model, see `runtime.decoding.Decoder`; several engines may use one model in turn
    bundle      calibrated for it: whole, or this process's slice
    sequences   the most requests that run at once
    max_tokens  the most that one of them may hold, prefix, prompt and new tokens; no more than the model has positions
    budget      bytes of the cache; None: room for all sequences at full length
    chunk       tokens of prompts that are processed between two decode steps; None: a whole prompt, or several that
                have few tokens. Chunks make others wait less, but a prompt of several is held in full precision until
                it is complete
    capture     on the GPU, decode steps as CUDA graphs; see `prepare`
    short       on the GPU, with `capture`, passes over prompts of at most so many tokens are CUDA graphs too; 0: none.
                They keep memory beside `budget`: room for keys and values of so many tokens in full precision, and what
                such a pass takes; with prefixes, also room for one layer's keys and values of a prefix, at most 256 MiB
                (requests behind longer prefixes have no graphs, nor have any behind prefixes of models in
                float32, with windows, caps or layers in full precision)
    prefixes    the most that are kept at once, see `prefix`; each is a sequence of the cache beside those of requests
    reuse       the most texts that are kept of requests that have ended, each a sequence of the cache, too. A prompt
                that begins as one of them does comes behind it, as behind a prefix: `Generation.reused` says how much
                of it (`runtime.reuse`). They have what pages requests leave, the least recently used goes first
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
        prefixes: int = 0,
        short: int = SHORT,
        reuse: int = 0,
    ):
        if not all(map(whole, (sequences, prefixes, reuse))) or sequences < 1 or min(prefixes, reuse) < 0:
            raise ValueError(
                f"sequences={sequences}, prefixes={prefixes}, reuse={reuse}: whole numbers, at least 1 sequence for "
                "requests, and 0 or more beside them for prefixes and for texts that are kept"
            )
        if not whole(max_tokens) or max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: must be a whole number, at least 1 token")
        if chunk is not None and (not whole(chunk) or chunk < 1):
            raise ValueError(f"chunk={chunk}: must be at least 1 token, or None for whole prompts")
        if not whole(short) or short < 0:
            raise ValueError(f"short={short}: must be at least 1 token, or 0 for no graphs of prompts")
        if not hasattr(decoder, "require"):
            raise TypeError(f"a {type(decoder).__name__} is no decoder: runtime.hf_decoder.HFDecoder(model) makes one")
        decoder.require(bundle)
        self.decoder, self.chunk, self.sequences = decoder, chunk, sequences
        bundle = bundle.shard(decoder.split.rank, decoder.split.world)
        # These stand behind the sequences of requests: what a step does to those that do not take part would harm.
        b, most = sequences + prefixes + reuse, min(max_tokens, decoder.positions or max_tokens)
        self.kv = KVCache(bundle, b, most, decoder.dtype, decoder.device, budget=budget)
        self.reuse = Reuse(self.kv, range(sequences + prefixes, b))
        if b > sequences:
            self.kv.begin_unpacking()
        self.max_tokens = min(most, self.kv.free_tokens())
        self._capture = capture
        self._short = min(short, chunk or short, self.max_tokens) if capture else 0
        self._graphs: PromptGraphs | None = None  # made with the steps
        # On the CPU there is nothing to wait for.
        self._steps = None if has_kernels(decoder.device) else steps_of(decoder, self.kv, capture, sequences)
        self.waiting: deque[Generation | Prefix] = deque()
        self.running: dict[int, Generation] = {}  # by sequence, the prompt complete
        self.prompt: tuple[Generation | Prefix, Prompt] | None = None
        self.prefixes = Prefixes(range(sequences, sequences + prefixes))  # from the call until they are kept no more
        self._flights: deque[_Flight] = deque()  # steps that are queued
        self._served: list[Generation] = []  # in a step that was raised from, and not yet told
        self._stepping = Lock()

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waiting or self.running or self.prompt)

    def prefix(self, tokens: Sequence[int]) -> Prefix:
        """Queues tokens that requests are to begin with (`submit`): processed once, kept until `drop`.

        A request's own prompt sees the prefix as it is cached, compressed, while attention within one prompt is exact.
        Raises RequestError for no tokens, too many of them, or where no sequence for prefixes is free.
        """
        found = known(tokens, self.decoder.vocabulary, "prefix")
        if not found:
            raise RequestError("the prefix is empty: give at least one token")
        if len(found) >= self.max_tokens:
            raise RequestError(f"a prefix of {len(found)} tokens and at least one behind it: {self._limit}")
        prefix = self.prefixes.make(found)
        self.waiting.append(prefix)
        return prefix

    def drop(self, prefix: Prefix) -> None:
        """Keeps a prefix no longer than the requests need that were submitted with it; those that run have its pages.

        Nothing happens to one that was dropped before or has failed. Raises RequestError for another engine's.
        """
        if not isinstance(prefix, Prefix):
            raise RequestError(f"{prefix!r} is no prefix: give what `Engine.prefix` returned")
        if prefix.sequence is None or prefix.dropped:
            return
        self.prefixes.require(prefix)
        prefix.dropped = True
        self._let_go(prefix)

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: int | Iterable[int | Sequence[int]] = (),
        prefix: Prefix | None = None,
    ) -> Generation:
        """Queues a request; `stop` is a token, or several tokens or sequences of tokens, that end it; `prefix` is what
        it begins with.

        Raises RequestError for what can never be served: an empty prompt, tokens that the model does not have, more
        tokens than the model or the cache holds, a prefix that has failed or was dropped.
        """
        if prefix is not None:
            self.prefixes.require(prefix)
        tokens = known(prompt, self.decoder.vocabulary)
        if not tokens:
            raise RequestError(f"the prompt is empty: give at least one token{' behind the prefix' if prefix else ''}")
        if not isinstance(sampling, Sampling | None):
            raise RequestError(f"sampling={sampling!r}: give runtime.Sampling(temperature=..., top_p=..., seed=...)")
        if not whole(max_new_tokens) or max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens}: must be at least 1, a whole number")
        stops = ends(stop)
        request = Generation(tokens, max_new_tokens, sampling or Sampling(), stops, prefix=prefix)
        if request.total > self.max_tokens:
            raise RequestError(f"{request}: {self._limit}")
        request.draws.manual_seed(request.sampling.seed)
        self.waiting.append(request)
        if prefix is not None:
            prefix.wanted[request] = None
        return request

    def cancel(self, request: Generation) -> None:
        """Ends a request wherever it is, and frees what it holds; nothing happens to one that has ended.

        Raises RequestError for another engine's.
        """
        self._require(request)
        if request.reason is None:
            self._end(request, "cancelled")

    def _require(self, request: Generation) -> None:
        """Raises RequestError for what is no request of this engine; one that has ended may be anybody's."""
        if not isinstance(request, Generation):
            way = ": Engine.drop ends a prefix" if isinstance(request, Prefix) else ": give what Engine.submit returned"
            raise RequestError(f"{request if isinstance(request, Prefix) else repr(request)} is no request{way}")
        mine = request in self.waiting or request in self.running.values() or (self.prompt or (None,))[0] is request
        if request.reason is None and not mine:
            raise RequestError(f"{request}: another engine's request; ask the engine that it was submitted to")

    def step(self) -> list[Generation]:
        """Some work for everybody: those requests that got a token or ended.

        What fails in a decode step (memory that somebody else took) is raised, and the requests that run are as they
        were before it: step again, or cancel some first. Tokens of a step that was queued before come with the next one
        that does not fail. Raises RuntimeError in a step, of another thread, say.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError(
                "a step of this engine is running: an engine is for one thread, which steps it for all; "
                "let others hand their requests to that one"
            )
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> list[Generation]:
        begun = self._steps is not None or bool(self.running)
        self._served += self._advance_prompt()
        if begun:  # who gets the first of all tokens hears of it before steps are prepared
            self._decode()
        served, self._served = self._served, []
        return served

    def prepare(self) -> HostSteps | DeviceSteps:
        """The decode steps. The first call waits for the compiler, where kernels are missing, and captures graphs.

        The first step that decodes does so if nobody has, and lets requests wait for it, new ones as well; so a server
        calls this before they come. Raises KernelError, and torch.OutOfMemoryError for want of memory for the graphs:
        requests stay as they were, where the model is not shared with other processes, which wait in a pass then. If
        there was memory for steps but not for graphs of prompts, what follows does without these.
        """
        if self._steps is None:
            self._steps = steps_of(self.decoder, self.kv, self._capture, self.sequences)
            self._capture_prompts(self._steps)
        return self._steps

    def _capture_prompts(self, steps: HostSteps | DeviceSteps) -> None:
        """Graphs of prompts. Where there is no memory for them, the steps are there all the same."""
        if self._short and isinstance(steps, DeviceSteps):
            try:
                self._graphs = PromptGraphs(self.decoder, self.kv, self._short, self.sequences, steps.pool)
                if self.kv.b > self.sequences:
                    self._graphs.add_behind(most_behind(self.kv))
            except torch.OutOfMemoryError as error:
                whose = "behind prefixes " if self._graphs else ""
                error.add_note(
                    f"for graphs of prompts {whose}of up to {self._short} tokens (short={self._short}): this engine "
                    "goes on without them; make it with short=0, or fewer tokens, or give the cache a smaller budget"
                )
                raise

    def _decode(self) -> None:
        """A step for all that run, or where it cannot be done together and can apart, one for each."""
        if not self.running:
            return
        steps = self.prepare()
        try:
            self._served += self._decode_together(steps)
        except (SignpostError, ValueError):
            if not steps.any_of_them or self.decoder.ranks > 1:
                raise
            self._served += self._decode_one_by_one(steps)

    def _decode_together(self, steps: HostSteps | DeviceSteps) -> list[Generation]:
        """Queues a step of all that run and takes the tokens that have come by then; returns as `step`.

        Where queueing fails, nothing has changed.
        """
        ahead = Counter(request for flight in self._flights for request in flight.requests)
        going = {i: r for i, r in self.running.items() if len(r.tokens) + ahead[r] < r.max_new_tokens}
        if going and len(self._flights) <= steps.ahead:
            self._queue(steps, going, ahead)
        if len(self._flights) > (steps.ahead if going else 0):
            return self._land()
        return []

    def _queue(
        self, steps: HostSteps | DeviceSteps, going: dict[int, Generation], ahead: Mapping[Generation, int]
    ) -> None:
        """A step of these requests, by sequence; where that fails, nothing has changed.

        ahead: steps that are queued for each already
        """
        requests, sequences = list(going.values()), list(going)
        last = {i: None if ahead[request] else request.tokens[-1] for i, request in going.items()}
        if self._flights:  # the step before says what these go on with
            steps.keep(self._flights[-1].sequences, self._flights[-1].chosen)
        try:
            with self.kv.transaction(sequences):
                chosen = self._choose(steps.run(last), requests)
                flight = _Flight(requests, sequences, chosen, Arriving(chosen))
        except BaseException:
            for request in requests:
                request.draw_again(ahead[request])
            raise
        self._flights.append(flight)

    def _land(self) -> list[Generation]:
        """Takes the tokens of the first step that is queued: those that took part in it and have not ended since."""
        tokens = self._flights[0].arriving.wait()
        flight = self._flights.popleft()
        taking = [(r, token) for r, token in zip(flight.requests, tokens, strict=True) if r.reason is None]
        for request, token in taking:
            self._take(request, token)
        return [request for request, _ in taking]

    def _decode_one_by_one(self, steps: HostSteps | DeviceSteps) -> list[Generation]:
        """A token for every running request but those whose numbers cannot be packed: these end."""
        requests = dict(self.running)
        for i, request in requests.items():
            try:
                self._queue(steps, {i: request}, Counter())
                self._land()
            except (SignpostError, ValueError) as error:
                self._fail(request, error)
        return list(requests.values())

    def run(self) -> None:
        """Steps until everything has ended. What a request failed with is its `error`, and not raised."""
        while not self.idle:
            self.step()

    def stream(self, request: Generation) -> Iterator[int]:
        """Tokens of a request as they come; others go on meanwhile. Raises what the request failed with, and
        RequestError for another engine's."""
        self._require(request)
        return self._stream(request)

    def _stream(self, request: Generation) -> Iterator[int]:
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
        """Admits what comes next if there is room, and processes a chunk of it; returns as `step`."""
        if not (self.prompt or self.waiting):
            return []
        if not self.prompt:
            free = self.sequences - len(self.running)
            self._find_kept(free)
            if len(few := sharing(self.waiting, free, self.chunk or PADDED, self._graphs)) > 1:
                return self._process(few)
        work = self.prompt[0] if self.prompt else self.waiting[0]
        try:
            self.prompt = self.prompt or self._admit(work)
            logits = self.prompt[1].advance() if self.prompt else None
            if logits is None:
                return []
            tokens = [] if isinstance(work, Prefix) else self._choose(logits[None], [work]).tolist()
        except (SignpostError, ValueError, torch.OutOfMemoryError) as error:
            # Numbers that cannot be packed, or memory that somebody else took: this one ends, the others do not.
            return self._fail(work, error, alike=isinstance(error, CacheFullError))
        except BaseException as error:  # Ctrl-C, too: what is half in the cache cannot go on
            self._fail(work, RequestError(f"{work} was broken off: {error!r}"), alike=True)
            raise
        self.prompt = None
        if isinstance(work, Prefix):
            return []
        self._start(work, tokens[0])
        return [work]

    def _start(self, request: Generation, token: int) -> None:
        """The request's prompt is in the cache, and the model says this token."""
        assert request.sequence is not None
        self.running[request.sequence] = request
        self.reuse.begun()
        self._begun(request)
        self._take(request, token)

    def _process(self, few: list[Generation]) -> list[Generation]:
        """Admits as many of these as find room and processes their prompts in one pass; returns as `step`.

        Where that fails, they wait again, to be processed one by one.
        """
        admitted: list[Generation] = []
        try:
            for request in few:
                # For want of room one may have had to come behind less than the others.
                if admitted and request.source is not admitted[0].source:
                    break
                if not self._reserve(request, admitted):
                    break
                admitted.append(request)
            if not admitted:
                return []
            sequences = [request.sequence for request in admitted if request.sequence is not None]
            prompts = [request.fresh for request in admitted]
            source = self._source(admitted[0])
            logits = Prompts(self.decoder, self.kv, sequences, prompts, self._graphs, source).advance()
            tokens = self._choose(logits, admitted).tolist()
        except (SignpostError, ValueError, torch.OutOfMemoryError) as error:
            self._put_back(admitted or few[:1])
            if self.decoder.ranks > 1 and not isinstance(error, CacheFullError):
                raise  # other processes wait in that pass
            return []
        except BaseException:
            self._put_back(admitted)
            raise
        for request, token in zip(admitted, tokens, strict=True):
            self._start(request, token)
        return admitted

    def _put_back(self, requests: list[Generation]) -> None:
        """Requests whose prompts failed together wait again, each for itself."""
        for request in reversed(requests):
            request.apart = True
            if request.sequence is not None:
                self.kv.release(request.sequence)
                request.sequence = None
                request.draw_again()
                self.waiting.appendleft(request)

    def _admit(self, work: Generation | Prefix) -> tuple[Generation | Prefix, Prompt] | None:
        """Gives the first of those that wait a sequence and room for all of its tokens, if there are.

        A prefix is complete when its requests' turn comes: it was queued before them. Raises CacheFullError for want of
        room that no request's end can bring.
        """
        if not self._reserve(work):
            return None
        assert work.sequence is not None
        return work, Prompt(
            self.decoder, self.kv, work.sequence, work.fresh, self.chunk, self._source(work), self._graphs
        )

    @staticmethod
    def _source(work: Generation | Prefix) -> int | None:
        """The sequence that the work's tokens come behind."""
        return work.source.sequence if work.source else None

    def _find_kept(self, free: int) -> None:
        """What is kept of that with which those begin who might be admitted now."""
        for work in islice(self.waiting, free):
            if isinstance(work, Prefix):
                break
            work.kept = work.kept or self.reuse.find(work, self.running.values())

    def _reserve(self, work: Generation | Prefix, beside: Sequence[Generation] = ()) -> bool:
        """Gives the first of those that wait a sequence and room, if there are, beside those that run and others that
        were given theirs in this step; raises as `_admit`."""
        sequence = work.sequence  # a prefix has one
        if sequence is None:
            held = {request.sequence for request in (*self.running.values(), *beside)}
            sequence = next((i for i in range(self.sequences) if i not in held), None)
        if sequence is None:
            return False
        while True:
            try:
                self.kv.reserve(sequence, work.total, len(work.fresh), self._source(work))
                break
            except CacheFullError as error:
                if self.reuse.give_up():
                    continue
                if self.running or beside:
                    return False  # they will end
                if self._let_others_begin_alone(work):
                    continue
                if isinstance(work, Generation) and work.kept is not None:
                    work.begin_alone()  # what it then needs is another matter, which the next step sees to
                    return False
                raise CacheFullError(
                    f"{work}: nothing runs that could end, and the cache has no room for it beside "
                    f"{self.prefixes.names(but=work)}: drop a prefix, or give the cache a larger budget"
                ) from error
        self.waiting.popleft()
        work.sequence = sequence
        return True

    def _let_others_begin_alone(self, work: Generation | Prefix) -> bool:
        """Lets one of the others that wait not come behind a kept text, which may go then; whether there was one. One
        that the work comes behind itself stays in any case."""
        for other in self.waiting:
            if isinstance(other, Generation) and other.kept is not None and other.kept is not work.source:
                other.kept.wanted.pop(other)
                other.kept = None
                return True
        return False

    def _choose(self, logits: Tensor, requests: list[Generation]) -> Tensor:
        """A token for each row of logits, the same in all processes that share the model: int64 where these are."""
        return self.decoder.agree(choose(logits, [r.sampling for r in requests], [r.draws for r in requests]))

    def _take(self, request: Generation, token: int) -> None:
        if token == NONE:
            found = RequestError(f"{request}: the model's logits hold NaN or infinity: check its weights")
            self._fail(request, found, alike=True)
            return
        request.take(token)
        if request.reason is not None:
            self._end(request, request.reason)

    def _fail(self, work: Generation | Prefix, error: Exception, alike: bool = False) -> list[Generation]:
        """Ends a request, or a prefix and all requests that are to begin with it; returns the requests.

        alike: all processes that share the model fail so. Else the others wait for this one in a pass, and it raises.
        """
        work.error = without_frames(error)
        if isinstance(work, Generation):
            self._end(work, "failed")
            failed = [work]
        else:
            self._leave(work)
            failed = list(work.wanted)
            for request in failed:
                request.error = work.failure()
                self._end(request, "failed")
        if self.decoder.ranks > 1 and not alike:
            raise error
        return failed

    def _end(self, request: Generation, reason: Reason) -> None:
        request.reason = reason
        if request.sequence is not None:
            self.running.pop(request.sequence, None)
        if not self.running:
            self._flights.clear()  # nobody waits for these
        try:
            if reason in ("length", "stop"):
                self.reuse.keep(request)
        finally:
            self._leave(request)
            self._begun(request)

    def _begun(self, request: Generation) -> None:
        """The request needs what it comes behind no more: it has the pages, or has ended."""
        if request.kept is not None:
            request.kept.wanted.pop(request, None)
        if request.prefix is not None:
            request.prefix.wanted.pop(request, None)
            self._let_go(request.prefix)

    def _let_go(self, prefix: Prefix) -> None:
        """Frees a prefix that was dropped, if no request is still to begin with it."""
        if prefix.dropped and not prefix.wanted and prefix.sequence is not None:
            self._leave(prefix)

    def _leave(self, work: Generation | Prefix) -> None:
        """Takes a request or a prefix from wherever it is, and frees what it holds."""
        if work in self.waiting:
            self.waiting.remove(work)
        if self.prompt and self.prompt[0] is work:
            self.prompt = None
        if work.sequence is not None:
            self.kv.release(work.sequence)
            if isinstance(work, Prefix):
                del self.prefixes[work.sequence]
            work.sequence = None

    @property
    def _limit(self) -> str:
        return (
            f"a sequence of this engine holds {self.max_tokens} (max_tokens=, budget=, and the model has "
            f"{self.decoder.positions} positions)"
        )
