"""Ideas for 1 to 3 bits, tried before they are built: codes of pairs of numbers, error feedback along layers, tokens
of one size; and what centring earns.

    python -m benchmarks.joint_codes --model FOLDER --data CALIBRATION.txt --eval TEST.txt --out FILE.json

Every row quantizes keys before RoPE and values of all layers behind the first token, every number less its channel's
mean and over its channel's standard deviation, and is alike in everything else: plain k-means by weight, the square of
the loss's gradient (of a pair: of either number), one codebook for each layer, side and head.

single               2^b values
pairs of neighbours  2^(2b) points, numbers 2i and 2i + 1 of a head
rotary pairs         the same, numbers i and i + d/2
not centred          single, channels keep their means and are divided by their root mean squares
tokens of one size   single, every token of a head divided by its root mean square, a number more to be stored for each
keys of one size     the same of keys alone
feedback             single, each layer fitted to what the layers below it give when they are quantized already

Reported are loss and KL on --tokens tokens of --eval, and the fit's own error, weighted, over the weighted variance.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.commands import command
from calib.config import TextConfig
from calib.data import calibration_tokens, evaluation_tokens
from calib.evaluate import Comparison
from calib.forward import Head, blocks, hidden_states
from calib.tap import Activations, Tap
from runtime.exact import causal_attention
from runtime.hf import AttendingCache, load_causal_lm
from runtime.hf_model import rotary
from runtime.rope import Rotation

JOINT = ("pairs of neighbours", "rotary pairs")
KINDS = ("single", *JOINT, "not centred", "tokens of one size", "keys of one size")
FEEDBACK = "feedback"
ROUNDS, SAMPLE = 25, 1 << 16


def main() -> None:
    """Prints the table and writes --out."""
    options = _parser().parse_args()
    model, tokenizer = load_causal_lm(options.model, "float32", options.device)
    data, text = TextConfig("text", options.data), TextConfig("text", options.eval)
    calibration = calibration_tokens(data, model, tokenizer, options.samples, options.seqlen, 0).ids
    windows = evaluation_tokens(text, model, tokenizer, options.tokens, options.context, 0).ids
    rows: dict[str, dict[str, Any]] = {}
    seen = samples(model, calibration)
    for bits in (1, 2, 3):
        for kind in options.kinds:
            start = time.perf_counter()
            fits = with_feedback(model, calibration, seen, bits) if kind == FEEDBACK else fitted(seen, kind, bits)
            error = sum(fit.error for pair in fits for fit in pair) / sum(len(pair) for pair in fits)
            rows[f"{kind}, {bits}"] = measured(model, fits, windows) | {"error": error}
            print(f"{kind}, {bits}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    result = {
        "rows": rows,
        "model": Path(options.model).name,
        "calibration": f"{Path(options.data).name}, {options.samples} x {options.seqlen}",
        "evaluation": f"{Path(options.eval).name}, {windows.numel()} tokens in windows of {options.context}",
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": command("joint_codes"),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| codes, bits | error | loss | KL | KL 99.9% |\n|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['error']:.4f} | {row['loss_increase']:+.4f} "
            f"| {row['kl_mean']:.4f} | {row['kl_p999']:.2f} |"
        )


class Fit:
    """A side's codebooks [h_kv, 2^(b dims), dims], and the channels' means and deviations [h_kv, d]."""

    def __init__(self, x: Tensor, weight: Tensor, kind: str, bits: int):
        """x, weight: [n, h_kv, d]."""
        self.kind, self.dims = kind, 2 if kind in JOINT else 1
        self.mean = torch.zeros_like(x[0]) if kind == "not centred" else x.mean(0)
        self.deviation = (x - self.mean).square().mean(0).sqrt().clamp_min(1e-6)
        plain, size = self._plain(x)
        numbers, weights = self._split(plain), self._split(weight * (self.deviation * size).square())
        found = [
            kmeans(numbers[:, h].flatten(0, 1), weights[:, h].flatten(0, 1), 1 << bits * self.dims)
            for h in range(x.shape[1])
        ]
        self.books = torch.stack([book for book, _ in found])
        self.error = sum(error for _, error in found) / len(found)

    def _split(self, x: Tensor) -> Tensor:
        """[n, h_kv, d] -> [n, h_kv, d / dims, dims]."""
        n, h, d = x.shape
        return (
            x.view(n, h, 2, d // 2).transpose(2, 3)
            if self.kind == "rotary pairs"
            else x.view(n, h, d // self.dims, self.dims)
        )

    def _join(self, x: Tensor) -> Tensor:
        n, h = x.shape[:2]
        return (x.transpose(2, 3) if self.kind == "rotary pairs" else x).reshape(n, h, -1)

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, h_kv, d] as it is coded, and the tokens' sizes [n, h_kv, 1]."""
        plain = (x - self.mean) / self.deviation
        if self.kind != "tokens of one size":
            return plain, torch.ones_like(plain[..., :1])
        size = plain.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
        return plain / size, size

    def quantized(self, x: Tensor) -> Tensor:
        """[n, h_kv, d]: every number or pair becomes the nearest point."""
        plain, size = self._plain(x)
        numbers = self._split(plain)
        chosen = [
            book[nearest(numbers[:, h].flatten(0, 1), book)].view_as(numbers[:, h]) for h, book in enumerate(self.books)
        ]
        return self._join(torch.stack(chosen, 1)) * size * self.deviation + self.mean


def nearest(x: Tensor, book: Tensor) -> Tensor:
    """Which point of a book [k, dims] is nearest to each of x [n, dims]: int64 [n]."""
    parts = []
    for rows in torch.arange(len(x), device=x.device).split(1 << 16):
        parts.append((x[rows, None] - book).square().sum(-1).argmin(1))
    return torch.cat(parts)


def kmeans(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, float]:
    """Points [k, dims] for x [n, dims], means by coordinates' weights, and their error over the variance."""
    random = torch.Generator().manual_seed(0)
    some = torch.randperm(len(x), generator=random)[:SAMPLE].to(x.device)
    x, weight = x[some], weight[some] / weight[some].mean()
    if x.shape[1] == 1:
        book = x[:, 0].quantile((torch.arange(k, device=x.device) + 0.5) / k)[:, None]
    else:
        book = x[torch.multinomial(weight.sum(1).cpu(), k, generator=random).to(x.device)]
    for _ in range(ROUNDS):
        which = nearest(x, book)
        total = torch.zeros_like(book).index_add_(0, which, weight)
        first = torch.zeros_like(book).index_add_(0, which, weight * x)
        book = torch.where(total > 0, first / total.clamp_min(1e-20), book)
    error = (weight * (x - book[nearest(x, book)]).square()).sum()
    mean = (weight * x).sum(0) / weight.sum(0)
    return book, (error / (weight * (x - mean).square()).sum()).item()


Seen = list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]  # of a layer: (keys, weights), (values, weights)


def samples(model: PreTrainedModel, calibration: Tensor) -> Seen:
    """Keys before RoPE and values [n, h_kv, d] of all layers without first tokens, and squares of their gradients."""
    tap, parts = Tap(model), []
    for ids in calibration:
        of_layer: dict[int, Activations] = {}
        tap.run(ids, True, lambda seen, of_layer=of_layer: of_layer.update({seen.layer: seen}))
        parts.append(of_layer)
    found = []
    for layer in range(tap.layers):
        each = [part[layer] for part in parts]
        key = (torch.cat([a.key[1:] for a in each]), torch.cat([a.key_gradient[1:].square() for a in each]))
        value = (torch.cat([a.value[1:] for a in each]), torch.cat([a.value_gradient[1:].square() for a in each]))
        found.append((key, value))
    return found


def fitted(seen: Seen, kind: str, bits: int) -> list[tuple[Fit, Fit]]:
    """Of every layer."""
    of_keys, of_values = ("tokens of one size", "single") if kind == "keys of one size" else (kind, kind)
    return [(Fit(*key, of_keys, bits), Fit(*value, of_values, bits)) for key, value in seen]


def with_feedback(model: PreTrainedModel, calibration: Tensor, seen: Seen, bits: int) -> list[tuple[Fit, Fit]]:
    """Each layer is fitted to its numbers behind quantized layers; weights are those of full precision."""
    fits: list[tuple[Fit, Fit]] = []
    for layer in range(len(seen)):
        numbers: list[tuple[Tensor, Tensor]] = []
        for ids in calibration:
            cache = Quantizing(model, fits, watched=layer)
            with torch.no_grad():
                hidden_states(model, ids[None].to(model.device), cache)
            assert cache.found is not None  # the watched layer ran
            numbers.append(cache.found)
        key, value = (torch.cat([pair[side] for pair in numbers]) for side in (0, 1))
        fits.append((Fit(key, seen[layer][0][1], "single", bits), Fit(value, seen[layer][1][1], "single", bits)))
    return fits


class Quantizing(AttendingCache):
    """Attention over quantized keys and values of the layers that have fits; the first token stays as it is.

    found: keys before RoPE and values [n, h_kv, d] of the watched layer, without the first token.
    """

    def __init__(self, model: PreTrainedModel, fits: list[tuple[Fit, Fit]], watched: int = -1):
        super().__init__(model)
        self.fits, self.watched = fits, watched
        self.found: tuple[Tensor, Tensor] | None = None
        rope, frequencies = rotary(model)
        self.rotation = Rotation(rope, frequencies, model.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        at = torch.arange(1, k.shape[2], device=k.device)
        if layer == self.watched:
            self.found = (self.rotation.unrotate(k[0, :, 1:], at).transpose(0, 1), v[0, :, 1:].transpose(0, 1))
        if layer < len(self.fits):
            of_keys, of_values = self.fits[layer]
            k = self._behind_first(
                k, lambda x: self.rotation.rotate(_by_token(of_keys, self.rotation.unrotate(x, at)), at)
            )
            v = self._behind_first(v, lambda x: _by_token(of_values, x))
        return causal_attention(q, k, v, scaling, self.window(layer), self.softcap).transpose(1, 2)

    @staticmethod
    def _behind_first(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([x[:, :, :1], change(x[0, :, 1:])[None]], 2)


def _by_token(fit: Fit, x: Tensor) -> Tensor:
    return fit.quantized(x.transpose(0, 1)).transpose(0, 1)


@torch.no_grad()
def measured(model: PreTrainedModel, fits: list[tuple[Fit, Fit]], windows: Tensor) -> dict[str, float]:
    """Loss increase and KL with all layers quantized."""
    comparison, head = Comparison(), Head(model)
    for window in windows:
        ids = window[None].to(model.device)
        full, compressed = hidden_states(model, ids), hidden_states(model, ids, Quantizing(model, fits))
        for rows in blocks(ids.shape[1] - 1):
            targets = ids[0, rows.start + 1 : rows.stop + 1]
            comparison.add(head(full[:, rows])[0], head(compressed[:, rows])[0], targets)
    result = comparison.result()
    return {name: result[name] for name in ("loss_increase", "kl_mean", "kl_p999", "top1")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", required=True, help="calibration text")
    parser.add_argument("--eval", required=True, help="evaluation text")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, FEEDBACK], choices=[*KINDS, FEEDBACK])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
