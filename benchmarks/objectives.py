"""Which error predicts damage? Of every candidate of a table, three errors that no pass of the model is needed for.

    python -m calib model=local model.path=FOLDER data.path=TEXT eval=none samples=4 seqlen=2048 candidates=plain \
        candidates.tokens=2048 model.dtype=float32 budget=2.5bits@4K table=TABLE
    python -m benchmarks.objectives --model FOLDER --table TABLE --options candidates=plain --data TEXT --out FILE.json

Damage is the table's: KL of the next token with one side of one layer compressed. The errors are of the same numbers,
on the first --tokens tokens of --data:

numbers    mean squared error of the side's numbers over their mean square
output     squared error of the attention's output over its mean square, all else exact
fisher     half the sum of (gradient x error)^2, a token: plain Fisher information, diagonal

Spearman's rank correlation over all candidates of all layers and sides, over those of keys and of values, and its mean
over the sides of layers taken one by one; and how many times the damage Fisher information is, by quantiles.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import PageGeometry
from benchmarks.commands import command
from benchmarks.tables import load_table
from calib.allocation.candidates import SIDES
from calib.allocation.table import Table
from calib.config import TextConfig
from calib.data import calibration_tokens
from calib.evaluate import packed
from calib.forward import hidden_states
from calib.tap import Activations, Tap
from runtime.codec import Codec
from runtime.exact import causal_attention
from runtime.hf import AttendingCache, load_causal_lm
from runtime.hf_model import rotary
from runtime.rope import Rotation

ERRORS = ("numbers", "output", "fisher")
QUANTILES = (0.1, 0.5, 0.9)


def main() -> None:
    """Prints the correlations and writes --out."""
    options = _parser().parse_args()
    table = load_table(options.table, options.options)
    model, tokenizer = load_causal_lm(options.model, "float32", options.device)
    text = TextConfig("text", options.data)
    ids = calibration_tokens(text, model, tokenizer, 1, options.tokens, 0).ids[0]
    rows = errors(model, table, ids)
    result = {
        "correlations": correlations(rows),
        "fisher_over_damage": {q: float(np.quantile([r["fisher"] / r["damage"] for r in rows], q)) for q in QUANTILES},
        "rows": rows,
        "model": Path(options.model).name,
        "tokens": f"{options.tokens} of {Path(options.data).name}",
        "table": dict(table.provenance),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": command("objectives"),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| error | all | keys | values | mean of sides |\n|---|---|---|---|---|")
    for name, found in result["correlations"].items():
        print(f"| {name} | " + " | ".join(f"{x:.3f}" for x in found.values()) + " |")
    print("\nFisher over damage: " + ", ".join(f"{q:.0%}: {x:.1f}" for q, x in result["fisher_over_damage"].items()))


def errors(model: PreTrainedModel, table: Table, ids: Tensor) -> list[dict[str, Any]]:
    """Of every layer, side and variant at the first filling: damage and the three errors."""
    recorder = _Recorder(model)
    with torch.no_grad():
        hidden_states(model, ids[None].to(model.device), recorder)
    gradients: dict[int, Activations] = {}
    Tap(model).run(ids, True, lambda seen: gradients.update({seen.layer: seen}))
    rope, frequencies = rotary(model)
    rotation = Rotation(rope, frequencies, model.device)
    rows = []
    for layer in table.layers:
        q, k, v, scaling = recorder.seen[layer]
        exact = causal_attention(q, k, v, scaling, recorder.window(layer), recorder.softcap)
        for index, side in enumerate(SIDES):
            x = (k, v)[index]
            gradient = (gradients[layer].rotated_key_gradient, gradients[layer].value_gradient)[index]
            assert gradient is not None  # the tap ran with gradients
            for variant, name in enumerate(table.candidates.names(side)):
                fmt = table.candidates.format(side, name, table.candidates.fillings[0])
                bundle = table.fitted(side, name)
                geometry = PageGeometry.of(fmt, bundle.model.h_kv, bundle.model.d, side)
                codec = Codec(geometry, bundle.side_tensors(layer, side), model.device)
                found = packed(x, fmt, codec, rotation if fmt.domain == "pre_rope" else None, tail=True)
                error = (found - x)[0].transpose(0, 1)  # [n, h_kv, d], as gradients
                out = causal_attention(
                    q, *((found, v) if index == 0 else (k, found)), scaling, recorder.window(layer), recorder.softcap
                )
                rows.append(
                    {
                        "layer": layer,
                        "side": side,
                        "variant": name,
                        "damage": float(table.damages.of(index)[layer, variant, 0]),
                        "numbers": ((found - x).square().mean() / x.square().mean()).item(),
                        "output": ((out - exact).square().mean() / exact.square().mean()).item(),
                        "fisher": ((gradient * error).square().sum() / 2 / len(ids)).item(),
                    }
                )
    return rows


class _Recorder(AttendingCache):
    """Keeps queries, rotated keys and values [1, heads, n, d] of every layer; attention is exact."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        self.seen[layer] = (q, k, v, scaling)
        return causal_attention(q, k, v, scaling, self.window(layer), self.softcap).transpose(1, 2)


def correlations(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each error with damage: over all rows, keys, values, and the mean over layers and sides."""
    sides = sorted({(row["layer"], row["side"]) for row in rows})
    found = {}
    for name in ERRORS:
        within = [_spearman([row for row in rows if (row["layer"], row["side"]) == side], name) for side in sides]
        by_side = {side: _spearman([row for row in rows if row["side"] == side], name) for side in SIDES}
        found[name] = {"all": _spearman(rows, name), **by_side, "mean": float(np.mean(within))}
    return found


def _spearman(rows: list[dict[str, Any]], name: str) -> float:
    return float(spearmanr([row[name] for row in rows], [row["damage"] for row in rows]).statistic)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--table", type=Path, required=True, help="folder that `python -m calib budget=...` has made")
    parser.add_argument("--options", default="", help="options of calib that the table was made with, if any")
    parser.add_argument("--data", required=True, help="the text that the table was measured on")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
