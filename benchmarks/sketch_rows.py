"""Orthogonal against Gaussian rows of QJL's sketch, on a model's own queries and keys.

    python -m benchmarks.sketch_rows --model FOLDER [--model FOLDER] --text FILE --out docs/images/sketch-rows.png

For every layer and head and some random sketches each: error of the estimated scores over the size of the exact ones
(root of the ratio of their sums of squares), over all pairs of a query and an earlier key. Without outlier channels.
Prints the figures and plots their mean over layers and heads against m.
"""

import argparse
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Format, PageGeometry, Sketch
from calib.config import TextConfig
from calib.data import evaluation_tokens
from calib.fits.sketch import matrix
from calib.forward import hidden_states
from runtime.codec import Codec
from runtime.hf import AttendingCache, load_causal_lm

ROWS = ("orthogonal", "gaussian")
SIZES = (32, 64, 128, 256, 512)
TOKENS, SEEDS = 1024, 4


class Taken(AttendingCache):
    """Exact attention over one window that keeps every layer's queries and keys after RoPE, [h, n, d]."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        self.pairs.append((q[0].float(), k[0].float()))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)


def errors(q: Tensor, k: Tensor, part: Sketch, seed: int) -> Tensor:
    """Relative error [h_kv] of the scores of q [h_q, n, d] with earlier keys k [h_kv, n, d]."""
    h_kv, n, d = k.shape
    s = matrix(part.m, d, part.rows, torch.Generator().manual_seed(seed)).to(k.device)
    codec = Codec(PageGeometry.of(Format(n, sketch=part), h_kv, d, "key"), {"sketch": s}, k.device)
    off = codec.encode(k.transpose(0, 1)[None])[1][0].transpose(0, 1) - k
    queries = q.unflatten(0, (h_kv, -1))
    wrong, exact = ((queries @ x[:, None].transpose(2, 3)).tril().square().sum((1, 2, 3)) for x in (off, k))
    return (wrong / exact).sqrt()


@torch.no_grad()
def measure(model: PreTrainedModel, ids: Tensor) -> dict[str, dict[int, Tensor]]:
    """Errors [layers, h_kv] by rows and m, the mean over seeds; ids int64 [n]."""
    taken = Taken(model)
    hidden_states(model, ids[None].to(model.device), taken)

    def of_layers(part: Sketch) -> Tensor:
        found = [torch.stack([errors(q, k, part, seed) for seed in range(SEEDS)]).mean(0) for q, k in taken.pairs]
        return torch.stack(found).cpu()

    return {rows: {m: of_layers(Sketch(m, rows)) for m in SIZES} for rows in ROWS}


def main() -> None:
    """Prints the table and writes the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, action="append")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(6, 4))
    for path, color in zip(options.model, ("C0", "C1", "C2", "C3"), strict=False):
        model, tokenizer = load_causal_lm(path, "float32", "auto")
        text = evaluation_tokens(TextConfig("text", options.text), model, tokenizer, TOKENS, TOKENS, 0)
        found = measure(model, text.ids[0])
        for m in SIZES:
            mean = {rows: float(found[rows][m].mean()) for rows in ROWS}
            worse = float((found["orthogonal"][m] >= found["gaussian"][m]).double().mean())
            print(f"{Path(path).name} m={m}: {mean}; orthogonal is not better in {worse:.0%} of the heads")
        for rows, style in zip(ROWS, ("-", "--"), strict=True):
            line = [float(found[rows][m].mean()) for m in SIZES]
            axes.plot(SIZES, line, style, color=color, marker="o", label=f"{Path(path).name}, {rows} rows")
    axes.set(xscale="log", yscale="log", xlabel="sign bits m", ylabel="error of scores, relative")
    axes.set_xticks(SIZES, labels=[str(m) for m in SIZES])
    axes.set_yticks((0.2, 0.3, 0.5, 1.0), labels=("0.2", "0.3", "0.5", "1"))
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
