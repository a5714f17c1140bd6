"""Milliseconds from a request to its first token in an engine, with prompts from CUDA graphs and without.

    python -m benchmarks.first_token --out first-token.json [--formats nuq2 ...] [--prompts 32 161 512]

A real architecture's layers, random weights (`benchmarks.decode_model`). The request comes alone, or while all other
sequences decode, whose steps are queued before it. Beside that: how long `Engine.prepare` takes, kernels compiled
before, and what of the GPU's memory it keeps. Medians.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import MODELS, bundle_of, fresh_peak, model_of
from runtime import Engine
from runtime.hf_decoder import HFDecoder
from runtime.prompts import SHORT

REQUESTS = 9  # of which the first does not count


def engine_of(decoder: HFDecoder, name: str, short: int, sequences: int) -> tuple[Engine, float, int]:
    """An engine, seconds that it takes to prepare, and bytes of torch's and others' that this keeps of the GPU."""
    engine = Engine(decoder, bundle_of(decoder, name), sequences, max_tokens=4096, short=short)
    torch.cuda.synchronize()
    fresh_peak()
    free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    engine.prepare()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    fresh_peak()
    return engine, seconds, free - torch.cuda.mem_get_info()[0]


def first_ms(engine: Engine, tokens: list[int]) -> float:
    """From a request to its first token, for which the engine steps."""
    start = time.perf_counter()
    request = engine.submit(tokens, 1)
    while not request.tokens:
        engine.step()
    if request.error is not None:
        raise request.error
    return 1e3 * (time.perf_counter() - start)


def times(engine: Engine, decoder: HFDecoder, n: int, others: int) -> float:
    """The median of some requests' of n tokens, while so many others decode."""
    torch.manual_seed(n)
    for _ in range(others):
        engine.submit(torch.randint(decoder.vocabulary, (100,)).tolist(), 1000)
    found = []
    for _ in range(REQUESTS):
        for _ in range(5 if others else 0):
            engine.step()
        torch.cuda.synchronize()
        found.append(first_ms(engine, torch.randint(decoder.vocabulary, (n,)).tolist()))
    for request in list(engine.running.values()):
        engine.cancel(request)
    return statistics.median(found[1:])


def main() -> None:
    """Measures all formats, each without graphs of prompts and with them; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["nuq2", "nuq3-1", "kivi2-g32"], choices=FORMATS)
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 161, 512], help="tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8)
    args = parser.parse_args()
    require_gpu()
    decoder = model_of(args.model, args.layers, 1 << 20)
    run = {"command": command("first_token"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for name in args.formats:
        for short in (0, SHORT):
            engine_of(decoder, name, 0, args.sequences)  # compiles
            engine, seconds, kept = engine_of(decoder, name, short, args.sequences)
            row = {"format": name, "short": short, "prepare_s": seconds, "kept_bytes": kept}
            for n in args.prompts:
                alone, busy = (times(engine, decoder, n, others) for others in (0, args.sequences - 1))
                row |= {f"{n}_alone_ms": alone, f"{n}_busy_ms": busy}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            found = run | {"model": args.model, "layers": args.layers, "sequences": args.sequences, "rows": rows}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            del engine
            fresh_peak()
    table = Table(*rows[0], title="ms to the first token")
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
