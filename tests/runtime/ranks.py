"""What two ranks that share a model do in test_tensor_parallel.py, which does the same with the whole model.

    torchrun --nproc-per-node 2 -m tests.runtime.ranks FOLDER [fail]

FOLDER holds models and bundles; every rank leaves what it saw there.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, PreTrainedModel

from artifacts import Bundle, load
from artifacts.errors import SignpostError
from runtime import Engine, Sampling, engine
from runtime.hf import SignpostCache, fingerprint, load_causal_lm
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import share_of, split_of
from runtime.prompts import Prompt
from tests.formats import kivi, kvquant
from tests.runtime.test_hf_decoding import batch, logits
from tests.runtime.tiny_models import CONFIGS, SIZE

MODELS = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3-norm", "phi3-fused", "olmo2-norm", "gemma2-capped")},
    "llama-tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "gpt-neox-partial": CONFIGS["gpt-neox-partial"],
}
GATHERED = ("phi3-fused", "olmo2-norm")  # all kv heads on every rank
ODD = LlamaConfig(**SIZE | {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3})
FORMATS = {"kivi": kivi(2, t=32, recent=5), "kvquant": kvquant(3, t=32)}
IDS, MASK = batch(57, 90)


def loaded(folder: Path, name: str, sharded: bool, dtype: str = "float32") -> PreTrainedModel:
    """A model of the folder; there is no tokenizer to load."""
    with patch.object(AutoTokenizer, "from_pretrained"):
        return load_causal_lm(str(folder / name), dtype, "auto", sharded=sharded)[0]


@torch.no_grad()
def seen(model: PreTrainedModel, bundle: Bundle) -> dict[str, object]:
    """Tokens of generate() and of the engine, logits, and bytes."""
    cache = SignpostCache(model, bundle, max_tokens=120)
    greedy = model.generate(
        IDS, attention_mask=MASK, past_key_values=cache, max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    return {
        "greedy": greedy,
        "nbytes": cache.nbytes,
        "geometry": 2 * cache.bundle.geometry.cache_bytes(120, 4),
        "logits": logits(model, IDS, MASK, SignpostCache(model, bundle)),
        "served": served(model, bundle),
    }


def served(model: PreTrainedModel, bundle: Bundle) -> list[list[int]]:
    """Tokens of an engine: prompts whole and in chunks, greedy and drawn, more requests than sequences."""
    tokens = []
    for chunk in (None, 16):
        serving = Engine(HFDecoder(model, bundle), bundle, sequences=2, max_tokens=120, chunk=chunk)
        requests = [serving.submit(row[mask.bool()].tolist(), 20) for row, mask in zip(IDS, MASK, strict=True)]
        requests.append(serving.submit([3, 4, 5], 20, Sampling(1.0, 0.9, seed=7)))
        serving.run()
        tokens += [request.tokens for request in requests]
    return tokens


def refusal(make) -> tuple[str, str]:
    """Type and message of the error."""
    try:
        make()
    except SignpostError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def main(folder: Path, mode: str) -> None:
    """Everything, or with `fail` a rank that fails in the middle of a pass."""
    llama = loaded(folder, "llama", True)
    rank, bundles = dist.get_rank(), {name: load(folder / f"{name}-bundle") for name in FORMATS}
    if mode == "fail":
        if rank == 1:
            Prompt.advance = lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("memory of rank 1"))
        served(llama, bundles["kivi"])
    found = {name: seen(llama, bundle) for name, bundle in bundles.items()}
    found["slices"] = seen(llama, bundles["kivi"].shard(rank, 2))
    models = {name: llama if name == "llama" else loaded(folder, name, True) for name in MODELS}
    found["fingerprints"] = {name: fingerprint(model) for name, model in models.items()}
    found["splits"] = {name: split_of(model) for name, model in models.items()}
    found["gathered"] = seen(models["olmo2-norm"], load(folder / "olmo2-bundle"))
    found["other slice"] = refusal(lambda: SignpostCache(llama, bundles["kivi"].shard(1 - rank, 2)))
    odd = loaded(folder, "odd", True)
    found["odd"] = refusal(lambda: share_of(odd, load(folder / "odd-bundle")))
    if rank == 1:
        engine.choose = lambda logits, *_: torch.full((len(logits),), 9)
    found["of two minds"] = served(llama, bundles["kivi"])
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or [""]))
