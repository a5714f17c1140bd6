"""Time per token of a whole model on a GPU: compressed caches against fp16, both from CUDA graphs, in the same engine.

    python -m benchmarks.decode_model --out decode-model.json [--shapes llama2-7b@1x4096 ...] [--formats nuq3-1 ...]

Weights are random, of the real architecture's sizes: times and bytes do not depend on them. Caches are filled through
pack with numbers like a cache's (`benchmarks.decode_attention`), of which every 4096 tokens are alike, keys up to their
rotation; scaled rows of weights make the model's own keys and values alike. With --compile the model's layers are
compiled around their attention, for all caches alike. A step is the whole model: embedding, all layers with writing and
attention, logits; packing follows it where a page fills. The baseline's attention is PyTorch's with the cuDNN backend
over dense fp16 keys and values. Times are medians over replays, in microseconds per step, eight tokens before the named
length, so that the step that is repeated fills no page; `loop_us` is the engine's own loop instead, over 64 steps that
fill one: pages taken, graph replayed, tokens chosen, the next step queued meanwhile.

A format `a+b+c` gives the layers these formats in turn. Its row then also has the mean of the times that a model of
each takes alone, if they were measured before it at the same shape: that is what the mixture is expected to take.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from artifacts import Bundle, LayerFormat
from benchmarks.commands import require_gpu
from benchmarks.decode_attention import FORMATS, D, channels, numbers, tables
from runtime import KVCache
from runtime.decoding import DeviceSteps, greedy
from runtime.dense import DenseCache
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import rotary

MODELS = {
    "llama2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
    "llama3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
}
ALIKE = 4096  # tokens
SHORT = 8  # tokens
LOOP = 64  # steps of the engine's loop: a page fills once


@dataclass
class Row:
    """One cache at one shape. Bytes: of weights; of the cache and the bundle's tensors, as torch counts them and as the
    geometry predicts; the most that was allocated during steps, weights included. ratio: fp16's time over this one's.
    parts_us: of a mixture, the mean of its formats' own step times."""

    shape: str
    cache: str
    bits: float
    step_us: float
    loop_us: float
    fill_s: float
    weight_bytes: int
    cache_bytes: int
    predicted_bytes: int
    peak_bytes: int
    ratio: float | None
    parts_us: float | None = None


def model_of(name: str, layers: int, positions: int, compile: bool = False) -> HFDecoder:
    """The decoder of a shape, random weights in float16 on the device; keys and values are like a cache's."""
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=32, max_position_embeddings=positions, **MODELS[name]
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.eval().requires_grad_(False)
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            spread_out(projection)
    return HFDecoder(model, compile=compile)


def spread_out(projection: torch.nn.Linear) -> None:
    """Makes what a projection of random weights gives like `cached` numbers: normal ones, of which as many lie outside
    a channel's thresholds of 1% (Laplace's 0.5% are at 4.6 spreads, a normal's at 2.58 standard deviations). Its
    inputs, behind a norm, have a mean square of 1."""
    spread = channels(projection.out_features // D)[1]
    deviation = projection.weight.float().std() * projection.in_features**0.5
    projection.weight *= (spread.flatten() * (4.605 / 2.576) / deviation)[:, None]


def cached(n: int, h_kv: int, seed: int) -> Tensor:
    """[n, h_kv, D] float32, like a cache's numbers but for their means, which a model without biases does not make."""
    return numbers(n, h_kv, seed) - channels(h_kv)[0]


def formats_of(name: str, layers: int) -> tuple[LayerFormat, ...]:
    """Of all layers. Raises SystemExit for a name that is not known."""
    parts = name.split("+")
    if unknown := [part for part in parts if part not in FORMATS]:
        raise SystemExit(f"format {unknown[0]}: known are {', '.join(FORMATS)}, and several joined by +")
    return tuple(FORMATS[parts[layer % len(parts)]] for layer in range(layers))


def bundle_of(decoder: HFDecoder, name: str) -> Bundle:
    """A bundle with the same tensors for all layers of a format."""
    found = fingerprint(decoder.model)
    formats, sample = formats_of(name, found.l), cached(1024, found.h_kv, 99)
    tensors = {"rope.inv_freq": rotary(decoder.model)[1].numpy()}
    for each in dict.fromkeys(formats):
        for side, fmt in (("key", each.key), ("value", each.value)):
            for tensor_name, tensor in tables(fmt, sample).items():
                for layer in (layer for layer in range(found.l) if formats[layer] == each):
                    tensors[f"layers.{layer}.{side}.{tensor_name}"] = tensor.cpu().numpy()
    return Bundle("random", found, formats, tensors)


def median_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Median time of a replay in microseconds."""
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds * 1e6:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def fresh_peak() -> int:
    """Bytes allocated now, from which the next peak counts."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def dense(decoder: HFDecoder, shape: str, b: int, n: int, seconds: float) -> Row:
    """The fp16 cache at length n."""
    found, weights = fingerprint(decoder.model), fresh_peak()
    cache = DenseCache(decoder, found, b, n)
    held = torch.cuda.memory_allocated() - weights
    few = cached(min(n, 256), found.h_kv, 1).half().transpose(0, 1)
    for start in range(0, n, few.shape[1]):
        part = cache.numbers[:, :, :, :, start : start + few.shape[1]]
        part.copy_(few[:, : part.shape[4]].expand_as(part))
    us = median_us(cache.capture(n), seconds)
    predicted = dense_bytes(decoder, b, n)
    peak = torch.cuda.max_memory_allocated()
    return Row(shape, "fp16", 16.0, us, us, 0.0, weights, held, predicted, peak, 1.0)


def compressed(decoder: HFDecoder, shape: str, name: str, b: int, n: int, seconds: float, fp16_us: float | None) -> Row:
    """A compressed cache at length n."""
    bundle, weights = bundle_of(decoder, name), fresh_peak()
    most = n + LOOP + 64
    kv = KVCache(bundle, b, most, torch.float16, "cuda", prompt=n - 1)
    held = torch.cuda.memory_allocated() - weights
    steps = DeviceSteps(decoder, kv, [b])
    start = time.perf_counter()
    fill(kv, n - 1)
    fill_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    graph, logits = step_at(steps, kv, n)
    us = median_us(graph, seconds)
    assert torch.isfinite(logits).all(), f"{shape} {name}: logits have NaN"
    loop_us = loop(decoder, steps, b)
    kv.check()
    geometry = bundle.geometry
    predicted = b * geometry.cache_bytes(most, 2, n - 1) + geometry.resident_bytes
    peak, ratio = torch.cuda.max_memory_allocated(), fp16_us and fp16_us / us
    return Row(shape, name, geometry.bits(n, 2, n), us, loop_us, fill_s, weights, held, predicted, peak, ratio)


def fill(kv: KVCache, n: int) -> None:
    """n tokens for every sequence of the cache, through pack; sequences are alike, but pages are their own."""
    model = kv.bundle.model
    few = cached(min(n, ALIKE), model.h_kv, 1).transpose(0, 1).contiguous()
    for start in range(0, n, ALIKE):
        part = few[:, : min(ALIKE, n - start)]
        turned = kv.rotation.rotate(part, torch.arange(start, start + part.shape[1], device=part.device))
        keys, values = turned.half(), part.half()
        for layer in kv:
            layer.append(0, keys, values)
    for i in range(1, kv.b):
        repeat(kv, i)
    torch.cuda.synchronize()


def step_at(steps: DeviceSteps, kv: KVCache, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The captured step whose token is number n of every sequence of a cache that holds those before, run once, and
    where it leaves its logits."""
    step = steps.step(kv.b, n)
    assert step.graph is not None
    kv.take_step(range(kv.b))
    step.run([(1, n)] * kv.b)
    return step.graph, step.logits


def repeat(kv: KVCache, sequence: int) -> None:
    """Makes an empty sequence as long as sequence 0, with the same numbers in pages and segments of its own."""
    kv.room.take({sequence: kv.lengths[0]})
    for layer in kv.paged:
        for side in (layer.key, layer.value):
            pool, used, tables = side.pool, side.used[0], side.tables.book.tables
            old, new = (side.table[i, :used].long() for i in (0, sequence))
            pool.heads[new], pool.records[new] = pool.heads[old], pool.records[old]
            if side.geometry.segment_bytes:
                groups = [torch.tensor(side.tables.book.groups(tables[i][:used])).to(new) for i in (0, sequence)]
                pool.segments[groups[1]] = pool.segments[groups[0]]
                at = (pool.field("segment")[old].long() == groups[0]).int().argmax(1, keepdim=True)
                pool.field("segment")[new] = groups[1][at].to(pool.field("segment").dtype)
            side.sinks[sequence], side.window[sequence], side.used[sequence] = side.sinks[0], side.window[0], used
        layer.lengths[sequence] = layer.lengths[0]


def loop(decoder: HFDecoder, steps: DeviceSteps, b: int) -> float:
    """Microseconds a step of the engine's loop: each is queued before the tokens of the one before are known."""
    found = greedy(decoder, steps, dict.fromkeys(range(b), 1))
    next(found)
    start = time.perf_counter()
    for _ in range(LOOP):
        next(found)
    return (time.perf_counter() - start) / LOOP * 1e6


def main() -> None:
    """Measures all shapes and formats; writes the JSON after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="+", default=["llama2-7b@1x4096", "llama2-7b@1x32768", "llama2-7b@1x131072"])
    parser.add_argument("--formats", nargs="+", default=["nuq3-1", "nuq2-1", "kivi2-g32"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile", action="store_true", help="the model's layers, around their attention")
    parser.add_argument("--seconds", type=float, default=0.5, help="of replays for each time")
    args = parser.parse_args()
    require_gpu()
    for name in args.formats:
        formats_of(name, args.layers)
    rows: list[Row] = []
    decoder, made = None, ""
    for shape in args.shapes:
        model, _, size = shape.partition("@")
        b, n = (int(x) for x in size.split("x"))
        if model != made:
            decoder, made = None, model
            decoder = model_of(model, args.layers, 1 << 20, args.compile)
        assert decoder is not None
        for name in ("fp16", *args.formats):
            if name == "fp16" and not fits(decoder, b, n):
                print(f"{shape} fp16: does not fit this GPU", file=sys.stderr, flush=True)
                continue
            row = (
                dense(decoder, shape, b, n - SHORT, args.seconds)
                if name == "fp16"
                else compressed(decoder, shape, name, b, n - SHORT, args.seconds, rows_of(rows, shape))
            )
            row.parts_us = parts_of(rows, shape, name, args.layers)
            rows.append(row)
            expected = f", its formats alone {row.parts_us:.0f} us" if row.parts_us else ""
            print(
                f"{shape} {name}: {row.step_us:.0f} us{expected} ({shown(row.ratio)}x), loop {row.loop_us:.0f} us, "
                f"filled in {row.fill_s:.1f} s, cache {row.cache_bytes} bytes, predicted {row.predicted_bytes}",
                file=sys.stderr,
                flush=True,
            )
            run = {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "layers": args.layers,
                "compiled": args.compile,
            }
            with open(args.out, "w") as file:
                json.dump(run | {"rows": [asdict(row) for row in rows]}, file, indent=1)
    show(rows)


def fits(decoder: HFDecoder, b: int, n: int) -> bool:
    """Whether the GPU has room for a cache in fp16."""
    fresh_peak()
    return dense_bytes(decoder, b, n) < torch.cuda.mem_get_info()[0]


def dense_bytes(decoder: HFDecoder, b: int, n: int) -> int:
    """Bytes of a cache in fp16."""
    found = fingerprint(decoder.model)
    return 2 * found.l * b * n * found.h_kv * found.d * 2


def rows_of(rows: list[Row], shape: str) -> float | None:
    """fp16's time at a shape; None where it does not fit."""
    return next((row.step_us for row in rows if row.shape == shape and row.cache == "fp16"), None)


def parts_of(rows: list[Row], shape: str, name: str, layers: int) -> float | None:
    """The mean step time of a mixture's formats, by layers; None if one was not measured alone, and for no mixture."""
    parts = name.split("+")
    alone = {row.cache: row.step_us for row in rows if row.shape == shape}
    if len(parts) == 1 or any(part not in alone for part in parts):
        return None
    return statistics.mean(alone[parts[layer % len(parts)]] for layer in range(layers))


def shown(x: float | None, digits: int = 2) -> str:
    """For people."""
    return "-" if x is None else f"{x:.{digits}f}"


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(title="one decode step of the whole model")
    for title in ("shape", "cache", "bits", "us", "ratio", "loop us", "cache GB", "of predicted", "peak GB"):
        table.add_column(title, justify="left" if title in ("shape", "cache") else "right")
    for r in rows:
        table.add_row(
            r.shape, r.cache, f"{r.bits:.2f}", f"{r.step_us:.0f}", shown(r.ratio), f"{r.loop_us:.0f}",
            f"{r.cache_bytes * 1e-9:.2f}", f"{r.cache_bytes / r.predicted_bytes:.4f}", f"{r.peak_bytes * 1e-9:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
