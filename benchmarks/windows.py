"""Decode steps on a GPU of layers that see a window, cap their logits or are in full precision, and of their models.

    python -m benchmarks.windows --out windows.json

Layers: attention of a step beside PyTorch's fp16 attention on the tokens that a query sees, from CUDA graphs that go
round among caches larger than the L2 cache; no kernel of PyTorch's caps logits, so there it does not. Models: real
sizes, random weights in bfloat16, captured steps of a sequence whose cache was filled through pack with
normal numbers, layers that slide in full precision where others do not; beside the same engine with a dense cache.
With --compile the models' layers are compiled around their attention. Medians, microseconds.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, PreTrainedConfig

from artifacts import Bundle, Rope
from benchmarks import decode_attention
from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS, L2_BYTES, Measured, copy_bandwidth, filled, timed
from benchmarks.decode_model import SHORT, fresh_peak, median_us, step_at
from runtime import KVCache
from runtime.attention import PagedAttention, PagedSide
from runtime.decoding import DeviceSteps
from runtime.dense import DenseCache
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import rotary
from runtime.rope import Rotation
from runtime.units import Scoring
from runtime.unpaged import unpaged


@dataclass(frozen=True)
class Layer:
    """One kind of layer of a model at a length."""

    name: str
    h_q: int
    h_kv: int
    d: int
    scoring: Scoring
    b: int
    n: int
    format: str | None  # None: full precision

    @property
    def seen(self) -> int:
        """Tokens that a query sees."""
        return min(self.n, self.scoring.window or self.n)


def layers() -> list[Layer]:
    """Of models that have such layers."""
    gemma2, gemma3, mistral = Scoring(4096, 50.0), Scoring(1024), Scoring(4096)
    return [
        *(Layer("gemma3-12b, local", 16, 8, 256, gemma3, b, 32768, None) for b in (1, 8, 64)),
        *(Layer("gemma2-9b, local", 16, 8, 256, gemma2, b, 8192, None) for b in (1, 8, 64)),
        *(Layer("32/8 heads, full precision", 32, 8, 128, Scoring(), b, n, None) for b, n in ((1, 32768), (8, 8192))),
        *(Layer("mistral-7b-v0.1", 32, 8, 128, mistral, b, 32768, f) for b in (1, 8) for f in ("nuq4", "kivi2-g32")),
        *(Layer("32/8 heads", 32, 8, 128, Scoring(0, s), 1, 32768, "kivi2-g32") for s in (None, 50.0)),
    ]


def kernels_us(layer: Layer) -> float:
    """Ours."""
    b, d = layer.b, layer.d
    size = 2 * b * layer.seen * layer.h_kv * d * 2
    sets = max(2, min(16, 1 + 2 * L2_BYTES // size))
    if layer.format is None:
        rotation = Rotation(Rope(d, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, d, 2) / d), "cuda")
        kernels = PagedAttention(
            *unpaged(layer.h_kv, d), {}, {}, rotation, layer.h_q, torch.float16, "cuda", layer.scoring
        )
        sides = [[ring(layer) for _ in range(2)] for _ in range(sets)]
    else:
        given = Measured(FORMATS[layer.format], layer.h_q, layer.h_kv)
        kernels = given.kernels
        kernels.scoring = layer.scoring
        sides = [[filled(few, b, layer.n) for few in given.pages] for _ in range(sets)]
    lengths = torch.full((b,), layer.n, dtype=torch.int32, device="cuda")
    offsets = torch.zeros(b, dtype=torch.int32, device="cuda")
    plans = [kernels.plan(*pair, lengths, offsets, 1, d**-0.5, layer.n) for pair in sides]
    q = torch.randn(b, layer.h_q, 1, d, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)
    us = timed([lambda plan=plan: plan.run(q, out, follows=True) for plan in plans])
    assert torch.isfinite(out).all(), f"{layer}: the output has NaN"
    return us


def ring(layer: Layer) -> PagedSide:
    """A side in full precision."""
    none, size = torch.empty(0, dtype=torch.uint8, device="cuda"), (layer.b, layer.seen, layer.h_kv, layer.d)
    tokens = torch.randn(size, device="cuda", dtype=torch.float16)
    return PagedSide(none, none, none, none.int().expand(layer.b, 0), tokens[:, :0], tokens)


def fp16_us(layer: Layer) -> float:
    """PyTorch's, with the faster of two backends."""
    shape = layer.b, layer.h_kv, layer.seen, layer.d
    sets = max(2, min(16, 1 + 2 * L2_BYTES // (4 * layer.b * layer.h_kv * layer.seen * layer.d)))
    caches = [[torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2)] for _ in range(sets)]
    q = torch.randn(layer.b, layer.h_q, 1, layer.d, device="cuda", dtype=torch.float16)

    def run(backend: SDPBackend, k: Tensor, v: Tensor) -> None:
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=layer.h_q != layer.h_kv)

    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            found.append(timed([lambda pair=pair, backend=backend: run(backend, *pair) for pair in caches]))
        except RuntimeError as error:  # a backend without this head dimension
            print(f"{layer.name}: {backend.name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return min(found)


MODELS: dict[str, tuple[PreTrainedConfig, list[int]]] = {
    "gemma3-12b": (
        Gemma3TextConfig(
            hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, sliding_window=1024, max_position_embeddings=131072,
        ),
        [32768, 131072],
    ),
    "gemma2-9b": (
        Gemma2Config(
            hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, max_position_embeddings=8192,
        ),
        [8192],
    ),
}  # fmt: skip
PART = 4096  # tokens that come at once


def steps_us(decoder: HFDecoder, name: str | None, n: int) -> tuple[float, int]:
    """Of a sequence with token n, and bytes of its cache; without a format's name: dense."""
    found, before = fingerprint(decoder.model), fresh_peak()
    if name is None:
        cache = DenseCache(decoder, found, 1, n)
        torch.nn.init.normal_(cache.numbers)
        held = torch.cuda.memory_allocated() - before
        return median_us(cache.capture(n), 0.3), held
    mixed = 0 in found.sliding
    formats = tuple(None if mixed and found.window(layer) else FORMATS[name] for layer in range(found.l))
    bundle = Bundle("random", found, formats, {"rope.inv_freq": rotary(decoder.model)[1].numpy()})
    kv = KVCache(bundle, 1, n + 64, decoder.dtype, "cuda", prompt=n - 1)
    held = torch.cuda.memory_allocated() - before
    steps = DeviceSteps(decoder, kv, [1])
    for start in range(0, n - 1, PART):
        size = found.h_kv, min(PART, n - 1 - start), found.d
        numbers = [torch.randn(size, device="cuda", dtype=decoder.dtype) for _ in range(2)]
        for layer in kv:
            layer.append(0, *numbers)
    graph, logits = step_at(steps, kv, n)
    us = median_us(graph, 0.3)
    assert torch.isfinite(logits).all(), f"{name}: logits have NaN"
    return us, held


def models(names: list[str], compile: bool) -> list[dict[str, object]]:
    """Rows of these models."""
    rows: list[dict[str, object]] = []
    for name in names:
        config, lengths = MODELS[name]
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        decoder = HFDecoder(model.eval().requires_grad_(False), compile=compile)
        for n in lengths:
            dense_us, dense_bytes = steps_us(decoder, None, n - SHORT)
            for cache in ("kivi4-g32", "kivi2-g32"):
                us, held = steps_us(decoder, cache, n - SHORT)
                row = {"model": name, "n": n, "cache": cache, "us": us, "bytes": held}
                rows.append(row | {"dense_us": dense_us, "dense_bytes": dense_bytes})
                print(rows[-1], file=sys.stderr, flush=True)
        del model, decoder
        fresh_peak()
    return rows


def main() -> None:
    """Measures all; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compile", action="store_true", help="models' layers, around their attention")
    args = parser.parse_args()
    require_gpu()
    copy = copy_bandwidth()
    run = {"command": command("windows"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    table = Table(title=f"a decode step of a layer, us; copy {copy * 1e-12:.2f} TB/s")
    for title in ("layer", "cache", "batch x tokens", "window", "cap", "us", "of copy", "fp16", "ratio"):
        table.add_column(title)
    rows = []
    for layer in layers():
        ours, theirs = kernels_us(layer), fp16_us(layer)
        torch.cuda.empty_cache()
        rows.append(asdict(layer) | {"us": ours, "fp16_us": theirs})
        read = 4 * layer.b * layer.seen * layer.h_kv * layer.d / (ours * 1e-6) / copy
        table.add_row(
            layer.name, layer.format or "full precision", f"{layer.b} x {layer.n}", str(layer.scoring.window or "-"),
            str(layer.scoring.softcap or "-"), f"{ours:.1f}", "-" if layer.format else f"{read:.0%}", f"{theirs:.1f}",
            f"{theirs / ours:.2f}",
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        with open(args.out, "w") as file:
            json.dump(run | {"copy_tb_s": copy * 1e-12, "rows": rows}, file, indent=1)
    Console(width=140).print(table)
    whole = models(args.models, args.compile)
    with open(args.out, "w") as file:
        json.dump(run | {"copy_tb_s": copy * 1e-12, "rows": rows, "models": whole}, file, indent=1)


if __name__ == "__main__":
    assert decode_attention.D == 128, "packed layers have the numbers of `benchmarks.decode_attention`"
    main()
