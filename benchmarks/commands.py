"""How a benchmark was run, for its JSON, and what it needs."""

import re
import shlex
import sys

import torch


def command(module: str) -> str:
    """This process's command line; of a path from the root only the last name, as the rest says where files are kept.

    module: its name in `benchmarks`.
    """
    words = (re.sub(r"(^|=|\s)/(?:[^/\s]+/)*(?=[^/\s])", r"\1", word) for word in sys.argv[1:])
    return shlex.join(["python", "-m", f"benchmarks.{module}", *words])


def require_gpu() -> None:
    """Raises SystemExit with one sentence where torch finds no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"this benchmark runs on an NVIDIA GPU, and torch {torch.__version__} finds none: run it on a machine that "
            "has one, with a CUDA build of torch (README.md, Installing)"
        )
