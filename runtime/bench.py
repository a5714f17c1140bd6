"""Memory and speed of a model with a compressed cache beside one in full precision: `python -m runtime bench`.

Both run in the same engine: the same passes of the model, on the GPU both from CUDA graphs. Prompts are random tokens:
neither times nor bytes depend on what they say.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from artifacts import Bundle, CacheGeometry
from artifacts.errors import SignpostError
from runtime.cache import KVCache
from runtime.decoding import Decoder, greedy, steps_of
from runtime.dense import DenseCache
from runtime.grouping import PADDED, TOGETHER
from runtime.prompts import Prompts


@dataclass(frozen=True)
class Measured:
    """One cache. Bytes of the cache; the most that torch allocated on the GPU, weights included (None on the CPU);
    seconds until the whole batch has its first token; seconds a step of the batch, mean."""

    name: str
    batch: int
    cache_bytes: int
    peak_bytes: int | None
    first_s: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the whole batch, prompts not counted."""
        return self.batch / self.step_s


def compare(
    decoder: Decoder,
    bundle: Bundle,
    batch: int,
    prompt: int,
    new: int,
    tell: Callable[[str], None] = lambda stage: None,
) -> list[Measured]:
    """Full precision, then the bundle: `batch` prompts of `prompt` tokens, `new` tokens each.

    Processes that share a model call this together; figures are this one's, bytes those of its heads.
    tell: called with the name of each stage as it begins. Raises SignpostError for numbers that make no sense.
    """
    if min(batch, prompt) < 1 or new < 2:
        raise SignpostError(f"batch={batch}, prompt={prompt}, new={new}: at least 1 prompt of 1 token, and 2 new ones")
    if decoder.positions is not None and prompt + new > decoder.positions:
        raise SignpostError(
            f"prompts of {prompt} tokens and {new} new ones exceed the model's {decoder.positions} positions: "
            "shorten one of them"
        )
    bundle = bundle.shard(decoder.split.rank, decoder.split.world)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.vocabulary, (batch, prompt), generator=generator)
    return [_dense(decoder, bundle, tokens, new, tell), _compressed(decoder, bundle, tokens, new, tell)]


def _dense(decoder: Decoder, bundle: Bundle, tokens: torch.Tensor, new: int, tell: Callable[[str], None]) -> Measured:
    model, (b, n) = bundle.model, tokens.shape
    name = str(decoder.dtype).removeprefix("torch.")
    tell(f"{name}: prompts")
    _warm(decoder, bundle, tokens)
    cache = DenseCache(decoder, model, b, n + new)
    start = time.perf_counter()
    chosen = cache.append(tokens.to(decoder.device)).argmax(-1)
    chosen.tolist()  # waits
    first = time.perf_counter() - start
    tell(f"{name}: steps")
    if decoder.device.type == "cuda":
        # A captured step has one length: the mean one.
        seconds = _mean(cache.capture(n + new // 2).replay, new - 1, torch.cuda.synchronize)
    else:
        seconds = _mean(lambda: cache.append(chosen[:, None]), new - 1)

    # A plain cache would drop what is behind a sliding window; this one keeps it, and must not make us look better.
    plain = CacheGeometry.of([None] * model.l, model.h_kv, model.d, model.sliding)
    held = b * plain.cache_bytes(n + new, decoder.dtype.itemsize)
    return Measured(name, b, held, _peak(decoder), first, seconds)


def _compressed(
    decoder: Decoder, bundle: Bundle, tokens: torch.Tensor, new: int, tell: Callable[[str], None]
) -> Measured:
    b, n = tokens.shape
    tell(f"{bundle.recipe}: loading kernels")
    _warm(decoder, bundle, tokens)
    kv = KVCache(bundle, b, n + new, decoder.dtype, decoder.device, prompt=n)
    steps = steps_of(decoder, kv)
    tell(f"{bundle.recipe}: prompts")
    start, chosen, together = time.perf_counter(), dict[int, int](), max(1, min(TOGETHER, PADDED // n))
    for i in range(0, b, together):  # as many in a pass as in an engine, without its graphs
        rows = tokens[i : i + together].tolist()
        logits = Prompts(decoder, kv, range(i, i + len(rows)), rows).advance()
        chosen |= dict(enumerate(decoder.agree(logits.argmax(-1)).tolist(), i))
    first = time.perf_counter() - start
    tell(f"{bundle.recipe}: steps")
    found = greedy(decoder, steps, chosen)
    seconds = _mean(lambda: next(found), new - 1)  # each waits for its tokens; one more may be queued in the end
    kv.check()
    return Measured(bundle.recipe, b, kv.nbytes, _peak(decoder), first, seconds)


def _warm(decoder: Decoder, bundle: Bundle, tokens: torch.Tensor) -> None:
    """A prompt whose time nobody takes, and from which the peak of memory counts."""
    DenseCache(decoder, bundle.model, 1, tokens.shape[1]).append(tokens[:1].to(decoder.device))
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(decoder: Decoder) -> int | None:
    return torch.cuda.max_memory_allocated() if decoder.device.type == "cuda" else None


def _mean(step: Callable[[], object], count: int, wait: Callable[[], None] = lambda: None) -> float:
    """Mean seconds of a step; the first is not counted if there are others. wait: for what steps have queued."""
    for number in range(count):
        if number < 2:
            wait()
            start = time.perf_counter()
        step()
    wait()
    return (time.perf_counter() - start) / max(1, count - 1)


def _smaller(first: int, bytes_: int) -> str:
    return f"{first / bytes_:.2f}x less" if bytes_ <= first else f"{bytes_ / first:.2f}x more"


# Lines of the table: a cache's figure, and what it is held against.
_FIGURES: dict[str, Callable[[Measured, Measured], str]] = {
    "bytes": lambda row, first: f"{row.cache_bytes:,}",
    "peak bytes": lambda row, first: "-" if row.peak_bytes is None else f"{row.peak_bytes:,}",
    "first token, s": lambda row, first: f"{row.first_s:.3f}",
    "a token, ms": lambda row, first: f"{1e3 * row.step_s:.3f}",
    "tokens/s": lambda row, first: f"{row.tokens_per_s:.1f}",
    "memory": lambda row, first: _smaller(first.cache_bytes, row.cache_bytes),
    "speed": lambda row, first: f"{first.step_s / row.step_s:.2f}x",
}


def table(rows: list[Measured], prompt: int, new: int, ranks: int = 1) -> Table:
    """Side by side, a column each, which 80 characters have room for; ratios are to the first. ranks: that share the
    model; the figures are those of one."""
    each = f", each of {ranks} ranks" if ranks > 1 else ""
    title = f"batch {rows[0].batch}, {prompt} tokens in, {new} out{each}"
    shown = Table(title=title, min_width=len(title))
    shown.add_column("cache")
    for row in rows:
        shown.add_column(Text(row.name), justify="right", overflow="fold")
    for name, figure in _FIGURES.items():
        shown.add_row(name, *(figure(row, rows[0]) for row in rows))
    return shown
