"""What GPUs that share a model serve in test_two_gpus.py, which serves the same on one.

    torchrun --nproc-per-node 2 -m tests.gpu.ranks FOLDER

FOLDER holds a model and a bundle; every rank leaves its tokens there.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from artifacts import load
from runtime import Engine
from runtime.hf_decoder import HFDecoder
from tests.runtime.ranks import loaded
from tests.runtime.test_engine import prompt

DTYPES = ["float32", "float16"]


def served(folder: Path, sharded: bool) -> dict[str, list[list[int]]]:
    """Tokens by the model's type: of prompts that graphs take and of others, behind a prefix and not."""
    bundle, found = load(folder / "bundle"), {}
    for dtype in DTYPES:
        decoder = HFDecoder(loaded(folder, "model", sharded, dtype), bundle)
        engine = Engine(decoder, bundle, sequences=3, max_tokens=500, short=256, prefixes=1)
        engine.prepare()
        prefix = engine.prefix(prompt(200, 1))
        engine.run()
        behind = [engine.submit(prompt(n, n), 30, prefix=prefix) for n in (64, 64, 200, 3)]
        requests = [*behind, *(engine.submit(prompt(n, n), 30) for n in (5, 250, 30, 300))]
        engine.run()
        for request in requests:
            assert request.error is None
        found[dtype] = [request.tokens for request in requests]
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    tokens = served(place, sharded=True)
    (place / f"rank{os.environ['RANK']}.json").write_text(json.dumps(tokens))
    gc.collect()  # captured steps go before what connects their ranks
    dist.destroy_process_group()
