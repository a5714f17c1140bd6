"""The engine on two GPUs that share a model: graphs of steps and prompts, prefixes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

from tests.formats import kivi  # noqa: E402
from tests.gpu.ranks import served  # noqa: E402
from tests.gpu.test_engine import MODEL  # noqa: E402
from tests.runtime.tiny_models import bundle_for  # noqa: E402


def test_tokens_are_those_of_one(tmp_path: Path) -> None:
    """On both ranks. The format's numbers are those of one GPU; sums of halves are taken in another order."""
    MODEL.save_pretrained(tmp_path / "model")
    bundle_for(MODEL, kivi(2, t=64, recent=5)).save(tmp_path / "bundle")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, "-m", "tests.gpu.ranks", str(tmp_path)], check=True)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = served(tmp_path, sharded=False)
    assert first["float32"] == alone["float32"]
    same = [a == b for a, b in zip(first["float16"], alone["float16"], strict=True)]
    assert sum(same) >= len(same) - 2
