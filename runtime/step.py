"""A decode step of one token for each sequence on the GPU: the same launches every time, so it can be captured. And the
packing of many sides at once, behind steps and for prompts.

What changes from step to step (lengths, page ids, where a token is written) is read on the device.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor

from artifacts import Format
from runtime.attention import PagedAttention, PagedSide, Step
from runtime.intake import PromptRows
from runtime.keep import keep
from runtime.pack import Packer
from runtime.side import Side
from runtime.transfer import to_device
from runtime.units import Sharing


class StepInputs:
    """Lengths and positions of the first `b` of a cache's sequences, on the device.

    lengths  int32 [b], cached tokens with the step's own; 0: a sequence of nobody, of which a step neither reads nor
             writes anything
    offsets  int32 [b], position of token 0
    """

    def __init__(self, b: int, device: torch.device):
        self.lengths = torch.zeros(b, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(b, dtype=torch.int32, device=device)

    def first(self, b: int) -> Self:
        """Those of the first b sequences, at the same addresses."""
        found = copy(self)
        found.lengths, found.offsets = self.lengths[:b], self.offsets[:b]
        return found

    def set(self, lengths: list[int], offsets: list[int]) -> None:
        """From the host: lengths with the new token."""
        both = to_device([lengths, offsets], torch.int32, self.lengths.device)
        self.lengths.copy_(both[0])
        self.offsets.copy_(both[1])


class Kept(Protocol):
    """Keys or values of a layer as steps take them."""

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What kernels read of it. As long as these are the same tensors, what is cut out of them is where it was."""

    def paged(self, b: int) -> PagedSide:
        """Of the first b sequences."""


class LayerStep:
    """Attention of one layer over what it keeps."""

    def __init__(self, kernels: PagedAttention, key: Kept, value: Kept):
        self.kernels, self.key, self.value = kernels, key, value
        self._plans: dict[tuple[object, ...], Step] = {}
        self._memory: tuple[Tensor, ...] = ()  # of the sides, as all those plans read it
        self._newest: tuple[tuple[object, ...], Step] | None = None  # what was asked for, and the plan

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs, scaling: float, out: Tensor, tokens: int
    ) -> Step:
        """Writes the new tokens k, v [b, h_kv, 1, d], attends q [b, h_q, 1, d] into out alike.

        Returns the plan, whose memory the kernels work in: who captures this in a graph must keep it. tokens: as of
        `PagedAttention.plan`. Pages that fill are still to be packed, before the next step. Queued on PyTorch's current
        stream, never waits.
        """
        step = self.plan(inputs, scaling, tokens)
        step.write(k.to(self.kernels.dtype), v.to(self.kernels.dtype))
        step.run(q, out, follows=True)
        return step

    def sharing(self, b: int, tokens: int) -> Sharing:
        """How a step of b sequences of at most so many tokens is dealt out."""
        return self.kernels.sharing(self.kernels.g, b, tokens)

    def plan(self, inputs: StepInputs, scaling: float, tokens: int) -> Step:
        """The step's plan; made anew where memory has moved. Also loads kernels, so call it before a capture."""
        # Layers that transformers runs ask in every step: that nothing has moved must be quick to see. Tensors that are
        # held here are told by their identity: nothing else can be in their place.
        memory = *self.key.memory, *self.value.memory
        asked = inputs, scaling, tokens, *map(id, memory)
        if self._newest is None or self._newest[0] != asked:
            self._newest = asked, self._plan(inputs, memory, scaling, tokens)
        return self._newest[1]

    def _plan(self, inputs: StepInputs, memory: tuple[Tensor, ...], scaling: float, tokens: int) -> Step:
        if len(memory) != len(self._memory) or any(x is not y for x, y in zip(memory, self._memory, strict=True)):
            self._memory = memory
            self._plans.clear()  # they would hold memory that nobody uses any more
        b = inputs.lengths.numel()
        sides = self.key.paged(b), self.value.paged(b)
        # All that a plan holds on to: an allocator may hand out an address again, for one of them.
        tensors = (inputs.lengths, inputs.offsets, *(x for side in sides for x in vars(side).values()))
        key = (scaling, self.sharing(b, tokens), *((x.data_ptr(), x.shape, x.stride()) for x in tensors))
        if key not in self._plans:
            if len(self._plans) >= 16:  # of batch sizes in use
                self._plans.clear()
            self._plans[key] = self.kernels.plan(*sides, inputs.lengths, inputs.offsets, 1, scaling, tokens)
        return self._plans[key]


class SidePackers:
    """Packs the pages that a step of all layers or prompts have filled: sides that are alike in one launch, so that a
    step in which no page fills pays for few."""

    def __init__(self, sides: Iterable[Side]):
        alike: dict[object, list[Side]] = {}
        for side in sides:
            alike.setdefault((side.geometry, side.rotation is None), []).append(side)
        self._groups = [
            (Packer([side.codec for side in group], group[0].rotation, group[0].buffer.dtype), group)
            for group in alike.values()
        ]

    def reserve(self, b: int) -> None:
        """Work space for steps of b sequences; to be called before one is captured."""
        for packer, _ in self._groups:
            packer.reserve(b)

    def step(self, inputs: StepInputs, rows: Tensor | None = None) -> None:
        """Packs the pages that the newest tokens have filled. Queued on PyTorch's current stream, never waits.

        rows: int32 [any number], the sequences to look at, each once; below 0: none. None: all of them. What it costs
        goes by their number.
        """
        lengths, offsets = inputs.lengths, inputs.offsets
        if rows is not None:
            there, rows = rows >= 0, rows.clamp_min(0)
            lengths, offsets = lengths[rows] * there, offsets[rows]
        for packer, group in self._groups:
            pack(packer, group, lengths, offsets, rows)

    def prompts(self, rows_of: Callable[[Format], PromptRows], given: Mapping[Side, Tensor]) -> None:
        """Packs and keeps x [rows, n, h_kv, d] of some of the sides; the tables hold their ids.

        rows_of: where rows go in sides of a format. Queued on PyTorch's current stream, never waits. Numbers that
        cannot be packed are told by `Packer.check`.
        """
        for packer, group in self._groups:
            some = [i for i, side in enumerate(group) if side in given]
            if not some:
                continue
            sides, first = [group[i] for i in some], group[some[0]]
            numbers, to = [given[side].to(side.buffer.dtype) for side in sides], rows_of(first.format)
            pools = [side.pool for side in sides]
            rings = None if to.source is None else [side.window[to.source : to.source + 1] for side in sides]
            for pages, (rows, sequences) in to.packed.items():
                segments = None if first.segments is None else first.segments[sequences]
                offsets, behind = to.offsets[: len(rows)], (to.first_page, to.first_token, rings)
                packer.prompts(some, pools, first.table[sequences], numbers, pages, offsets, segments, rows, *behind)
            keep([(x, side.buffer) for x, side in zip(numbers, sides, strict=True)], to.exact)
            keep([(side.buffer[None], side.buffer) for side in sides], to.shared)
            for side in sides:
                for sequence, pages in to.used.items():
                    side.used[sequence] = pages

    @property
    def packers(self) -> list[Packer]:
        """One for each kind of side."""
        return [packer for packer, _ in self._groups]


def pack(packer: Packer, sides: list[Side], lengths: Tensor, offsets: Tensor, rows: Tensor | None = None) -> None:
    """Packs the pages that the newest tokens have filled of sides that are alike: their tables hold the same ids.

    lengths, offsets, rows: as of `SidePackers.step`. Queued on PyTorch's current stream, never waits.
    """
    first, some = sides[0], slice(lengths.numel()) if rows is None else rows
    pools, windows = [side.pool for side in sides], [side.window for side in sides]
    segments = None if first.segments is None else first.segments[some]
    packer.step(pools, first.table[some], windows, lengths, 1, offsets, segments, rows)
