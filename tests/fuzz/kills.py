"""SIGKILL while a bundle is saved and while one is pulled.

    python -m tests.fuzz.kills --kills 200 --out docs/results/kills.json

A process replaces the bundle at one path again and again, by another one each time, and is killed at a random moment.
Whatever is at the path then must be one of the two, whole. The hub of the pulls is on this machine.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from artifacts import load
from artifacts.hub import push
from tests.artifacts.samples import assert_same, sample_bundle
from tests.artifacts.stand_in_hub import Hub, running

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = sample_bundle(1), sample_bundle(2)
REPOS = ("someone/old", "someone/new")
SAVE = """\
import sys
from artifacts import load
both = [load(path) for path in sys.argv[2:4]]
print(flush=True)
while True:
    for bundle in both:
        bundle.save(sys.argv[1])
"""
PULL = """\
import sys
import huggingface_hub
from artifacts.hub import pull
huggingface_hub.get_session()
print(flush=True)
while True:
    for repo in sys.argv[3:5]:
        pull(repo, sys.argv[1], endpoint=sys.argv[2])
"""


def main() -> None:
    """Kills, and keeps what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="of each kind; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    start, result = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as scratch, running() as hub:
        sources = prepare(Path(scratch), hub)
        for name, arguments in sources.items():
            result[name] = kill(name, arguments, Path(scratch) / name, options.kills, options.seed)
    found = {
        "command": f"python -m tests.fuzz.kills --kills {options.kills} --seed {options.seed}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "seconds": round(time.monotonic() - start),
    } | result
    text = json.dumps(found, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


def prepare(scratch: Path, hub: Hub) -> dict[str, list[str]]:
    """Both bundles on the disk and on the hub. Returns the code's arguments behind the destination, by kind."""
    os.environ.update(HF_TOKEN="hf_stand_in", HF_HUB_OFFLINE="0")
    both = [str(bundle.save(scratch / name)) for name, bundle in (("old", OLD), ("new", NEW))]
    for path, repo in zip(both, REPOS, strict=True):
        push(path, repo, endpoint=hub.url)
    return {"save": both, "pull": [hub.url, *REPOS]}


def kill(name: str, arguments: Sequence[str], folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills so many processes that replace the bundle in `folder`/bundle. Returns what was there afterwards.

    Raises AssertionError for anything but one of the two bundles, whole.
    """
    destination, moments, found = folder / "bundle", Random(seed), Counter[str]()
    OLD.save(destination)
    code = {"save": SAVE, "pull": PULL}[name]
    longest = {"save": 0.2, "pull": 1.0}[name]  # seconds: some rounds
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(destination), *arguments], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        bundle = load(destination)
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)
        found["old" if bundle.recipe == OLD.recipe else "new"] += 1
        left = [entry for entry in folder.iterdir() if entry != destination]
        assert all(entry.name.startswith(".saving-") for entry in left), left
        found["killed_while_writing"] += bool(left)
        for entry in left:
            shutil.rmtree(entry)
    return {"kills": kills, "whole": found["old"] + found["new"], **dict(sorted(found.items()))}


if __name__ == "__main__":
    main()
