"""Quality of recipes on a trained model and real text: the tables of docs/quality.md.

    python -m benchmarks.quality --model FOLDER --data CALIBRATION.txt --eval TEST.txt --out quality.json

Every experiment of conf/experiment/ that matches --rows is calibrated (the model is loaded once) and evaluated on the
whole text in windows of --context tokens, as deployed, and once more without a window (every token quantized at once,
as the papers simulate it). Prints Markdown; --out keeps everything as JSON, and is continued if it already holds some
of the rows (with all of them there, nothing is computed: `--out docs/results/ladder-llama-gqa.json` prints the
committed table).
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress

from artifacts import Bundle
from calib.__main__ import CONF
from calib.config import Settings, TextConfig, register
from calib.data import Tokens, calibration_tokens, evaluation_tokens
from calib.evaluate import evaluate
from calib.pipeline import calibrate
from calib.recall import accuracy
from runtime.hf import SignpostCache, load_causal_lm

LONG = 131072  # tokens at which bits are stated besides the context
LADDER = [  # KVQuant's steps in the paper's order, then the other widths
    f"ladder/{name}"
    for name in (
        "int3-token", "int3-channel", "int3-prerope", "nf3", "nuq3-unweighted", "nuq3-fisher", "nuq3", "nuq3-sink",
        "nuq3-0.1-matrix", "nuq3-0.1", "nuq3-1-matrix", "nuq3-1", "nuq4", "nuq4-1", "nuq2", "nuq2-1", "int2-token",
    )
]  # fmt: skip


def main() -> None:
    """Runs the rows and prints the table."""
    options = _parser().parse_args()
    out = Path(options.out)
    done = json.loads(out.read_text())["rows"] if out.exists() else {}
    names = _experiments(options.rows)
    if set(names) - done.keys():
        _measure([name for name in names if name not in done], done, out, options)
    print(_markdown([done[name] for name in names]))


def _measure(names: list[str], done: dict[str, Any], out: Path, options: argparse.Namespace) -> None:
    """Adds the rows to `done` and to the file, one by one."""
    register()
    model, tokenizer = load_causal_lm(options.model, options.dtype, options.device)
    data = TextConfig("text", options.data)
    calibration = calibration_tokens(data, model, tokenizer, options.samples, options.seqlen, 0)
    text = evaluation_tokens(TextConfig("text", options.eval), model, tokenizer, options.tokens, options.context, 0)

    def recall(bundle: Bundle | None) -> dict[str, Any]:
        """Share of pass keys found, by length; full precision for no bundle."""
        if not options.filler:
            return {}
        filler = Path(options.filler).read_text(encoding="utf-8")
        make = (lambda: None) if bundle is None else (lambda: SignpostCache(model, bundle))
        lengths = [int(n) for n in options.recall_lengths.split(",")]
        found = {n: accuracy(model, tokenizer, filler, "passkey", n, options.trials, make) for n in lengths}
        return {"passkey": found}

    if options.filler and "full precision" not in done:
        done["full precision"] = recall(None)
    for name in names:
        start = time.perf_counter()
        done[name] = _row(name, model, calibration, text, recall)
        done[name]["seconds"] = time.perf_counter() - start
        out.write_text(json.dumps({"rows": done} | _environment(options, model), indent=1) + "\n")
        print(f"{name}: {done[name]['seconds']:.0f} s", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data", help="calibration text")
    parser.add_argument("--eval", help="evaluation text")
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--rows", default=",".join(LADDER), help="patterns over experiments, in the order of the table")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, help="evaluation tokens at most; default: all")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--filler", help="text to hide pass keys in; none: recall is not measured")
    parser.add_argument("--recall-lengths", default="1024,4096,16384")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--device", default="auto")
    return parser


def _experiments(patterns: str) -> list[str]:
    """Names of all experiments that match, in the order of the patterns."""
    folder = CONF / "experiment"
    names = sorted(str(p.relative_to(folder))[: -len(".yaml")] for p in folder.rglob("*.yaml"))
    return list(dict.fromkeys(name for pattern in patterns.split(",") for name in names if fnmatch(name, pattern)))


def _row(
    name: str, model: Any, calibration: Tokens, text: Tokens, recall: Callable[[Bundle], dict[str, Any]]
) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", [f"experiment={name}"]))
    with Progress(console=Console(quiet=True)) as progress:
        bundle = calibrate(model, settings, calibration, progress)
    result = evaluate(model, bundle, text)
    plain = evaluate(model, bundle, text, window=False)
    return recall(bundle) | {
        "recipe": settings.config.method.name,
        **result,
        "bits_long": bundle.geometry.bits(LONG),
        "bits_page": sum(s.bits for layer in bundle.geometry.layers for s in layer) / (2 * bundle.model.l),
        "no_window": {k: plain[k] for k in ("loss_increase", "kl_mean", "kl_p999", "top1")},
    }


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
    """The table; with a column of pass keys found for every length that was measured."""
    lengths = list(rows[0].get("passkey", {})) if rows else []
    columns = ["recipe", "bits", "bits at 128K", "loss", "KL", "KL 99.9%"]
    columns += ["loss, no window", "KL, no window", "KL 99.9%, no window", *(f"passkey {n}" for n in lengths)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        plain = row["no_window"]
        cells = [row["recipe"], f"{row['bits']:.2f}", f"{row['bits_long']:.2f}"]
        for part in (row, plain):
            cells += [f"{part['loss_increase']:+.4f}", f"{part['kl_mean']:.4f}", f"{part['kl_p999']:.2f}"]
        cells += [f"{100 * share:.0f}%" for share in row.get("passkey", {}).values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
