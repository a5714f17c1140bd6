"""Quality of recipes on a trained model and real text: the tables of docs/quality.md.

    python -m benchmarks.quality --model FOLDER --data CALIBRATION.txt --eval TEST.txt --out quality.json

Every experiment of conf/experiment/ that matches --rows is calibrated (the model is loaded once) and evaluated on the
whole text in windows of --context tokens, as deployed, and once more without a window (every token quantized at once,
as the papers simulate it); --passkey and --lookup measure recall at the lengths they name, in full precision first.
Prints Markdown. --out keeps everything as JSON; what it already holds is not measured again, so a run that was broken
off goes on, and `--out docs/results/ladder-llama-gqa.json` alone prints the committed table.
"""

import argparse
import json
import platform
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

from artifacts import Bundle
from calib.__main__ import CONF
from calib.config import Settings, TextConfig, register
from calib.data import Tokens, calibration_tokens, evaluation_tokens
from calib.evaluate import evaluate
from calib.pipeline import calibrate
from calib.recall import Prompts, prompts, score, trials
from runtime.hf import load_causal_lm

LONG = 131072  # tokens at which bits are stated besides the context
FULL = "full precision"  # the row that recall is compared with
LADDER = [  # KVQuant's steps in the paper's order, then the other widths
    f"ladder/{name}"
    for name in (
        "int3-token", "int3-channel", "int3-prerope", "nf3", "nuq3-unweighted", "nuq3-fisher", "nuq3", "nuq3-sink",
        "nuq3-0.1-matrix", "nuq3-0.1", "nuq3-1-matrix", "nuq3-1", "nuq4", "nuq4-1", "nuq2", "nuq2-1", "int2-token",
    )
]  # fmt: skip
METHODS = [  # the baselines, then the papers by age
    f"methods/{name}"
    for name in (
        "int2", "int3", "int4", "nf2", "nf3", "nf4", "nuq2-1", "nuq3-1", "nuq4-1",
        "kivi2", "kivi3", "kivi4", "kivi2-g64", "kivi4-g64",
        "gear-l2", "gear2", "gear-l3", "gear3", "gear-l4", "gear4", "kcvt4", "gear-l-kcvt4", "gear-kcvt4",
        "qjl", "qjl-512", "qjl-gaussian",
        "turboquant-mse2", "turboquant-mse3", "turboquant-mse4", "turboquant-prod3", "turboquant-prod4",
    )
]  # fmt: skip


def main() -> None:
    """Runs the rows and prints the table."""
    options = _parser().parse_args()
    out = Path(options.out)
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    rows = kept["rows"]
    names = experiments(options.rows)
    wanted = recall_wanted(options)
    if missing := [name for name in [FULL] * bool(wanted) + names if not _complete(name, rows, wanted)]:
        register()
        bench = _Bench(options)
        for name in missing:
            start = time.perf_counter()
            rows[name] = bench.completed(name, rows.get(name, {}))
            rows[name]["seconds"] = time.perf_counter() - start
            out.write_text(json.dumps({"rows": rows} | bench.environment, indent=1) + "\n")
            print(f"{name}: {rows[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    print(_markdown([rows[name] for name in [FULL, *names] if name in rows]))


def recall_wanted(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Tasks and lengths of recall."""
    return [(task, int(n)) for task in ("passkey", "lookup") for n in getattr(options, task).split(",") if n]


def recall_prompts(options: argparse.Namespace, model: PreTrainedModel, tokenizer: Any) -> dict[str, list[Prompts]]:
    """The texts of recall by task and length."""
    wanted = recall_wanted(options)
    filler = Path(options.filler).read_text(encoding="utf-8") if wanted else ""
    return {f"{task} {n}": prompts(model, trials(tokenizer, filler, task, n, options.trials)) for task, n in wanted}


def recall_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that these texts depend on."""
    parser.add_argument("--passkey", default="", metavar="N,N", help="lengths in tokens at which pass keys are hidden")
    parser.add_argument("--lookup", default="", metavar="N,N", help="lengths in tokens at which records are looked up")
    parser.add_argument("--filler", help="text that both stand in")
    parser.add_argument("--trials", type=int, default=20, help="texts for each task and length")


def _complete(name: str, rows: dict[str, Any], wanted: list[tuple[str, int]]) -> bool:
    row = rows.get(name, {})
    return ("loss" in row or name == FULL) and all(f"{task} {n}" in row.get("recall", {}) for task, n in wanted)


class _Bench:
    """A loaded model and the texts that every row is measured on."""

    def __init__(self, options: argparse.Namespace):
        self.model, tokenizer = load_causal_lm(options.model, options.dtype, options.device)
        data, text = TextConfig("text", options.data), TextConfig("text", options.eval)
        self.calibration = calibration_tokens(data, self.model, tokenizer, options.samples, options.seqlen, 0)
        self.text = evaluation_tokens(text, self.model, tokenizer, options.tokens, options.context, 0)
        self.prompts = recall_prompts(options, self.model, tokenizer)
        self.environment = _environment(options, self.model)

    def completed(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """`row` with what it lacks: an experiment calibrated and measured, or recall in full precision."""
        if name == FULL:
            return {"recipe": FULL, "recall": self.recall(None, row)}
        bundle = calibrated(self.model, name, self.calibration)
        row = {"recipe": bundle.recipe, **row, "recall": self.recall(bundle, row)}
        return row if "loss" in row else row | measured(self.model, bundle, self.text)

    def recall(self, bundle: Bundle | None, row: dict[str, Any]) -> dict[str, Any]:
        """Shares found, by task and length, in the order of the options."""
        have = row.get("recall", {})
        found = {
            name: have.get(name) or score(self.model, groups, bundle)._asdict() for name, groups in self.prompts.items()
        }
        return found | {name: have[name] for name in have if name not in found}


def calibrated(model: PreTrainedModel, name: str, tokens: Tokens) -> Bundle:
    """The bundle of an experiment of conf/experiment/. `register` must have been called."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", [f"experiment={name}"]))
    return calibrate(model, settings, tokens)


def measured(model: PreTrainedModel, bundle: Bundle, text: Tokens) -> dict[str, Any]:
    """Loss, divergence and bits, as deployed and without a window."""
    plain = evaluate(model, bundle, text, window=False)
    return {
        **evaluate(model, bundle, text),
        "bits_long": bundle.geometry.bits(LONG),
        "bits_page": sum(s.bits for s in bundle.geometry.sides) / max(1, len(bundle.geometry.sides)),
        "no_window": {k: plain[k] for k in ("loss_increase", "kl_mean", "kl_p999", "top1")},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data", help="calibration text")
    parser.add_argument("--eval", help="evaluation text")
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--rows", default="ladder", help="`ladder`, `methods` or patterns over experiments")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, help="evaluation tokens at most; default: all")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    recall_options(parser)
    parser.add_argument("--device", default="auto")
    return parser


def experiments(patterns: str) -> list[str]:
    """Names of all experiments that match, in the order of the patterns."""
    patterns = ",".join({"ladder": LADDER, "methods": METHODS}.get(patterns, [patterns]))
    folder = CONF / "experiment"
    names = sorted(str(p.relative_to(folder))[: -len(".yaml")] for p in folder.rglob("*.yaml"))
    return list(dict.fromkeys(name for pattern in patterns.split(",") for name in names if fnmatch(name, pattern)))


def _environment(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor() or "CPU"
    return {
        "model": Path(options.model).name,
        "context": options.context,
        "calibration": f"{Path(options.data).name}, {options.samples} x {options.seqlen}",
        "device": device,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": "python -m benchmarks.quality " + " ".join(sys.argv[1:]),
    }


def _markdown(rows: list[dict[str, Any]]) -> str:
    """The table; recall has a column for every task and length that was measured, a dash where a row lacks it."""
    recall = list(rows[0].get("recall", {})) if rows else []
    columns = ["recipe", "bits", "bits at 128K", "loss", "KL", "KL 99.9%"]
    columns += ["loss, no window", "KL, no window", "KL 99.9%, no window", *recall]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row["recipe"], *["" if row["recipe"] == FULL else "-"] * 8]
        if "loss" in row:
            cells[1:3] = f"{row['bits']:.2f}", f"{row['bits_long']:.2f}"
            for i, part in ((3, row), (6, row["no_window"])):
                cells[i : i + 3] = f"{part['loss_increase']:+.4f}", f"{part['kl_mean']:.4f}", f"{part['kl_p999']:.2f}"
        cells += [shares(row.get("recall", {}).get(name), name) for name in recall]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shares(found: dict[str, float] | None, name: str) -> str:
    """Digits too where whole numbers alone say little: the reference model finds few of the records it is asked for."""
    if found is None:
        return "-"
    return f"{100 * found['whole']:.0f}%" + f", {100 * found['digits']:.0f}%" * name.startswith("lookup")


if __name__ == "__main__":
    main()
