"""Where a decode step's time goes: the kernels of a whole model's step on a GPU, from torch's profiler.

    python -m benchmarks.step_profile --out step-profile.json [--steps llama2-7b@1x131072:nuq3-1 ...] [--layers 8]

Model, caches and steps are those of `benchmarks.decode_model --compile`, of fewer layers; `fp16` is a format too.
`low_us` and `high_us` are the first and the last eighth of a kernel's launches. Where kernels overlap (programmatic
dependent launch), the sum of theirs is more than the step's time, which `step_us` says without the profiler. Inductor
chooses its kernels anew on every machine: --repeat compiles the layers so many times, from empty caches, and shows what
its choices differ by.
"""

import argparse
import json
import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_inductor_cache
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.commands import command, require_gpu
from benchmarks.decode_model import MODELS, SHORT, bundle_of, fill, formats_of, fresh_peak, median_us, model_of, step_at
from runtime import KVCache
from runtime.decoding import DeviceSteps
from runtime.dense import DenseCache
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder

REPLAYS = 6


@dataclass
class Kernel:
    """Launches a layer, and microseconds of each; total_us: of all of them, a layer."""

    name: str
    launches: float
    mean_us: float
    low_us: float
    high_us: float
    total_us: float


def kernels_of(graph: torch.cuda.CUDAGraph, layers: int) -> list[Kernel]:
    """Those of a captured step, the most expensive first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    times = defaultdict[str, list[float]](list)
    for event in cast(Any, profiler).profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            times[event.name()].append(event.duration_ns() * 1e-3)
    found = []
    for name, each in times.items():
        each.sort()
        low, high, total = each[len(each) // 8], each[-1 - len(each) // 8], sum(each) / REPLAYS / layers
        found.append(Kernel(name, len(each) / REPLAYS / layers, sum(each) / len(each), low, high, total))
    return sorted(found, key=lambda kernel: -kernel.total_us)


def step_of(decoder: HFDecoder, name: str, b: int, n: int) -> tuple[torch.cuda.CUDAGraph, object]:
    """The captured step at length n, and what it works in."""
    fresh_peak()
    if name == "fp16":
        dense = DenseCache(decoder, fingerprint(decoder.model), b, n)
        return dense.capture(n), dense
    kv = KVCache(bundle_of(decoder, name), b, n + 64, torch.float16, "cuda", prompt=n - 1)
    steps = DeviceSteps(decoder, kv, [b])
    fill(kv, n - 1)
    return step_at(steps, kv, n)[0], steps


def show(title: str, step_us: float, kernels: list[Kernel]) -> None:
    """Prints the dearest ones."""
    table = Table(title=f"{title}: a step of {step_us:.0f} us, microseconds a layer")
    for column in ("kernel", "launches", "mean", "low", "high", "all"):
        table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
    for k in kernels[:12]:
        numbers = (k.launches, k.mean_us, k.low_us, k.high_us, k.total_us)
        table.add_row(k.name[:60], *(f"{x:.2f}" for x in numbers))
    Console(width=120).print(table)


def main() -> None:
    """Profiles all steps; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", nargs="+", default=["llama2-7b@1x131072:nuq3-1", "llama2-7b@1x131072:fp16"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=0, help="from empty compile caches")
    args = parser.parse_args()
    require_gpu()
    asked: list[tuple[str, str, str, int, int]] = []
    for title in args.steps:
        shape, _, name = title.partition(":")
        model, _, size = shape.partition("@")
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
        if model not in MODELS or not name or not found:
            raise SystemExit(f"step {title}: MODEL@BATCHxTOKENS:FORMAT, of the models {', '.join(MODELS)}")
        if name != "fp16":
            formats_of(name, args.layers)
        asked.append((title, model, name, int(found[1]), int(found[2])))
    rows: list[dict[str, Any]] = []
    for title, model, name, b, n in asked:
        plain = model_of(model, args.layers, 1 << 20).model
        for _ in range(max(1, args.repeat)):
            torch._dynamo.reset()
            with fresh_inductor_cache() if args.repeat else nullcontext():
                graph, kept = step_of(HFDecoder(plain, compile=True), name, b, n - SHORT)
                us, kernels = median_us(graph, 0.2), kernels_of(graph, args.layers)
                del graph, kept
            show(title, us, kernels)
            rows.append({"step": title, "step_us": us, "kernels": [asdict(kernel) for kernel in kernels]})
            run = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": args.layers}
            with open(args.out, "w") as file:
                json.dump(run | {"command": command("step_profile"), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
