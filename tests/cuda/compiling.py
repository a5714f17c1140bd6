"""Compiling units of kernels in tests that ask whether they compile at all."""

import functools
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor

from runtime import jit


def report(unit: jit.Unit, arch: str) -> dict[str, jit.Resources]:
    """`runtime.jit.report` of a compiler that optimizes little: the same code, instantiated and assembled in a third of
    the time. How much it spills means nothing; tests/gpu compiles all formats as they are used.

    In a process of its own: once NVRTC 13.0 has been asked for that, it optimizes less whatever comes then.
    """
    found = _process().submit(_report, unit, arch).result()
    assert not isinstance(found, str), found
    return found


def _report(unit: jit.Unit, arch: str) -> dict[str, jit.Resources] | str:
    """Or what the compiler says: its error would end both processes, as it cannot be sent."""
    try:
        return jit.report(unit, arch)
    except jit.KernelError as error:
        return str(error)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _optimize_little)


def _optimize_little() -> None:
    flags = jit._flags
    jit._flags = lambda arch: [*flags(arch), "--Ofast-compile=max"]
    os.environ["SIGNPOST_CACHE_DIR"] = tempfile.mkdtemp(prefix="signpost-compiled-")
