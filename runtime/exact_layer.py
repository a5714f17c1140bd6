"""A layer without a format: its tokens stay as the model made them, as many as the next one may still see."""

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts import Bundle
from runtime.attention import PagedAttention, PagedSide
from runtime.exact import causal_attention
from runtime.layer import CacheLayer
from runtime.room import Room
from runtime.rope import Rotation
from runtime.side import write_ring
from runtime.step import LayerStep
from runtime.unpaged import unpaged


class _Kept:
    """Keys or values as `runtime.step` takes them: all tokens are in the window."""

    def __init__(self, layer: "ExactLayer", name: str):
        self._layer, self._name = layer, name
        self._none = torch.empty(0, dtype=torch.uint8, device=layer.device)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All that kernels read of it."""
        return (getattr(self._layer, self._name),)

    def paged(self, b: int) -> PagedSide:
        """The first b sequences."""
        (tokens,) = self.memory
        return PagedSide(self._none, self._none, self._none, self._none.int().expand(b, 0), tokens[:b, :0], tokens[:b])


class ExactLayer(CacheLayer):
    """Keys and values of one layer in full precision: [b, capacity, h_kv, d] each, token n at n % capacity.

    The capacity is the layer's window, so that a token takes the place of the one that nobody sees any more. Without a
    window, or before so many tokens have come, it is what was reserved, or grows by doubling.
    """

    def __init__(self, bundle: Bundle, layer: int, room: Room, dtype: torch.dtype, rotation: Rotation):
        super().__init__(bundle.model, layer, room)
        self._turning, self._grows = rotation, room.max_tokens is None
        capacity = bundle.geometry.held(layer, room.max_tokens or 0)
        size = (room.b, capacity, bundle.model.h_kv, bundle.model.d)
        self.keys, self.values = (torch.zeros(size, dtype=dtype, device=room.device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def _attend_one(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        keys, values = (
            torch.cat([kept.transpose(0, 1).to(q.dtype), fresh], 1)[None]
            for kept, fresh in zip(self.newest(i), (k, v), strict=True)
        )
        return causal_attention(q[None], keys, values, scaling, self.window, self.softcap)[0]

    def newest(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens that are kept of a sequence, in order: [tokens, h_kv, d] each."""
        n, capacity = self.lengths[i], self.keys.shape[1]
        places = torch.arange(max(0, n - capacity), n, device=self.device) % max(1, capacity)
        return self.keys[i, places], self.values[i, places]

    def _append(self, i: int, k: Tensor, v: Tensor, offset: int) -> None:
        n, m = self.lengths[i], k.shape[1]
        self._make_room(n + m)
        kept = min(m, self.keys.shape[1])
        for store, fresh in ((self.keys, k), (self.values, v)):
            write_ring(store[i], n + m - kept, fresh[:, m - kept :].transpose(0, 1))
        self.offsets[i], self.lengths[i] = offset, n + m

    def ring(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Where tokens of all sequences stand, [b * capacity, h_kv, d] of both sides, token n of sequence i at
        i * capacity + n % capacity, once there is room for so many tokens of a sequence."""
        self._make_room(tokens)
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)

    def _make_step(self, h_q: int) -> LayerStep:
        h_kv, d = self.keys.shape[2:]
        kernels = PagedAttention(
            *unpaged(h_kv, d),
            {},
            {},
            self._turning,
            h_q,
            self.keys.dtype,
            self.device,
            self.scoring,
            self.room.workspace,
        )
        return LayerStep(kernels, _Kept(self, "keys"), _Kept(self, "values"))

    def _device_step(self, q: Tensor, k: Tensor, v: Tensor, starts: list[int], scaling: float) -> Tensor:
        """One token for every sequence, on the page kernels."""
        self._make_room(max(self.lengths) + 1)
        return super()._device_step(q, k, v, starts, scaling)

    def _make_room(self, n: int) -> None:
        """Room for n tokens of a sequence, or for the window. While it grows, no token has lost its place."""
        capacity = self.keys.shape[1]
        wanted = min(n, self.window) if self.window else n
        if self._grows and wanted > capacity:
            doubled = max(wanted, 2 * capacity)
            more = (min(doubled, self.window) if self.window else doubled) - capacity
            self.keys, self.values = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.keys, self.values))

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences, in this order."""
        super().select(sequences)
        index = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        self.keys, self.values = self.keys[index], self.values[index]

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the first n tokens of another, all of them where there is a window."""
        super().share(source, sequence, n)
        kept = min(n, self.keys.shape[1])  # fewer than there is room for stand at their own numbers
        for tokens in (self.keys, self.values):
            tokens[sequence, :kept] = tokens[source, :kept]
