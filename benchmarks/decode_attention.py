"""Attention of one decode step over packed pages on a GPU, against PyTorch's fp16 attention (cuDNN) in the same run.

    python -m benchmarks.decode_attention --out decode.json [--shapes llama2-7b@1x131072 ...] [--formats nuq4-1 ...]

Pages are made by the torch codec from numbers like a cache's (channels that differ in mean and spread, heavy tails) and
repeated until the cache is full. Both sides run from CUDA graphs and go round among caches that are together larger
than the L2 cache. Times are medians in microseconds per step and layer, merge included.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from artifacts import (
    Banded,
    Dense,
    Format,
    LayerFormat,
    LowRank,
    PageGeometry,
    Rope,
    Rotate,
    Sketch,
    Sparse,
    Window,
)
from artifacts.fields import SideName
from artifacts.geometry import SEGMENT_PAGES
from artifacts.matrices import eight_bits
from artifacts.parts.banded import BAND
from benchmarks.commands import require_gpu
from runtime import jit
from runtime.attention import PagedAttention, PagedSide
from runtime.codec import Codec, PagePool, join_fields
from runtime.rope import Rotation
from runtime.units import Sharing

D = 128
L2_BYTES = 60 << 20  # of an H200, and some more
# Query heads, kv heads.
MODELS = {"llama2-7b": (32, 32), "llama3-8b": (32, 8), "llama3-70b": (64, 8), "qwen2.5-7b": (28, 4)}


def nuq(bits: int, outliers: bool = True, t: int = 64, codebook: str = "nuq") -> LayerFormat:
    """KVQuant with 1% outliers, or without."""
    window = Window(sinks=1)
    key, value = (Sparse(0.01, "channel", "bundle"), Sparse(0.01, "token", "online")) if outliers else (None, None)
    return LayerFormat(
        Format(t, Dense(bits, "channel", 0, codebook, "bundle"), key, window, "pre_rope"),
        Format(t, Dense(bits, "token", 0, codebook), value, window),
    )


def even(bits: int, outliers: bool = True, t: int = 64) -> LayerFormat:
    """The same with signposts that are evenly spaced."""
    return nuq(bits, outliers, t, "uniform-fit")


def kivi(bits: int, group: int = 32, rank: LowRank | None = None, t: int = 64) -> LayerFormat:
    """Uniform codes in groups: keys of tokens, values of channels; with factors: GEAR-L."""
    key, value = Dense(bits, "channel", group), Dense(bits, "token", group)
    return LayerFormat(Format(t, key, lowrank=rank), Format(t, value, lowrank=rank))


def turboquant(bits: int) -> Format:
    """Rotated coordinates in a Lloyd-Max code."""
    return Format(64, Dense(bits, "head", codebook="lloyd", normalize="norm"), rotate=Rotate("haar"))


def banded(bits: float) -> LayerFormat:
    """Codes of a width by band of 32 channels; values behind a learned matrix."""
    window = Window(sinks=1)
    return LayerFormat(
        Format(64, banded=Banded(bits), window=window, domain="pre_rope"),
        Format(64, banded=Banded(bits), window=window, rotate=Rotate("learned")),
    )


FORMATS: dict[str, LayerFormat] = {
    "nuq4-1": nuq(4),
    "nuq3-1": nuq(3),
    "nuq2-1": nuq(2),
    "nuq4": nuq(4, outliers=False),
    "nuq2": nuq(2, outliers=False),
    "nuq2-t32": nuq(2, outliers=False, t=32),
    "nuq2-t16": nuq(2, outliers=False, t=16),
    "even4-1": even(4),
    "even3-1": even(3),
    "even2-1": even(2),
    "even4": even(4, outliers=False),
    "even2": even(2, outliers=False),
    "even2-t32": even(2, outliers=False, t=32),
    "even2-t16": even(2, outliers=False, t=16),
    "banded4": banded(3.75),
    "banded3": banded(3),
    "banded2": banded(2),
    "kivi4-g32": kivi(4),
    "kivi2-g32": kivi(2),
    "kivi2-g32-t32": kivi(2, t=32),
    "gear-l2": kivi(2, 64, LowRank(4, 2)),
    "qjl-256": LayerFormat(Format(64, sketch=Sketch(256, "orthogonal", 8, 64)), Format(64, Dense(2, "token", 32))),
    "turboquant-3": LayerFormat(turboquant(3), turboquant(3)),
}


@dataclass
class Row:
    """One measurement. us: microseconds; bytes_: of pages that a step reads; ratio: fp16's time over ours."""

    shape: str
    format: str
    bits: float
    us: float
    merge_us: float
    bytes_: int
    tb_s: float
    of_copy: float
    fp16_us: float
    ratio: float


def channels(h_kv: int) -> tuple[Tensor, Tensor]:
    """Means and spreads of channels, each [h_kv, D] float32: an order of magnitude apart."""
    drawn = torch.Generator().manual_seed(7)
    mean = torch.randn(h_kv, D, generator=drawn)
    return mean.cuda(), (torch.randn(h_kv, D, generator=drawn) * 0.8 - 0.5).exp().cuda()


def numbers(n: int, h_kv: int, seed: int) -> Tensor:
    """[n, h_kv, D] float32: with the means and spreads of `channels`, Laplace tails."""
    mean, spread = channels(h_kv)
    even = torch.rand(n, h_kv, D, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") - 0.5
    return mean - spread * even.sign() * torch.log1p(-2 * even.abs().clamp(max=0.4999999))


def tables(fmt: Format, x: Tensor) -> dict[str, Tensor]:
    """Bundle tensors of a format from x [n, h_kv, D], calibrated plainly."""
    h_kv, found = x.shape[1], {}
    if fmt.center:
        found["mean"] = x.mean(0)
    if fmt.rotate and fmt.rotate.kind == "learned":
        matrices = [torch.linalg.qr(torch.randn(D, D))[0] * 300 for _ in range(h_kv)]
        found["rotation"] = torch.stack(matrices).clamp(-127, 127).to(torch.int8).cuda()
        x = torch.einsum("nhc,hcd->nhd", x, found["rotation"].float())
    elif fmt.rotate:
        found["rotation"] = coarse(torch.linalg.qr(torch.randn(D, D))[0]).cuda()
    if fmt.sparse and fmt.sparse.thresholds == "bundle":
        ends = torch.tensor([fmt.sparse.fraction / 2, 1 - fmt.sparse.fraction / 2]).cuda()
        found["lower"], found["upper"] = torch.quantile(x, ends, dim=0)
        x = x.clamp(found["lower"], found["upper"])
    if fmt.banded or (fmt.dense and fmt.dense.scales == "bundle"):
        low, high = x.amin(0), x.amax(0)
        found |= {"scale": (high - low) / 2, "zero": (high + low) / 2}
    if fmt.dense and fmt.dense.codebook == "nuq":
        count = 1 << fmt.dense.bits
        at = (torch.arange(count) + 0.5) / count
        found["signposts"] = (torch.special.ndtri(at) * 0.4).clamp(-1, 1).cuda()
    if fmt.dense and fmt.dense.codebook == "uniform-fit":  # about where those of "nuq" are
        reach = {2: 930, 3: 1250, 4: 1450}[fmt.dense.bits]
        step = 2 * reach // ((1 << fmt.dense.bits) - 1)
        found["spacing"] = torch.tensor([-reach, step], dtype=torch.int16).cuda()
    if fmt.banded:
        of_heads = torch.tensor([widths(fmt.banded.bits, head) for head in range(h_kv)], dtype=torch.uint8)
        books = torch.ones(h_kv, D // BAND, 16)
        for width in range(5):
            at = (torch.arange(1 << width) + 0.5) / (1 << width)
            book = (torch.special.ndtri(at) * 0.4).clamp(-1, 1)
            books[of_heads == width] = torch.nn.functional.pad(book, (0, 16 - len(book)), value=float(book[-1]))
        found |= {"widths": of_heads.cuda(), "signposts": books.cuda()}
    if fmt.sketch:
        for name, m in (("sketch", fmt.sketch.m), ("outlier_sketch", fmt.sketch.outlier_m)):
            blocks = [torch.linalg.qr(torch.randn(D, D))[0] for _ in range(-(-m // D))]
            found[name] = coarse(torch.cat(blocks)[:m] * D**0.5).cuda()
        found["outlier_mask"] = (
            (torch.arange(D) < fmt.sketch.outliers).to(torch.uint8).expand(h_kv, D).contiguous().cuda()
        )
    return {name: tensor.float() if tensor.dtype == torch.float64 else tensor for name, tensor in found.items()}


def coarse(matrix: Tensor) -> Tensor:
    """As a bundle's matrices are."""
    return torch.from_numpy(eight_bits(matrix.numpy()))


def widths(bits: float, head: int) -> list[int]:
    """Of a head's bands, adding up to the mean `bits`; every fourth head alike, in others bits are moved forward."""
    total = round(4 * bits)
    found = [total // 4 + (band < total % 4) for band in range(4)]
    for _ in range(head % 4):
        for taker, giver in ((0, 3), (1, 2), (0, 2)):
            if found[taker] < 4 and found[giver] > 1:
                found[taker], found[giver] = found[taker] + 1, found[giver] - 1
                break
    return found


def samples(geometry: PageGeometry, found: dict[str, Tensor], pages: int, seed: int) -> PagePool:
    """So many different pages of a side, up to a segment's; seed: of their numbers."""
    fmt, shape = geometry.format, geometry.shape
    codec = Codec(geometry, found, "cuda")
    groups = [
        codec.encode(numbers(8 * fmt.t, shape.h_kv, seed + i).unflatten(0, (-1, fmt.t)), 8)[0]
        for i in range(-(-max(1, min(SEGMENT_PAGES, pages)) // 8))
    ]
    few = PagePool(geometry, 8 * len(groups), "cuda")
    few.write(torch.arange(few.capacity).cuda(), join_fields(groups))
    return few


def filled(few: PagePool, b: int, n: int) -> PagedSide:
    """A side of b sequences of n tokens: the pages of `few`, repeated in random order at places of their own."""
    geometry = few.geometry
    fmt, h_kv = geometry.format, geometry.shape.h_kv
    pages = fmt.window.pages(n, fmt.t)
    pool = PagePool(geometry, b * pages, "cuda", max(1, -(-b * pages // SEGMENT_PAGES)))
    source = torch.randint(few.capacity, (b * pages,), device="cuda")
    for store, small in ((pool.heads, few.heads), (pool.records, few.records)):
        store.copy_(small[source])
    table = torch.randperm(b * pages, device="cuda").view(b, pages)
    if geometry.segment_bytes:
        pool.segments.copy_(few.segments[torch.arange(pool.segments.shape[0]).cuda() % few.segments.shape[0]])
        pool.field("segment").copy_((torch.arange(b * pages, device="cuda") // SEGMENT_PAGES)[:, None])
        table = torch.arange(b * pages, device="cuda").view(b, pages)  # a segment's stand together in a sequence
    window = torch.randn(b, fmt.window.recent + fmt.t + 1, h_kv, D, device="cuda", dtype=torch.float16)
    sinks = torch.randn(b, fmt.window.sinks, h_kv, D, device="cuda", dtype=torch.float16)
    return PagedSide(pool.heads, pool.records, pool.segments, table.int(), sinks, window)


def timed(steps: list[Callable[[], None]], seconds: float = 0.25) -> float:
    """Median microseconds of one step: a graph of all steps, replayed."""
    torch.cuda.synchronize()  # what fills the caches has another stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in steps:
            step()
    torch.cuda.synchronize()
    rounds = max(1, 8 // len(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for step in steps:
                step()
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < 5 or (sum(times) * rounds * len(steps) < seconds * 1e6 and len(times) < 200):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(steps)))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read plus written."""
    a, b = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    return 2 * a.nbytes / (timed([lambda: torch.neg(a, out=b)]) * 1e-6)


def fp16_us(b: int, n: int, h_q: int, h_kv: int) -> float:
    """PyTorch's attention with the cuDNN backend on dense fp16 keys and values."""
    size = 2 * b * n * h_kv * D * 2
    sets = max(1, min(16, 1 + 2 * L2_BYTES // size))
    caches = [[torch.randn(b, h_kv, n, D, device="cuda", dtype=torch.float16) for _ in range(2)] for _ in range(sets)]
    q = torch.randn(b, h_q, 1, D, device="cuda", dtype=torch.float16)

    def step(k: Tensor, v: Tensor) -> Callable[[], None]:
        def run() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=h_q != h_kv)

        return run

    return timed([step(k, v) for k, v in caches])


def size_of(shape: str) -> tuple[int, int, int, int]:
    """Sequences, tokens of each, query heads and kv heads of `model@batch x tokens`. Raises SystemExit for others."""
    model, _, size = shape.partition("@")
    if model not in MODELS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
        raise SystemExit(f"--shapes {shape}: {' or '.join(MODELS)}, then @BATCHxTOKENS, as in llama2-7b@1x131072")
    b, n = (int(x) for x in size.split("x"))
    return b, n, *MODELS[model]


WAYS = {
    "one": Sharing(1), "beside": Sharing(1, beside=True), "multiplies": Sharing(1, multiplies=True),
    "two": Sharing(2), "alone": Sharing(1, alone=True),
}  # fmt: skip


class Dealt(PagedAttention):
    """Kernels of which every batch is dealt out in the same way; None: in the best one."""

    way: Sharing | None = None

    def sharing(self, rows: int, b: int, tokens: int) -> Sharing:
        """As `PagedAttention.sharing`."""
        return self.way or super().sharing(rows, b, tokens)


class Measured:
    """One format with the heads of a model: its kernels and some pages."""

    def __init__(self, formats: LayerFormat, h_q: int, h_kv: int):
        sides: tuple[tuple[Format, SideName], ...] = ((formats.key, "key"), (formats.value, "value"))
        self.geometries = [PageGeometry.of(fmt, h_kv, D, side) for fmt, side in sides]
        sample = numbers(1024, h_kv, 99)
        self.tables = [tables(fmt, sample) for fmt, _ in sides]
        rotation = Rotation(Rope(D, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, D, 2) / D), "cuda")
        self.kernels = Dealt(*self.geometries, *self.tables, rotation, h_q, torch.float16, "cuda")

    @cached_property
    def pages(self) -> list[PagePool]:
        both = zip(self.geometries, self.tables, strict=True)
        return [samples(geometry, found, SEGMENT_PAGES, 5 * side) for side, (geometry, found) in enumerate(both)]


def unit_of(kernels: PagedAttention, b: int, n: int) -> jit.Unit:
    """What a step of b sequences of n tokens loads."""
    fmt = kernels.key.format
    return kernels.unit(kernels.g, kernels.sharing(kernels.g, b, fmt.window.pages(n, fmt.t) * fmt.t))


def measure(shape: str, name: str, given: Measured, dense_us: float, copy: float) -> Row:
    """One format at one shape."""
    b, n, h_q, h_kv = size_of(shape)
    lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
    offsets = torch.zeros(b, dtype=torch.int32, device="cuda")
    bytes_ = sum(b * s.format.window.pages(n - 1, s.format.t) * s.page_bytes for s in given.geometries)
    sets = max(1, min(16, 1 + 2 * L2_BYTES // max(1, bytes_)))
    plans = [
        given.kernels.plan(*(filled(few, b, n) for few in given.pages), lengths, offsets, 1, D**-0.5)
        for _ in range(sets)
    ]
    q = torch.randn(b, h_q, 1, D, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)
    us = timed([lambda plan=plan: plan.run(q, out, follows=True) for plan in plans])
    assert torch.isfinite(out).all(), f"{shape} {name}: the output has NaN"
    merge_us = timed([lambda plan=plan: plan.merge(out) for plan in plans], 0.05)
    bits = 8 * bytes_ / (2 * b * (n - 1) * h_kv * D)
    tb_s = bytes_ / us * 1e-6
    return Row(shape, name, bits, us, merge_us, bytes_, tb_s, tb_s * 1e12 / copy, dense_us, dense_us / us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama2-7b@1x131072"], help="model@batch x tokens")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--way", choices=list(WAYS), help="how the work is dealt out: runtime.units.Sharing")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    require_gpu()
    Dealt.way = WAYS[args.way] if args.way else None
    sizes = {shape: size_of(shape) for shape in args.shapes}
    given = {
        (heads, name): Measured(FORMATS[name], *heads)
        for heads in dict.fromkeys(size[2:] for size in sizes.values())
        for name in args.formats
    }
    units = [unit_of(given[size[2:], name].kernels, *size[:2]) for size in sizes.values() for name in args.formats]
    jit.begin(units, torch.device("cuda", torch.cuda.current_device()))  # on all cores, while the first are timed
    copy, rows = copy_bandwidth(), []
    for shape, (b, n, h_q, h_kv) in sizes.items():
        dense = fp16_us(b, n, h_q, h_kv)
        for name in args.formats:
            rows.append(measure(shape, name, given[(h_q, h_kv), name], dense, copy))
            torch.cuda.empty_cache()
            print(
                f"{shape} {name}: {rows[-1].us:.1f} us, fp16 {dense:.1f}, {rows[-1].ratio:.2f}x",
                file=sys.stderr,
                flush=True,
            )
            run = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": copy * 1e-12}
            with open(args.out, "w") as file:
                json.dump(run | {"rows": [asdict(row) for row in rows]}, file, indent=1)
    show(rows, copy)


def show(rows: list[Row], copy: float) -> None:
    """Prints the table."""
    table = Table(title=f"one decode step of one layer; copy {copy * 1e-12:.2f} TB/s")
    for title in ("shape", "format", "bits", "us", "merge us", "TB/s", "of copy", "fp16 us", "ratio"):
        table.add_column(title, justify="left" if title in ("shape", "format") else "right")
    for r in rows:
        table.add_row(
            r.shape, r.format, f"{r.bits:.2f}", f"{r.us:.1f}", f"{r.merge_us:.1f}", f"{r.tb_s:.2f}", f"{r.of_copy:.0%}",
            f"{r.fp16_us:.1f}", f"{r.ratio:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
