"""Simulated evaluation against the real cache, token by token, in float32 and in float64.

    python -m benchmarks.two_modes --model FOLDER --bundle FOLDER --text FILE

Prints the largest difference of logits and both losses on the first --tokens tokens of the text.
"""

import argparse

import torch
import torch.nn.functional as F

from artifacts import load
from calib.config import TextConfig
from calib.data import evaluation_tokens
from calib.evaluate import cached_logits, simulated_logits
from runtime.hf import load_causal_lm


def main() -> None:
    """One line per precision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--model", "--bundle", "--text"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    bundle = load(options.bundle)
    model, tokenizer = load_causal_lm(options.model, "float32", "cpu")
    text = TextConfig("text", options.text)
    ids = evaluation_tokens(text, model, tokenizer, options.tokens, options.tokens, 0).ids
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        with torch.no_grad():
            simulated, full = simulated_logits(model, bundle, ids), model(ids, use_cache=False).logits
            real = cached_logits(model, bundle, ids)[0]
        losses = [F.cross_entropy(x[0, :-1], ids[0, 1:]).item() for x in (simulated, real, full)]
        print(
            f"{dtype}: logits differ by {(simulated - real).abs().max():.2g} at most "
            f"(compression moves them by {(simulated - full).abs().max():.2g}); "
            f"loss {losses[0]:.9f} simulated, {losses[1]:.9f} real cache, {losses[2]:.9f} full precision"
        )


if __name__ == "__main__":
    main()
