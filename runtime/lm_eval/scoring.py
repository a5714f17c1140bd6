"""Log-likelihoods of continuations that are read over a compressed cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle
from runtime.hf import SignpostCache
from runtime.hf_model import with_cache

NO_TARGET = -1


@dataclass(frozen=True)
class Request:
    """A continuation to score behind its context, both as token ids, both with one token at least."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise ValueError(
                f"a request of {len(self.context)} context tokens and {len(self.continuation)} to score: both need "
                "one at least; an empty context is the token that texts begin with"
            )

    def split(self, tail: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is packed at once, as a prompt, and what is read behind it. The last token is only predicted."""
        at = max(0, len(self.context) - tail)
        return self.context[:at], self.context[at:] + self.continuation[:-1]


@torch.no_grad()
def score(
    model: PreTrainedModel,
    bundle: Bundle,
    requests: Sequence[Request],
    tail: int = 1,
    chunk: int = 32,
    softmax_dtype: torch.dtype | None = None,
) -> list[tuple[float, bool]]:
    """Log-likelihood in nats of each continuation, and whether each of its tokens is the likeliest, as one batch.

    Contexts but for their last `tail` tokens are a prompt: attended exactly, then packed; equal ones once for all
    requests. The rest is read behind them, `chunk` tokens a pass: a pass sees all earlier ones as the cache holds them,
    and itself exactly. With chunk=1 that is how tokens are decoded.
    tail           0: the prompt's own pass predicts the first token, which then tells nothing of the cache
    softmax_dtype  None: that of the logits
    """
    tokens, mask, targets, width = _columns(requests, tail, model.device)
    prompts: dict[tuple[int, ...], int] = {}  # first request with this prompt
    sources = [prompts.setdefault(request.split(tail)[0], i) for i, request in enumerate(requests)]
    found = _Found(len(requests), softmax_dtype, model.device)
    cache = SignpostCache(model, bundle)
    if width:
        distinct = list(prompts.values())
        rows = torch.tensor([distinct.index(i) for i in sources], device=model.device)
        logits = _logits(model, cache, tokens[distinct], mask[distinct], slice(0, width), keep=1)
        found.add(logits[rows], targets[:, width - 1 : width])
        cache.batch_select_indices(rows)
    for start in range(width, tokens.shape[1], chunk):
        columns = slice(start, min(start + chunk, tokens.shape[1]))
        found.add(_logits(model, cache, tokens, mask, columns), targets[:, columns])
    return found.results()


def _columns(requests: Sequence[Request], tail: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens, padding mask and targets (NO_TARGET: not asked for), int64 [b, n] each, and the prompts' columns.

    Prompts end, and what is read behind them begins, at the same column: padding is on both sides.
    """
    splits = [request.split(tail) for request in requests]
    width, behind = (max(map(len, parts)) for parts in zip(*splits, strict=True))
    tokens = torch.zeros(len(requests), width + behind, dtype=torch.int64)
    mask, targets = torch.zeros_like(tokens), torch.full_like(tokens, NO_TARGET)
    for i, (request, (prompt, rest)) in enumerate(zip(requests, splits, strict=True)):
        stop = width + len(rest)
        tokens[i, width - len(prompt) : stop] = torch.tensor(prompt + rest)
        mask[i, width - len(prompt) : stop] = 1
        targets[i, stop - len(request.continuation) : stop] = torch.tensor(request.continuation)
    return tokens.to(device), mask.to(device), targets.to(device), width


def _logits(
    model: PreTrainedModel, cache: SignpostCache, tokens: Tensor, mask: Tensor, columns: slice, keep: int = 0
) -> Tensor:
    """Logits [b, columns, vocabulary] of one pass; keep: only so many of the last, 0: all."""
    seen = mask[:, : columns.stop]
    positions = (seen.cumsum(1) - 1).clamp_min(0)[:, columns]
    output = cast(Any, model)(
        input_ids=tokens[:, columns], attention_mask=seen, position_ids=positions, use_cache=True,
        logits_to_keep=keep, **with_cache(model, cache),
    )  # fmt: skip
    return output.logits


class _Found:
    """Sums up what passes tell of each request; in float64, so that long texts lose nothing."""

    def __init__(self, b: int, softmax_dtype: torch.dtype | None, device: torch.device):
        self.dtype = softmax_dtype
        self.likelihoods = torch.zeros(b, dtype=torch.float64, device=device)
        self.greedy = torch.ones(b, dtype=torch.bool, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Logits [b, m, vocabulary] and the tokens that came next, int64 [b, m]."""
        asked = targets != NO_TARGET
        logs = logits.log_softmax(-1, dtype=self.dtype)
        of_targets = logs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        self.likelihoods += of_targets.double().where(asked, 0.0).sum(1)
        self.greedy &= ((logs.argmax(-1) == targets) | ~asked).all(1)

    def results(self) -> list[tuple[float, bool]]:
        """By request."""
        return list(zip(self.likelihoods.tolist(), self.greedy.tolist(), strict=True))
