"""Packing on a GPU: a prompt's keys and values, and the page of one decode step, against the bandwidth of a copy.

    python -m benchmarks.pack --out pack.json [--model llama2-7b] [--tokens 32768] [--formats nuq4-1 ...]
    ncu --clock-control none -k regex:pack python -m benchmarks.pack --once

Bytes: what is read (fp16 numbers) plus what is written (pages). Numbers are like a cache's, as those of
`benchmarks.decode_attention`; keys that are stored before RoPE arrive after it. A prompt is larger than the L2 cache.
A step is that of all layers of a model, one launch a side (of each of its kernels); its time is given per layer.
Times are medians in microseconds per layer and side, of CUDA graphs.
`--once` runs every kernel of a prompt once, for a profiler.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from artifacts import PageGeometry, Rope
from artifacts.fields import SideName
from artifacts.geometry import SEGMENT_PAGES
from benchmarks.commands import require_gpu
from benchmarks.decode_attention import FORMATS, MODELS, D, copy_bandwidth, numbers, tables, timed
from runtime import jit
from runtime.codec import Codec, PagePool
from runtime.pack import Packer
from runtime.rope import Rotation

DEFAULT = ["nuq4-1", "nuq3-1", "nuq2-1", "kivi2-g32", "gear-l2", "qjl-256", "turboquant-3"]


LAYERS = 32


@dataclass
class Row:
    """One measurement. us: microseconds of the prompt; window_us: of a step in which the page of one sequence fills in
    all layers, divided by layers, and windows_us of eight sequences; idle_us: of a step in which none fills."""

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


@dataclass
class Case:
    """One side of one format with a prompt x [1, n, h_kv, D] to pack into pages of a pool."""

    name: str
    side: SideName
    packer: Packer
    x: Tensor
    pool: PagePool
    table: Tensor
    segments: Tensor | None
    rotation: Rotation

    @classmethod
    def of(cls, name: str, side: SideName, h_kv: int, n: int) -> "Case":
        fmt = FORMATS[name].key if side == "key" else FORMATS[name].value
        geometry = PageGeometry.of(fmt, h_kv, D, side)
        rotation = Rotation(Rope(D, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, D, 2) / D), "cuda")
        packer = Packer(Codec(geometry, tables(fmt, numbers(1024, h_kv, 99)), "cuda"), rotation, torch.float16)
        pages = (n - fmt.window.sinks) // fmt.t
        count = geometry.segments(pages, pages)
        segments = torch.arange(pages, device="cuda", dtype=torch.int32)[None] // SEGMENT_PAGES if count else None
        table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None]
        x = prompt(h_kv, n)
        if fmt.domain == "pre_rope":
            x = torch.cat([rotated(rotation, x[:, i : i + 4096], i) for i in range(0, n, 4096)], 1)
        return cls(name, side, packer, x, PagePool(geometry, pages, "cuda", count), table, segments, rotation)

    def pack(self) -> None:
        self.packer.prompt(self.pool, self.table, self.x, 0, self.table.shape[1], segments=self.segments)


def measure(name: str, side: SideName, h_kv: int, n: int, copy: float) -> Row:
    """One side of one format."""
    case = Case.of(name, side, h_kv, n)
    packer, geometry = case.packer, case.packer.geometry
    torch.cuda.synchronize()  # `timed` warms up on a stream of its own
    us = timed([case.pack])
    bytes_ = case.table.shape[1] * (geometry.format.t * h_kv * D * 2 + geometry.page_bytes)
    packer.check()
    steps = windows(case)
    found = jit.report(packer.unit, jit.arch_of("cuda"))["pack"]
    return Row(
        name, side, geometry.bits, us, bytes_, bytes_ / us * 1e-6, bytes_ / (us * 1e-6) / copy, *steps,
        found.registers, packer.plan.shared, packer.plan.ctas,
    )  # fmt: skip


def rotated(rotation: Rotation, x: Tensor, first: int) -> Tensor:
    """x [1, n, h_kv, D] at positions first ... after RoPE."""
    positions = torch.arange(first, first + x.shape[1], device="cuda")
    return rotation.rotate(x.transpose(1, 2), positions).transpose(1, 2).half()


@cache
def prompt(h_kv: int, n: int) -> Tensor:
    """Numbers [1, n, h_kv, D], float16; every 4096 tokens are alike."""
    return numbers(min(n, 4096), h_kv, 1).half().repeat(-(-n // 4096), 1, 1)[None, :n]


def windows(case: Case) -> list[float]:
    """Microseconds per layer of a step in which the page of one sequence fills in all layers, of eight, and of none."""
    geometry = case.packer.geometry
    window, t = geometry.format.window, geometry.format.t
    packer = Packer(case.packer.codecs * LAYERS, case.rotation, torch.float16)
    tokens = case.x[:, window.sinks : window.sinks + window.recent + t]
    found: list[float] = []
    for b, full in ((1, True), (8, True), (1, False)):
        pools = [PagePool(geometry, b, "cuda", b) for _ in range(LAYERS)]
        rings = [tokens.repeat(b, 1, 1, 1) for _ in range(LAYERS)]
        n = window.sinks + window.recent + t + int(not full)
        lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
        table = torch.arange(b, dtype=torch.int32, device="cuda")[:, None]
        torch.cuda.synchronize()
        segments = table if geometry.format.lowrank else None  # the page is a segment of its own
        found.append(timed([partial(packer.step, pools, table, rings, lengths, segments=segments)]) / LAYERS)
        packer.check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--formats", nargs="+", default=DEFAULT, choices=list(FORMATS))
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--out", required="--once" not in sys.argv)
    args = parser.parse_args()
    require_gpu()
    sides: tuple[SideName, SideName] = ("key", "value")
    if args.once:
        for name in args.formats:
            for side in sides:
                Case.of(name, side, MODELS[args.model][1], args.tokens).pack()
        torch.cuda.synchronize()
        return
    copy, rows = copy_bandwidth(), []
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
            r.format, r.side, f"{r.bits:.2f}", f"{r.us:.1f}", f"{r.tb_s:.2f}", f"{r.of_copy:.0%}",
            *(f"{us:.1f}" for us in (r.window_us, r.windows_us, r.idle_us)), str(r.registers),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
