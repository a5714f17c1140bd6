"""How near the low-rank factors come to the SVD on a model's own keys and values.

    python -m benchmarks.factors --model FOLDER --text FILE

For every layer, side, kv head and window: the residual that GEAR's 2-bit backbone and outliers leave is factorized as a
prompt (all pages at once) and block by block, and its error is divided by the least possible one at that rank.
"""

import argparse

import torch
from torch import Tensor

from artifacts import Dense, Format, LowRank, PageGeometry, Sparse
from artifacts.fields import SideName
from calib.config import TextConfig
from calib.data import evaluation_tokens
from calib.tap import Activations, Tap
from runtime.codec import Codec
from runtime.hf import load_causal_lm
from runtime.parts.lowrank import factorize

T = 64  # tokens per page
BACKBONES = {
    "keys": Format(T, Dense(2, "channel", 64), Sparse(0.02, "channel", "online")),
    "values": Format(T, Dense(2, "token", 64), Sparse(0.02, "token", "online")),
}
FACTORS = LowRank(rank=4, block_rank=2)


def main() -> None:
    """Prints the worst and the mean ratio, prompt and blocks apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=4)
    options = parser.parse_args()
    model, tokenizer = load_causal_lm(options.model, "float32", "auto")
    text = evaluation_tokens(TextConfig("text", options.text), model, tokenizer, options.windows * 2048, 2048, 0)
    ratios: dict[str, list[Tensor]] = {}

    def see(a: Activations) -> None:
        for side, x in (("keys", a.rotated_key), ("values", a.value)):
            for kind, ratio in _ratios(side, x).items():
                ratios.setdefault(f"{side}, {kind}", []).append(ratio.flatten())

    tap = Tap(model)
    for ids in text.ids:
        tap.run(ids, False, see)
    for name, parts in ratios.items():
        ratio = torch.cat(parts)
        print(
            f"{name}: {ratio.numel()} matrices, error over the SVD's {ratio.mean():.5f} mean, {ratio.max():.5f} at most"
        )


def _ratios(side: SideName, x: Tensor) -> dict[str, Tensor]:
    """x [n, h_kv, d]: error over the optimum for the whole prompt and for every block."""
    pages = x.unflatten(0, (-1, T))
    residual = pages - Codec(PageGeometry.of(BACKBONES[side], *x.shape[1:], side), {}, x.device).encode(pages)[1]
    blocks = residual.transpose(1, 2)  # [p, h_kv, t, d]
    prompt = residual.flatten(0, 1).transpose(0, 1)  # [h_kv, n, d]
    return {
        f"prompt of {x.shape[0]} tokens, rank {FACTORS.rank}": _over_svd(prompt, FACTORS.rank),
        f"blocks of {T} tokens, rank {FACTORS.block_rank}": _over_svd(blocks, FACTORS.block_rank),
    }


def _over_svd(matrices: Tensor, rank: int) -> Tensor:
    left, right = factorize(matrices, rank)
    error = (matrices - left @ right.transpose(-1, -2)).double().flatten(-2).norm(dim=-1)
    return error / torch.linalg.svdvals(matrices.double())[..., rank:].norm(dim=-1)


if __name__ == "__main__":
    main()
