"""What it costs that signposts are whole numbers of a byte: loss with them rounded, as they are decoded, and as fitted.

python -m benchmarks.signpost_grid --model MODEL --data wiki-train.txt --eval wiki-test.txt --tokens 16384
"""

import argparse

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from calib.__main__ import CONF
from calib.config import Settings, TextConfig, register
from calib.data import calibration_tokens, evaluation_tokens
from calib.evaluate import evaluate
from calib.pipeline import calibrate
from runtime.hf import load_causal_lm
from runtime.parts import dense

FINE = 1 << 20  # steps that leave signposts as they are


def main() -> None:
    """Prints a row for each width."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "data", "eval"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rows", nargs="+", default=["ladder/nuq2-1", "ladder/nuq3-1", "ladder/nuq4-1"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    model, tokenizer = load_causal_lm(options.model, "float32", "auto")
    data = calibration_tokens(TextConfig("text", options.data), model, tokenizer, options.samples, 2048, 0)
    text = evaluation_tokens(TextConfig("text", options.eval), model, tokenizer, options.tokens, options.context, 0)
    register()
    table = Table("recipe", "steps", "loss increase", "KL", "KL, no window")
    as_decoded = dense.signpost_steps
    for name in options.rows:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = Settings.of(compose("config", [f"experiment={name}"]))
        with Progress(console=Console(quiet=True)) as progress:
            bundle = calibrate(model, settings, data, progress)
        for title, steps in (("rounded", as_decoded), ("as fitted", lambda bits: FINE)):
            dense.signpost_steps = steps
            found, plain = evaluate(model, bundle, text), evaluate(model, bundle, text, window=False)
            table.add_row(
                name, title, f"{found['loss_increase']:+.5f}", f"{found['kl_mean']:.5f}", f"{plain['kl_mean']:.5f}"
            )
        dense.signpost_steps = as_decoded
    Console().print(table)


if __name__ == "__main__":
    main()
