"""What the kernels that pack a pass over prompts take, by torch's profiler.

    python -m benchmarks.prompt_kernels --out prompt-kernels.json [--shapes 1x512 4x100 ...] [--format gear-l2]

Passes are those of `benchmarks.prompts`, from a graph where an engine has one for the shape. Microseconds and launches
of a pass, of all layers.
"""

import argparse
import json
import re
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import MODELS, fresh_peak, model_of
from benchmarks.prompts import passes
from runtime.hf_decoder import HFDecoder

KERNELS = ("pack", "gram", "directions", "project", "keep")
WARM, PASSES = 2, 4  # those before, those counted


def kernels_of(decoder: HFDecoder, some: int, m: int, name: str) -> dict[str, dict[str, float]]:
    """Of a pass over so many prompts of m tokens: `us` and `launches` of each kernel that packs."""
    found = passes(decoder, some, m, [name])
    work = found.get(f"{name}, graph", found[name])
    for _ in range(WARM):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PASSES):
            work()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in profiled.key_averages() if event.key.split("(")[0] in KERNELS]
    return {
        event.key.split("(")[0]: {"us": event.self_device_time_total / PASSES, "launches": event.count / PASSES}
        for event in events
    }


def main() -> None:
    """Measures all shapes; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--shapes", nargs="+", default=["1x512", "4x100", "16x161", "1x2048"], help="prompts x tokens")
    parser.add_argument("--format", default="gear-l2", choices=FORMATS)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    if wrong := [shape for shape in args.shapes if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)]:
        raise SystemExit(f"--shapes {wrong[0]}: PROMPTSxTOKENS, as in 16x161")
    require_gpu()
    decoder = model_of(args.model, args.layers, 1 << 20)
    run = {"command": command("prompt_kernels"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        some, m = (int(x) for x in shape.split("x"))
        rows.append({"shape": shape, "kernels": kernels_of(decoder, some, m, args.format)})
        print(rows[-1], file=sys.stderr, flush=True)
        with open(args.out, "w") as file:
            json.dump(run | {"model": args.model, "layers": args.layers, "rows": rows}, file, indent=1)
        fresh_peak()
    table = Table("shape", *KERNELS, title=f"{args.format}: kernels of a pass, us")
    for row in rows:
        table.add_row(row["shape"], *(f"{row['kernels'].get(name, {'us': 0.0})['us']:.0f}" for name in KERNELS))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
