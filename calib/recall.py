"""Recall through a compressed cache: does the model still find what stands far back?

Two tasks in the form that the reference models were trained on: a pass key hidden somewhere in filler text, and a
lookup among records that stand at its beginning. A trial counts when every digit of the answer is the model's first
choice, which is the same as greedy decoding giving the whole number; the answer's tokens go through the cache in one
step behind the prompt.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from artifacts.errors import SignpostError

CHARACTERS_PER_TOKEN = 8  # more than any text here has: enough filler is cut before it is counted in tokens


@dataclass(frozen=True)
class Trial:
    """prompt: tokens int64 [n] up to where the answer starts; answer: its tokens int64 [a]."""

    prompt: Tensor
    answer: Tensor


def passkey(tokenizer: PreTrainedTokenizerBase, filler: str, n: int, rng: random.Random) -> Trial:
    """A five-digit key at a random place of n tokens, asked for at the end. Raises SignpostError if n is too small."""
    key = "".join(str(rng.randrange(10)) for _ in range(5))
    needle = f" The pass key is {key}. Remember it. {key} is the pass key. "
    return _fitted(tokenizer, filler, n, rng, "", needle, " What is the pass key? The pass key is", f" {key}")


def lookup(tokenizer: PreTrainedTokenizerBase, filler: str, n: int, rng: random.Random, records: int = 4) -> Trial:
    """`records` numbered records at the beginning of n tokens, one asked for at the end. Raises as `passkey`."""
    names = rng.sample(range(100, 1000), records)
    held = [rng.randrange(100, 100_000) for _ in names]
    table = " ".join(f"record {name} holds {value}." for name, value in zip(names, held, strict=True)) + " "
    asked = rng.randrange(records)
    question = f" Question: record {names[asked]}? Answer:"
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
    size = int(len(text) * (n - fixed) / max(1, len(_ids(tokenizer, text))))
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


@torch.no_grad()
def found(model: PreTrainedModel, trial: Trial, cache: Cache | None) -> bool:
    """Whether every token of the answer is the first choice. `cache`: an empty one, or None for full precision."""
    prompt, answer = trial.prompt.to(model.device), trial.answer.to(model.device)
    tail = torch.cat([prompt[-1:], answer[:-1]])
    if cache is None:
        logits = model(torch.cat([prompt[:-1], tail])[None], use_cache=False, logits_to_keep=tail.numel()).logits
    else:
        model(prompt[None, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = model(tail[None], past_key_values=cache, use_cache=True).logits
    return bool((logits[0, -tail.numel() :].argmax(-1) == answer).all())


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    filler: str,
    task: str,
    n: int,
    trials: int,
    make_cache: Callable[[], Cache | None],
    seed: int = 0,
) -> float:
    """Share of `trials` texts of n tokens in which the answer is found; the same texts for the same seed.

    Raises SignpostError for an unknown task.
    """
    if task not in TASKS:
        raise SignpostError(f"task {task!r}: known are {', '.join(TASKS)}")
    rng = random.Random(f"{task} {n} {seed}")
    hits = [found(model, TASKS[task](tokenizer, filler, n, rng), make_cache()) for _ in range(trials)]
    return sum(hits) / trials
