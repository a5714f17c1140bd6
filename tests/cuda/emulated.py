"""Units of kernels as libraries of this machine, over tests/cuda/emulator.h, in the place of `runtime.jit`'s modules.

Needs g++. Shared memory of a block is poisoned before it starts.
"""

import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from runtime import jit
from runtime.jit import Unit
from runtime.sources import kernel_folder

HERE = Path(__file__).parent
POISON = 0xFF  # bytes of shared memory
# So that accesses to shared memory are seen: tests/cuda/races.cpp takes the place of what the option would link.
RACES = "-DSIGNPOST_RACES"
WATCHED = ("-O1", RACES, "-fsanitize=thread", "-fno-gnu-unique")


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """Of this process, which removes it in the end: libraries of all tests are more than half a gigabyte."""
    return tempfile.TemporaryDirectory(prefix="signpost-emulated-", ignore_cleanup_errors=True)


def folder() -> Path:
    return Path(_temporary().name)


def compiled(source: str, emulator: str, flags: tuple[str, ...]) -> Path:
    """A library of C++ that begins with its includes of kernels, behind those of an emulator. What equal includes say
    is compiled once, and so is what of an emulator is in files of its own: with that and with all of the C++ library,
    linking would take a tenth of a second for each kernel."""
    name = hashlib.sha256("\0".join((source, emulator, *flags)).encode()).hexdigest()
    path = folder() / f"{name}.cpp"
    library = path.with_suffix(".so")
    if not library.exists():
        headers = precompiled((emulator, *re.findall(r'#include "(.+)"', source)), flags)
        path.write_text(f'#include "{headers.name}"\n{source}')
        _gcc(*flags, "-c", "-o", str(path.with_suffix(".o")), str(path))
        needed = support(emulator, RACES in flags)
        _gcc("-shared", "-nostdlib", "-o", str(library), str(path.with_suffix(".o")), str(needed), "-lgcc")
    return library


@functools.cache
def support(emulator: str, races: bool) -> Path:
    """A library of what of an emulator is the same for all kernels. It is optimized: every thread comes by."""
    sources = [HERE / "fibers.cpp", *([HERE / "races.cpp"] if races else [])]
    own = (HERE / emulator).with_suffix(".cpp")
    sources += [own] if own.exists() else []
    library = folder() / f"{own.stem}{'-races' if races else ''}.so"
    _gcc("-O2", *([RACES] if races else []), "-shared", "-o", str(library), *map(str, sources), "-ldl")
    return library


@functools.cache
def precompiled(headers: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    name = hashlib.sha256("\0".join((*headers, *flags)).encode()).hexdigest()
    path = folder() / f"{name}.h"
    path.write_text("".join(f'#include "{header}"\n' for header in headers))
    _gcc(*flags, "-x", "c++-header", "-o", f"{path}.gch", str(path))
    return path


def _gcc(*options: str) -> None:
    command = ["g++", "-std=c++17", "-ffp-contract=off", "-w", "-fPIC", f"-I{HERE}", f"-I{kernel_folder()}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def build(unit: Unit, races: bool = False) -> ctypes.CDLL:
    """`run_ENTRY(x, y, z, threads, shared, params)` for each entry, and `params_size`. races: it finds those in shared
    memory, of a cluster's last CTA (tests/cuda/races.h), and `races_found()` says how many since it was last asked."""
    cluster = re.search(r"__cluster_dims__\((\d+)", unit.source)
    at_once = cluster[1] if cluster else 1
    runs = "".join(
        f'extern "C" void run_{entry}(int x, int y, int z, int threads, int shared, const Layers* params) {{\n'
        f"    emulator::launch([&] {{ {entry}(*params); }}, x, y, z, threads, {at_once}, shared, {POISON});"
        "\n}\n"
        for entry in unit.entries
    )
    text = f'{unit.source}extern "C" int params_size = sizeof(Layers);\n{runs}'
    return ctypes.CDLL(str(compiled(text, "emulator.h", WATCHED if races else ("-O1",))))


class Kernel:
    """`runtime.jit.Kernel`; a launch has ended when it returns."""

    def __init__(self, library: ctypes.CDLL, entry: str):
        self.params_size = ctypes.c_int.in_dll(library, "params_size").value
        self._run = getattr(library, f"run_{entry}")

    def launch(self, grid, block, shared, params, stream=0, overlap=False):
        assert ctypes.sizeof(params) == self.params_size
        self._run(*grid, block, shared, ctypes.byref(params))


class Module:
    """`runtime.jit.Module`."""

    def __init__(self, unit: Unit, races: bool = False):
        self.unit, self._library = unit, build(unit, races)
        self.integers = {name: ctypes.c_int.in_dll(self._library, name).value for name in unit.integers}

    def kernel(self, entry: str) -> Kernel:
        return Kernel(self._library, entry)

    def races_found(self) -> int:
        return self._library.races_found()


def stand_in(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> None:
    """From now on kernels are loaded for this machine; work space that a caller has not filled holds NaN."""
    monkeypatch.setattr(jit, "load", lambda unit, device: Module(unit))
    monkeypatch.setattr(jit, "arch_of", lambda device: arch)
    monkeypatch.setattr(jit, "processors", lambda device: 3)
    monkeypatch.setattr(jit, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
