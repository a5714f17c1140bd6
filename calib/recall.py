"""Recall through a compressed cache: does the model still find what stands far back?

Two tasks in the form that the reference models were trained on: a pass key hidden somewhere in filler text, and a
lookup among records that stand at its beginning. A number counts as found when every digit of it is the model's first
choice, which is the same as greedy decoding giving the whole number; digits are counted as well, each behind the true
ones before it.

The prompt is one step, its attention exact as in the cache, and the answer's tokens are another. So keys and values of
the prompts are computed once; every bundle packs them as the cache does, the texts of equal length together.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from artifacts import Bundle, Format
from artifacts.errors import SignpostError
from artifacts.geometry import SEGMENT_PAGES
from calib.evaluate import SimulatedCache
from runtime.codec import Codec
from runtime.exact import causal_attention
from runtime.hf import AttendingCache
from runtime.hf_model import with_cache
from runtime.rope import Rotation

TOGETHER = 64  # texts that are read at once
CHARACTERS_PER_TOKEN = 8  # more than any text here has: enough filler is cut before it is counted in tokens


@dataclass(frozen=True)
class Trial:
    """prompt: tokens int64 [n] up to where the answer starts; answer: its tokens int64 [a]."""

    prompt: Tensor
    answer: Tensor


class Score(NamedTuple):
    """Shares of whole numbers and of their digits that were found."""

    whole: float
    digits: float


def passkey(tokenizer: PreTrainedTokenizerBase, filler: str, n: int, rng: random.Random) -> Trial:
    """A five-digit key at a random place of n tokens, asked for at the end. Raises SignpostError if n is too small."""
    key = rng.randrange(10_000, 100_000)
    needle = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    return _fitted(tokenizer, filler, n, rng, "", needle, "\nWhat is the pass key? The pass key is", f" {key}")


def lookup(tokenizer: PreTrainedTokenizerBase, filler: str, n: int, rng: random.Random, records: int = 4) -> Trial:
    """`records` numbered records at the beginning of n tokens, one asked for at the end. Raises as `passkey`."""
    names = rng.sample(range(100, 1000), records)
    held = [rng.randrange(100, 100_000) for _ in names]
    # The model met such texts with a newline as their first token: it then expects " holds" behind a record's number
    # with probability 0.999, without it with 0.03.
    table = "\n" + " ".join(f"record {name} holds {value}." for name, value in zip(names, held, strict=True)) + "\n"
    asked = rng.randrange(records)
    question = f"\nQuestion: record {names[asked]}? Answer:"
    return _fitted(tokenizer, filler, n, rng, table, "", question, f" {held[asked]}")


TASKS: dict[str, Callable[[PreTrainedTokenizerBase, str, int, random.Random], Trial]] = {
    "passkey": passkey,
    "lookup": lookup,
}


def _fitted(
    tokenizer: PreTrainedTokenizerBase,
    filler: str,
    n: int,
    rng: random.Random,
    head: str,
    needle: str,
    question: str,
    answer: str,
) -> Trial:
    """head + filler with the needle somewhere in it + question + answer, n tokens in all (or a few less)."""
    start = rng.randrange(max(1, len(filler) - CHARACTERS_PER_TOKEN * n))
    text = filler[start : start + CHARACTERS_PER_TOKEN * n]
    fixed = len(_ids(tokenizer, head + needle + question + answer))
    if fixed >= n:
        raise SignpostError(f"a text of {n} tokens has no room for the task, which takes {fixed}: use longer texts")
    depth = rng.random()
    size = len(tokenizer.decode(_ids(tokenizer, text)[: n - fixed]))
    while True:  # the tokens of the whole are not the sum of its pieces' tokens: shrink until it fits
        body = text[:size]
        cut = int(depth * len(body))
        prefix = head + body[:cut] + needle + body[cut:] + question
        whole = _ids(tokenizer, prefix + answer)
        if len(whole) <= n:
            break
        size -= max(1, (len(whole) - n))
    # Encoded as one string; digits are single tokens, so the answer is the tail behind the question's tokens.
    asked = len(_ids(tokenizer, prefix))
    return Trial(torch.tensor(whole[:asked]), torch.tensor(whole[asked:]))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def trials(
    tokenizer: PreTrainedTokenizerBase, filler: str, task: str, n: int, count: int, seed: int = 0
) -> list[Trial]:
    """`count` texts of n tokens; the same ones for the same seed. Raises SignpostError for an unknown task."""
    if task not in TASKS:
        raise SignpostError(f"task {task!r}: known are {', '.join(TASKS)}")
    rng = random.Random(f"{task} {n} {seed}")
    return [TASKS[task](tokenizer, filler, n, rng) for _ in range(count)]


@dataclass(frozen=True)
class Prompts:
    """Texts of equal length: tail, the prompt's last token and the answer but its last, and the answer, int64 [b, a];
    layers: keys after RoPE and values of the tokens before, each [b, h_kv, n, d]."""

    tail: Tensor
    answer: Tensor
    layers: list[tuple[Tensor, Tensor]]


@torch.no_grad()
def prompts(model: PreTrainedModel, texts: Sequence[Trial]) -> list[Prompts]:
    """Reads the prompts in full precision."""

    def lengths(text: Trial) -> tuple[int, int]:
        return text.prompt.numel(), text.answer.numel()

    groups = []
    alike = [list(group) for _, group in groupby(sorted(texts, key=lengths), lengths)]
    for same in (group[i : i + TOGETHER] for group in alike for i in range(0, len(group), TOGETHER)):
        prompt = torch.stack([text.prompt for text in same]).to(model.device)
        answer = torch.stack([text.answer for text in same]).to(model.device)
        cache = _Recorder(model)
        model(prompt[:, :-1], **with_cache(model, cache), use_cache=True, logits_to_keep=1)
        groups.append(Prompts(torch.cat([prompt[:, -1:], answer[:, :-1]], 1), answer, cache.kept))
    return groups


@torch.no_grad()
def score(model: PreTrainedModel, groups: Sequence[Prompts], bundle: Bundle | None) -> Score:
    """What is found with the prompts packed by `bundle`, or in full precision for None."""
    codecs = None if bundle is None else SimulatedCache(model, bundle)
    hits = []
    for group in groups:
        logits = model(group.tail, **with_cache(model, _Answering(model, codecs, group)), use_cache=True).logits
        hits.append(logits.argmax(-1) == group.answer)
    whole = torch.cat([hit.all(1) for hit in hits])
    return Score(whole.double().mean().item(), torch.cat([hit.flatten() for hit in hits]).double().mean().item())


class _Recorder(AttendingCache):
    """Exact attention of one step; keeps its keys and values, layer after layer."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        self.kept.append((k, v))
        return causal_attention(q, k, v, scaling, self.window(layer), self.softcap).transpose(1, 2)


class _Answering(AttendingCache):
    """Attention of one step over prompts as a cache would hold them that packs with `codecs`; None: as they are."""

    def __init__(self, model: PreTrainedModel, codecs: SimulatedCache | None, group: Prompts):
        super().__init__(model)
        self.codecs, self.group = codecs, group
        for layer in self.layers:
            cast(Any, layer).seen = group.layers[0][0].shape[2]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        earlier_k, earlier_v = self.group.layers[layer]
        if self.codecs is not None and (formats := self.codecs.formats[layer]):
            key_codec, value_codec = self.codecs.codecs[layer]
            rotation = self.codecs.rotation if formats.key.domain == "pre_rope" else None
            earlier_k = as_cached(earlier_k, formats.key, key_codec, rotation)
            earlier_v = as_cached(earlier_v, formats.value, value_codec, None)
        k, v = torch.cat([earlier_k, k], 2), torch.cat([earlier_v, v], 2)
        return causal_attention(q, k, v, scaling, self.window(layer), self.softcap).transpose(1, 2)


def as_cached(x: Tensor, fmt: Format, codec: Codec, rotation: Rotation | None) -> Tensor:
    """Keys after RoPE or values [b, h_kv, n, d] of prompts as the cache holds them: whole pages encoded and decoded.

    rotation: un-rotates keys before they are encoded, or None.
    """
    n = x.shape[2]
    first, count = fmt.window.sinks, fmt.window.pages(n, fmt.t)
    if not count:
        return x
    stop = first + count * fmt.t
    positions = torch.arange(first, stop, device=x.device)
    part = x[:, :, first:stop].float()
    part = part if rotation is None else rotation.unrotate(part, positions)
    pages = part.transpose(1, 2).unflatten(1, (count, fmt.t))
    # The same pages of all texts at once; as many of a text stand one behind the other as the cache packs together.
    decoded = [
        codec.encode(some.flatten(0, 1), some.shape[1])[1].view(some.shape) for some in pages.split(SEGMENT_PAGES, 1)
    ]
    part = torch.cat(decoded, 1).flatten(1, 2).transpose(1, 2)
    part = part if rotation is None else rotation.rotate(part, positions)
    return torch.cat([x[:, :, :first], part.to(x.dtype), x[:, :, stop:]], 2)
