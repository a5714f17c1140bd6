"""A million mutated bundles: python -m tests.fuzz --inputs 1000000 --out docs/results/fuzz.json

Inputs are loaded in processes whose address space is limited, so that a claimed size cannot be allocated. Stops at the
first rule that is broken. `--first N --inputs 1` repeats input N.
"""

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.corpus import bundles
from tests.fuzz.harness import HANG, JSON_FACTOR
from tests.fuzz.ranges import HEADROOM, run_range


def main() -> None:
    """Runs the inputs and prints or keeps the rates."""
    options = _parser().parse_args()
    start = time.monotonic()
    if options.inputs:
        tally = run_range(
            options.first, options.first + options.inputs, options.seed, options.memory_every, options.scratch
        )
        found = [tally.as_json() | {"seconds": time.monotonic() - start}]
    else:
        found = []
    if options.out and options.out.exists():
        found.append(json.loads(options.out.read_text()))
    found += [json.loads(path.read_text()) for path in options.merge]
    text = json.dumps(merged(found) | environment(), indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


def environment() -> dict[str, Any]:
    """What ran, and the rules' numbers."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "corpus": sorted(bundles()),
        "limits": {
            "processor_seconds_per_load": HANG,
            "address_space_beyond_start_bytes": HEADROOM,
            "allocated_bytes_per_byte_of_file": JSON_FACTOR,
        },
    }


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of several runs over different inputs as one."""
    tables = {
        name: dict(sum((Counter(result[name]) for result in results), Counter()).most_common())
        for name in ("by_mutation", "outcomes")
    }
    sums = ("inputs", "seconds", "load_seconds", "loads_with_memory_measured")
    slowest = max(results, key=lambda result: result["slowest_load_seconds"])
    return (
        {name: sum(result[name] for result in results) for name in sums}
        | {name: slowest[name] for name in ("slowest_load_seconds", "slowest_input")}
        | {"largest_share_of_allowed_memory": max(r["largest_share_of_allowed_memory"] for r in results)}
        | tables
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="0 to merge only; default: 100000")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first one; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other inputs; default: 0")
    parser.add_argument("--memory-every", type=int, default=100, metavar="N", help="default: 100, and at 0 always")
    parser.add_argument("--scratch", type=Path, help="folder for the inputs; best one in memory, such as /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON file for the rates; what it holds already is added")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], metavar="JSON", help="results to add, too")
    return parser


if __name__ == "__main__":
    main()
