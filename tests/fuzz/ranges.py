"""What a long run does."""

import faulthandler
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import Fuzzer, Opened, Tally

HEADROOM = 512 << 20  # bytes of address space beyond what the process has at its start
STUCK = 120  # seconds for a thousand inputs, after which the stack is reported


def run_range(first: int, stop: int, seed: int, memory_every: int, scratch: Path | None) -> Tally:
    """Inputs from number `first` to below `stop`, in this process, whose address space is limited."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="signpost-fuzz-", dir=scratch) as folder:
        fuzzer = Fuzzer(Path(folder), seed, Opened())
        for n in range(first, stop):
            if n % 1000 == 0:
                faulthandler.dump_traceback_later(STUCK, exit=True)
            fuzzer.run(n, memory=n % memory_every == 0)
            if n % 20_000 == 0:
                print(f"input {n}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        faulthandler.cancel_dump_traceback_later()
    return fuzzer.tally
