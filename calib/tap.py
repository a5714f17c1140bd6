"""The tap: keys before RoPE and values of every layer, and the loss's gradients with respect to both, one sample at a time.

Works on any decoder that hands its keys to a transformers cache: the cache is the tap. Gradients are taken of the activations
alone; no gradient of any weight is ever allocated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from artifacts.errors import SignpostError
from runtime.hf import rotary, text_config
from runtime.rope import Rotation


class ActivationError(SignpostError, ValueError):
    """The model produced NaN or infinity."""


@dataclass(frozen=True)
class Activations:
    """Keys and values of one layer and one sample, and their gradients: float32 [n, h_kv, d]; keys before and after RoPE.

    Gradients are of the summed next-token loss (None without a backward pass); the keys' belong to the keys before RoPE.
    """

    layer: int
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    key_gradient: Tensor | None
    rotated_key_gradient: Tensor | None
    value_gradient: Tensor | None


class _TapCache(DynamicCache):
    """Keeps what every layer hands over, with its gradient if there is a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        for states in (key_states, value_states):
            if states.requires_grad:
                states.retain_grad()
        self.taken[layer_idx] = (key_states, value_states)
        return key_states, value_states


class Tap:
    """Runs a model over samples and yields `Activations` layer by layer."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        rope, frequencies = rotary(model)
        self.rotation = Rotation(rope, frequencies, model.device)
        self.layers = text_config(model).num_hidden_layers

    def run(self, ids: Tensor, gradients: bool) -> Iterator[Activations]:
        """One sample, ids int64 [n]. Raises ActivationError for NaN or infinity, naming the layer."""
        cache = _TapCache()
        with torch.set_grad_enabled(gradients), _embeddings_require_grad(self.model, gradients):
            ids = ids[None].to(self.model.device)
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            if gradients:
                loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
                loss.backward()
        del logits
        for layer in range(self.layers):
            yield self._activations(layer, *cache.taken.pop(layer))

    def _activations(self, layer: int, k: Tensor, v: Tensor) -> Activations:
        positions = torch.arange(k.shape[2], device=k.device)
        gradients = [None if x.grad is None else x.grad[0].float() for x in (k, v)]
        key, value = k.detach()[0].float(), v.detach()[0].float()
        for name, x in (("keys", key), ("values", value), ("key gradients", gradients[0]), ("value gradients", gradients[1])):
            if x is not None and not torch.isfinite(x).all():
                raise ActivationError(
                    f"layer {layer}: {name} hold NaN or infinity: check the weights, or calibrate in another model.dtype"
                )
        by_token = lambda x: None if x is None else x.transpose(0, 1)  # noqa: E731  [h_kv, n, d] -> [n, h_kv, d]
        pulled = None if gradients[0] is None else self.rotation.pull_back(gradients[0], positions)
        return Activations(
            layer,
            by_token(self.rotation.unrotate(key, positions)),
            by_token(key),
            by_token(value),
            by_token(pulled),
            by_token(gradients[0]),
            by_token(gradients[1]),
        )


@contextmanager
def _embeddings_require_grad(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """With all weights frozen, gradients flow to the activations because the embeddings' output asks for them."""
    if not enabled:
        yield
        return
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    try:
        yield
    finally:
        hook.remove()
