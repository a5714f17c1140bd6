"""How many key outliers find no slot in their page, by capacity: the choice of `sparse.capacity`.

    python -m benchmarks.outlier_capacity --model FOLDER --bundle FOLDER --text FILE

The bundle must have calibrated thresholds (method=kvquant). For every page of every layer the outliers that the
thresholds ask for are counted against the slots that each capacity gives.
"""

import argparse
from math import ceil

import torch
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle, load
from calib.config import TextConfig
from calib.data import evaluation_tokens
from calib.tap import Activations, Tap
from runtime.hf import load_causal_lm

CAPACITIES = (1.0, 1.25, 1.5, 2.0, 3.0)


def main() -> None:
    """Prints one line per capacity."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--model", "--bundle", "--text"):
        parser.add_argument(name, required=True)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    model, tokenizer = load_causal_lm(options.model, "float32", "auto")
    bundle = load(options.bundle)
    text = evaluation_tokens(TextConfig("text", options.text), model, tokenizer, options.windows * 2048, 2048, 0)
    found, numbers = _outliers_per_page(model, bundle, text.ids)
    part = bundle.layers[0].key.sparse
    assert part is not None
    share = 100 * found.sum().item() / (found.numel() * numbers)
    print(f"{found.sum().item()} outliers in {found.numel()} pages: {share:.3f}%")
    for capacity in CAPACITIES:
        slots = ceil(capacity * part.fraction * numbers)
        lost = (found - slots).clamp_min(0)
        print(
            f"capacity {capacity}: {slots} slots, {100 * (lost > 0).float().mean().item():.2f}% of pages overflow, "
            f"{100 * lost.sum().item() / found.sum().item():.3f}% of outliers clipped"
        )


def _outliers_per_page(model: PreTrainedModel, bundle: Bundle, windows: Tensor) -> tuple[Tensor, int]:
    """Outliers of each page of keys, int64, over layers and windows; numbers per page."""
    counts: list[Tensor] = []
    numbers = 0

    def see(activations: Activations) -> None:
        nonlocal numbers
        fmt, tables = bundle.layers[activations.layer].key, bundle.side_tensors(activations.layer, "key")
        x = activations.key if fmt.domain == "pre_rope" else activations.rotated_key
        behind = x[fmt.window.sinks :]
        pages = behind[: behind.shape[0] // fmt.t * fmt.t].unflatten(0, (-1, fmt.t))
        lower, upper = (torch.from_numpy(tables[name]).to(x.device) for name in ("lower", "upper"))
        counts.append(((pages < lower) | (pages > upper)).flatten(1).sum(1).cpu())
        numbers = pages[0].numel()

    tap = Tap(model)
    for ids in windows:
        tap.run(ids, False, see)
    return torch.cat(counts), numbers


if __name__ == "__main__":
    main()
