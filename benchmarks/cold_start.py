"""Seconds to the first token where no kernel has been compiled yet, and where all have been, in a process of its own.

    python -m benchmarks.cold_start --out cold-start.json [--formats nuq4-1 kivi2-g32+nuq2-1 ...]

The model has the heads of a real one, a few layers and random weights; kernels do not depend on the number of layers.
It has answered the prompt once without a cache before the clock starts, so that CUDA, cuBLAS and the weights are there.
From then: the engine is made (its kernels begin to compile), the prompt goes through and is packed, the first token
comes; decoding steps are captured as CUDA graphs when the second is asked for.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import command, require_gpu
from benchmarks.decode_model import MODELS, bundle_of, formats_of, model_of
from runtime import Engine

REQUIRED_S = 3.0  # to the first token, nothing compiled


def main() -> None:
    """Measures every format twice; writes the JSON after each."""
    args = _parser().parse_args()
    require_gpu()
    if args.one:
        print(json.dumps(one(args.model, args.one, args.layers, args.prompt)))
        return
    rows: list[dict[str, Any]] = []
    for name in args.formats:
        formats_of(name, args.layers)
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (child(args, name, folder) for _ in range(2))
        rows.append({"format": name, "cold": cold, "warm": warm})
        print(f"{name}: first token after {cold['first_s']:.2f} s, compiled {warm['first_s']:.2f}", file=sys.stderr)
        run = {
            "command": command("cold_start"),
            "required_s": REQUIRED_S,
            "gpu": torch.cuda.get_device_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        args.out.write_text(json.dumps(run | {"rows": rows}, indent=1) + "\n")


def child(args: argparse.Namespace, name: str, folder: str) -> dict[str, float]:
    """What `one` finds in a fresh process whose kernels lie in `folder`."""
    options = ["--model", args.model, "--layers", str(args.layers), "--prompt", str(args.prompt), "--out", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold_start", "--one", name, *options],
        env=os.environ | {"SIGNPOST_CACHE_DIR": folder},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(model: str, name: str, layers: int, prompt: int) -> dict[str, float]:
    """Seconds from the engine's making to its end, to the first token and to the second, and then for another token."""
    decoder = model_of(model, layers, 1 << 14)
    bundle, tokens = bundle_of(decoder, name), [1] * prompt
    decoder.model(torch.tensor([tokens], device="cuda"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine = Engine(decoder, bundle, sequences=1, max_tokens=prompt + 256)
    made, seconds = time.perf_counter() - start, []
    for _ in engine.stream(engine.submit(tokens, max_new_tokens=8)):
        seconds.append(time.perf_counter() - start)
    return {"made_s": made, "first_s": seconds[0], "second_s": seconds[1], "later_s": seconds[-1] - seconds[-2]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["nuq4-1", "nuq2-1", "kivi2-g32", "banded3"])
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
