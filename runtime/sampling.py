"""From logits to tokens: greedy, or drawn with temperature and top-p from a seed of the request's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index

import torch
from torch import Tensor

from artifacts.errors import SignpostError
from runtime.transfer import to_device

NONE = -1  # no token
COLDEST = 1e-6  # temperature above 0: logits over it stay finite


class SamplingError(SignpostError, ValueError):
    """A sampling parameter is out of its range, or no number."""


def whole(x: object) -> bool:
    """Whether it is a whole number; a truth value is none."""
    return hasattr(x, "__index__") and not isinstance(x, bool)


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    temperature  0 takes the likeliest token
    top_p        draws from the smallest set of likeliest tokens that together have this probability
    seed         of the draws; the same whatever other requests are in the batch
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise SamplingError(f"{name}={value!r}: must be a number")
        if not whole(self.seed):
            raise SamplingError(f"seed={self.seed!r}: must be a whole number")
        object.__setattr__(self, "seed", index(self.seed))
        if self.temperature != 0 and not COLDEST <= self.temperature < float("inf"):
            raise SamplingError(f"temperature={self.temperature}: must be 0 (greedy), or finite and {COLDEST} or more")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p={self.top_p}: must lie above 0 and be at most 1")
        if not 0 <= self.seed < 1 << 63:
            raise SamplingError(f"seed={self.seed}: must be 0 or more and below 2**63")


def choose(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[torch.Generator]) -> Tensor:
    """A token for each row of logits float32 [b, vocabulary], NONE where they have NaN or no largest number: int64 [b].

    Queued where the logits are, never waits. draws: generators on the CPU, each used once a row.
    """
    best, tokens = logits.max(-1)
    drawn = [i for i, sampling in enumerate(samplings) if sampling.temperature]
    if drawn:
        draw = [torch.rand((), generator=draws[i], dtype=torch.float64) for i in drawn]
        parameters = [(samplings[i].temperature, samplings[i].top_p) for i in drawn]
        temperatures, top_p = to_device(parameters, torch.float64, logits.device).T
        rows = to_device(drawn, torch.int64, logits.device)
        tokens[rows] = _draw(logits[rows], temperatures, top_p, to_device(draw, torch.float64, logits.device))
    return tokens.where(best.isfinite(), NONE)


def _draw(logits: Tensor, temperatures: Tensor, top_p: Tensor, places: Tensor) -> Tensor:
    """Tokens [b] at `places` in [0, 1) of the distributions over the likeliest tokens."""
    chances, order = (logits.double() / temperatures[:, None]).softmax(-1).sort(stable=True, dim=-1, descending=True)
    before = chances.cumsum(-1) - chances
    chances = chances.masked_fill(before >= top_p[:, None], 0)
    reached = chances.cumsum(-1)
    rank = torch.searchsorted(reached, (places * reached[:, -1])[:, None], right=True)
    kept = (chances > 0).sum(-1, keepdim=True)
    return order.gather(1, rank.clamp_max(kept - 1).clamp_min(0))[:, 0]  # NaN keeps none
