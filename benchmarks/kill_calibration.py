"""Kills calibration at random moments by SIGKILL, starts the same command again, and compares the bundle's bits.

    python -m benchmarks.kill_calibration --kills 100 --out docs/results/kill-calibration.json

The command calibrates the embedded model on text that it generates, saves after every sample, and evaluates. It runs
undisturbed once; then it is killed at moments drawn uniformly from that run's length, and started again until it ends
by itself; then the next run begins with nothing, until there were enough kills. Every run that ends must leave the
undisturbed run's tensors, evaluation and manifest (but for its date), and no other file.
"""

import argparse
import json
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

OPTIONS = ("bits=3", "samples=6", "seqlen=160", "eval.tokens=320", "eval.cache_tokens=80", "checkpoint=0", "device=cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


def start(out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "calib", *OPTIONS, f"out={out}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def contents(out: Path) -> dict[str, Any]:
    """Bytes of the bundle's files; the manifest without its date."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in out.iterdir()}
    manifest = json.loads(files["manifest.json"])
    del manifest["created"]
    return files | {"manifest.json": manifest}


def until_done(process: "subprocess.Popen[bytes]", seconds: float | None) -> bool:
    """Whether the run ended by itself within the time; else it is killed. SystemExit if it failed."""
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    if process.returncode:
        raise SystemExit(f"calibration ended with {process.returncode}: {errors.decode()[-2000:]}")
    return True


def main() -> None:
    given = arguments()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="signpost-kills-") as folder:
        began = time.monotonic()
        until_done(start(Path(folder) / "undisturbed" / "bundle"), None)
        length = time.monotonic() - began
        expected = contents(Path(folder) / "undisturbed" / "bundle")
        kills, runs, stages = 0, [], 0
        while kills < given.kills:
            out = Path(folder) / f"run{len(runs)}" / "bundle"
            killed = 0
            while not until_done(start(out), draw.uniform(0, length) if kills < given.kills else None):
                kills, killed = kills + 1, killed + 1
                stages += any((out.parent / ".signpost-work").glob("*"))
                print(f"{kills} kills, {len(runs)} runs done", flush=True)
            if contents(out) != expected:
                raise SystemExit(f"run {len(runs)}, killed {killed} times: another bundle than the undisturbed one")
            if left := [path.name for path in out.parent.iterdir() if path != out]:
                raise SystemExit(f"run {len(runs)}, killed {killed} times, left {left}")
            runs.append(killed)
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.kill_calibration", *sys.argv[1:]]),
        "calibration": shlex.join(OPTIONS),
        "kills": kills,
        "kills_of_each_run": runs,
        "kills_that_left_something_to_continue_from": stages,
        "undisturbed_s": round(length, 1),
        "same_bits": True,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
