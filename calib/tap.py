"""The tap: keys before RoPE and values of every layer, and the loss's gradients with respect to both, sample by sample.

Works on any decoder that hands its keys to a transformers cache: the cache is the tap. Gradients are taken of the
activations alone; no gradient of any weight is ever allocated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from calib.forward import at_least_float32, blocks, head, hidden_states, require_finite
from runtime.hf import rotary, text_config
from runtime.rope import Rotation


@dataclass(frozen=True)
class Activations:
    """Keys before and after RoPE and values of one layer and one sample, and their gradients: float32 [n, h_kv, d].

    Gradients are of the summed next-token loss (None without a backward pass).
    """

    layer: int
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    key_gradient: Tensor | None
    rotated_key_gradient: Tensor | None
    value_gradient: Tensor | None


class _TapCache(DynamicCache):
    """Keeps what every layer hands over, [1, h_kv, n, d], and hands it on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        require_finite(key_states, f"layer {layer_idx}: keys")
        require_finite(value_states, f"layer {layer_idx}: values")
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
        cache, ids = _TapCache(), ids[None].to(self.model.device)
        found: list[Tensor | None] = [None] * (2 * self.layers)
        with torch.set_grad_enabled(gradients), _embeddings_require_grad(self.model, gradients):
            hidden = hidden_states(self.model, ids, cache)
            if gradients:
                taken = [x for layer in range(self.layers) for x in cache.taken[layer]]
                found = list(_loss_gradients(self.model, hidden, ids, taken))
        del hidden
        for layer in range(self.layers):
            k, v = (x.detach() for x in cache.taken.pop(layer))
            k_gradient, v_gradient = found[2 * layer : 2 * layer + 2]
            found[2 * layer : 2 * layer + 2] = None, None  # so that memory shrinks while layers are consumed
            yield self._activations(layer, k, v, k_gradient, v_gradient)

    def _activations(
        self, layer: int, k: Tensor, v: Tensor, k_gradient: Tensor | None, v_gradient: Tensor | None
    ) -> Activations:
        positions = torch.arange(k.shape[2], device=k.device)
        before, before_gradient = self.rotation.unrotate(k, positions), None
        if k_gradient is not None and v_gradient is not None:
            require_finite(k_gradient, f"layer {layer}: gradients of keys")
            require_finite(v_gradient, f"layer {layer}: gradients of values")
            before_gradient = _by_token(self.rotation.pull_back(k_gradient, positions))
            k_gradient, v_gradient = _by_token(k_gradient), _by_token(v_gradient)
        return Activations(
            layer, _by_token(before), _by_token(k), _by_token(v), before_gradient, k_gradient, v_gradient
        )


def _by_token(x: Tensor) -> Tensor:
    """[1, h_kv, n, d] as float32 [n, h_kv, d]."""
    return x[0].transpose(0, 1).float()


def _loss_gradients(
    model: PreTrainedModel, hidden: Tensor, ids: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the summed next-token loss of ids [1, n] by `inputs`, on which hidden [1, n, hidden] depends.

    Summed, not averaged: a mean would tie the scale of one sample's gradients to its length.
    """
    of_hidden = torch.zeros_like(hidden)
    for rows in blocks(ids.shape[1] - 1):
        block = hidden[:, rows].detach().requires_grad_()
        logits = at_least_float32(head(model, block)[0])
        loss = F.cross_entropy(logits, ids[0, rows.start + 1 : rows.stop + 1], reduction="sum")
        require_finite(loss, "behind the last layer: logits")
        of_hidden[:, rows] = torch.autograd.grad(loss, block)[0]
    return torch.autograd.grad(hidden, inputs, of_hidden)


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
