"""The model's forward pass in two halves, so that logits need not exist for a whole window at once.

2048 rows over a vocabulary of 128 K are 1 GB in float32, several times over in a loss and its gradient; hidden states
are small.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from artifacts.errors import SignpostError
from runtime.hf_model import with_cache

ROWS = 512  # rows of logits that are held at a time


class ActivationError(SignpostError, ValueError):
    """The model produced NaN or infinity."""


def require_finite(x: Tensor, what: str) -> None:
    """Raises ActivationError where x is not finite."""
    if not torch.isfinite(x).all():
        raise ActivationError(f"{what} hold NaN or infinity: check the weights, or take another model.dtype")


def hidden_states(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """What the head reads, [b, n, hidden], for ids int64 [b, n]; keys and values go through `cache` if there is one."""
    base = model.base_model
    return base(input_ids=ids, **with_cache(base, cache), use_cache=cache is not None).last_hidden_state


class Head:
    """A model's head alone: logits [b, rows, vocabulary] of hidden states [b, rows, hidden].

    The model's own forward pass computes them, so whatever scales or caps its logits is kept. What is below the head
    runs once, on one token, when this is made; then the given hidden states take the place of that token's.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.base = model, model.base_model
        outputs: list[Any] = []
        hook = self.base.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            with torch.no_grad():
                self._run()
        finally:
            hook.remove()
        self.below = outputs[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        output = replace(self.below, last_hidden_state=hidden)
        with forward_as(self.base, lambda *args, **kwargs: output):
            return self._run()

    def _run(self) -> Tensor:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        return self.model(input_ids=token, use_cache=False).logits


@contextmanager
def forward_as(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Within it `function` is the module's forward pass."""
    own = module.__dict__.get("forward")  # where layers are on several GPUs, accelerate's
    try:
        module.forward = function
        yield
    finally:
        if own is not None:
            module.forward = own
        else:
            module.__dict__.pop("forward", None)


def blocks(n: int) -> Iterator[slice]:
    """n rows in blocks of ROWS."""
    for start in range(0, n, ROWS):
        yield slice(start, min(start + ROWS, n))


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is more precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats [n], of log-probabilities [n, vocabulary], all finite.

    Summed as p (log p - log q) + q - p, in which what distributions that are nearly alike are off by rounding counts
    squared: p (log p - log q) alone is off by 2^-21, and may be below zero, where log-probabilities are around -10.
    """
    d, weight = p - q, p.exp()
    near = weight * (d + torch.expm1(-d))  # the same, without what cancels
    return torch.where(d.abs() < 0.5, near, weight * (d - 1) + q.exp()).sum(-1)
