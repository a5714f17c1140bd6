"""Kernels at run time: tiny CUDA C++ units over the `.cuh` files, compiled by NVRTC, cached on disk, launched cheaply.

A unit is a few generated lines: `#include` of our sources and `extern "C"` entry points. Compiling needs NVRTC and the
CUDA headers, no driver and no GPU; `load` and `Kernel.launch` need a GPU. Nothing of cuda-python is imported before one
of the functions here is called, so the CPU path never depends on it.

Environment:

| variable | what | default |
|---|---|---|
| `SIGNPOST_CACHE_DIR` | compiled units; may be read-only | `$XDG_CACHE_HOME/signpost`, else `~/.cache/signpost` |
| `SIGNPOST_NO_COMPILE` | 1: never compile, a unit that the cache lacks is an error | 0 |
| `SIGNPOST_LINEINFO` | 1: with source lines for profilers | 0 |

An entry of the cache is named by the sha256 of all that decides its content: the unit, every `.cuh`, compiler release,
flags and architecture. The CUDA headers belong to the compiler's release and are not hashed, nor are the names of
folders, so a cache that one machine filled serves another. Nothing removes old entries; deleting the folder is safe.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import secrets
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from artifacts.errors import SignpostError
from runtime import cubin as cubins
from runtime.sources import kernel_folder

# Compute capability of a device -> what its kernels are compiled for. sm_90a has Hopper's own instructions.
_ARCH_OF = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}
ARCHS = tuple(_ARCH_OF.values())

_CPU = 'or run with device="cpu"'
_NVRTC = "nvidia-cuda-nvrtc==13.0.*"
# A header of each package that the units include from.
_HEADERS = {"cuda_fp16.h": "nvidia-cuda-runtime==13.0.*"}
_MAGIC = b"SIGNPOST CUBIN 1"
_CONFIGS = 64  # launch shapes that a kernel remembers

Device = torch.device | str | int


class KernelError(SignpostError):
    """A kernel cannot be compiled, loaded or launched. The CPU path is not affected."""


class CompileError(KernelError):
    """The compiler refuses a unit. Attributes: `unit` (its name), `log` (all that the compiler said)."""

    def __init__(self, unit: str, arch: str, log: str) -> None:
        super().__init__(f"kernel unit {unit!r} does not compile for {arch}:\n{log}")
        self.unit = unit
        self.log = log


@dataclass(frozen=True)
class Unit:
    """A generated translation unit.

    name: for messages, unique within a process. source: CUDA C++. entries: its `extern "C" __global__` functions.
    integers: its `extern "C" __device__` ints, which a loaded module has the values of. beside: whether its kernels run
    beside others on a multiprocessor, which has as much shared memory for one as for the other: all there is.
    """

    name: str
    source: str
    entries: tuple[str, ...]
    integers: tuple[str, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class Resources:
    """What an entry takes.

    registers: of a thread. stack: bytes of a thread. spill_bytes: of a thread, stored plus loaded; those of functions
    that were not inlined count for the entry behind which ptxas lists them. shared: static bytes of a block. The last
    two are None where the compiler's log does not tell of the entry.
    """

    registers: int
    stack: int
    spill_bytes: int | None
    shared: int | None


def arch_of(device: Device) -> str:
    """The architecture that kernels for `device` are compiled for. KernelError for a device that has none."""
    capability = torch.cuda.get_device_capability(_index(device))
    if capability not in _ARCH_OF:
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCH_OF)
        raise KernelError(
            f"{torch.cuda.get_device_name(_index(device))} has compute capability {capability[0]}.{capability[1]}; "
            f"there are kernels for {known}: choose another device {_CPU}"
        )
    return _ARCH_OF[capability]


def processors(device: Device) -> int:
    """Multiprocessors of a GPU, among which blocks are dealt out."""
    return torch.cuda.get_device_properties(_index(device)).multi_processor_count


# ---------------------------------------------------------------------------------------------------------- compiling


def compile_unit(unit: Unit, arch: str) -> bytes:
    """The cubin of `unit` for `arch`, one of ARCHS, from the cache or compiled (0.1 to 2 s).

    Raises CompileError where the compiler refuses it, KernelError for an unknown arch, without NVRTC or the CUDA
    headers, and where compiling is forbidden. A cache that cannot be written is warned of once.
    """
    return _built(unit, arch)[0]


def log(unit: Unit, arch: str) -> str:
    """What the compiler said about `unit`: warnings, and the resources of every entry. Raises as `compile_unit`."""
    return _built(unit, arch)[1]


def report(unit: Unit, arch: str) -> dict[str, Resources]:
    """Registers, spills, shared memory and stack of every entry of `unit`. Raises as `compile_unit`."""
    return _resources(unit, *_built(unit, arch))


def precompile(units: Iterable[Unit], arch: str) -> Iterator[tuple[Unit, float, dict[str, Resources]]]:
    """Puts `units` into the cache, several at once: yields each in order with the seconds it took and its resources.

    NVRTC compiles without Python's lock. Raises as `compile_unit`, and KernelError where the cache cannot be written.
    """

    def compiled(unit: Unit) -> tuple[Unit, float, dict[str, Resources]]:
        start = time.perf_counter()
        built = _built(unit, arch, must_keep=True)
        return unit, time.perf_counter() - start, _resources(unit, *built)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from pool.map(compiled, units)
        finally:
            pool.shutdown(cancel_futures=True)


def cache_folder() -> Path:
    """Where compiled units lie; it need not exist yet."""
    if named := os.environ.get("SIGNPOST_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative ones ignored
        return Path(base, "signpost")
    home = os.path.expanduser("~")
    if home == "~":
        raise KernelError("no home folder for the kernel cache: set SIGNPOST_CACHE_DIR to a folder")
    return Path(home, ".cache", "signpost")


def _built(unit: Unit, arch: str, must_keep: bool = False) -> tuple[bytes, str]:
    """Cubin and log, from the cache or compiled. must_keep: a cache that cannot be written is an error."""
    if arch not in ARCHS:
        raise KernelError(f"architecture {arch!r}: one of {', '.join(ARCHS)}, {_CPU}")
    path = cache_folder() / _key(unit, arch)
    state, payload = _read(path)
    if payload is None:
        if switch("SIGNPOST_NO_COMPILE"):
            raise KernelError(
                f"kernel unit {unit.name!r} for {arch} is {state} in {path.parent}, and SIGNPOST_NO_COMPILE forbids to "
                f"compile it: fill the cache by `python -m runtime compile --bundle B --arch {arch}` without the switch"
            )
        cubin, said = _compile(unit, arch)
        payload = struct.pack("<Q", len(cubin)) + cubin + said.encode()
        try:
            _write(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            reason = error.strerror or str(error)
            if must_keep:
                raise KernelError(
                    f"cannot write the kernel cache {path.parent} ({reason}): set SIGNPOST_CACHE_DIR to one that can be"
                ) from error
            _warn_unwritable(str(path.parent), reason)
    (size,) = struct.unpack_from("<Q", payload)
    return payload[8 : 8 + size], payload[8 + size :].decode()


def _key(unit: Unit, arch: str) -> str:
    """Hex digest of all that decides the cubin; every field goes in with its length."""
    digest = hashlib.sha256()
    folder = kernel_folder()
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.cuh"))
    fields = [_MAGIC, _nvrtc_version().encode(), *(flag.encode() for flag in _flags(arch))]
    fields += [unit.name.encode(), unit.source.encode(), *(entry.encode() for entry in unit.entries)]
    for name, path in files:
        fields += [name.encode(), path.read_bytes()]
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.hexdigest()


def _flags(arch: str) -> list[str]:
    """Compiler options, folders excepted.

    ptxas always reports: CI asserts that nothing spills. NVRTC's own cache, which it keeps where there is a driver, is
    left out: what it finds there comes without ptxas' report, and ours holds the same.
    """
    lines = ["--generate-line-info"] if switch("SIGNPOST_LINEINFO") else []
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        "--no-cache",
        *lines,
    ]


def switch(name: str) -> bool:
    """Whether an environment variable is 1. KernelError for what is neither 0 nor 1 nor empty."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise KernelError(f"{name}={value}: 1 or 0")
    return value == "1"


def _read(path: Path) -> tuple[str, bytes | None]:
    """The payload of an entry, or None and why there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "missing", None
    except OSError as error:
        return f"unreadable ({error.strerror})", None
    start = len(_MAGIC) + 32
    payload = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(payload).digest():
        return "corrupt", None
    return "there", payload


def _write(path: Path, data: bytes) -> None:
    """Puts an entry in place by one rename: processes see none or all of it. A power cut's remains fail the digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@functools.cache  # once per folder and reason
def _warn_unwritable(folder: str, reason: str) -> None:
    warnings.warn(
        f"cannot write the kernel cache {folder} ({reason}), so every process compiles its kernels again: "
        "set SIGNPOST_CACHE_DIR to a folder that can be",
        RuntimeWarning,
        stacklevel=4,
    )


def _cuda_python(name: str) -> Any:
    """The module `cuda.<name>`, imported here and not before."""
    try:
        return import_module(f"cuda.{name}")
    except ImportError as error:
        raise KernelError(
            f"no cuda-python ({error}): pip install 'cuda-bindings>=13.0.3,<14' 'cuda-pathfinder>=1.3', {_CPU}"
        ) from error


@functools.cache
def _nvrtc_version() -> str:
    nvrtc = _cuda_python("bindings.nvrtc")
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # what cuda-python raises for a missing library differs by release
        raise KernelError(f"no NVRTC library, the compiler of kernels: pip install '{_NVRTC}', {_CPU}") from error
    if result:
        raise KernelError(f"NVRTC does not start ({result.name}): pip install '{_NVRTC}', {_CPU}")
    return f"{major}.{minor}"


def _headers() -> Path:
    """The folder of the CUDA headers. KernelError where it lacks some."""
    found = _cuda_python("pathfinder").find_nvidia_header_directory("cudart")
    for header, package in _HEADERS.items():
        if found is None or not Path(found, header).is_file():
            place = f"no CUDA headers: {header} is missing" + (f" in {found}" if found else "")
            raise KernelError(f"{place}: pip install '{package}', {_CPU}")
    return Path(found)


def _compile(unit: Unit, arch: str) -> tuple[bytes, str]:
    """Cubin and log of NVRTC."""
    nvrtc, version = _cuda_python("bindings.nvrtc"), _nvrtc_version()
    result, known = nvrtc.nvrtcGetSupportedArchs()
    if not result and int(re.sub(r"\D", "", arch)) not in known:
        raise KernelError(f"NVRTC {version} does not compile for {arch}: pip install '{_NVRTC}', {_CPU}")
    folders = [f"--include-path={kernel_folder()}", f"--include-path={_headers()}"]
    options = [os.fsencode(option) for option in [*_flags(arch), *folders]]
    result, program = nvrtc.nvrtcCreateProgram(unit.source.encode(), f"{unit.name}.cu".encode(), 0, [], [])
    if result:
        raise KernelError(f"kernel unit {unit.name!r}: NVRTC {version} cannot start on it: {result.name}")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        said = buffer.rstrip(b"\0 \n").decode(errors="replace")
        said = re.sub(r"\n.*: Compile time = .*", "", said)  # so that equal units make equal entries
        if result:
            raise CompileError(unit.name, arch, said or result.name)
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        (result,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        if result:
            raise CompileError(unit.name, arch, f"no cubin: {result.name}")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    _resources(unit, bytes(cubin), said)
    return bytes(cubin), said


def _resources(unit: Unit, cubin: bytes, said: str) -> dict[str, Resources]:
    """What the entries take, by the cubin and by ptxas' report. KernelError if one of them is not in the unit."""
    found = cubins.entries(cubin)
    for entry in unit.entries:
        if entry not in found:
            has = ", ".join(found) or "none"
            raise KernelError(f'kernel unit {unit.name!r} has no entry {entry!r} (extern "C" __global__); it has {has}')
    blocks = re.split(r"Compiling entry function '([^']+)'", said)
    texts = dict(zip(blocks[1::2], blocks[2::2], strict=True))

    def total(entry: str, pattern: str) -> int | None:
        return sum(map(int, re.findall(pattern, texts[entry]))) if entry in texts else None

    spills, shared = r"(\d+) bytes spill (?:stores|loads)", r"(\d+) bytes smem"
    return {
        name: Resources(found[name].registers, found[name].stack, total(name, spills), total(name, shared))
        for name in unit.entries
    }


# ------------------------------------------------------------------------------------------------ loading and launching


_Pointers = ctypes.c_void_p * 1
_sizeof = ctypes.sizeof
_addressof = ctypes.addressof


class Kernel:
    """An entry on one device; made by `load`.

    entry: its name. params_size: bytes of its one argument. max_shared: dynamic shared bytes that a launch may ask for.
    """

    def __init__(
        self, entry: str, device: int, context: Any, function: Any, params_size: int, max_shared: int, overlaps: bool
    ) -> None:
        self.entry = entry
        self.params_size = params_size
        self.max_shared = max_shared
        self._device = device
        self._context = context
        self._function = function
        self._overlaps = overlaps
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._driver = _cuda_python("bindings.driver")
        self._current = torch._C._cuda_getDevice

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared: int,
        params: ctypes.Structure | bytearray,
        stream: int,
        overlap: bool = False,
    ) -> None:
        """Queues the kernel on `stream` (a CUstream of its device, see `current_stream`); it may be capturing a graph.

        grid: blocks. block: threads. shared: dynamic shared bytes, at most `max_shared`. params: the kernel's one
        argument, a struct by value of exactly `params_size` bytes; it is read before this returns. overlap: the kernel
        may start before its predecessor on the stream ends, and calls `cudaGridDependencySynchronize` itself (below
        compute capability 9.0 it starts afterwards as ever).

        Fastest with a ctypes.Structure, with launch shapes that recur, and with the kernel's device current. Any thread
        may call it. KernelError for a struct of another size and for what the driver refuses.
        """
        shape = (grid, block, shared, stream, overlap)
        config = self._configs.get(shape) or self._configure(shape)
        data: Any = (ctypes.c_char * len(params)).from_buffer(params) if isinstance(params, bytearray) else params
        if _sizeof(data) != self.params_size:
            raise KernelError(
                f"kernel {self.entry!r} takes a struct of {self.params_size} bytes, not {_sizeof(data)}: "
                "the two definitions differ"
            )
        pointers = _Pointers(_addressof(data))
        code = None
        if self._current() == self._device:
            (code,) = self._driver.cuLaunchKernelEx(config, self._function, _addressof(pointers), 0)
            if not code:
                return
        if code is None or code == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # Another device is current, or the thread is new and has no context yet.
            with _context(self._context):
                (code,) = self._driver.cuLaunchKernelEx(config, self._function, _addressof(pointers), 0)
        if code:
            raise KernelError(
                f"kernel {self.entry!r} does not launch: {_explain(code)} "
                f"(grid {grid}, {block} threads, {shared} of {self.max_shared} shared bytes)"
            )

    def _configure(self, shape: tuple[Any, ...]) -> Any:
        """The driver's form of a launch shape, kept for the next time. Never changed once made: threads share it."""
        grid, block, shared, stream, overlap = shape
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        config.hStream = self._driver.CUstream(stream)
        if overlap and self._overlaps:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        if len(self._configs) >= _CONFIGS:
            self._configs = {}
        self._configs[shape] = config
        return config


class Module:
    """A unit on one device; made by `load`, and never unloaded."""

    def __init__(self, unit: Unit, kernels: dict[str, Kernel], integers: dict[str, int] | None = None) -> None:
        self.unit = unit
        self.integers = integers or {}
        self._kernels = kernels

    def kernel(self, entry: str) -> Kernel:
        """The kernel called `entry`. KernelError if the unit has none of that name."""
        if entry not in self._kernels:
            raise KernelError(f"kernel unit {self.unit.name!r} has no entry {entry!r}: {', '.join(self._kernels)}")
        return self._kernels[entry]


_modules: dict[tuple[Unit, int], Module] = {}
_begun: dict[tuple[Unit, str], "Future[bytes]"] = {}
_lock = threading.Lock()


def begin(units: Iterable[Unit], device: Device) -> None:
    """Begins to compile units that `load` will be asked for soon, in threads, so that they are compiled at once.

    What goes wrong is told by `load`. Raises KernelError without a GPU.
    """
    index = _index(device)
    arch = arch_of(index)
    with _lock:
        wanted = [unit for unit in units if (unit, index) not in _modules and (unit, arch) not in _begun]
        if wanted:
            pool = ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1))
            _begun.update({(unit, arch): pool.submit(compile_unit, unit, arch) for unit in wanted})
            pool.shutdown(wait=False)


def load(unit: Unit, device: Device) -> Module:
    """`unit` on a CUDA device, ready to launch; compiled if need be, and loaded once per process and device.

    Not to be called while a graph is captured. Raises as `compile_unit`, and KernelError without a GPU or with a driver
    that does not take the cubin.
    """
    key = (unit, _index(device))
    with _lock:
        if key not in _modules:
            arch = arch_of(key[1])
            begun = _begun.pop((unit, arch), None)
            _modules[key] = _load(unit, begun.result() if begun else compile_unit(unit, arch), key[1])
        return _modules[key]


def current_stream(device: Device) -> int:
    """PyTorch's current stream on `device`, as `Kernel.launch` takes it. Fastest with the device's index."""
    index = device if isinstance(device, int) else _index(device)
    return torch._C._cuda_getCurrentRawStream(index)


def _index(device: Device) -> int:
    """The index of a CUDA device, with CUDA initialized. KernelError if it is none, or there is none."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise KernelError(f"device {wanted}: the kernels run on CUDA devices; the CPU path needs none of them")
    if not torch.cuda.is_available():
        why = "no NVIDIA GPU, or no working driver" if torch.version.cuda else "this torch is built without CUDA"
        raise KernelError(f"no CUDA device ({why}): install what is missing {_CPU}")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= count:
        raise KernelError(f"device {wanted}: this machine has cuda:0 to cuda:{count - 1}; choose one of them {_CPU}")
    return index


def _explain(code: Any) -> str:
    """A CUresult in words."""
    error, text = _cuda_python("bindings.driver").cuGetErrorString(code)
    return code.name if error else f"{code.name}, {text.decode()}"


@contextlib.contextmanager
def _context(context: Any) -> Iterator[None]:
    """Makes a context the thread's, and puts back what was, were it none. Allowed within a capture."""
    driver = _cuda_python("bindings.driver")
    before = driver.cuCtxGetCurrent()[1]
    driver.cuCtxSetCurrent(context)
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


def _load(unit: Unit, cubin: bytes, index: int) -> Module:
    """Loads a cubin into torch's context of a device; kernels can be captured at once and use all shared memory."""
    driver = _cuda_python("bindings.driver")

    def ask(name: str, *arguments: Any) -> Any:
        code, *values = getattr(driver, name)(*arguments)
        if code:
            newest = driver.cuDriverGetVersion()[1]
            raise KernelError(
                f"kernel unit {unit.name!r} not loaded: {name} says {_explain(code)}; NVRTC is {_nvrtc_version()}"
                f", the driver for CUDA {newest // 1000}.{newest % 1000 // 10}: if older, update the driver {_CPU}"
            )
        return values[0] if values else None

    torch.cuda.init()
    device = ask("cuDeviceGet", index)
    context = ask("cuDevicePrimaryCtxRetain", device)
    of_device, of_function = driver.CUdevice_attribute, driver.CUfunction_attribute
    room = ask("cuDeviceGetAttribute", of_device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
    overlaps = torch.cuda.get_device_capability(index) >= (9, 0)
    kernels = {}
    with _context(context):
        module = ask("cuModuleLoadData", cubin)
        for entry in unit.entries:
            function = ask("cuModuleGetFunction", module, entry.encode())
            ask("cuFuncLoad", function)
            dynamic = room - ask("cuFuncGetAttribute", of_function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            ask("cuFuncSetAttribute", function, of_function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic)
            if (
                unit.beside and overlaps
            ):  # with another share of the L1 cache a kernel waits until a multiprocessor is idle
                share = of_function.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                ask("cuFuncSetAttribute", function, share, 100)
            no_first, _, size = driver.cuFuncGetParamInfo(function, 0)
            if no_first or not driver.cuFuncGetParamInfo(function, 1)[0]:
                raise KernelError(
                    f"kernel {entry!r} of unit {unit.name!r}: it must take one argument, a struct by value"
                )
            kernels[entry] = Kernel(entry, index, context, function, size, dynamic, overlaps)
        integers = {name: ctypes.c_int() for name in unit.integers}
        for name, value in integers.items():
            code, address, size = driver.cuModuleGetGlobal(module, name.encode())
            if code:
                raise KernelError(f"kernel unit {unit.name!r} has no integer {name!r}: {_explain(code)}")
            ask("cuMemcpyDtoH", ctypes.addressof(value), address, size)
    return Module(unit, kernels, {name: value.value for name, value in integers.items()})
