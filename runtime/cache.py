"""The compressed KV cache: sinks and newest tokens in full precision, everything between them in packed pages.

One query step is `attend`: exact attention over what is cached and the step's own tokens, then the tokens are appended.
A number is quantized once, when its page fills, and never again. Sequences own lists of page ids, so batches of
different lengths, reordering, sharing and freeing are edits of tables (`runtime.pages`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from artifacts import Bundle, Format, PageGeometry
from artifacts.fields import SideName
from runtime.codec import Codec
from runtime.exact import causal_attention
from runtime.pages import CacheFullError
from runtime.room import Room
from runtime.rope import Rotation
from runtime.side import Side, filling, has_kernels
from runtime.step import LayerStep, StepInputs

__all__ = ["CacheFullError", "KVCache", "LayerCache"]

FUSED_QUERIES = (
    8  # up to this many new tokens are attended by the CPU's page kernels; more make decoding to dense cheaper
)


class LayerCache:
    """Cache of one layer for `b` sequences. Query heads h_q = g * h_kv; tensors as transformers hands them out."""

    def __init__(self, bundle: Bundle, layer: int, room: Room, dtype: torch.dtype, rotation: Rotation):
        formats, model, b = bundle.layers[layer], bundle.model, room.b
        self.room, self.device, self._turning = room, rotation.inv_freq.device, rotation
        self.lengths, self.offsets = [0] * b, [0] * b
        self.rotation = rotation if formats.key.domain == "pre_rope" else None  # of packed keys

        def side(name: SideName, fmt: Format, turning: Rotation | None) -> Side:
            geometry = PageGeometry.of(fmt, model.h_kv, model.d, name)
            codec = Codec(geometry, bundle.side_tensors(layer, name), self.device)
            return room.join(Side(codec, turning, room.tables[filling(fmt)], room.next_index(fmt), b, dtype))

        self.key, self.value = side("key", formats.key, self.rotation), side("value", formats.value, None)
        self._step: LayerStep | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied cache loads its kernels anew: these look at the memory of this one."""
        return self.__dict__ | {"_step": None}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.key.nbytes + self.value.nbytes

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float,
        sequences: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of m new tokens over the cache and themselves; then they are appended.

        q [b, h_q, m, d], k and v [b, h_kv, m, d] after RoPE; positions int64 [b or 1, m]; valid bool [b, m] marks real
        tokens (None: all are); sequences: which ones these are (None: all, in order).
        Returns [b, m, h_q, d] in q's dtype, zero in rows that are not valid.
        Raises ValueError where a sequence's positions do not follow each other and CacheFullError where it would
        outgrow the reserve or the budget, both before anything has changed.
        """
        b, m = q.shape[0], q.shape[2]
        chosen = list(range(len(self.lengths)) if sequences is None else sequences)
        rows, starts = self.room.admit(self.lengths, self.offsets, positions, valid, chosen, m)
        if all(row is None for row in rows):
            if not any(self.lengths[i] for i in chosen):
                out = causal_attention(q, k, v, scaling).transpose(1, 2)
                for row, i in enumerate(chosen):
                    self._append(i, k[row], v[row], starts[row])
                return out
            if m == 1 and sequences is None and has_kernels(self.device):
                return self._device_step(q, k, v, starts, scaling)
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

    def append(self, sequence: int, k: Tensor, v: Tensor, offset: int = 0) -> None:
        """Appends k and v [h_kv, m, d], attended elsewhere. Raises as `attend`; offset: position of token 0."""
        self.room.take({sequence: self.lengths[sequence] + k.shape[1]})
        self._append(sequence, k, v, self.offsets[sequence] if self.lengths[sequence] else offset)

    def _append(self, i: int, k: Tensor, v: Tensor, offset: int) -> None:
        """Appends k and v [h_kv, m, d] to sequence i: both or, if one cannot be packed, neither."""
        n = self.lengths[i]
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        try:
            self.key.pack(i, k, n, offset)
            self.value.pack(i, v, n, offset)
        except Exception:
            self.room.trim()
            raise
        self.key.append(i, k, n)
        self.value.append(i, v, n)
        self.offsets[i], self.lengths[i] = offset, n + k.shape[0]

    def step(self, h_q: int) -> LayerStep:
        """The kernels of a decode step on the GPU, loaded once."""
        if self._step is None:
            self._step = LayerStep(self.key, self.value, self._turning, h_q)
        return self._step

    def _device_step(self, q: Tensor, k: Tensor, v: Tensor, starts: list[int], scaling: float) -> Tensor:
        """One token for every sequence, on the page kernels."""
        self.offsets = list(starts)
        inputs = self.room.inputs([n + 1 for n in self.lengths], self.offsets)
        out = torch.empty_like(q.transpose(1, 2))
        step = self.step(q.shape[1])
        step.run(q, k, v, inputs, scaling, out.transpose(1, 2))
        self.advance(range(len(self.lengths)))
        if step.on_host:
            for i, n in enumerate(self.lengths):
                step.pack_factors(i, n, self.offsets[i])
        return out

    def advance(self, sequences: Sequence[int]) -> None:
        """Counts a token that a device step has appended to each of these sequences."""
        for i in sequences:
            self.lengths[i] += 1
            for side in (self.key, self.value):
                side.used[i] = side.format.window.pages(self.lengths[i], side.format.t)

    def _attend_one(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [h_q, m, d], k and v [h_kv, m, d] of sequence i -> [h_q, m, d]."""
        m = q.shape[1]
        if m > FUSED_QUERIES or has_kernels(self.device) or not self.lengths[i]:
            return self._attend_dense(i, q, k, v, scaling)
        h_kv, d = k.shape[0], k.shape[2]
        rows = q.float().reshape(h_kv, -1, d)  # query heads of a kv head are neighbours: [h_kv, g * m, d]
        weights = (self._scores(i, rows, k.float(), m) * scaling).softmax(-1)
        return self._values(i, weights, v.float()).reshape(q.shape)

    def _scores(self, i: int, rows: Tensor, k: Tensor, m: int) -> Tensor:
        """Unscaled scores float32 [h_kv, g * m, n + m] of all cached and the m new tokens, causal."""
        sinks, newest = (x.float().permute(1, 2, 0) for x in self.key.exact(i, self.lengths[i]))
        fresh = (rows @ k.transpose(1, 2)).unflatten(1, (-1, m))
        later = torch.ones(m, m, dtype=torch.bool).triu(1)
        fresh = fresh.masked_fill(later, -torch.inf).flatten(1, 2)
        return torch.cat([rows @ sinks, self._paged_scores(i, rows), rows @ newest, fresh], -1)

    def _paged_scores(self, i: int, rows: Tensor) -> Tensor:
        pages = self.key.pages_of(i)
        if not pages.numel():
            return rows.new_empty(*rows.shape[:2], 0)
        position = self.offsets[i] + self.key.format.window.sinks
        return self.key.reader.scores(rows, pages, self.rotation, position)

    def _values(self, i: int, weights: Tensor, v: Tensor) -> Tensor:
        """Weighted sum float32 [h_kv, g * m, d] of all cached and the new values."""
        sinks, newest = (x.float().transpose(0, 1) for x in self.value.exact(i, self.lengths[i]))
        pages, t = self.value.pages_of(i), self.value.format.t
        sizes = [sinks.shape[1], pages.numel() * t, newest.shape[1], v.shape[1]]
        to_sinks, to_pages, to_newest, to_fresh = weights.split(sizes, -1)
        out = to_sinks @ sinks + to_newest @ newest + to_fresh @ v
        return out + self.value.reader.weighted_sum(to_pages, pages) if pages.numel() else out

    def _attend_dense(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The same by decoding all pages first: for many queries at once."""
        keys = self._dense_side(i, self.key, k, q.dtype)
        values = self._dense_side(i, self.value, v, q.dtype)
        return causal_attention(q[None], keys[None], values[None], scaling)[0]

    def _dense_side(self, i: int, side: Side, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """All tokens of a side after RoPE, [h_kv, n + m, d]."""
        sinks, newest = (x.transpose(0, 1).to(dtype) for x in side.exact(i, self.lengths[i]))
        if not side.used[i]:
            return torch.cat([sinks, newest, fresh], 1)
        paged = side.dense(i).transpose(0, 1)
        if side is self.key and self.rotation is not None:
            first = self.offsets[i] + side.format.window.sinks
            paged = self.rotation.rotate(paged, torch.arange(first, first + paged.shape[1], device=paged.device))
        return torch.cat([sinks, paged.to(dtype), newest, fresh], 1)

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences, in this order; `KVCache.select` does the tables."""
        self.lengths = [self.lengths[i] for i in sequences]
        self.offsets = [self.offsets[i] for i in sequences]
        self.key.select(sequences)
        self.value.select(sequences)

    def share(self, source: int, sequence: int) -> None:
        """Lets an empty sequence begin with the tokens of another; `KVCache.fork` does the tables."""
        self.lengths[sequence], self.offsets[sequence] = self.lengths[source], self.offsets[source]
        self.key.share(source, sequence)
        self.value.share(source, sequence)

    @property
    def loaded_step(self) -> LayerStep | None:
        """The kernels of a decode step, if `step` has loaded them."""
        return self._step

    def release(self, sequence: int) -> None:
        """Forgets a sequence; `KVCache.release` does the tables."""
        self.lengths[sequence] = self.offsets[sequence] = 0
        self.key.used[sequence] = self.value.used[sequence] = 0


class KVCache:
    """Compressed cache of a whole model for `b` sequences.

    bundle      loaded by `artifacts.load`
    b           sequences
    max_tokens  tokens to reserve for, per sequence, and the most that one may hold: `nbytes` is
                `b * bundle.geometry.cache_bytes(max_tokens, itemsize)` from the start and no step allocates any more.
                None: pages are allocated by doubling
    prompt      with max_tokens, how many of them will come as one prompt: formats with factors per segment need less
                room then, and `nbytes` is `b * bundle.geometry.cache_bytes(max_tokens, itemsize, prompt)`
    dtype       of sinks and window: the model's
    device      where the cache lives. On the CPU decode steps run on the page kernels (numba), on CUDA devices on
                `runtime.attention` and `runtime.pack`
    budget      bytes for everything, with max_tokens: pages are a pool for all sequences, as many as fit; `reserve`
                says whether a sequence will find room. Raises CacheFullError if not even one page of each side fits
    """

    def __init__(
        self,
        bundle: Bundle,
        b: int,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt: int = 0,
        budget: int | None = None,
    ):
        if b < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"b={b}, max_tokens={max_tokens}: both must be at least 1")
        if budget is not None and max_tokens is None:
            raise ValueError(f"budget={budget}: say the most that a sequence may hold, too (max_tokens=)")
        self.bundle = bundle
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], device)
        self.room = Room(bundle.geometry, b, max_tokens, prompt, budget, dtype.itemsize, self.rotation.inv_freq.device)
        self.layers = [LayerCache(bundle, layer, self.room, dtype, self.rotation) for layer in range(bundle.model.l)]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    @property
    def b(self) -> int:
        """Sequences."""
        return len(self.layers[0].lengths)

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence."""
        return list(self.layers[-1].lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers. The table of rotation angles, shared by all layers, is work space on top."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bits(self) -> float:
        """Bits per cached number with everything counted: `nbytes` and the bundle's tensors over the numbers held."""
        model = self.bundle.model
        shared = sum(side.geometry.bundle_bytes for layer in self.layers for side in (layer.key, layer.value))
        numbers = 2 * model.l * model.h_kv * model.d * sum(self.lengths)
        return 8 * (self.nbytes + shared) / numbers if numbers else float("nan")

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences: reorders, repeats (sharing pages) or drops them."""
        self.room.select(sequences)
        for layer in self.layers:
            layer.select(sequences)

    def reserve(self, sequence: int, tokens: int, prompt: int = 0) -> None:
        """Keeps room for an empty sequence until it holds so many tokens, `prompt` of them its prompt.

        Then no step of it can fail for want of pages. Raises CacheFullError, nothing changed, where there is none.
        """
        if self.lengths[sequence]:
            raise ValueError(f"sequence {sequence} holds {self.lengths[sequence]} tokens already: release it first")
        self.room.promise(sequence, tokens, prompt)

    def free_tokens(self) -> int:
        """Tokens that one more sequence can be sure of now, its prompt not known: what admission goes by."""
        return self.room.free_tokens()

    def fork(self, source: int, sequence: int) -> None:
        """Lets an empty sequence begin as a copy of another one, sharing its full pages."""
        self.room.share(source, sequence)
        for layer in self.layers:
            layer.share(source, sequence)

    def release(self, sequence: int) -> None:
        """Ends a sequence: it is empty, and what it held or was promised is free."""
        self.room.release(sequence)
        for layer in self.layers:
            layer.release(sequence)

    def take_step(self, sequences: Sequence[int]) -> None:
        """Pages for one more token of each of these sequences. Raises CacheFullError before anything has changed."""
        self.room.take({i: self.layers[0].lengths[i] + 1 for i in sequences})

    def step_inputs(self, b: int) -> StepInputs:
        """Inputs of device steps of the first b sequences, at an address of their own."""
        return StepInputs(b, self.room.sides, self.room.device)

    def check(self) -> None:
        """Waits for the device and raises KernelError where a kernel met numbers that it cannot pack."""
        for side in self.room.sides:
            if has_kernels(side.codec.device):
                side.packer.check()
