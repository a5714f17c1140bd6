"""Does a bundle reproduce the full-precision greedy tokens? And is the cache exactly as large as the geometry says?

    python -m benchmarks.reproduce_greedy --model FOLDER --bundle FOLDER --text FILE

Prompts are cut from the text at even distances. Prints, per prompt, how many of the new tokens agree before the first
that does not, and the gap between the two best logits at that point (a tie breaks either way).
"""

import argparse

import torch

from artifacts import load
from calib.config import TextConfig
from calib.data import calibration_tokens
from runtime.hf import SignpostCache, load_causal_lm
from runtime.hf_model import with_cache


def main() -> None:
    """Generates twice per prompt and compares."""
    options = _parser().parse_args()
    model, tokenizer = load_causal_lm(options.model, options.dtype, "auto")
    bundle = load(options.bundle)
    prompts = calibration_tokens(
        TextConfig("text", options.text), model, tokenizer, options.prompts, options.prompt_tokens, 0
    )
    total = options.prompt_tokens + options.new
    for number, ids in enumerate(prompts.ids.to(model.device)):
        arguments = {
            "attention_mask": torch.ones_like(ids[None]), "max_new_tokens": options.new, "min_new_tokens": options.new,
            "do_sample": False, "output_scores": True, "return_dict_in_generate": True,
        }  # fmt: skip
        full = model.generate(ids[None], **arguments)
        cache = SignpostCache(model, bundle, max_tokens=total)
        ours = model.generate(ids[None], **with_cache(model, cache), **arguments)
        same = (full.sequences == ours.sequences)[0, options.prompt_tokens :].long().cumprod(0).sum().item()
        gap = ""
        if same < options.new:
            best = full.scores[same][0].topk(2).values
            gap = f", where the two best logits are {(best[0] - best[1]).item():.4f} apart"
        predicted = bundle.geometry.cache_bytes(total, model.dtype.itemsize)
        print(
            f"prompt {number}: {same} of {options.new} tokens agree{gap}; "
            f"cache {cache.nbytes} bytes, geometry {predicted}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    return parser


if __name__ == "__main__":
    main()
