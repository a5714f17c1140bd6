"""Decode steps of a model over a `KVCache`, a token for each of a batch.

A decoder is any callable that turns tokens into logits and hands each layer's attention on; `runtime.hf_decoder` makes
one of a transformers model. On the GPU a decode step is captured as a CUDA graph for each size of batch. Prompts:
`runtime.prompts`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from artifacts import Bundle, Split
from runtime.cache import KVCache
from runtime.side import has_kernels
from runtime.step import StepInputs
from runtime.transfer import Arriving, to_device

Result = TypeVar("Result")

# layer, q [b, h_q, m, d], k and v [b, h_kv, m, d] after RoPE, positions [b, m], scaling -> [b, m, h_q, d]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Decoder(Protocol):
    """A model without its attention."""

    @property
    def device(self) -> torch.device:
        """Where weights and tokens live."""

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def positions(self) -> int | None:
        """The most tokens that a sequence may have; None: any number."""

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""

    @property
    def split(self) -> Split:
        """Which share of the kv heads this process attends with; a bundle's slice for it is what it needs."""

    @property
    def ranks(self) -> int:
        """Processes that share the model and do all passes together; 1 where the model is whole."""

    def agree(self, tokens: Tensor) -> Tensor:
        """The tokens that all these processes go on with, each of which calls this with its own choice, int64 [b].

        Queued on PyTorch's current stream, never waits.
        """

    def require(self, bundle: Bundle) -> None:
        """Raises BundleMismatchError for a bundle of another model."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, behind: Tensor | None = None) -> Tensor:
        """Logits float32 [b, vocabulary] behind the last of tokens int64 [b, m] at positions int64 [b, m], or behind
        token behind[row] of each row, int64 [b]."""


class HostSteps:
    """Decode steps on the CPU: the sequences that go on are the batch."""

    any_of_them = True  # some of the sequences may go on while others that hold tokens wait
    ahead = 0  # steps worth queueing before the tokens of the first of them are known

    def __init__(self, decoder: Decoder, kv: KVCache):
        self.decoder, self.kv = decoder, kv
        self._kept = torch.zeros(kv.b, dtype=torch.int64)

    def run(self, tokens: Mapping[int, int | None]) -> Tensor:
        """Appends a token to each of these sequences: logits [as many, vocabulary], in their order.

        tokens: by sequence; None: the one that was kept for it. Raises CacheFullError before anything has changed.
        """
        sequences = list(tokens)
        given = [self._kept[i] if token is None else torch.tensor(token) for i, token in tokens.items()]
        positions = torch.tensor([[self.kv.lengths[i]] for i in sequences])
        self.kv.take_step(sequences)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
            return self.kv.layers[layer].attend(q, k, v, positions, None, scaling, sequences)

        return self.decoder.forward(torch.stack(given)[:, None], positions, attend)

    def keep(self, sequences: list[int], tokens: Tensor) -> None:
        """Keeps the tokens int64 [as many] that these sequences go on with."""
        self._kept[sequences] = tokens


class DeviceSteps:
    """Decode steps on the GPU, by size of batch and length of sequences, each a CUDA graph of all layers.

    A step is of the cache's first b sequences, b the smallest size that covers those that go on. Others among them
    decode a token 0 behind what they hold, where no token is that anybody still sees (there is room for one more), and
    stay as they are. Where the kernels deal out the work of short sequences in another way, steps of short sequences
    are others.

    sizes    of batches; sequences behind the largest are in no step
    capture  False runs the same launches one by one
    """

    any_of_them = False
    ahead = 1

    def __init__(self, decoder: Decoder, kv: KVCache, sizes: Sequence[int], capture: bool = True):
        if kv.room.max_tokens is None:
            raise ValueError(
                "a captured step cannot follow a cache that grows: say the most that it holds (max_tokens=)"
            )
        self.decoder, self.kv = decoder, kv
        self.steps: dict[tuple[int, int], DeviceStep] = {}  # by sequences, and tokens of each at most
        self._kept = torch.zeros(kv.b, dtype=torch.int64, device=decoder.device)
        self._rows: tuple[list[int], Tensor] = [], self._kept  # the last sequences, and where the device has them
        inputs = kv.step_inputs(kv.b)  # of nobody yet: while a graph is tried, what the cache holds stays as it is
        self.pool = pool = torch.cuda.graph_pool_handle() if capture else None  # of all these graphs' memory
        kv.packers.reserve(max(sizes))
        self.packing: dict[int, DevicePacking] = {}  # by sequences
        for b in sorted(sizes, reverse=True):  # the largest first: smaller ones find room in its memory
            for tokens in kv.spans(b):
                self.steps[b, tokens] = DeviceStep(decoder, kv, inputs.first(b), tokens, pool, self._kept[:b])
            self.packing[b] = DevicePacking(kv, inputs, b, pool)

    def run(self, tokens: Mapping[int, int | None]) -> Tensor:
        """As `HostSteps.run`, but queued on PyTorch's current stream: never waits."""
        sequences = list(tokens)
        self.kv.take_step(sequences)
        lengths = self.kv.lengths
        step = self.step(max(tokens) + 1, max(lengths[i] for i in tokens) + 1)
        given = [(0, n + 1) for n in lengths[: step.b]]
        for i, token in tokens.items():
            given[i] = -1 if token is None else token, lengths[i] + 1
        logits = step.run(given)
        self.kv.advance(sequences)
        if filling := self.kv.filling(sequences):
            self.packing[min(b for b in self.packing if b >= len(filling))].run(filling)
        return logits[self._places(sequences)]

    def step(self, b: int, tokens: int) -> "DeviceStep":
        """Of the first b sequences, which hold at most so many tokens with the step's own."""
        return self.steps[min(size for size in self.steps if size[0] >= b and size[1] >= tokens)]

    def keep(self, sequences: list[int], tokens: Tensor) -> None:
        """As `HostSteps.keep`. One that is none is kept as 0: its sequence ends when the host hears of it."""
        self._kept[self._places(sequences)] = tokens.clamp_min(0)

    def _places(self, sequences: list[int]) -> Tensor:
        if self._rows[0] != sequences:
            self._rows = sequences, to_device(sequences, torch.int64, self._kept.device)
        return self._rows[1]


class DeviceStep:
    """The step of the first b sequences of a cache, of at most so many tokens, whose positions count from 0.

    inputs: of these; kept: tokens, int64 [b]. Pages that fill are not packed yet
    """

    def __init__(self, decoder: Decoder, kv: KVCache, inputs: StepInputs, tokens: int, pool: Any, kept: Tensor):
        self.decoder, self.kv, self.inputs, self.most, self.kept = decoder, kv, inputs, tokens, kept
        self.b = b = kept.numel()
        self._plans: dict[int, object] = {}  # by layer, of the newest pass: what is captured works in their memory
        self.tokens = torch.zeros(b, 1, dtype=torch.int64, device=decoder.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self.graph, self.logits = captured(self._pass, pool)

    def run(self, given: list[tuple[int, int]]) -> Tensor:
        """Logits [b, vocabulary] of one more token for each sequence, overwritten by the next step.

        given: the token, and the sequence's length with it; -1: the token that is kept
        """
        tokens, lengths = to_device(given, torch.int64, self.tokens.device).T
        self.tokens.copy_(torch.where(tokens < 0, self.kept, tokens)[:, None])
        self.inputs.lengths.copy_(lengths)
        if self.graph is None:
            return self._pass()
        self.graph.replay()
        return self.logits

    def _pass(self) -> Tensor:
        positions = (self.inputs.lengths - 1)[:, None].long()
        return self.decoder.forward(self.tokens, positions, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        out = torch.empty(q.shape[0], 1, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
        kernels, to = self.kv.layers[layer].step(q.shape[1]), out.transpose(1, 2)
        self._plans[layer] = kernels.run(q, k, v, self.inputs, scaling, to, self.most)
        return out


class DevicePacking:
    """Packs the pages that a step fills in at most b of a cache's sequences; inputs: of all of these."""

    def __init__(self, kv: KVCache, inputs: StepInputs, b: int, pool: Any):
        self.kv, self.inputs = kv, inputs
        self.rows = torch.full((b,), -1, dtype=torch.int32, device=inputs.lengths.device)
        self.graph = None if pool is None else captured(self._pack, pool)[0]

    def run(self, filling: list[int]) -> None:
        """Queued on PyTorch's current stream, never waits."""
        rows = filling + [-1] * (self.rows.numel() - len(filling))
        self.rows.copy_(to_device(rows, torch.int32, self.rows.device))
        if self.graph is None:
            self._pack()
        else:
            self.graph.replay()

    def _pack(self) -> None:
        self.kv.packers.step(self.inputs, self.rows)


def captured(work: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of `work`, and where it leaves its result. `work` runs once before: it loads kernels, plans.

    Both are queued on PyTorch's own stream for captures: cuBLAS keeps a work space for every stream it has seen.
    """
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool)
    stream = capture.capture_stream
    assert stream is not None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    with capture:
        out = work()
    return graph, out


def steps_of(decoder: Decoder, kv: KVCache, capture: bool = True, b: int | None = None) -> HostSteps | DeviceSteps:
    """Decode steps for a cache, where it lives: on the GPU for batches of 1, 2, 4, ... up to b.

    b: the first of the cache's sequences are those that steps may be of; others are never touched (None: all).
    """
    if not has_kernels(kv.rotation.inv_freq.device):
        return HostSteps(decoder, kv)
    b = kv.b if b is None else b
    return DeviceSteps(decoder, kv, sorted({min(1 << i, b) for i in range(b.bit_length() + 1)}), capture)


def greedy(decoder: Decoder, steps: HostSteps | DeviceSteps, tokens: Mapping[int, int]) -> Iterator[list[int]]:
    """Steps of these sequences without end, each with the likeliest token: those of each step, when they are known."""
    sequences, given, flights = list(tokens), dict[int, int | None](tokens), deque[Arriving]()
    while True:
        chosen = decoder.agree(steps.run(given).argmax(-1))
        steps.keep(sequences, chosen)
        flights.append(Arriving(chosen))
        given = dict.fromkeys(sequences)
        if len(flights) > steps.ahead:
            yield flights.popleft().wait()
