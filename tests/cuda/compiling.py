"""Compiling units of kernels in tests that ask whether they compile at all."""

import functools
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor

from runtime import jit
from runtime.sources import kernel_folder


def check(unit: jit.Unit, arch: str, assembled: bool = True) -> None:
    """A unit compiles to PTX with all of its entries. Where that has an instruction that no unit before had, ptxas
    assembles it too, unless it is not to: what ptxas could still refuse is instructions, and it takes four times as
    long as NVRTC.

    By a compiler that optimizes little: the same code, instantiated. How it comes out means nothing; tests/gpu compiles
    all formats as they are used. In a process of its own: once NVRTC 13.0 has been asked for that, it optimizes less
    whatever comes then.
    """
    problem = _process().submit(_check, unit, arch, assembled).result()
    assert problem is None, problem


_LITTLE = "--Ofast-compile=max"
_assembled: set[tuple[str, str]] = set()  # architectures and instructions


def _check(unit: jit.Unit, arch: str, assembled: bool) -> str | None:
    """What the compiler says against it: its error would end both processes, as it cannot be sent."""
    try:
        ptx = _ptx(unit, arch)
        entries = set(re.findall(r"\.entry (\w+)\(", ptx))
        if entries != set(unit.entries):
            return f"{unit.name} has the entries {entries}"
        instructions = re.findall(r"^\s+(?:@!?%\w+ )?([a-z]\w*(?:[.:]+\w+)*)[ ;]", ptx, re.MULTILINE)
        found = {(arch, name) for name in instructions}
        if assembled and not found <= _assembled:
            jit.compile_unit(unit, arch)
            _assembled.update(found)
    except jit.KernelError as error:
        return str(error)
    return None


def _ptx(unit: jit.Unit, arch: str) -> str:
    from cuda.bindings import nvrtc

    flags = ["--std=c++17", "--device-as-default-execution-space", "--no-cache", _LITTLE]
    flags += [f"--gpu-architecture={arch.replace('sm', 'compute')}"]
    flags += [f"--include-path={kernel_folder()}", f"--include-path={jit._headers()}"]
    _, program = nvrtc.nvrtcCreateProgram(unit.source.encode(), b"unit.cu", 0, [], [])
    (refused,) = nvrtc.nvrtcCompileProgram(program, len(flags), [os.fsencode(flag) for flag in flags])
    sizes, texts = (
        (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if refused
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    text = bytearray(sizes(program)[1])
    texts(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    if refused:
        raise jit.CompileError(unit.name, arch, text.decode(errors="replace"))
    return text.decode()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_optimize_little)


def _optimize_little() -> None:
    flags = jit._flags
    jit._flags = lambda arch: [*flags(arch), _LITTLE]
    os.environ["SIGNPOST_CACHE_DIR"] = tempfile.mkdtemp(prefix="signpost-compiled-")
