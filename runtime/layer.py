"""What all layers of a cache do alike: one pass at a time, attention first, then the new tokens are kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from artifacts import ModelFingerprint
from runtime.exact import causal_attention
from runtime.room import Room
from runtime.side import Side, has_kernels
from runtime.step import LayerStep
from runtime.units import Scoring


class CacheLayer(ABC):
    """Cache of one layer for `b` sequences. Query heads h_q = g * h_kv; tensors as transformers hands them out.

    window, softcap: of this layer's attention, as in `runtime.exact.causal_attention`.
    """

    def __init__(self, model: ModelFingerprint, layer: int, room: Room):
        self.room, self.device = room, room.device
        self.lengths, self.offsets = [0] * room.b, [0] * room.b
        self.window, self.softcap = model.window(layer), model.softcap
        self._step: LayerStep | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied cache loads its kernels anew: these look at the memory of this one."""
        return self.__dict__ | {"_step": None}

    @property
    def scoring(self) -> Scoring:
        """Window and softcap, as kernels take them."""
        return Scoring(self.window, self.softcap)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Keys and values that are packed."""
        return ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float,
        sequences: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of m new tokens over the cache and themselves; then they are appended.

        q [b, h_q, m, d], k and v [b, h_kv, m, d] after RoPE; positions int64 [b or 1, m]; valid bool [b, m] marks real
        tokens (None: all are); sequences: which ones these are (None: all, in order).
        Returns [b, m, h_q, d] in q's dtype, zero in rows that are not valid.
        Raises ValueError where a sequence's positions do not follow each other and CacheFullError where it would
        outgrow the reserve or the budget, both before anything has changed. On a GPU a token for every sequence is a
        step of the page kernels.
        """
        b, m = q.shape[0], q.shape[2]
        stepping = m == 1 and valid is None and sequences is None and has_kernels(self.device)
        if stepping and any(self.lengths):
            _, starts = self.room.admit(self.lengths, self.offsets, positions, None, list(range(len(self.lengths))), 1)
            return self._device_step(q, k, v, starts, scaling)
        chosen = list(range(len(self.lengths)) if sequences is None else sequences)
        rows, starts = self.room.admit(self.lengths, self.offsets, positions, valid, chosen, m)
        if all(row is None for row in rows) and not any(self.lengths[i] for i in chosen):
            out = self.prompt(q, k, v, scaling).transpose(1, 2)
            for row, i in enumerate(chosen):
                self._append(i, k[row], v[row], starts[row])
            return out
        out = q.new_zeros(b, m, q.shape[1], q.shape[3])
        for row, i in enumerate(chosen):
            real = torch.arange(m) if rows[row] is None else rows[row]
            assert real is not None
            if not real.numel():
                continue
            real = real.to(q.device)
            qi, ki, vi = q[row][:, real], k[row][:, real], v[row][:, real]
            out[row, real] = self._attend_one(i, qi, ki, vi, scaling).transpose(0, 1).to(out.dtype)
            self._append(i, ki, vi, starts[row])
        return out

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """This layer's attention in full precision, nothing cached: as `causal_attention`."""
        return causal_attention(q, k, v, scaling, self.window, self.softcap)

    def attend_behind(self, sequence: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention over a sequence and k, v [1, h_kv, n, d] behind it of q [1, h_q, m, d], the last m of these n.

        Nothing is kept, the sequence stays as it is. Returns [1, m, h_q, d] in q's dtype.
        """
        return self._attend_one(sequence, q[0], k[0], v[0], scaling).transpose(0, 1)[None].to(q.dtype)

    def append(self, sequence: int, k: Tensor, v: Tensor, offset: int = 0) -> None:
        """Appends k and v [h_kv, m, d], attended elsewhere. Raises as `attend`; offset: position of token 0."""
        self.room.take({sequence: self.lengths[sequence] + k.shape[1]})
        self._append(sequence, k, v, self.offsets[sequence] if self.lengths[sequence] else offset)

    def append_prompts(self, sequences: Sequence[int], k: Tensor, v: Tensor, counts: Sequence[int]) -> None:
        """Appends to each of these sequences, empty or forks of one, the first counts[row] tokens of its row of k, v
        [rows, h_kv, n, d], attended elsewhere. Raises as `append`."""
        for row, (i, n) in enumerate(zip(sequences, counts, strict=True)):
            self.append(i, k[row, :, :n], v[row, :, :n])

    def step(self, h_q: int) -> LayerStep:
        """The kernels of a decode step on the GPU, loaded once."""
        if self._step is None:
            self._step = self._make_step(h_q)
        return self._step

    @abstractmethod
    def _make_step(self, h_q: int) -> LayerStep:
        """Loads them."""

    def _device_step(self, q: Tensor, k: Tensor, v: Tensor, starts: list[int], scaling: float) -> Tensor:
        """One token for every sequence, on the page kernels."""
        self.offsets = list(starts)
        inputs = self.room.inputs([n + 1 for n in self.lengths], self.offsets)
        out, most = torch.empty_like(q.transpose(1, 2)), max(self.lengths) + 1
        self.step(q.shape[1]).run(q, k, v, inputs, scaling, out.transpose(1, 2), self.room.span(most))
        self.advance(range(len(self.lengths)))
        return out

    def advance(self, sequences: Iterable[int]) -> None:
        """Counts a token that a device step has appended to each of these sequences."""
        for i in sequences:
            self.lengths[i] += 1

    @abstractmethod
    def _attend_one(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [h_q, m, d], the last of k and v [h_kv, n, d] behind sequence i, over it and these -> [h_q, m, d]."""

    @abstractmethod
    def _append(self, i: int, k: Tensor, v: Tensor, offset: int) -> None:
        """Appends k and v [h_kv, m, d] to sequence i: both or, if one cannot be packed, neither."""

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences, in this order; `KVCache.select` does the tables."""
        self.lengths = [self.lengths[i] for i in sequences]
        self.offsets = [self.offsets[i] for i in sequences]

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the first n tokens of another; `KVCache.fork` does the tables."""
        self.lengths[sequence], self.offsets[sequence] = n, self.offsets[source]

    def rewind(self, sequence: int, n: int) -> None:
        """Forgets the newest token of a sequence, if it holds more than n; `KVCache.transaction` does the tables."""
        self.lengths[sequence] = n

    def release(self, sequence: int) -> None:
        """Forgets a sequence; `KVCache.release` does the tables."""
        self.lengths[sequence] = self.offsets[sequence] = 0
