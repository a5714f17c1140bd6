"""Time of prompts with packing against the same passes with an fp16 cache, in turns.

    python -m benchmarks.prompts --out prompts.json [--shapes 16x161 1x161 1x2048] [--formats nuq2 ...] [--layers 32]

A shape is prompts of a pass x tokens of each. A real architecture's layers, random weights, keys and values like a
cache's (`benchmarks.decode_model`). Microseconds of a pass, medians: what a prompt of few tokens takes is what the host
takes, so with fewer layers what is paid once a pass weighs more. Where an engine has a graph for the shape
(`runtime.prompts`), the same from graphs, filled up to the graph's size; fp16's has that size, too.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import MODELS, bundle_of, fresh_peak, model_of
from benchmarks.throughput import median_of, prompt_of, prompts
from runtime import KVCache
from runtime.decoding import captured
from runtime.dense import DenseCache
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.intake import Intake
from runtime.prompts import SHORT, PromptGraph, graph_sizes, prompt_numbers

ROUNDS = 3  # in turns


def passes(decoder: HFDecoder, some: int, m: int, formats: list[str]) -> dict[str, Callable[[], None]]:
    """A pass over prompts, by what keeps their keys and values."""
    tokens = prompts(decoder, some, m)
    size = next((size for size in graph_sizes(SHORT, some) if size[0] >= some and size[1] >= m), None)
    found = {"fp16": dense(decoder, tokens)}
    if size:
        found["fp16, graph"] = captured_dense(decoder, tokens, size)
    for name in formats:
        kv = KVCache(bundle_of(decoder, name), some, m + 64, torch.float16, "cuda", prompt=m)
        found[name] = prompt_of(decoder, kv, m, some)
        if size:
            found[f"{name}, graph"] = captured_prompt(decoder, kv, tokens, size)
    return found


def dense(decoder: HFDecoder, tokens: Tensor) -> Callable[[], None]:
    """A pass into a dense cache."""
    cache = DenseCache(decoder, fingerprint(decoder.model), *tokens.shape)

    def prompt() -> None:
        cache.length = 0
        cache.append(tokens)

    return prompt


def captured_dense(decoder: HFDecoder, tokens: Tensor, size: tuple[int, int]) -> Callable[[], None]:
    """The same as a graph of this size."""
    filled, (rows, n) = torch.zeros(size, dtype=torch.int64, device=tokens.device), tokens.shape
    work = dense(decoder, filled)
    held = captured(work)[0], work  # the graph works in the memory of the pass's cache

    def prompt() -> None:
        filled[:rows, :n] = tokens
        held[0].replay()

    return prompt


def captured_prompt(decoder: HFDecoder, kv: KVCache, tokens: Tensor, size: tuple[int, int]) -> Callable[[], None]:
    """A pass from a graph of this size into a compressed cache, packing behind it."""
    numbers = prompt_numbers(decoder, kv, size[0] * size[1])
    graph, rows = PromptGraph(decoder, kv, *size, numbers, torch.cuda.graph_pool_handle()), tokens.tolist()

    def prompt() -> None:
        for i in range(len(rows)):
            kv.release(i)
        intake = Intake(kv, range(len(rows)), [len(row) for row in rows])
        with kv.checked_once():
            graph.run(rows, intake)
            intake.finish()

    return prompt


def main() -> None:
    """Measures all shapes; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--shapes", nargs="+", default=["16x161", "1x161", "1x2048"], help="prompts x tokens")
    parser.add_argument("--formats", nargs="+", default=["nuq2", "kivi2-g32", "nuq4-1", "gear-l2"], choices=FORMATS)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    if wrong := [shape for shape in args.shapes if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)]:
        raise SystemExit(f"--shapes {wrong[0]}: PROMPTSxTOKENS, as in 16x161")
    require_gpu()
    decoder = model_of(args.model, args.layers, 1 << 20)
    run = {"command": command("prompts"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = []
    for shape in args.shapes:
        some, m = (int(x) for x in shape.split("x"))
        found = passes(decoder, some, m, args.formats)
        times = [{name: median_of(work) for name, work in found.items()} for _ in range(ROUNDS)]
        us = {name: statistics.median(each[name] for each in times) for name in found}
        rows.append({"shape": shape, "us": us, "rounds_us": times})
        shown = ", ".join(f"{name} {x:.0f} us ({x / us['fp16']:.3f}x)" for name, x in us.items())
        print(f"{shape}: {shown}", file=sys.stderr, flush=True)
        with open(args.out, "w") as file:
            json.dump(run | {"model": args.model, "layers": args.layers, "rows": rows}, file, indent=1)
        del found
        fresh_peak()
    table = Table("shape", *rows[0]["us"], title="a pass, us (of the fp16 cache's)")
    for row in rows:
        table.add_row(row["shape"], *(f"{x:.0f} ({x / row['us']['fp16']:.2f})" for x in row["us"].values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
