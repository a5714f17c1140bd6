"""Tokens that prompts come behind, on the GPU: a sequence of the cache, whose numbers are unpacked layer by layer.

All prompts of a pass come behind the same sequence, so it is unpacked once for all of them, and attended once where
flash attention takes the model's numbers.
"""

import torch
from torch import Tensor

from runtime.cache import KVCache
from runtime.exact import causal_attention
from runtime.exact_layer import ExactLayer
from runtime.joined import Bounds, attention_behind, has_flash
from runtime.transfer import to_device
from runtime.units import ALL_PLAIN

LAYER_BYTES = 256 << 20  # of one layer's numbers that graphs of prompts have room for


class Behind:
    """Room for one layer's keys and values of a sequence, which `set` names before each pass.

    tokens: that it has at most
    """

    def __init__(self, kv: KVCache, tokens: int):
        model, device = kv.bundle.model, kv.room.device
        size = (tokens, model.h_kv, model.d)
        self.kv, self.tokens = kv, tokens
        self.keys, self.values = (torch.empty(size, dtype=kv.dtype, device=device) for _ in range(2))
        self._which = torch.zeros(3, dtype=torch.int32, device=device)
        self._sequence = self._count = 0
        self._bounds: Bounds | None = None  # of the pass, where flash attention takes its numbers

    def set(self, sequence: int) -> None:
        """The sequence that prompts of the next pass come behind, of at most `tokens`. Never waits."""
        self._sequence, self._count = sequence, self.kv.lengths[sequence]
        offset = self.kv.layers[0].offsets[sequence]
        self._which.copy_(to_device([sequence, self._count, offset], torch.int32, self._which.device))

    def begin(self, b: int, m: int) -> Tensor:
        """Before a pass over b rows of m tokens: their positions, int64 [m]; read on the device, as all of it is."""
        if has_flash(self.keys.dtype, self.keys.device):
            self._bounds = Bounds.of(self._which[1:2], b * m, self.kv.bundle.model.h_q)
        return self._which[1:].sum() + torch.arange(m, device=self._which.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention of q [b, h_q, m, d] over the sequence and k, v [b, h_kv, m, d]: [b, m, h_q, d].

        Can be captured where `captures_behind` says so.
        """
        of, numbers = self.kv.layers[layer], (self.keys, self.values)
        if isinstance(of, ExactLayer):
            numbers = of.newest(self._sequence)
        else:
            of.unpack(self._which, *numbers)
            if self._bounds is not None and of.scoring == ALL_PLAIN:
                return attention_behind(q, k, v, *numbers, self._bounds, scaling)
            numbers = self.keys[: self._count], self.values[: self._count]
        before = (x.transpose(0, 1).expand(len(q), -1, -1, -1) for x in numbers)
        keys, values = (torch.cat([x, own], 2) for x, own in zip(before, (k, v), strict=True))
        return causal_attention(q, keys, values, scaling, *of.scoring).transpose(1, 2)


def captures_behind(kv: KVCache) -> bool:
    """Whether passes over prompts behind a sequence can be captured: all layers have pages, and queries see all of them
    by plain softmax, in numbers that flash attention takes."""
    plain = all(layer.sides and layer.scoring == ALL_PLAIN for layer in kv.layers)
    return plain and has_flash(kv.dtype, kv.room.device)


def most_behind(kv: KVCache) -> int:
    """Tokens that prompts of graphs come behind at most."""
    model = kv.bundle.model
    most = LAYER_BYTES // (2 * model.h_kv * model.d * kv.dtype.itemsize)
    return min(most, kv.room.max_tokens or most)
