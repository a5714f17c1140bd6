"""Milliseconds from a request to its first token in an engine, behind a shared prefix and with the same tokens whole.

    python -m benchmarks.prefixes --out prefixes.json [--formats nuq3-1 ...] [--prefixes 1024 8192] [--prompts 32 161]

A real architecture's layers, random weights (`benchmarks.decode_model`). "behind": the prefix is in the cache, the
request brings its own tokens; "burst": as many such requests at once as the engine has sequences, until all have their
first token; "whole": a request that brings both, without a prefix; "alone": its own tokens, nothing before them.
Medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
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
from runtime.requests import Prefix

REQUESTS = 5  # of which the first does not count


def first_ms(engine: Engine, prompts: list[list[int]], prefix: Prefix | None = None) -> float:
    """From so many requests to the last one's first token, for which the engine steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [engine.submit(prompt, 1, prefix=prefix) for prompt in prompts]
    while any(request.reason is None for request in requests):
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return 1e3 * (time.perf_counter() - start)


def median_ms(work: Callable[[], float]) -> float:
    """Of some times, without the first one's."""
    return statistics.median([work() for _ in range(REQUESTS)][1:])


def times(engine: Engine, decoder: HFDecoder, before: int, n: int) -> dict[str, float]:
    """Milliseconds, with a prefix of so many tokens and requests of n."""
    torch.manual_seed(n)

    def tokens(count: int) -> list[int]:
        return torch.randint(decoder.vocabulary, (count,)).tolist()

    prefix = engine.prefix(tokens(before))
    try:
        some = engine.sequences
        return {
            "behind": median_ms(lambda: first_ms(engine, [tokens(n)], prefix)),
            "burst": median_ms(lambda: first_ms(engine, [tokens(n) for _ in range(some)], prefix)),
            "whole": median_ms(lambda: first_ms(engine, [tokens(before + n)])),
            "alone": median_ms(lambda: first_ms(engine, [tokens(n)])),
        }
    finally:
        engine.drop(prefix)


def main() -> None:
    """Measures all formats, prefixes and prompts; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default="llama3-8b", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["nuq3-1", "kivi2-g32"], choices=FORMATS)
    parser.add_argument("--prefixes", nargs="+", type=int, default=[1024, 8192], help="tokens")
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 161, 512], help="tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8)
    args = parser.parse_args()
    require_gpu()
    decoder = model_of(args.model, args.layers, 1 << 20)
    run = {"command": command("prefixes"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    most = max(args.prefixes) + max(args.prompts) + 64
    for name in args.formats:
        engine = Engine(decoder, bundle_of(decoder, name), args.sequences, most, prefixes=1)
        engine.prepare()
        for before in args.prefixes:
            for n in args.prompts:
                row = {"format": name, "prefix": before, "prompt": n} | times(engine, decoder, before, n)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
                found = run | {"model": args.model, "layers": args.layers, "sequences": args.sequences, "rows": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n")
        del engine
        fresh_peak()
    table = Table(*rows[0], title="ms to the first token")
    for row in rows:
        table.add_row(*(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
