"""The model's forward pass in two halves, so that logits need not exist for a whole window at once.

2048 rows over a vocabulary of 128 K are 1 GB in float32, several times over in a loss and its gradient; hidden states
are small.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from artifacts.errors import SignpostError

ROWS = 512  # rows of logits that are held at a time


class ActivationError(SignpostError, ValueError):
    """The model produced NaN or infinity."""


def require_finite(x: Tensor, what: str) -> None:
    """Raises ActivationError where x is not finite."""
    if not torch.isfinite(x).all():
        raise ActivationError(f"{what} hold NaN or infinity: check the weights, or take another model.dtype")


def hidden_states(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """What the head reads, [b, n, hidden], for ids int64 [b, n]; keys and values go through `cache` if there is one."""
    return model.base_model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [1, rows, vocabulary] of hidden states [1, rows, hidden].

    The model's own forward pass computes them, so whatever scales or caps its logits is kept: it runs on one token, and
    the given hidden states take the place of that token's.
    """

    def replace(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False).logits
    finally:
        hook.remove()


def blocks(n: int) -> Iterator[slice]:
    """n rows in blocks of ROWS."""
    for start in range(0, n, ROWS):
        yield slice(start, min(start + ROWS, n))


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is more precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
