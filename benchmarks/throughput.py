"""New tokens per second in equal memory: the largest batch that fits beside the weights, compressed caches and fp16.

    python -m benchmarks.throughput --out throughput.json [--model llama2-7b] [--memory 80e9] [--shapes 161+338 ...]

A real architecture's shape, random weights. For prompts of m tokens and n new ones, a batch is as large as the
geometry's bytes of the whole length allow beside the weights and work space, --room bytes and `WORK` a sequence, or,
with --batch, so many, if they fit (how fast products are depends on their number: cuBLAS chooses other kernels);
peak_bytes says what torch then allocated. A step is the whole model's, from a CUDA graph, at half of the new tokens;
`decode` is batch / step. `loop_us` is the engine's own loop instead, of 64 steps around there: pages taken, graph
replayed, tokens chosen, the next step queued meanwhile. A prompt is a pass of the model with attention in full
precision, and packed; the random model's keys and values are like a cache's (`benchmarks.decode_model`). Short prompts
share passes, as in the engine; `prompt` is a pass over the number of its prompts, and `total` the batch's new tokens
over the time of its prompts and steps. Microseconds and tokens per second; ratios are to fp16.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.commands import require_gpu
from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import LOOP, MODELS, bundle_of, dense, fill, fresh_peak, loop, median_us, model_of
from runtime import KVCache
from runtime.decoding import DeviceSteps
from runtime.dense import DenseCache
from runtime.grouping import PADDED, TOGETHER
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.intake import Intake

PROMPTS = 3  # whose median time counts
WORK = 600_000  # bytes of a step's work space that a sequence takes, logits above all


@dataclass
class Row:
    """One cache at one shape. bytes_each: of a sequence at full length."""

    shape: str
    cache: str
    batch: int
    bytes_each: int
    peak_bytes: int
    step_us: float
    loop_us: float
    prompt_us: float
    decode: float
    total: float
    batch_ratio: float = 1.0
    decode_ratio: float = 1.0
    total_ratio: float = 1.0


def median_of(work: Callable[[], None]) -> float:
    """Median microseconds of a call, the first not counted."""
    times = []
    for _ in range(PROMPTS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])


def together(m: int, b: int) -> int:
    """Prompts of m tokens that share a pass, of b."""
    return max(1, min(TOGETHER, PADDED // m, b))


def prompts(decoder: HFDecoder, some: int, m: int) -> Tensor:
    """Different tokens, int64 [some, m]: products of numbers that are alike take less power, and so less time."""
    torch.manual_seed(0)
    return torch.randint(decoder.vocabulary, (some, m), device=decoder.device)


def fp16(decoder: HFDecoder, m: int, n: int, free: int) -> tuple[int, int, int, float, float, float]:
    """Batch, bytes of a sequence, peak bytes, microseconds of a step, of the engine's (here the same) and a prompt."""
    found = fingerprint(decoder.model)
    each = 2 * found.l * (m + n) * found.h_kv * found.d * 2
    b = free // (each + WORK)
    row = dense(decoder, "", b, m + n // 2, 0.3)
    # `dense` reserves what it fills; here the whole length is reserved.
    longer = b * 2 * found.l * (n - n // 2) * found.h_kv * found.d * 2
    fresh_peak()
    some = together(m, b)
    cache = DenseCache(decoder, found, some, m)
    tokens = prompts(decoder, some, m)

    def prompt() -> None:
        cache.length = 0
        cache.append(tokens)

    return b, each, row.peak_bytes + longer, row.step_us, row.loop_us, median_of(prompt) / some


def compressed(
    decoder: HFDecoder, name: str, m: int, n: int, free: int, batch: int | None = None
) -> tuple[int, int, int, float, float, float]:
    """As `fp16`, for a compressed cache. The engine's steps are as many before half of the new tokens as behind."""
    bundle = bundle_of(decoder, name)
    each = bundle.geometry.cache_bytes(m + n, 2, m)
    b = min(free // (each + WORK), batch or sys.maxsize)
    fresh_peak()
    kv = KVCache(bundle, b, m + n, torch.float16, "cuda", prompt=m)
    steps = DeviceSteps(decoder, kv, [b])
    fill(kv, m + n // 2)
    step = steps.step(b, max(kv.lengths) + 1)
    assert step.graph is not None
    step.run([(1, n) for n in kv.lengths])  # the newest token again: no page fills
    us = median_us(step.graph, 0.3)
    assert torch.isfinite(step.logits).all(), f"{name}: logits have NaN"
    peak = torch.cuda.max_memory_allocated()
    empty(kv)
    fill(kv, m + n // 2 - LOOP // 2)
    loop_us = loop(decoder, steps, b)
    empty(kv)

    some = together(m, b)
    return b, each, peak, us, loop_us, median_of(prompt_of(decoder, kv, m, some)) / some


def empty(kv: KVCache) -> None:
    """Gives all pages back."""
    kv.check()
    for i in range(kv.b):
        kv.release(i)


def prompt_of(decoder: HFDecoder, kv: KVCache, m: int, some: int) -> Callable[[], None]:
    """A pass over `some` prompts of m tokens into the first sequences, packed as the engine does."""
    tokens = prompts(decoder, some, m)
    positions = torch.arange(m, device=decoder.device).expand(some, -1)

    def prompt() -> None:
        for i in range(some):
            kv.release(i)
        intake = Intake(kv, range(some), [m] * some)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
            intake.give(layer, k, v)
            return kv.layers[layer].prompt(q, k, v, scaling).transpose(1, 2)

        with kv.checked_once():
            decoder.forward(tokens, positions, attend)
            intake.finish()

    return prompt


def main() -> None:
    """Measures all shapes and formats; writes the JSON after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--memory", type=float, default=80e9, help="bytes, weights included (default: %(default).0f)")
    parser.add_argument("--room", type=float, default=8e8, help="bytes for other work space (default: %(default).0f)")
    parser.add_argument("--shapes", nargs="+", default=["161+338", "4096+512"], help="prompt + new tokens")
    parser.add_argument("--formats", nargs="+", default=["nuq4-1", "nuq2-1", "kivi2-g32", "gear-l2"], choices=FORMATS)
    parser.add_argument("--batch", nargs="+", type=int, default=[None], help="sequences of compressed caches at most")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile", action="store_true", help="the model's layers, around their attention")
    args = parser.parse_args()
    require_gpu()
    decoder = model_of(args.model, args.layers, 1 << 20, args.compile)
    weights = fresh_peak()
    run = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model, "layers": args.layers,
        "compiled": args.compile, "memory": args.memory, "weight_bytes": weights,
    }  # fmt: skip
    free, rows = int(args.memory - args.room) - weights, list[Row]()
    for shape in args.shapes:
        m, n = (int(x) for x in shape.split("+"))
        for name, batch in (("fp16", None), *product(args.formats, args.batch)):
            b, each, peak, step, engine, prompt = (
                fp16(decoder, m, n, free) if name == "fp16" else compressed(decoder, name, m, n, free, batch)
            )
            total = b * n / (b * prompt + n * step) * 1e6
            row = Row(shape, name, b, each, peak, step, engine, prompt, b / step * 1e6, total)
            first = next((r for r in rows if r.shape == shape), row)
            row.batch_ratio = b / first.batch
            row.decode_ratio, row.total_ratio = row.decode / first.decode, row.total / first.total
            rows.append(row)
            print(
                f"{shape} {name}: batch {b} ({row.batch_ratio:.2f}x), step {step:.0f} us, loop {engine:.0f} us, "
                f"{row.decode:.0f} tokens/s ({row.decode_ratio:.2f}x), prompt {prompt:.0f} us, with prompts "
                f"{row.total:.0f} ({row.total_ratio:.2f}x), peak {peak * 1e-9:.1f} GB",
                file=sys.stderr,
                flush=True,
            )
            with open(args.out, "w") as file:
                json.dump(run | {"rows": [asdict(r) for r in rows]}, file, indent=1)
    show(rows)


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(title="equal memory")
    for title in (
        "shape", "cache", "batch", "ratio", "step us", "loop us", "tokens/s", "ratio", "with prompts", "ratio",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title in ("shape", "cache") else "right")
    for r in rows:
        table.add_row(
            r.shape, r.cache, str(r.batch), f"{r.batch_ratio:.2f}", f"{r.step_us:.0f}", f"{r.loop_us:.0f}",
            f"{r.decode:.0f}", f"{r.decode_ratio:.2f}", f"{r.total:.0f}", f"{r.total_ratio:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
