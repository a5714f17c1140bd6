"""Does quality depend on the text that calibrates, or on statistics that stream? The tables of docs/calibration.md.

    python -m benchmarks.calibration_text --model FOLDER --data wiki.txt,books.txt,generated --eval TEST.txt --out FILE

Every recipe of --rows is calibrated on every text (`generated` is the model's own), and on the first one twice more:
with thresholds from histograms, as for long text, instead of lists, and with all numbers kept: thresholds by sorting,
signposts the optimum of k-means over single numbers. All are evaluated on the same text, see `benchmarks.quality`.
Prints Markdown. --out keeps everything as JSON, written after every row.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

from benchmarks.exact_statistics import Kept, kept
from benchmarks.quality import measured
from calib.__main__ import CONF
from calib.config import Settings, TextConfig, register
from calib.data import calibration_tokens, evaluation_tokens
from calib.fits import sparse
from calib.pipeline import calibrate
from calib.quantiles import CHANNEL_BINS, LONE_BINS, BinaryHistogram
from runtime.hf import load_causal_lm

STREAMED, HISTOGRAMS, EXACT = STATISTICS = ("streamed", "streamed, thresholds from histograms", "all numbers kept")


@contextmanager
def collecting(how: str) -> Iterator[Kept | None]:
    """Calibrations inside collect so; what they have seen, if they keep it."""
    real: Callable[..., Any] = sparse.tails
    if how == HISTOGRAMS:
        sparse.tails = lambda k, columns: BinaryHistogram(LONE_BINS if columns == 1 else CHANNEL_BINS)
    try:
        if how == EXACT:
            with kept(exact=True) as seen:
                yield seen
        else:
            yield None
    finally:
        sparse.tails = real


def main() -> None:
    """Runs all rows and prints the table."""
    options = _parser().parse_args()
    start = time.perf_counter()
    model, tokenizer = load_causal_lm(options.model, options.dtype, options.device)
    test = TextConfig("text", options.eval)
    text = evaluation_tokens(test, model, tokenizer, options.tokens, options.context, 0)
    rows: list[dict[str, Any]] = []
    texts = [
        calibration_tokens(
            TextConfig("generated") if name == "generated" else TextConfig("text", name),
            model, tokenizer, options.samples, options.seqlen, options.seed,
        )
        for name in options.data.split(",")
    ]  # fmt: skip
    cases = [(texts[0], STATISTICS), *((tokens, STATISTICS[:1]) for tokens in texts[1:])]
    register()
    for (tokens, statistics), experiment in product(cases, options.rows.split(",")):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = Settings.of(compose("config", [f"experiment={experiment}"]))
        for how in statistics:
            with collecting(how) as seen:
                bundle = calibrate(model, settings, tokens)
            row = {"recipe": settings.config.method.name, "calibrated_on": tokens.provenance(), "statistics": how}
            if seen:  # of keys and values of every layer
                row["cost_above_optimum"] = [fit.excess for fit in seen.signposts if fit.excess is not None]
            rows.append(row | measured(model, bundle, text))
            found = environment(options, model) | {"seconds": time.perf_counter() - start, "rows": rows}
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(rows))


def environment(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Any]:
    device = model.device
    return {
        "command": shlex.join(["python", "-m", "benchmarks.calibration_text", *sys.argv[1:]]),
        "model": Path(options.model).name,
        "context": options.context,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    columns = ["recipe", "calibrated on", "statistics", "loss", "KL", "KL 99.9%", "loss, no window", "KL, no window"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        plain = row["no_window"]
        cells = [
            f"`{row['recipe']}`",
            row["calibrated_on"]["source"],
            row["statistics"],
            f"{row['loss_increase']:+.4f}",
        ]
        cells += [f"{row['kl_mean']:.4f}", f"{row['kl_p999']:.2f}"]
        cells += [f"{plain['loss_increase']:+.4f}", f"{plain['kl_mean']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="generated", help="texts to calibrate on, or `generated`; with commas")
    parser.add_argument("--eval", required=True, help="evaluation text")
    parser.add_argument("--rows", default="methods/nuq3-1,methods/nuq2-1", help="experiments (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="evaluation tokens at most; default: all")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    return parser


if __name__ == "__main__":
    main()
