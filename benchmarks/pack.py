"""Packing on a GPU: a prompt's keys and values, and the page of one decode step, against the bandwidth of a copy.

    python -m benchmarks.pack --out pack.json [--model llama2-7b] [--tokens 32768] [--formats nuq4-1 ...]

Bytes: what is read (fp16 numbers) plus what is written (pages). Numbers are like a cache's, as those of
`benchmarks.decode_attention`. A prompt is larger than the L2 cache; windows go round among sequences that together are.
Times are medians of CUDA graphs, in microseconds per layer and side.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from artifacts import PageGeometry, Rope
from artifacts.fields import SideName
from benchmarks.decode_attention import FORMATS, L2_BYTES, MODELS, D, copy_bandwidth, numbers, tables, timed
from runtime import jit
from runtime.codec import Codec, PagePool
from runtime.pack import Packer
from runtime.rope import Rotation

DEFAULT = ["nuq4-1", "nuq2-1", "kivi2-g32", "qjl-256", "turboquant-3"]


@dataclass
class Row:
    """One measurement. us: microseconds of the prompt; window_us: of the page of one sequence, and of eight at once;
    idle_us: of a step in which no page fills."""

    format: str
    side: str
    bits: float
    us: float
    bytes_: int
    tb_s: float
    of_copy: float
    window_us: float
    windows_us: float
    idle_us: float
    registers: int
    shared: int
    ctas: int


def measure(name: str, side: SideName, h_kv: int, n: int, copy: float) -> Row:
    """One side of one format."""
    fmt = FORMATS[name].key if side == "key" else FORMATS[name].value
    geometry = PageGeometry.of(fmt, h_kv, D, side)
    rotation = Rotation(Rope(D, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, D, 2) / D), "cuda")
    codec = Codec(geometry, tables(fmt, numbers(1024, h_kv, 99)), "cuda")
    packer = Packer(codec, rotation, torch.float16)
    pages = (n - fmt.window.sinks) // fmt.t
    x = prompt(h_kv, n)
    pool = PagePool(geometry, pages, "cuda")
    table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None]
    us = timed([lambda: packer.prompt(pool, table, x, 0, pages)])
    bytes_ = pages * (fmt.t * h_kv * D * 2 + geometry.page_bytes)
    packer.check()
    alone, together, idle = (windows(packer, x, b, full) for b, full in ((1, True), (8, True), (1, False)))
    packer.check()
    found = jit.report(packer.unit, jit.arch_of("cuda"))["pack"]
    return Row(
        name, side, geometry.bits, us, bytes_, bytes_ / us * 1e-6, bytes_ / (us * 1e-6) / copy, alone, together, idle,
        found.registers, packer.plan.shared, packer.plan.ctas,
    )  # fmt: skip


@cache
def prompt(h_kv: int, n: int) -> Tensor:
    """Numbers [1, n, h_kv, D], float16; every 4096 tokens are alike."""
    return numbers(min(n, 4096), h_kv, 1).half().repeat(-(-n // 4096), 1, 1)[None, :n]


def windows(packer: Packer, x: Tensor, b: int, full: bool) -> float:
    """Microseconds of a step in which the pages of all b sequences fill, or of none."""
    fmt, shape = packer.geometry.format, packer.geometry.shape
    capacity = fmt.window.recent + fmt.t
    size = b * capacity * shape.h_kv * shape.d * 2
    sets = max(2, min(64, 1 + 2 * L2_BYTES // size))
    pool = PagePool(packer.geometry, sets * b, "cuda")
    n = fmt.window.sinks + fmt.window.recent + fmt.t + (not full)
    lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
    steps: list[Callable[[], None]] = []
    for i in range(sets):
        first = i * 7 % (x.shape[1] - b * capacity)
        ring = x[0, first : first + b * capacity].clone().unflatten(0, (b, capacity))
        table = torch.arange(i * b, (i + 1) * b, dtype=torch.int32, device="cuda")[:, None]
        steps.append(partial(packer.step, pool, table, ring, lengths))
    return timed(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=32768)
    known = [name for name, formats in FORMATS.items() if not formats.key.lowrank]
    parser.add_argument("--formats", nargs="+", default=DEFAULT, choices=known)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    copy, rows = copy_bandwidth(), []
    sides: tuple[SideName, SideName] = ("key", "value")
    for name in args.formats:
        for side in sides:
            rows.append(measure(name, side, MODELS[args.model][1], args.tokens, copy))
            torch.cuda.empty_cache()
            print(f"{name}.{side}: {rows[-1].us:.1f} us, {rows[-1].of_copy:.0%} of copy", file=sys.stderr, flush=True)
            run = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": copy * 1e-12}
            run |= {"model": args.model, "tokens": args.tokens}
            with open(args.out, "w") as file:
                json.dump(run | {"rows": [asdict(row) for row in rows]}, file, indent=1)
    show(rows, copy, args.tokens)


def show(rows: list[Row], copy: float, tokens: int) -> None:
    """Prints the table."""
    table = Table(title=f"packing {tokens} tokens of one layer; copy {copy * 1e-12:.2f} TB/s")
    titles = ("format", "side", "bits", "us", "TB/s", "of copy", "window us", "8 windows us", "none us", "registers")
    for title in titles:
        table.add_column(title, justify="left" if title in ("format", "side") else "right")
    for r in rows:
        table.add_row(
            r.format, r.side, f"{r.bits:.2f}", f"{r.us:.1f}", f"{r.tb_s:.2f}", f"{r.of_copy:.0%}", f"{r.window_us:.1f}",
            f"{r.windows_us:.1f}", f"{r.idle_us:.1f}", str(r.registers),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
