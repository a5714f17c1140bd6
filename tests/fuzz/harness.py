"""Loads mutated bundles and watches what happens. A rule that is broken raises Broken, with the input's number."""

import os
import shutil
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from artifacts import Bundle, BundleError, load
from tests.artifacts.samples import assert_same
from tests.fuzz.corpus import Files, bundles, saved
from tests.fuzz.mutations import BYTES, EVALUATION, MANIFEST, TENSORS, spoil_folder

HANG = 1.0  # seconds of processor time
NAMES = {MANIFEST, TENSORS, EVALUATION}
MESSAGE_LIMIT = 4000  # characters
JSON_FACTOR = 64  # bytes that Python takes for a byte of JSON at most: `[],` makes a list of 56 bytes and its place
SPARE = 1 << 18  # bytes: Python's own small change


class Broken(AssertionError):
    """A rule was broken."""


@dataclass
class Tally:
    """What a run saw. Seconds are of processor time; `memory`: the largest share of its allowance that a load took."""

    inputs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0
    slowest_input: str = ""
    measured: int = 0
    memory: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "inputs": sum(self.inputs.values()),
            "by_mutation": dict(self.inputs.most_common()),
            "outcomes": dict(self.outcomes.most_common()),
            "load_seconds": self.seconds,
            "slowest_load_seconds": self.slowest,
            "slowest_input": self.slowest_input,
            "loads_with_memory_measured": self.measured,
            "largest_share_of_allowed_memory": self.memory,
        }


class Opened:
    """Notes what the process opens while it is watched, through Python's audit events."""

    def __init__(self) -> None:
        self.paths: list[Any] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is not None and event == "open":
            self.paths.append(arguments[0])


class Fuzzer:
    """Mutated inputs in folder `scratch`, number by number: input `n` of `seed` is always the same."""

    def __init__(self, scratch: Path, seed: int, opened: Opened):
        self.seed, self.opened, self.tally = seed, opened, Tally()
        self.corpus, self.whole = saved(scratch / "corpus"), bundles()
        self.folder = scratch / "bundle"
        shutil.copytree(scratch / "corpus" / "kvquant", scratch / "secret")
        self.folder.mkdir()

    def run(self, n: int, memory: bool = False) -> None:
        """Input `n`; memory: with its allocations measured, which is slow."""
        rng = Random(f"{self.seed} {n}")
        source = rng.choice(list(self.corpus))
        mutation = rng.choice([*BYTES, *BYTES, "spoil_folder"])
        files = self.corpus[source]
        if mutation != "spoil_folder":
            files = BYTES[mutation](files, rng)
        self._lay(files)
        if mutation == "spoil_folder":
            spoil_folder(self.folder, rng)
        outcome, bundle = self._load(f"{n} ({mutation} of {source})", files, memory)
        if bundle is not None:
            self._check_accepted(f"{n} ({mutation} of {source})", bundle, self.whole[source], mutation)
        self.tally.inputs[mutation] += 1
        self.tally.outcomes[outcome] += 1

    def _lay(self, files: Files) -> None:
        for entry in list(os.scandir(self.folder)):
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry)
            else:
                os.unlink(entry)
        for name, data in files.items():
            (self.folder / name).write_bytes(data)

    def _load(self, name: str, files: Files, memory: bool) -> tuple[str, Bundle | None]:
        bundle = None
        if memory:
            tracemalloc.start()
        self.opened.paths = []
        start = time.process_time()
        try:
            bundle, outcome = load(self.folder), "accepted"
        except BundleError as error:
            outcome = type(error).__name__
            if not 0 < len(str(error)) < MESSAGE_LIMIT:
                raise Broken(f"input {name}: a message of {len(str(error))} characters") from error
        except BaseException as error:
            raise Broken(f"input {name}: {type(error).__name__}: {error}") from error
        finally:
            seconds, paths, self.opened.paths = time.process_time() - start, self.opened.paths, None
            peak = tracemalloc.get_traced_memory()[1] if memory else 0
            tracemalloc.stop()
        self._check_watched(name, files, seconds, paths, peak, memory)
        return outcome, bundle

    def _check_watched(
        self, name: str, files: Files, seconds: float, paths: list[Any], peak: int, memory: bool
    ) -> None:
        if foreign := [path for path in paths if path not in NAMES and path != str(self.folder)]:
            raise Broken(f"input {name}: opened {foreign[0]!r}")
        if memory:
            json = len(files.get(MANIFEST, b"")) + len(files.get(EVALUATION, b"")) + len(files.get(TENSORS, b""))
            allowed = SPARE + JSON_FACTOR * json
            self.tally.measured += 1
            self.tally.memory = max(self.tally.memory, peak / allowed)
            if peak > allowed:
                raise Broken(f"input {name}: {peak} bytes of memory for {json} bytes of files")
            return  # measuring memory takes time itself
        self.tally.seconds += seconds
        if seconds > self.tally.slowest:
            self.tally.slowest, self.tally.slowest_input = seconds, name
        if seconds > HANG:
            raise Broken(f"input {name}: {seconds:.1f} s")

    def _check_accepted(self, name: str, bundle: Bundle, whole: Bundle, mutation: str) -> None:
        """What is accepted can be used, and unless somebody vouched for something else it is what was written."""
        geometry = bundle.geometry
        if not (geometry.bits(4096) > 0 and geometry.cache_bytes(4096) > 0):
            raise Broken(f"input {name}: accepted, but has no size")
        if mutation in ("flipped_files", "spoil_folder"):
            try:
                assert_same(bundle, whole)
            except AssertionError as error:
                raise Broken(f"input {name}: accepted, but altered: {error}") from error
