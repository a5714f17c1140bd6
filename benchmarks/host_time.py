"""Microseconds that the host takes to queue decode steps: a layer's launches, a layer under transformers, an engine's.

    python -m benchmarks.host_time --out host-time.json [--model llama2-7b] [--formats nuq3-1 ...] [--batches 1 64]

Medians of the time until a call returns; nothing waits for the GPU, whose work is short here. Of a layer: `launch` is
`Step.write` and `Step.run` of a plan (what the interface for other engines repeats), `transformers` is
`LayerCache.attend`, with what a cache keeps account of. Of a whole model: `engine` is a captured step of all layers,
pages taken and lengths counted. Random weights; keys and values are like a cache's.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS, D
from benchmarks.decode_model import MODELS, bundle_of, fill, model_of
from runtime import KVCache
from runtime.decoding import DeviceSteps
from runtime.hf_decoder import HFDecoder

TOKENS, CALLS = 300, 48  # cached; timed: no page fills meanwhile


def median_us(call: Callable[[], object], each: int = 1) -> float:
    """Median microseconds of a call over `each`; the GPU has nothing to do when it begins."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6 / each)
    return statistics.median(times)


def of_layers(decoder: HFDecoder, kv: KVCache) -> tuple[float, float]:
    """Microseconds of a layer's launches, and of its step under transformers."""
    model, b = kv.bundle.model, kv.b
    q, k, v = (
        torch.randn(b, heads, 1, D, dtype=decoder.dtype, device=decoder.device)
        for heads in (model.h_q, model.h_kv, model.h_kv)
    )
    inputs = kv.step_inputs(b)
    inputs.set([n + 1 for n in kv.lengths], [0] * b)
    plans, out = [layer.step(model.h_q).plan(inputs, D**-0.5, TOKENS + 99) for layer in kv.paged], torch.empty_like(q)

    def launch() -> None:
        for plan in plans:
            plan.write(k, v)
            plan.run(q, out, follows=True)

    def step() -> None:
        positions = torch.tensor([[n] for n in kv.lengths])
        for layer in kv.paged:
            layer.attend(q, k, v, positions, None, D**-0.5)

    launch()
    step()
    return median_us(launch, model.l), median_us(step, model.l)


def of_engine(decoder: HFDecoder, kv: KVCache) -> float:
    """Microseconds of a captured step of all layers."""
    steps, everybody = DeviceSteps(decoder, kv, [kv.b]), dict.fromkeys(range(kv.b), 1)
    steps.run(everybody)
    return median_us(lambda: steps.run(everybody))


def measured(decoder: HFDecoder, name: str, b: int) -> dict[str, float | str | int]:
    """One format and batch."""
    bundle, caches = bundle_of(decoder, name), []
    for _ in range(2):
        caches.append(KVCache(bundle, b, TOKENS + 2 * CALLS, decoder.dtype, decoder.device))
        fill(caches[-1], TOKENS - TOKENS % 64 + 2)  # just behind a page's end
    launch, transformers = of_layers(decoder, caches[0])
    engine = of_engine(decoder, caches[1])
    return {"format": name, "batch": b, "launch_us": launch, "transformers_us": transformers, "engine_us": engine}


def main() -> None:
    """Measures all formats and batches; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["nuq3-1", "kivi2-g32"], choices=FORMATS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    if min(args.batches) < 1:
        raise SystemExit(f"--batches {min(args.batches)}: at least 1 sequence")
    require_gpu()
    decoder, rows = model_of(args.model, args.layers, 1 << 14), []
    run = {
        "command": command("host_time"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cores": os.cpu_count(), "layers": args.layers,
    }  # fmt: skip
    for name in args.formats:
        for b in args.batches:
            rows.append(measured(decoder, name, b))
            print(rows[-1], file=sys.stderr, flush=True)
            with open(args.out, "w") as file:
                json.dump(run | {"rows": rows}, file, indent=1)
    table = Table("format", "batch", "launches, us a layer", "transformers, us a layer", "engine, us a step")
    for row in rows:
        numbers = (f"{row[name]:.1f}" for name in ("launch_us", "transformers_us", "engine_us"))
        table.add_row(str(row["format"]), str(row["batch"]), *numbers)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
