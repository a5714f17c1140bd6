"""Budgets on a trained model and real text: the tables of docs/allocation.md.

    python -m benchmarks.allocation --model FOLDER --table TABLE --eval TEST.txt --out allocation.json

TABLE is what `python -m calib budget=...` leaves behind. Every budget is solved and evaluated on --tokens of the text
in windows of --context, as deployed. `--random N` measures N random mixtures as well and compares their divergence with
the predicted one (Spearman's rank correlation). --out keeps everything as JSON; what it already holds is not measured
again.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.stats import spearmanr

from artifacts import Bundle
from benchmarks.commands import command
from benchmarks.quality import LONG, recall_options, recall_prompts, shares
from benchmarks.tables import load_table
from calib.allocation.budget import Budget
from calib.allocation.candidates import SIDES
from calib.config import TextConfig
from calib.data import Tokens, evaluation_tokens
from calib.evaluate import evaluate
from calib.recall import score
from runtime.hf import load_causal_lm

BUDGETS = ",".join(f"{bits}bits@{n}" for n in ("4K", "32K") for bits in (2.0, 2.33, 2.5, 3.0, 3.33, 4.0))


def main() -> None:
    """Measures what is missing and prints the tables."""
    options = _parser().parse_args()
    kept: dict[str, Any] = (
        json.loads(options.out.read_text()) if options.out.exists() else {"budgets": {}, "random": []}
    )
    wanted = [text for text in options.budgets.split(",") if text and text not in kept["budgets"]]
    if wanted or len(kept["random"]) < options.random:
        bench = _Bench(options)
        for text in wanted:
            kept["budgets"][text] = bench.budget(text)
            _keep(options.out, kept | bench.environment)
        for seed in range(len(kept["random"]), options.random):
            kept["random"].append(bench.random(seed))
            _keep(options.out, kept | bench.environment)
    print(_markdown(kept))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--table", type=Path, help="folder that `python -m calib budget=...` has made")
    parser.add_argument("--options", default="", help="options of calib that the table was made with, if any")
    parser.add_argument("--eval", help="evaluation text")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=102400)
    parser.add_argument("--random-tokens", type=int, default=4096, help="tokens on which random mixtures are measured")
    parser.add_argument("--dtype", default="float32")
    recall_options(parser)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    return parser


class _Bench:
    """A loaded model, its table, and the text."""

    def __init__(self, options: argparse.Namespace):
        self.table = load_table(options.table, options.options)
        self.model, tokenizer = load_causal_lm(options.model, options.dtype, options.device)
        text = TextConfig("text", options.eval)
        self.text = evaluation_tokens(text, self.model, tokenizer, options.tokens, options.context, 0)
        windows = max(1, options.random_tokens // options.context)
        self.little = Tokens(self.text.ids[:windows], self.text.source)
        self.prompts = recall_prompts(options, self.model, tokenizer)
        device = self.model.device
        self.environment = {
            "model": Path(options.model).name,
            "context": options.context,
            "tokens": self.text.ids.numel(),
            "random_tokens": self.little.ids.numel(),
            "table": dict(self.table.provenance),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": command("allocation"),
        }

    def budget(self, text: str) -> dict[str, Any]:
        """The bundle for a budget, solved and measured."""
        start = time.perf_counter()
        bundle = self.table.bundle(Budget.parse(text))
        solving = time.perf_counter() - start
        found = evaluate(self.model, bundle, self.text)
        n = Budget.parse(text).length
        print(f"{text}: {found['loss_increase']:+.4f}", file=sys.stderr, flush=True)
        return {
            "bits": bundle.geometry.bits(n),
            "bits_long": bundle.geometry.bits(LONG),
            "predicted_kl": bundle.calibration["allocation"]["predicted_kl"],
            "seconds_to_solve": solving,
            "choice": _described(bundle),
            **{name: found[name] for name in ("loss_increase", "kl_mean", "kl_p999", "top1")},
            "recall": {name: score(self.model, groups, bundle)._asdict() for name, groups in self.prompts.items()},
        }

    def random(self, seed: int) -> dict[str, float]:
        """A mixture drawn evenly, and its divergence as predicted and as measured."""
        rng, table = np.random.default_rng(seed), self.table
        fillings, layers = len(table.candidates.fillings), table.layers
        # One filling for all, or most mixtures would be alike; of each side's variants any.
        filling = int(rng.integers(fillings))
        chosen = np.array(
            [
                rng.integers(len(table.candidates.names(SIDES[i % 2]))) * fillings + filling
                for i in range(2 * len(layers))
            ]
        )
        predicted = sum(
            float(table.damages.of(i % 2)[layers[i // 2]].ravel()[candidate])
            for i, candidate in enumerate(chosen.tolist())
        )
        measured = evaluate(self.model, table.mixture(chosen, {}, f"random {seed}"), self.little)["kl_mean"]
        print(f"random {seed}: {predicted:.4f} {measured:.4f}", file=sys.stderr, flush=True)
        return {"predicted_kl": predicted, "kl_mean": measured}


def _described(bundle: Bundle) -> list[list[str]]:
    """Bits, outliers and newest exact tokens of keys and values, by layer."""

    def side(fmt: Any) -> str:
        outliers = f"-{100 * fmt.sparse.fraction:g}%" if fmt.sparse else ""
        codes = f"{fmt.dense.bits}" if fmt.dense else f"band-{fmt.banded.bits:g}" if fmt.banded else "sketch"
        return f"{codes}{outliers} t{fmt.t} w{fmt.window.recent}"

    return [[side(layer.key), side(layer.value)] if layer else ["exact", "exact"] for layer in bundle.layers]


def _keep(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def _markdown(found: dict[str, Any]) -> str:
    recall = list(next(iter(found["budgets"].values()), {}).get("recall", {}))
    titles = ["budget", "bits", "loss", "KL", "KL 99.9%", "predicted KL", "solved in", *recall]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for text, row in found["budgets"].items():
        known = row.get("recall", {})
        lines.append(
            f"| {text} | {row['bits']:.3f} | {row['loss_increase']:+.4f} | {row['kl_mean']:.4f} | "
            f"{row['kl_p999']:.2f} | {row['predicted_kl']:.4f} | {row['seconds_to_solve']:.2f} s |"
            + "".join(f" {shares(known.get(name), name)} |" for name in recall)
        )
    if len(found["random"]) > 2:
        pairs = [(row["predicted_kl"], row["kl_mean"]) for row in found["random"]]
        correlation = spearmanr(*zip(*pairs, strict=True)).statistic
        lines.append(
            f"\nRank correlation of predicted and measured KL over {len(pairs)} random mixtures: {correlation:.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
