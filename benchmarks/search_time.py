"""Time of a whole search (`budget=`) for the shape of a large model, with random weights made on the device.

    python -m benchmarks.search_time --text TEXT.txt --out search-time.json
    python -m benchmarks.search_time --shape small --samples 2 --seqlen 256 --tokens 256 --length 4096   (no GPU)

Runs what `python -m calib budget=... eval=none` runs once the model is loaded: checksums of the weights, all passes and
fits of all candidates, the damage of each, the table on disk, the integer program, the bundle. Then what another budget
takes: in this process (`another`), and as the command itself, imports included (`command_s`). Nothing is rehearsed.

As weights are random, tokens are the bytes of --text, or random ones without it: times do not depend on what they say,
but damages do, and solving by branch and bound depends on these. Seconds are counted with the device idle at both ends
of a stage; memory is the most that torch held. --layers takes that many of the shape's layers, and `measure` grows
with their square: a candidate's pass begins at its layer.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir

from artifacts import Bundle, load
from benchmarks.calibration import SHAPES, Clock, random_model, watched
from benchmarks.commands import command
from calib.__main__ import CONF
from calib.allocation import damage, job
from calib.allocation.budget import Budget, spent
from calib.allocation.candidates import Candidates
from calib.allocation.table import Table
from calib.config import Settings, register
from calib.data import Tokens
from calib.devices import place
from calib.inputs import of_model
from calib.passes import Work
from calib.ranks import Ranks
from calib.store import Store

SEARCH_S, ANOTHER_S = 600.0, 5.0  # what is required on one H200


def main() -> None:
    """Searches, solves again, prints and writes the result."""
    given = _parser().parse_args()
    register()
    placed = place(given.device)
    model = random_model(given.shape, placed, given.layers, model_dtype_of(placed.device))
    ids, text = token_ids(given.text, given.samples, given.seqlen, model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(given, Path(folder))
        found = search(model, settings, Tokens(ids, text), Path(folder))
        found["another"] = another(settings, given.other, Path(folder))
        model.config.save_pretrained(Path(folder) / "model")
        found["another"]["command_s"] = command_seconds(given.other, given.candidates, Path(folder))
    result = {
        "command": command("search_time"),
        "shape": {"name": given.shape, "layers": model.config.num_hidden_layers},
        "candidates": given.candidates,
        "text": text,
        "samples": f"{given.samples} x {given.seqlen}",
        "required": {"search_s": SEARCH_S, "another_s": ANOTHER_S},
        **found,
        "device": torch.cuda.get_device_name() if placed.device.type == "cuda" else platform.machine(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": version("transformers")},
    }
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


def search(model: Any, settings: Settings, tokens: Tokens, folder: Path) -> dict[str, Any]:
    """Seconds and memory of every stage of one search; leaves the table and the bundle in `folder`."""
    config = settings.config
    gpus = [model.device] if model.device.type == "cuda" else []
    weights = torch.cuda.memory_allocated() if gpus else 0
    clock, files, passes = Clock(model.device, gpus), list[int](), list[int]()
    budget, candidates = Budget.parse(config.budget or ""), Candidates.of(config.candidates)
    start = time.perf_counter()
    with watched(clock, files), _measuring(clock, passes):
        with clock.stage("checksum of the weights"):
            work = Work(Ranks.join(model.device), Store(folder / "work"), of_model(model), config.checkpoint)
        table = job.tabulate(model, settings, candidates, tokens, None, work)
        with clock.stage("save the table"):
            table.save(settings.table)
        with clock.stage("solve"):
            bundle = table.bundle(budget)
        with clock.stage("save the bundle"):
            bundle.save(config.out)
            bundle = load(config.out)
    total = time.perf_counter() - start
    found: dict[str, Any] = {
        "budget": budget.text,
        "search_s": round(total, 2),
        "stages_s": {name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        "passes_over_the_text": sum(name.startswith("collect") for name in clock.seconds),
        "measured_on": table.provenance["measured_on"],
        "measured_passes": len(passes),
        "measure_s_a_pass": round(clock.seconds["measure"] / len(passes), 4),
        "bits": round(bundle.geometry.bits(budget.length), 4),
        "table_bytes": sum(f.stat().st_size for f in settings.table.iterdir()),
        "stages_on_disk_MB": round(sum(files) / 1e6, 1),
        "host_peak_GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    if gpus:
        found["weights_GB"] = round(weights / 1e9, 2)
        found["peak_GB"] = round(max(peak for (peak,) in clock.bytes.values()) / 1e9, 2)
        found["stages_peak_GB"] = {name: round(peak / 1e9, 2) for name, (peak,) in clock.bytes.items()}
    _require_within(bundle, budget)
    return found


def another(settings: Settings, text: str, folder: Path) -> dict[str, Any]:
    """Seconds of another budget from the saved table, without the model, as `calib.allocation.job.run` takes them."""
    clock, budget = Clock(torch.device("cpu"), []), Budget.parse(text)
    with clock.stage("load the table"):
        table = Table.load(settings.table, Candidates.of(settings.config.candidates))
    with clock.stage("solve"):
        bundle = table.bundle(budget)
    with clock.stage("save the bundle"):
        bundle.save(folder / "another")
        bundle = load(folder / "another")
    _require_within(bundle, budget)
    return {
        "budget": text,
        "in_process_s": round(sum(clock.seconds.values()), 3),
        "stages_s": {name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        "bits": round(bundle.geometry.bits(budget.length), 4),
    }


def command_seconds(budget: str, candidates: str, folder: Path) -> float:
    """Seconds of `python -m calib` for a budget from the table that is there. Raises where the command fails."""
    options = {"model": "local", "model.path": folder / "model", "candidates": candidates, "budget": budget}
    options |= {"eval": "none", "table": folder / "table", "out": folder / "by-command"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "calib", *(f"{k}={v}" for k, v in options.items())], check=True, stdout=2)
    return round(time.perf_counter() - start, 2)


def token_ids(path: Path | None, samples: int, seqlen: int, vocabulary: int) -> tuple[torch.Tensor, str]:
    """int64 [samples, seqlen] and what they are: the first bytes of a file as tokens, or random tokens.

    Raises SystemExit for a text with fewer bytes, or a vocabulary that has not so many tokens as there are bytes.
    """
    count = samples * seqlen
    if path is None:
        generator = torch.Generator().manual_seed(samples)
        return torch.randint(0, vocabulary, (samples, seqlen), generator=generator), "random tokens"
    data = np.fromfile(path, np.uint8, count)
    if data.size < count or vocabulary < 256:
        raise SystemExit(
            f"--text {path}: {count} bytes are needed (--samples, --seqlen) and it has {data.size} of them; a token is "
            f"a byte, so the vocabulary must have 256 tokens and has {vocabulary}"
        )
    return torch.from_numpy(data.astype(np.int64)).view(samples, seqlen), f"bytes of {path.name}"


def model_dtype_of(device: torch.device) -> torch.dtype:
    """As calib takes it where model.dtype is auto: a large model's own type, and float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@contextmanager
def _measuring(clock: Clock, passes: list[int]) -> Iterator[None]:
    """Makes the job's measuring tell the clock how long it takes, and lists the layer at which every pass begins."""
    measure, one = job.measure, damage._Passes.damage

    def timed(*args: Any) -> Any:
        with clock.stage("measure"):
            return measure(*args)

    def counted(self: Any, layer: int, *args: Any) -> float:
        passes.append(layer)
        return one(self, layer, *args)

    changed: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
        (job, "measure", timed, measure),
        (damage._Passes, "damage", counted, one),
    ]
    try:
        for where, name, new, _ in changed:
            setattr(where, name, new)
        yield
    finally:
        for where, name, _, old in changed:
            setattr(where, name, old)


def _require_within(bundle: Bundle, budget: Budget) -> None:
    geometry = bundle.geometry
    allowed = budget.allowed(geometry.numbers(budget.length))
    assert spent(geometry, budget.length) <= allowed, f"{budget.text}: the bundle takes more than the budget"


def _settings(given: argparse.Namespace, folder: Path) -> Settings:
    options = {"candidates": given.candidates, "candidates.tokens": given.tokens, "budget": given.budget}
    options |= {"samples": given.samples, "seqlen": given.seqlen, "eval": "none"}
    options |= {"table": folder / "table", "out": folder / "bundle"}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return Settings.of(compose("config", [f"{k}={v}" for k, v in options.items()]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--layers", type=int, help="as many layers instead of the shape's own")
    parser.add_argument("--text", type=Path, help="its bytes are the tokens; default: random tokens")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="on which damage is measured (default: %(default)s)")
    parser.add_argument("--candidates", default="banded")
    parser.add_argument("--budget", default="2.5bits@32K")
    parser.add_argument("--other", default="3bits@32K", help="the second budget (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser


if __name__ == "__main__":
    main()
