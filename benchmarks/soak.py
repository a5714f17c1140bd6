"""Thousands of random requests through one Engine on a crowded pool: does anything leak, is any token wrong?

    python -m benchmarks.soak --bundle FOLDER --requests 10000 --out soak.json
    python -m benchmarks.soak --bundle FOLDER --model FOLDER --device cuda --out soak.json
    python -m benchmarks.soak --bundle FOLDER --reuse 4 --alike 0.6 --longest-prompt 500 --pool 3000 --out soak.json

Prompts are random tokens of random length; some requests are greedy, some drawn from seeds of their own, some have
stop tokens; some are cancelled while they wait, between the chunks of their prompt, or while they decode. More always
wait than the pool has room for. At the end
* the engine must hold what it held before: pages, segments, promises, sequences, bytes of tensors, objects;
* a random sample of the requests that ran to their end must have the tokens that each has alone in a fresh engine.
With --reuse the engine keeps texts of requests that have ended, and a share of the prompts, --alike, begin with all or
some of one of the last texts. What stands in the cache of those that come behind others' tokens has another history
than alone, so they are not compared; at the end the engine lets the texts go and must hold what it held.

The sum of a matrix product takes another order for another size of batch, which changes last bits, and a last bit can
choose another token. On the CPU the model's matrix products are therefore done row by row, so that a sequence's
arithmetic does not depend on the batch, and every token must be the same. On a GPU (and with --batched) the first token
that differs is allowed where changes of every logit by at most `bound` could have chosen it: twice the largest change
of any logit when the same texts go through fresh caches in one batch instead of alone. Texts differ behind it.

All random choices come from --seed. Ends with an error if anything leaked or a token was wrong.
"""

import argparse
import gc
import json
import platform
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel

from artifacts import Bundle, load
from runtime import Engine, KVCache, Sampling
from runtime.decoding import steps_of
from runtime.engine import Generation
from runtime.hf import load_causal_lm
from runtime.hf_decoder import HFDecoder
from runtime.prompts import Prompt
from runtime.sampling import choose

WAITING = 4  # requests that wait at any time
TEXTS = 8  # of which the bound is measured
WARM = 30  # requests that come first, where texts are kept
RECENT, TURN = 8, 20  # texts that prompts begin like, and tokens that they add at least
TRIES, HALVINGS = 1000, 16  # changes of logits that are tried where a drawn token differs, and their sizes


@dataclass(frozen=True)
class Load:
    """What is asked of the engine; lengths in tokens."""

    requests: int = 10_000
    checked: int = 200
    seed: int = 0
    sequences: int = 32
    longest_prompt: int = 100
    most_new: int = 120
    chunk: int = 64
    pool: int = 1060  # tokens that the pool has pages for
    cancelled: float = 0.2  # share of requests
    reuse: int = 0  # texts that are kept
    alike: float = 0.0  # share of prompts that begin as a text before

    @property
    def max_tokens(self) -> int:
        """Of a sequence."""
        return self.longest_prompt + self.most_new


@dataclass(frozen=True)
class Wish:
    """A request, and when it will be cancelled: "" is never, `patience` is counted in steps or tokens."""

    prompt: tuple[int, ...]
    new: int
    sampling: Sampling
    stop: tuple[int | tuple[int, ...], ...]
    cancel: str
    patience: int


def wishes(load: Load, vocabulary: int, said: Sequence[tuple[int, ...]]) -> Iterator[Wish]:
    """Endlessly many. said: texts, prompts and answers, of the requests that have ended."""
    draw = random.Random(load.seed)
    while True:
        cancel = draw.choice(("waiting", "prompt", "decoding")) if draw.random() < load.cancelled else ""
        shortest = min(load.chunk + 1, load.longest_prompt) if cancel == "prompt" else 1
        new = draw.randint(1, load.most_new)
        prompt = tuple(draw.choices(range(vocabulary), k=draw.randint(shortest, load.longest_prompt)))
        if load.alike and said and draw.random() < load.alike:
            text = draw.choice(said)
            begun = text[: draw.choice((len(text), draw.randint(1, len(text))))]
            prompt = (*begun, *prompt)[: max(len(prompt), min(len(begun) + TURN, load.longest_prompt))]
        sampling = Sampling(draw.choice((0.0, 0.7, 1.0, 1.5)), draw.choice((1.0, 0.9)), draw.getrandbits(40))
        stop: tuple[int | tuple[int, ...], ...] = ()
        if draw.random() < 0.3:  # each a fiftieth of all tokens, or two in a row
            stop = (
                *draw.sample(range(vocabulary), max(1, vocabulary // 50)),
                tuple(draw.choices(range(vocabulary), k=2)),
            )
        yield Wish(
            prompt, new, sampling, stop, cancel, draw.randint(0, 3) if cancel == "waiting" else draw.randint(1, new)
        )


def budget(bundle: Bundle, load: Load, full_bytes: int) -> int:
    """Bytes of a cache with windows and tables for all sequences, and a pool of pages for `load.pool` tokens."""
    empty, geometry = bundle.geometry.cache_bytes(0, full_bytes), bundle.geometry
    tables = sum(4 * side.format.window.pages(load.max_tokens, side.format.t) for side in geometry.sides)
    exact = geometry.exact_bytes(load.max_tokens, full_bytes)
    pool = geometry.cache_bytes(load.pool, full_bytes) - geometry.exact_bytes(load.pool, full_bytes) - empty
    return (load.sequences + load.reuse) * (empty + exact + tables) + pool


def engine_for(model: PreTrainedModel, bundle: Bundle, load: Load) -> Engine:
    """The engine under load, and warm: a few requests have loaded kernels and made tables."""
    decoder = HFDecoder(model, bundle)
    size = budget(bundle, load, decoder.dtype.itemsize)
    engine = Engine(decoder, bundle, load.sequences, load.max_tokens, size, load.chunk, reuse=load.reuse)
    if engine.max_tokens < load.max_tokens:
        raise SystemExit(
            f"requests of {load.max_tokens} tokens (--longest-prompt, --most-new): the model or the pool holds "
            f"{engine.max_tokens}; ask for shorter ones, or give more (--pool)"
        )
    if load.reuse:
        serve(engine, replace(load, requests=WARM, seed=load.seed + 1), lambda done: None)
    return engine


def held(engine: Engine, load: Load) -> dict[str, int]:
    """What an engine holds that could leak, when one request of full length has run and no text is kept: what is
    remembered of the newest step is as large every time."""
    engine.submit([1] * load.longest_prompt, load.most_new, Sampling(1.0))
    engine.run()
    engine.reuse.clear()
    gc.collect()
    books = [tables.book for tables in engine.kv.room.tables.values()]
    objects = gc.get_objects()
    tensors = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in objects if type(x) is Tensor}
    return {
        "pages": sum(len(table) for book in books for table in book.tables),
        "pages in use": sum(book.capacity - len(book.free) for book in books),
        "users of pages": sum(sum(book.users) for book in books),
        "segments": sum(book.segments - len(book.free_segments) for book in books),
        "promised pages": sum(sum(book.promised) for book in books),
        "promised segments": sum(sum(book.promised_segments) for book in books),
        "tokens": sum(sum(layer.lengths) for layer in engine.kv),
        "packed pages": sum(sum(side.used) for side in engine.kv.room.sides),
        "requests": len(engine.waiting) + len(engine.running) + (engine.prompt is not None),
        "free tokens": engine.kv.free_tokens(),
        "cache bytes": engine.kv.nbytes,
        "tensor bytes": sum(tensors.values()),
        "gpu bytes": torch.cuda.memory_allocated() if engine.decoder.device.type == "cuda" else 0,
        "generations": sum(type(x) is Generation for x in objects),
    }


def fill(engine: Engine) -> float:
    """Share of the pages that are held or promised, of whatever fills up first."""
    books = [tables.book for tables in engine.kv.room.tables.values()]
    return max(1 - book.room / book.capacity for book in books)


@dataclass
class Served:
    """What has become of the requests."""

    finished: list[tuple[Wish, list[int]]]
    reasons: Counter[str]
    cancelled: Counter[str]  # by where they were
    fills: list[float]  # of steps behind which requests wait
    tokens: int = 0
    steps: int = 0
    behind: int = 0  # requests that came behind tokens of others
    reused: int = 0  # those tokens


def serve(engine: Engine, load: Load, tell: Callable[[int], None]) -> Served:
    """All requests, from the first to the last."""
    left, served, said = load.requests, Served([], Counter(), Counter(), []), list[tuple[int, ...]]()
    coming = wishes(load, engine.decoder.vocabulary, said)
    going: list[tuple[Wish, Generation, int]] = []  # and the step when it came
    while left or not engine.idle:
        while left and len(engine.waiting) < WAITING:
            wish, left = next(coming), left - 1
            going.append((wish, engine.submit(wish.prompt, wish.new, wish.sampling, wish.stop), served.steps))
        engine.step()
        served.steps += 1
        if engine.waiting:
            served.fills.append(fill(engine))
        for wish, request, came in going:
            where = _place(engine, request)
            if wish.cancel and where == wish.cancel and _patience_ends(wish, request, served.steps - came):
                engine.cancel(request)
                served.cancelled[where] += 1
        for wish, request, _ in going:
            if request.reason is not None:
                served.reasons[request.reason] += 1
                served.tokens += len(request.tokens)
                served.behind, served.reused = served.behind + (request.reused > 0), served.reused + request.reused
                if load.alike:
                    said.append((*wish.prompt, *request.tokens))
                    del said[:-RECENT]
                if request.reason in ("length", "stop") and not request.reused:
                    served.finished.append((wish, request.tokens))
        going = [entry for entry in going if entry[1].reason is None]
        tell(load.requests - left - len(going))
    return served


def _place(engine: Engine, request: Generation) -> str:
    if request.reason is not None or request in engine.running.values():
        return "" if request.reason is not None else "decoding"
    if engine.prompt and engine.prompt[0] is request:
        return "prompt"
    return "waiting"


def _patience_ends(wish: Wish, request: Generation, steps: int) -> bool:
    if wish.cancel == "decoding":
        return len(request.tokens) >= wish.patience
    return wish.cancel == "prompt" or steps > wish.patience


class Watching(HFDecoder):
    """A decoder that keeps the logits [vocabulary] of each of its passes."""

    def __init__(self, model: PreTrainedModel, bundle: Bundle):
        super().__init__(model, bundle)
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, behind: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions, attend, behind)
        self.seen.append(logits[0].cpu())
        return logits


def alone(model: PreTrainedModel, bundle: Bundle, load: Load, wish: Wish) -> tuple[list[int], list[Tensor]]:
    """Tokens of a request in an engine of its own, and the logits that each was chosen from."""
    decoder = Watching(model, bundle)
    engine = Engine(decoder, bundle, 1, len(wish.prompt) + wish.new, chunk=load.chunk, capture=False)
    decoder.seen.clear()
    request = engine.submit(wish.prompt, wish.new, wish.sampling, wish.stop)
    engine.run()
    if request.error is not None:
        raise request.error
    first = -(-len(wish.prompt) // load.chunk) - 1  # passes of the prompt before its last
    return request.tokens, decoder.seen[first : first + len(request.tokens)]


def verdict(wish: Wish, tokens: list[int], expected: list[int], logits: Sequence[Tensor], bound: float) -> str:
    """`same`, `near` (the first difference is one that changes within the bound explain), or what is wrong."""
    if tokens == expected:
        return "same"
    at = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"ended after {len(tokens)} tokens, alone after {len(expected)}"
    if bound and could_be(wish.sampling, logits[at], at, tokens[at], expected[at], bound):
        return "near"
    gap = float(logits[at][expected[at]] - logits[at][tokens[at]])
    return f"token {at} is {tokens[at]}, alone {expected[at]} whose logit is {gap:.3g} above; bound {bound:.3g}"


def could_be(sampling: Sampling, logits: Tensor, at: int, token: int, expected: int, bound: float) -> bool:
    """Whether changes of every logit by at most `bound` choose this token as number `at`, not the expected one.

    Drawn tokens by trying: changes of many sizes, because large ones give all likely tokens another order.
    """
    if not sampling.temperature:
        return float(logits[expected] - logits[token]) <= 2 * bound
    draws = [torch.Generator().manual_seed(sampling.seed) for _ in range(TRIES)]
    for _ in range(at):
        for generator in draws:
            torch.rand((), generator=generator, dtype=torch.float64)
    changes = torch.rand(TRIES, logits.numel(), generator=torch.Generator().manual_seed(at)) * 2 - 1
    sizes = bound * 0.5 ** (torch.arange(TRIES) % HALVINGS)
    return token in choose(logits + sizes[:, None] * changes, [sampling] * TRIES, draws).tolist()


def largest_change(model: PreTrainedModel, bundle: Bundle, texts: Sequence[tuple[Wish, list[int]]]) -> float:
    """Of any logit when these texts go through a fresh cache in one batch instead of alone."""
    decoder = HFDecoder(model, bundle)
    most = max(len(wish.prompt) + len(tokens) for wish, tokens in texts)
    steps = max(len(tokens) for _, tokens in texts)
    together = _logits(decoder, bundle, texts, most + steps, steps)
    changes = [
        (together[:, i : i + 1] - _logits(decoder, bundle, [text], most + steps, steps))[: len(text[1])].abs().max()
        for i, text in enumerate(texts)
    ]
    return float(torch.stack(changes).max())


def _logits(
    decoder: HFDecoder, bundle: Bundle, texts: Sequence[tuple[Wish, list[int]]], most: int, steps: int
) -> Tensor:
    """Logits [steps, texts, vocabulary] behind each token of the texts; one that has ended repeats its last token."""
    kv = KVCache(bundle, len(texts), most, decoder.dtype, decoder.device)
    stepper, rows = steps_of(decoder, kv, capture=False), []
    for i, (wish, _) in enumerate(texts):
        Prompt(decoder, kv, i, wish.prompt, None).advance()
    for at in range(steps):
        tokens = {i: tokens[min(at, len(tokens) - 1)] for i, (_, tokens) in enumerate(texts)}
        rows.append(stepper.run(tokens).cpu().clone())
    return torch.stack(rows)


@contextmanager
def row_by_row(model: PreTrainedModel) -> Iterator[None]:
    """Does the model's matrix products for each sequence of a batch by itself."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return torch.cat([F.linear(row, layer.weight, layer.bias) for row in x.split(1)])

    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.forward = partial(forward, layer)  # type: ignore[method-assign]  # for this layer alone, undone below
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def check(
    model: PreTrainedModel, bundle: Bundle, load: Load, served: Served, exact: bool, tell: Callable[[int], None]
) -> dict[str, Any]:
    """Compares a sample with what each is alone."""
    sample = random.Random(load.seed).sample(served.finished, min(load.checked, len(served.finished)))
    bound = 0.0 if exact or not sample else 2 * largest_change(model, bundle, sample[:TEXTS])
    found: Counter[str] = Counter()
    wrong = []
    for number, (wish, tokens) in enumerate(sample):
        said = verdict(wish, tokens, *alone(model, bundle, load, wish), bound)
        found[said if said in ("same", "near") else "wrong"] += 1
        if said not in ("same", "near"):
            wrong.append(f"prompt of {len(wish.prompt)}, {wish.new} new, {wish.sampling}: {said}")
        tell(number + 1)
    return {"checked": len(sample), "bound": bound, "same": found["same"], "near": found["near"], "wrong": wrong}


def soak(
    model: PreTrainedModel, bundle: Bundle, load: Load, exact: bool, tell: Callable[[str, int], None]
) -> dict[str, Any]:
    """Figures of a run; `leaks` and `wrong` are empty if all is well. exact: matrix products row by row."""
    with row_by_row(model) if exact else torch.no_grad():
        engine = engine_for(model, bundle, load)
        before, start = held(engine, load), time.perf_counter()
        served = serve(engine, load, partial(tell, "served"))
        seconds, after = time.perf_counter() - start, held(engine, load)
        # What has been served holds lists of tokens, no tensors: whatever is more than before has leaked.
        leaks = {name: [n, after[name]] for name, n in before.items() if after[name] != n}
        books = [tables.book for tables in engine.kv.room.tables.values()]
        figures = {
            "requests": load.requests,
            "ended": dict(served.reasons),
            "cancelled": dict(served.cancelled),
            "tokens": served.tokens,
            "behind_others": served.behind,
            "reused_tokens": served.reused,
            "steps": served.steps,
            "seconds": round(seconds, 1),
            "pages": [book.capacity for book in books],
            "steps_with_requests_waiting": len(served.fills),
            "mean_fill": round(sum(served.fills) / max(1, len(served.fills)), 4),
            "share_of_steps_above_90%": round(sum(x > 0.9 for x in served.fills) / max(1, len(served.fills)), 4),
        }
        del engine
        compared = check(model, bundle, load, served, exact, partial(tell, "checked"))
    return figures | {"leaks": leaks, "before": before} | compared


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="folder written by `python -m calib`")
    parser.add_argument("--model", default="tiny", help="folder or hub id that the bundle was made for; default: tiny")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0, ...")
    parser.add_argument("--dtype", default="float32", help="of weights and windows; default: %(default)s")
    parser.add_argument("--batched", action="store_true", help="matrix products of whole batches on the CPU, too")
    parser.add_argument("--threads", type=int, default=1, help="of torch and numba on the CPU; default: %(default)s")
    for name, value in vars(Load()).items():
        kind = type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Prints and writes the figures. SystemExit where something leaked or a token was wrong."""
    options = arguments(given)
    wanted = replace(Load(), **{name: getattr(options, name) for name in vars(Load())})
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    model, _ = load_causal_lm(options.model, options.dtype, options.device)
    exact = model.device.type == "cpu" and not options.batched
    with Progress(console=Console(stderr=True)) as progress:
        tasks = {
            "served": progress.add_task("served", total=wanted.requests),
            "checked": progress.add_task("checked", total=wanted.checked),
        }
        found = soak(
            model, load(options.bundle), wanted, exact, lambda task, n: progress.update(tasks[task], completed=n)
        )
    gpu = {"gpu": torch.cuda.get_device_name()} if model.device.type == "cuda" else {}
    command = shlex.join(["python", "-m", "benchmarks.soak", *(sys.argv[1:] if given is None else given)])
    machine = {"machine": platform.machine(), "torch": version("torch"), "transformers": version("transformers")}
    result = {"command": command, "row_by_row": exact} | gpu | machine | found
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = found["ended"].get("failed", 0)
    if found["leaks"] or found["wrong"] or failed:
        raise SystemExit(f"{len(found['wrong'])} wrong, {failed} failed, leaked: {found['leaks'] or 'nothing'}")


if __name__ == "__main__":
    main()
