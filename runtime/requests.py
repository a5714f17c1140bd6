"""What an engine is asked for: requests, the prefixes that they begin with, and what becomes of both."""

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import index
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from artifacts.errors import SignpostError
from runtime.sampling import Sampling

Reason = Literal["length", "stop", "cancelled", "failed"]


class RequestError(SignpostError, ValueError):
    """A request that can never be served."""


@dataclass(eq=False)
class Prefix:
    """Tokens that requests begin with, kept by the engine that made it until `Engine.drop`.

    prompt    its tokens
    number    counts the engine's prefixes from 1
    sequence  of the cache; None once it is kept no more: dropped, or failed, and then `error` says how
    wanted    requests that were submitted with it and have not begun with it yet, in their order
    """

    prompt: tuple[int, ...]
    number: int
    sequence: int | None
    dropped: bool = False
    error: Exception | None = None
    wanted: dict["Generation", None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"prefix {self.number} of {len(self.prompt)} tokens"

    source: ClassVar[None] = None  # it comes behind nothing

    @property
    def fresh(self) -> tuple[int, ...]:
        """Tokens that are to be processed."""
        return self.prompt

    @property
    def total(self) -> int:
        """Tokens that the cache must have room for."""
        return len(self.prompt)

    def failure(self) -> RequestError:
        """What a request ends with whose prefix has failed."""
        error = RequestError(f"{self} failed, and so does what begins with it: {self.error}")
        error.__cause__ = self.error
        return error


@dataclass(eq=False)
class Generation:
    """A request and what has come of it.

    tokens  new ones so far, the stop token or sequence that ended them included
    reason  why it ended; None while it has not. `failed`: `error` says how
    prefix  what the prompt comes behind
    kept    a text that an engine has kept (`runtime.reuse`), which the prompt begins with, and the prefix
    apart   its prompt is not processed together with others': that failed
    looked  up to which news of texts nothing was found that the prompt begins as (`runtime.reuse`); infinite where none
            is looked for
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[tuple[int, ...], ...]
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    error: Exception | None = None
    sequence: int | None = None  # of the cache, while it runs
    draws: torch.Generator = field(default_factory=torch.Generator)
    prefix: Prefix | None = None
    kept: Prefix | None = None
    apart: bool = False
    looked: float = -1

    def __str__(self) -> str:
        behind = f" behind {self.prefix}" if self.prefix else ""
        return f"a prompt of {len(self.prompt)} tokens{behind} and {self.max_new_tokens} new ones"

    @cached_property
    def text(self) -> NDArray[np.int64]:
        """Prefix and prompt."""
        return np.array((*(self.prefix.prompt if self.prefix else ()), *self.prompt), dtype=np.int64)

    @property
    def source(self) -> Prefix | None:
        """What is cached of these already."""
        return self.kept or self.prefix

    @property
    def before(self) -> int:
        """How many tokens that is."""
        return self.source.total if self.source else 0

    @property
    def fresh(self) -> tuple[int, ...]:
        """Tokens behind it, which are to be processed."""
        return self.prompt if self.kept is None else tuple(self.text[self.kept.total :].tolist())

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were cached already."""
        return len(self.prompt) - len(self.fresh)

    @property
    def total(self) -> int:
        """Tokens that the cache must have room for: the last new one is never fed back."""
        return len(self.text) + self.max_new_tokens - 1

    def begin_alone(self) -> None:
        """Lets it not come behind the kept text that was found for it, nor behind another."""
        assert self.kept is not None
        self.kept.wanted.pop(self)
        self.kept, self.looked = None, inf

    def draw_again(self, ahead: int = 0) -> None:
        """Sets the draws to where they were before the next token: a step that broke off may have drawn for it.

        ahead: steps that are queued for it and whose tokens are not among `tokens` yet
        """
        self.draws.manual_seed(self.sampling.seed)
        for _ in range(len(self.tokens) + ahead if self.sampling.temperature else 0):
            torch.rand((), generator=self.draws, dtype=torch.float64)

    def take(self, token: int) -> None:
        """Appends a token and sees whether it is the last."""
        self.tokens.append(token)
        if any(tuple(self.tokens[-len(stop) :]) == stop for stop in self.stop):
            self.reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens:
            self.reason = "length"


def known(prompt: Sequence[int], vocabulary: int, what: str = "prompt") -> tuple[int, ...]:
    """A prompt's tokens, or of `what` else. Raises RequestError for what a model with so many embeddings does not
    have."""
    if isinstance(prompt, Tensor | np.ndarray) and prompt.ndim != 1:
        raise RequestError(
            f"a {what} of shape {list(prompt.shape)}: must be the tokens of one {what}, as in input_ids[0].tolist()"
        )
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Sequence | Tensor | np.ndarray):
        raise RequestError(f"{_short(prompt)} as {what}: must be a list of tokens, as tokenizer(text).input_ids is")
    tokens = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    for place, token in enumerate(tokens):
        if not _is_token(token, vocabulary):
            raise RequestError(
                f"token {token!r} at place {place} of the {what}: must be an integer from 0 to {vocabulary - 1}, what "
                "the model has embeddings of"
            )
    return tuple(index(token) for token in tokens)


def ends(stop: int | Iterable[int | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """What ends a request: a token, or several tokens or sequences of tokens, whether a model has them or only its
    tokenizer. Raises RequestError for anything else."""
    if _is_token(stop):
        return ((index(cast(int, stop)),),)
    if isinstance(stop, str | bytes | Mapping) or not isinstance(stop, Iterable) or getattr(stop, "ndim", 1) == 0:
        raise RequestError(f"stop={_short(stop)}: {_STOP}")
    found = []
    for each in stop.tolist() if isinstance(stop, Tensor | np.ndarray) else stop:
        alone = not isinstance(each, Sequence | Tensor | np.ndarray) or getattr(each, "ndim", 1) == 0
        sequence: tuple[int, ...] = (cast(int, each),) if alone else tuple(cast(Sequence[int], each))
        if not sequence:
            raise RequestError("an empty stop sequence: name at least one token in each")
        if isinstance(each, str | bytes) or not all(map(_is_token, sequence)):
            raise RequestError(f"stop has {_short(each)}: {_STOP}")
        found.append(tuple(index(token) for token in sequence))
    return tuple(found)


_STOP = (
    "must be a token, or tokens or sequences of tokens, not text (tokenizer(text, add_special_tokens=False).input_ids "
    "makes a sequence of it), integers of 0 or more"
)


def _is_token(x: Any, vocabulary: int | None = None) -> bool:
    """Whether it is an integer that may be a token, of a model with so many embeddings."""
    if getattr(x, "ndim", 0) or isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool:
        return False
    try:
        number = index(x)
    except TypeError:
        return False
    return number >= 0 and (vocabulary is None or number < vocabulary)


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:57]}..."


def without_frames(error: Exception) -> Exception:
    """The error with its traceback as a note: it lives on in a request, and what frames hold (work space, the cache)
    must not."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)))
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
