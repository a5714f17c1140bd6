"""Prompts on their way into a `KVCache`: attention is exact, whole or in chunks, one or several in a pass of the model.

On the GPU passes over few tokens are CUDA graphs (`PromptGraphs`): to launch a model's layers takes the host several
times what they take the GPU then.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from runtime.behind import Behind, captures_behind
from runtime.cache import KVCache
from runtime.decoding import Attend, Decoder, captured
from runtime.intake import Intake
from runtime.side import has_kernels
from runtime.transfer import to_device

SHORT = 512  # tokens of an engine's largest graph, unless it is told otherwise
LEAST = 128  # tokens of a graph: fewer take a GPU as long, which reads the same weights
ROWS = (1, 2, 4, 8)  # of a graph
SHORTEST = 32  # tokens of a row of several


class Prompt:
    """A prompt on its way into a sequence of a cache, `chunk` tokens a pass (None: all at once).

    Attention is exact: until the prompt is complete its keys and values stay in full precision, in a work space of
    their own (`nbytes`); then they are packed. One pass needs no such work space: layers are packed as they are done,
    on a GPU some at a time (`runtime.intake`), or have a place of their own (`PromptGraphs`). Pages are the same either
    way.

    source  a sequence that these tokens come behind, attended as it is cached: `sequence` becomes a fork of it in the
            last pass, and is empty until then. It must neither change nor end before that
    graphs  for prompts that are whole
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, sequence: int, tokens: Sequence[int], chunk: int | None,
        source: int | None = None, graphs: "PromptGraphs | None" = None,
    ):  # fmt: skip
        self.decoder, self.kv, self.sequence, self.tokens, self.done = decoder, kv, sequence, list(tokens), 0
        self.source, self.start = source, 0 if source is None else kv.lengths[source]
        self.chunk = len(tokens) if chunk is None else min(chunk, len(tokens))
        self._whole: Prompts | None = None
        self._dense: list[tuple[Tensor, Tensor]] = []
        if self.chunk < len(tokens):
            numbers = prompt_numbers(decoder, kv, len(tokens))
            self._dense = [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in numbers]
        else:
            self._whole = Prompts(decoder, kv, [sequence], [self.tokens], graphs, source)

    @property
    def nbytes(self) -> int:
        """Bytes of the work space."""
        return sum(x.nbytes for pair in self._dense for x in pair)

    def advance(self) -> Tensor | None:
        """Processes the next chunk. Logits [vocabulary] behind the prompt when it is in the cache, else None.

        Raises ValueError or KernelError for numbers that cannot be packed: release the sequence.
        """
        end = min(self.done + self.chunk, len(self.tokens))
        if self._whole:
            self.done = end
            return self._whole.advance()[0]
        tokens = torch.tensor([self.tokens[self.done : end]]).to(self.decoder.device)
        positions = torch.arange(self.start + self.done, self.start + end, device=self.decoder.device)[None]
        with self.kv.checked_once() if end == len(self.tokens) else nullcontext():
            logits = self.decoder.forward(tokens, positions, self._in_chunks)
            self.done = end
            if end < len(self.tokens):
                return None
            self._keep()
        self._dense = []
        return logits[0]

    def _keep(self) -> None:
        """The work space's numbers go into the sequence."""
        intake = Intake(self.kv, [self.sequence], [len(self.tokens)], self.source)
        for layer, (keys, values) in enumerate(self._dense):
            intake.give(layer, keys, values)
        intake.finish()

    def _in_chunks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        end = self.done + k.shape[2]
        keys, values = self._dense[layer]
        keys[:, :, self.done : end], values[:, :, self.done : end] = k, v
        keys, values = keys[:, :, :end], values[:, :, :end]
        if self.source is not None:
            return self.kv.layers[layer].attend_behind(self.source, q, keys, values, scaling)
        return self.kv.layers[layer].prompt(q, keys, values, scaling).transpose(1, 2)


class Prompts:
    """Several prompts, each whole into an empty sequence, in one pass: what it costs beside arithmetic is paid once.

    Shorter ones are filled up behind, where nothing of theirs looks: attention is causal. graphs: for those that fit.
    source: as of `Prompt`, of all of them.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, sequences: Sequence[int], prompts: Sequence[Sequence[int]],
        graphs: "PromptGraphs | None" = None, source: int | None = None,
    ):  # fmt: skip
        self.decoder, self.kv, self.sequences, self.prompts = decoder, kv, list(sequences), [list(p) for p in prompts]
        self.graphs, self.source = graphs, source
        self.start = 0 if source is None else kv.lengths[source]

    def advance(self) -> Tensor:
        """Logits [prompts, vocabulary] behind each of them. Raises as `Prompt.advance`: release the sequences."""
        counts = [len(prompt) for prompt in self.prompts]
        graph = self.graphs.fitting(len(counts), max(counts), self.start) if self.graphs else None
        with self.kv.checked_once():
            if self.source is not None and not has_kernels(self.kv.room.device):
                return self._forked(counts, self.source)
            intake = Intake(self.kv, self.sequences, counts, self.source)
            logits = graph.run(self.prompts, intake) if graph else self._pass(intake, counts)
            intake.finish()
        return logits

    def _pass(self, intake: Intake, counts: list[int]) -> Tensor:
        behind, longest = None, max(counts)
        positions = torch.arange(longest, device=self.decoder.device)
        if self.source is not None:
            behind = Behind(self.kv, self.start)
            behind.set(self.source)
            positions = behind.begin(len(counts), longest)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
            out = attended(self.kv, behind, layer, q, k, v, scaling)
            intake.give(layer, k, v)
            return out

        return self._forward(counts, positions, attend)

    def _forked(self, counts: list[int], source: int) -> Tensor:
        """Forks of the source, each of which attends to itself as it is packed."""
        for i in self.sequences:
            self.kv.fork(source, i)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
            return self.kv.layers[layer].attend(q, k, v, positions, real, scaling, self.sequences)

        positions = self.kv.layers[0].offsets[source] + self.start + torch.arange(max(counts))
        return self._forward(counts, positions, attend)

    def _forward(self, counts: list[int], positions: Tensor, attend: Attend) -> Tensor:
        longest, device = len(positions), self.decoder.device
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in self.prompts]).to(device)
        last, everyones = to_device([n - 1 for n in counts], torch.int64, device), positions.expand(len(counts), -1)
        return self.decoder.forward(tokens, everyones, attend, last)


def attended(kv: KVCache, behind: Behind | None, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Attention of prompts q [b, h_q, m, d], nothing cached: [b, m, h_q, d]."""
    if behind is not None:
        return behind.attend(layer, q, k, v, scaling)
    return kv.layers[layer].prompt(q, k, v, scaling).transpose(1, 2)


class PromptGraphs:
    """Passes over prompts of few tokens on the GPU, each a CUDA graph of the model, without packing.

    Graphs are of sizes (`graph_sizes`); prompts are filled up to one. Keys and values of all layers, which are packed
    behind the pass, have one place for all graphs.

    tokens     of a pass at most, with what fills prompts up
    sequences  prompts of a pass at most
    pool       of the graphs' memory
    """

    def __init__(self, decoder: Decoder, kv: KVCache, tokens: int, sequences: int, pool: Any):
        self.decoder, self.kv, self.tokens, self.sequences, self._pool = decoder, kv, tokens, sequences, pool
        self._numbers = prompt_numbers(decoder, kv, tokens)
        self.behind: Behind | None = None
        self.graphs = self._made(None)

    def add_behind(self, tokens: int) -> None:
        """As many graphs for prompts that come behind a sequence of at most so many tokens, with room for one layer's
        numbers of it in full precision; none where they cannot be captured (`captures_behind`).

        Raises ValueError for a cache that grows: these graphs know where its pages are.
        """
        if self.kv.room.max_tokens is None:
            raise ValueError("graphs cannot follow a cache that grows: say the most that it holds (max_tokens=)")
        if captures_behind(self.kv):
            behind = Behind(self.kv, tokens)
            self.graphs |= self._made(behind)
            self.behind = behind

    def _made(self, behind: Behind | None) -> dict[tuple[int, int, bool], "PromptGraph"]:
        """By rows, tokens of each, and whether they come behind a sequence."""
        # The largest first: smaller ones find room in its memory.
        made = [
            ((b, n, behind is not None), PromptGraph(self.decoder, self.kv, b, n, self._numbers, self._pool, behind))
            for b, n in reversed(graph_sizes(self.tokens, self.sequences))
        ]
        return dict(reversed(made))

    def fitting(self, rows: int, longest: int, before: int = 0) -> "PromptGraph | None":
        """The smallest for so many prompts, the longest of which has so many tokens, that come behind so many; None if
        there is none."""
        if before and (self.behind is None or before > self.behind.tokens):
            return None
        fit = (
            graph for (b, n, kind), graph in self.graphs.items() if b >= rows and n >= longest and kind == bool(before)
        )
        return next(fit, None)


def prompt_numbers(decoder: Decoder, kv: KVCache, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Room for keys and values [tokens, h_kv, d] of each layer, in full precision."""
    model = kv.bundle.model
    size = (tokens, model.h_kv, model.d)
    return [
        (torch.empty(size, dtype=decoder.dtype, device=decoder.device),
         torch.empty(size, dtype=decoder.dtype, device=decoder.device))
        for _ in range(model.l)
    ]  # fmt: skip


def graph_sizes(tokens: int, sequences: int) -> list[tuple[int, int]]:
    """Rows, and tokens of each, of the graphs for passes of at most so many tokens, those of fewest tokens first.

    128, 192, 256, 384, 512, ... tokens of one prompt, every other of these shared by 2, 4 and 8, or as many as there
    are sequences.
    """
    totals = [n for i in range(tokens.bit_length()) for n in (LEAST << i, LEAST * 3 // 2 << i) if n < tokens]
    found = {(1, n): None for n in (*totals, tokens)}
    for b in ROWS[1:]:
        if b < 2 * sequences:
            rows = min(b, sequences)
            whole = (n // rows for n in (*totals[::2], tokens))
            found |= {(rows, n): None for n in whole if n >= SHORTEST}
    return sorted(found, key=lambda size: (size[0] * size[1], size))


class PromptGraph:
    """The pass over b prompts of at most n tokens.

    numbers: where layers leave keys and values [b * n, h_kv, d]. behind: what the prompts come behind
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, b: int, n: int, numbers: Sequence[tuple[Tensor, Tensor]], pool: Any,
        behind: Behind | None = None,
    ):  # fmt: skip
        self.decoder, self.kv, self.behind = decoder, kv, behind
        self.tokens = torch.zeros(b, n, dtype=torch.int64, device=decoder.device)
        self.last = torch.zeros(b, dtype=torch.int64, device=decoder.device)
        self.numbers = [
            (keys[: b * n].unflatten(0, (b, n)).transpose(1, 2), values[: b * n].unflatten(0, (b, n)).transpose(1, 2))
            for keys, values in numbers
        ]
        self.graph, self.logits = captured(self._pass, pool)

    def run(self, prompts: Sequence[list[int]], intake: Intake) -> Tensor:
        """Logits [prompts, vocabulary] behind each; keys and values go to the intake, which must be finished before the
        next pass."""
        b, n = self.tokens.shape
        device, rows = self.tokens.device, [*prompts, *[[0]] * (b - len(prompts))]
        self.tokens.copy_(to_device([row + [0] * (n - len(row)) for row in rows], torch.int64, device))
        self.last.copy_(to_device([len(row) - 1 for row in rows], torch.int64, device))
        if self.behind is not None:
            assert intake.source is not None
            self.behind.set(intake.source)
        self.graph.replay()
        for layer, (keys, values) in enumerate(self.numbers):
            intake.give(layer, keys[: len(prompts)], values[: len(prompts)], stays=True)
        return self.logits[: len(prompts)].clone()  # other graphs of the pool, a decode step's too, may write there

    def _pass(self) -> Tensor:
        b, n = self.tokens.shape
        positions = self.behind.begin(b, n) if self.behind else torch.arange(n, device=self.tokens.device)
        return self.decoder.forward(self.tokens, positions.expand(b, -1), self._attend, self.last)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        keys, values = self.numbers[layer]
        keys.copy_(k)
        values.copy_(v)
        return attended(self.kv, self.behind, layer, q, k, v, scaling)
