"""Prompts on their way into a `KVCache`: attention is exact, whole or in chunks, one or several in a pass of the model.

On the GPU passes over few tokens are CUDA graphs (`PromptGraphs`): to launch a model's layers takes the host several
times what they take the GPU then.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from runtime.cache import KVCache
from runtime.decoding import Decoder, captured
from runtime.intake import Intake
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
    graphs  for prompts that are whole and come behind nothing
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
        elif source is None:
            self._whole = Prompts(decoder, kv, [sequence], [self.tokens], graphs)

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
        if not self._dense:
            self._fork()
        with self.kv.checked_once() if end == len(self.tokens) else nullcontext():
            logits = self.decoder.forward(tokens, positions, self._in_chunks if self._dense else self._behind)
            self.done = end
            if end < len(self.tokens):
                return None
            if self._dense:
                self._keep()
        self._dense = []
        return logits[0]

    def _fork(self) -> None:
        if self.source is not None:
            self.kv.fork(self.source, self.sequence)

    def _keep(self) -> None:
        """The work space's numbers go into the sequence."""
        self._fork()
        if self.source is None:
            intake = Intake(self.kv, [self.sequence], [len(self.tokens)])
            for layer, (keys, values) in enumerate(self._dense):
                intake.give(layer, keys, values)
            intake.finish()
            return
        for layer, (keys, values) in enumerate(self._dense):
            self.kv.layers[layer].append(self.sequence, keys[0], values[0])

    def _behind(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        return self.kv.layers[layer].attend(q, k, v, positions, None, scaling, [self.sequence])

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
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, sequences: Sequence[int], prompts: Sequence[Sequence[int]],
        graphs: "PromptGraphs | None" = None,
    ):  # fmt: skip
        self.decoder, self.kv, self.sequences, self.prompts = decoder, kv, list(sequences), [list(p) for p in prompts]
        self.graphs = graphs

    def advance(self) -> Tensor:
        """Logits [prompts, vocabulary] behind each of them. Raises as `Prompt.advance`: release the sequences."""
        counts = [len(prompt) for prompt in self.prompts]
        intake = Intake(self.kv, self.sequences, counts)
        graph = self.graphs.fitting(len(counts), max(counts)) if self.graphs else None
        with self.kv.checked_once():
            logits = graph.run(self.prompts, intake) if graph else self._pass(intake, counts)
            intake.finish()
        return logits

    def _pass(self, intake: Intake, counts: list[int]) -> Tensor:
        longest, device = max(counts), self.decoder.device
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in self.prompts]).to(device)
        positions = torch.arange(longest, device=device).expand(len(counts), -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
            out = self.kv.layers[layer].prompt(q, k, v, scaling).transpose(1, 2)
            intake.give(layer, k, v)
            return out

        return self.decoder.forward(tokens, positions, attend, to_device([n - 1 for n in counts], torch.int64, device))


class PromptGraphs:
    """Passes over prompts of few tokens on the GPU, each a CUDA graph of the model, without packing.

    Graphs are of sizes (`graph_sizes`); prompts are filled up to one. Keys and values of all layers, which are packed
    behind the pass, have one place for all graphs.

    tokens     of a pass at most, with what fills prompts up
    sequences  prompts of a pass at most
    pool       of the graphs' memory
    """

    def __init__(self, decoder: Decoder, kv: KVCache, tokens: int, sequences: int, pool: Any):
        self.tokens = tokens
        numbers, sizes = prompt_numbers(decoder, kv, tokens), graph_sizes(tokens, sequences)
        # The largest first: smaller ones find room in its memory.
        made = [(b, n, PromptGraph(decoder, kv, b, n, numbers, pool)) for b, n in reversed(sizes)]
        self.graphs = {(b, n): graph for b, n, graph in reversed(made)}

    def fitting(self, rows: int, longest: int) -> "PromptGraph | None":
        """The smallest for so many prompts, the longest of which has so many tokens; None if there is none."""
        return next((graph for (b, n), graph in self.graphs.items() if b >= rows and n >= longest), None)


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
    """The pass over b prompts of at most n tokens; numbers: where layers leave keys and values [b * n, h_kv, d]."""

    def __init__(
        self, decoder: Decoder, kv: KVCache, b: int, n: int, numbers: Sequence[tuple[Tensor, Tensor]], pool: Any
    ):
        self.decoder, self.kv = decoder, kv
        self.tokens = torch.zeros(b, n, dtype=torch.int64, device=decoder.device)
        self.behind = torch.zeros(b, dtype=torch.int64, device=decoder.device)
        self.positions = torch.arange(n, device=decoder.device).expand(b, -1)
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
        self.behind.copy_(to_device([len(row) - 1 for row in rows], torch.int64, device))
        self.graph.replay()
        for layer, (keys, values) in enumerate(self.numbers):
            intake.give(layer, keys[: len(prompts)], values[: len(prompts)], stays=True)
        return self.logits[: len(prompts)].clone()  # other graphs of the pool, a decode step's too, may write there

    def _pass(self) -> Tensor:
        return self.decoder.forward(self.tokens, self.positions, self._attend, self.behind)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        keys, values = self.numbers[layer]
        keys.copy_(k)
        values.copy_(v)
        return self.kv.layers[layer].prompt(q, k, v, scaling).transpose(1, 2)
