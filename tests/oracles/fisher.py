"""Oracles for gradients of the loss by keys before RoPE and by values: central differences in float64, no autograd; and
autograd through a whole model at once, keys and values taken where the model itself has them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Entry = tuple[int, int, int]  # token, kv head, channel


def summed_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Next-token loss of ids int64 [b, n], summed over tokens and sequences."""
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention modules, by layer."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]


@contextmanager
def keys_before_rope(model: PreTrainedModel, change: Any) -> Iterator[None]:
    """Puts `change(layer, k)` in the place of the keys [b, h_kv, n, d] that enter the model's own rotation."""
    module = sys.modules[type(attention_modules(model)[0]).__module__]
    original, calls = module.apply_rotary_pos_emb, iter(range(1_000_000))

    def replaced(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(q, change(next(calls), k), *args, **kwargs)

    module.apply_rotary_pos_emb = replaced
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = original


def _moved(x: Tensor, entry: Entry, step: float) -> Tensor:
    """x [1, h_kv, n, d] with one number moved."""
    token, head, channel = entry
    x = x.clone()
    x[0, head, token, channel] += step
    return x


@torch.no_grad()
def key_derivative(model: PreTrainedModel, ids: Tensor, layer: int, entry: Entry, step: float = 1e-4) -> float:
    """Derivative of the summed loss of ids [n] by one number of the keys before RoPE; error of the order of step^2."""
    losses = []
    for signed in (step, -step):
        with keys_before_rope(model, lambda l, k, by=signed: _moved(k, entry, by) if l == layer else k):
            losses.append(summed_loss(model, ids[None]).item())
    return (losses[0] - losses[1]) / (2 * step)


@torch.no_grad()
def value_derivative(model: PreTrainedModel, ids: Tensor, layer: int, entry: Entry, step: float = 1e-4) -> float:
    """The same by one number of the values."""
    attention, losses = attention_modules(model)[layer], []
    for signed in (step, -step):

        def move(module: Any, args: Any, output: Tensor, by: float = signed) -> Tensor:
            heads = output.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            return _moved(heads, entry, by).transpose(1, 2).flatten(2)

        hook = attention.v_proj.register_forward_hook(move)
        losses.append(summed_loss(model, ids[None]).item())
        hook.remove()
    return (losses[0] - losses[1]) / (2 * step)


class _Values(DynamicCache):
    """Keeps the values of every layer as they come; its update gives back what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.values.append(value_states)
        return key_states, value_states


def whole_model(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Keys entering the model's own rotation and values, by layer, and the gradients of the summed loss of ids [n] by
    both: each [1, heads, n, channels], the keys' channels those that turn, where a family cuts them off first."""
    keys: list[Tensor] = []
    cache, embeddings = _Values(), model.get_input_embeddings()
    embeddings.requires_grad_(True)
    try:
        with torch.enable_grad(), keys_before_rope(model, lambda layer, k: keys.append(k) or k):
            logits = model(ids[None], past_key_values=cache, use_cache=True).logits
            loss = F.cross_entropy(logits[0, :-1], ids[1:], reduction="sum")
            found = torch.autograd.grad(loss, [*keys, *cache.values])
    finally:
        embeddings.requires_grad_(False)
    return keys, cache.values, list(found[: len(keys)]), list(found[len(keys) :])
