"""What a run would take, before any weight is read: `python -m calib dry_run=true`."""

import time
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoModelForCausalLM

from artifacts import CacheGeometry, Format
from artifacts.parts.banded import BAND
from calib.config import Settings
from calib.devices import place
from calib.fits.banded import BINS
from calib.forward import ROWS
from calib.pipeline import check_formats, heads, model_dtype
from calib.statistics import LANES
from calib.summary import LONG
from runtime.hf_load import DTYPES
from runtime.hf_model import sliding_windows

MOMENTS = 3  # sums of each bin of a histogram, float64
FORWARDS = (1, 3)  # passes without and with gradients, in forward passes: the second goes up twice and down once
_SIZE = 2048  # of the matrices whose product tells how fast the device is


def plan(settings: Settings) -> Table:
    """Memory, time and sizes of the run that these settings describe.

    Raises what the run would raise before it loads the model.
    """
    config, model = settings.config, check_formats(settings)
    device = place(config.device).device
    name = model_dtype(config.model.dtype, device)
    dtype = DTYPES.get(name) or getattr(model, "dtype", None) or torch.float32
    weights, tokens = parameters(model), config.samples * config.seqlen
    geometry = CacheGeometry.of(
        settings.formats(model.num_hidden_layers, sliding_windows(model)), *heads(model), sliding_windows(model)
    )
    speed = products(device, dtype)
    least = 2 * weights * tokens * sum(FORWARDS) / speed
    rows = {
        "model": f"{model.num_hidden_layers} layers, {weights / 1e9:.3f} G parameters in {str(dtype)[6:]} on {device}",
        "text": f"{config.samples} samples of {config.seqlen} tokens",
        "weights": _mib(weights * dtype.itemsize),
        "memory above the weights": f"about {_mib(working(settings, model, dtype))}, whatever the number of samples",
        "time": f"at least {least:.1f} s for two passes, one with gradients, at the {speed / 1e12:.2f} TFLOP/s "
        "that products of matrices reach here",
        "tensors of the bundle": f"{geometry.bundle_bytes / 1024:.0f} KiB",
        "bits per number, everything counted": f"{geometry.bits(4096):.3f} at 4096 tokens, {geometry.bits(LONG):.3f} "
        f"at {LONG}",
        f"cache at {LONG} tokens": _mib(geometry.cache_bytes(LONG)),
    }
    table = Table(title=Text(f"dry run: {config.method.name} for {config.model.name}"), title_justify="left",
                  show_header=False)  # fmt: skip
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table


def parameters(model: Any) -> int:
    """How many numbers the weights of a model of this configuration are, tied ones counted once."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(model).parameters())


def working(settings: Settings, model: Any, dtype: torch.dtype) -> int:
    """Bytes that collecting needs beside the weights, about: the larger one of both passes.

    Without gradients: keys and values of one sample, all layers. With: what went into each layer, one layer's graph
    (inputs of its products, scores apart), histograms or second moments in lanes. Both: a block of logits and its
    gradient in float32.
    """
    n, l, (h_kv, d) = settings.config.seqlen, model.num_hidden_layers, heads(model)
    hidden, inner = model.hidden_size, getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    logits = 3 * ROWS * model.vocab_size * 4
    without = 2 * l * n * h_kv * d * dtype.itemsize
    graph = n * (8 * hidden + 4 * inner) * dtype.itemsize
    layers = [layer for layer in settings.formats(l, sliding_windows(model)) if layer]
    sides = [fmt for layer in layers for fmt in (layer.key, layer.value)]
    bins = settings.config.method.bins
    numbers = bins * sum(fmt.dense is not None and _fitted(fmt) for fmt in sides)
    numbers += min(BINS, bins) * h_kv * d // BAND * sum(fmt.banded is not None for fmt in sides)
    # Passes follow each other, and what the larger one of these keeps is what counts.
    matrices = 2 * h_kv * d * d * sum(fmt.rotate is not None and fmt.rotate.kind == "learned" for fmt in sides)
    histograms = LANES * 8 * max(MOMENTS * numbers, matrices)
    return logits + max(without, (l + 1) * n * hidden * dtype.itemsize + graph + histograms)


def _fitted(fmt: Format) -> bool:
    """Whether its dense codebook comes from a histogram."""
    return fmt.dense is not None and (fmt.dense.codebook == "uniform-fit" or fmt.dense.codebook.startswith("nuq"))


def products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of products of matrices, the best of three."""
    a = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    return 2 * _SIZE**3 / min(_seconds(a) for _ in range(3))


def _seconds(a: Tensor) -> float:
    start = time.perf_counter()
    (a @ a)[0, 0].item()
    return time.perf_counter() - start


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
