"""Kernels at run time, as far as they need no GPU: compiling, the cache, errors, what is launched, the command."""

import ctypes
import errno
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import cubin as cubins
from runtime import jit
from runtime.__main__ import main
from runtime.jit import ARCHS, CompileError, Kernel, KernelError, Unit
from tests.formats import kivi, random_bundle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cuda-python is a dependency on Linux only")

# Includes what the real units include: our sources, and headers of both CUDA packages.
SOURCE = """
#include "codes.cuh"
#include <cuda_fp16.h>
#include <mma.h>
struct Params { float* out; int n; };
extern "C" __global__ void fill(const __grid_constant__ Params p) {
    __shared__ float s[64];
    s[threadIdx.x % 64] = signpost::RUN;
    __syncthreads();
    p.out[threadIdx.x] = s[p.n];
}
extern "C" __global__ void clear(const __grid_constant__ Params p) { p.out[threadIdx.x] = 0; }
"""
UNIT = Unit("fill", SOURCE, ("fill", "clear"))
# 200 numbers alive across a barrier, in blocks that leave a thread 64 registers.
SPILLS = """
struct Params { float* x; int n; };
extern "C" __global__ void __launch_bounds__(1024) many(const __grid_constant__ Params p) {
    float a[200];
    #pragma unroll
    for (int i = 0; i < 200; ++i) a[i] = p.x[i * p.n];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 200; ++i) p.x[i * p.n + 1] = a[199 - i];
}
"""

# A function that is not inlined and has an array of its own.
DEEP = """
__device__ __noinline__ float deep(const float* x, int n) {
    float a[50];
    for (int i = 0; i < n; ++i) a[i] = x[i];
    return a[n / 2];
}
extern "C" __global__ void k(float* x) { x[0] = deep(x, x[1]); }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no switches."""
    for name in ("SIGNPOST_NO_COMPILE", "SIGNPOST_LINEINFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path / "cache"))
    jit._warn_unwritable.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch):
    """The names of the units that were compiled, not found."""
    names = []
    compile_ = jit._compile

    def counting(unit, arch):
        names.append(unit.name)
        return compile_(unit, arch)

    monkeypatch.setattr(jit, "_compile", counting)
    return names


@pytest.fixture
def fresh_nvrtc():
    """NVRTC is looked for again, before and after."""
    jit._nvrtc_version.cache_clear()
    yield
    jit._nvrtc_version.cache_clear()


def only_entry(cache):
    (path,) = cache.iterdir()
    return path


# ------------------------------------------------------------------------------------------------------- compiling


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles(arch):
    assert jit.compile_unit(UNIT, arch)[:4] == b"\x7fELF"
    used = jit.report(UNIT, arch)
    assert list(used) == ["fill", "clear"]
    assert used["fill"].shared == 256
    for resources in used.values():
        assert 0 < resources.registers < 64
        assert resources.spill_bytes == resources.stack == 0


def test_spills_are_seen():
    used = jit.report(Unit("many", SPILLS, ("many",)), "sm_90a")["many"]
    assert used.registers == 64
    assert used.spill_bytes > 1000
    assert used.stack > 500


def test_a_called_function_counts_for_the_entry_that_it_follows():
    said = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clear' for 'sm_90a'
ptxas info    : Function properties for clear
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'fill' for 'sm_90a'
ptxas info    : Function properties for fill
ptxas         .     480 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 480 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _Z3bigPfi
ptxas         .     16 bytes stack frame, 100 bytes spill stores, 200 bytes spill loads
"""
    used = jit._resources(UNIT, jit.compile_unit(UNIT, "sm_90a"), said)
    assert list(used) == ["fill", "clear"]
    assert (used["fill"].spill_bytes, used["fill"].shared) == (312, 128)
    assert (used["clear"].spill_bytes, used["clear"].shared) == (0, 0)


def test_the_cubin_tells_what_ptxas_reports():
    """Two sources of the same numbers; a function that is not inlined is no entry."""
    deep = Unit("deep", DEEP, ("k",))
    for unit, arch in (
        (UNIT, "sm_80"),
        (Unit("many", SPILLS, ("many",)), "sm_90a"),
        (deep, "sm_120"),
    ):
        cubin, said = jit._built(unit, arch)
        found = cubins.entries(cubin)
        assert sorted(found) == sorted(unit.entries)
        for name, entry in found.items():
            text = said.split(f"entry function '{name}'")[1].split("entry function")[0]
            assert entry.registers == int(re.search(r"Used (\d+) registers", text)[1])
            stack = re.search(r"(\d+) bytes cumulative stack size", text)
            assert entry.stack == int(stack[1] if stack else 0)


@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[:3000], lambda c: b"\x7fELG" + c[4:], lambda c: c[:64] + bytes(len(c) - 64)]
)
def test_what_is_no_cubin_has_no_entries(damage):
    with pytest.raises(cubins.CubinError, match=r"\d+ bytes that are no cubin"):
        cubins.entries(damage(jit.compile_unit(UNIT, "sm_90a")))


def test_a_compiler_that_says_nothing(monkeypatch, cache):
    """As NVRTC does when it finds a cubin in a cache of its own."""
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcGetProgramLogSize", lambda program: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 1))
    monkeypatch.setattr(nvrtc, "nvrtcGetProgramLog", lambda program, buffer: (nvrtc.nvrtcResult.NVRTC_SUCCESS,))
    used = jit.report(UNIT, "sm_90a")
    assert list(used) == ["fill", "clear"]
    assert 0 < used["fill"].registers < 64
    assert used["fill"].spill_bytes is used["fill"].shared is None
    with pytest.raises(KernelError, match=r"unit 'fill' has no entry 'drain' .* it has .*clear"):
        jit.compile_unit(Unit("fill", SOURCE, ("fill", "drain")), "sm_90a")


def test_a_compile_error_carries_log_and_name():
    with pytest.raises(
        CompileError, match=r"kernel unit 'broken' does not compile for sm_80:\n(.|\n)*broken\.cu\(2\)"
    ) as e:
        jit.compile_unit(Unit("broken", "int x = 1;\nint y = nothing;", ()), "sm_80")
    assert e.value.unit == "broken"
    assert 'identifier "nothing" is undefined' in e.value.log


def test_a_missing_entry_is_named():
    with pytest.raises(KernelError, match=r"unit 'fill' has no entry 'drain' .* it has .*clear"):
        jit.compile_unit(Unit("fill", SOURCE, ("fill", "drain")), "sm_90a")


def test_warnings_are_kept():
    unit = Unit("w", 'extern "C" __global__ void k() { int unused; }', ("k",))
    for _ in range(2):  # compiled, then from the cache
        assert 'variable "unused" was declared but never referenced' in jit.log(unit, "sm_80")


@pytest.mark.parametrize("arch", ["sm_70", "sm_90", "", "90"])
def test_an_unknown_architecture_lists_the_known(arch):
    with pytest.raises(
        KernelError, match=rf"architecture '{arch}': one of sm_80, .*sm_120, or run with device=\"cpu\""
    ):
        jit.compile_unit(UNIT, arch)


def test_an_architecture_that_nvrtc_lacks(monkeypatch):
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcGetSupportedArchs", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, [80, 90]))
    jit.compile_unit(UNIT, "sm_90a")
    with pytest.raises(KernelError, match=r"NVRTC 13\.\d+ does not compile for sm_120: pip install 'nvidia-cuda-nvrtc"):
        jit.compile_unit(UNIT, "sm_120")


@pytest.mark.usefixtures("fresh_nvrtc")
def test_without_cuda_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(KernelError, match=r"no cuda-python .*pip install 'cuda-bindings.* or run with device=\"cpu\""):
        jit.compile_unit(UNIT, "sm_90a")


def test_without_the_nvrtc_library():
    code = """
import cuda.pathfinder
def absent(name):
    raise cuda.pathfinder.DynamicLibNotFoundError(name)
cuda.pathfinder.load_nvidia_dynamic_lib = absent
from runtime import cubin as cubins
from runtime import jit
try:
    jit.compile_unit(jit.Unit("u", "", ()), "sm_90a")
except jit.KernelError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("no NVRTC library, the compiler of kernels: pip install 'nvidia-cuda-nvrtc"), done
    assert done.stdout.endswith('or run with device="cpu"\n')


@pytest.mark.usefixtures("fresh_nvrtc")
def test_nvrtc_that_does_not_start(monkeypatch):
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR, 0, 0))
    with pytest.raises(KernelError, match=r"NVRTC does not start .NVRTC_ERROR_INTERNAL_ERROR.: pip install"):
        jit.compile_unit(UNIT, "sm_90a")


def test_nvrtc_that_takes_no_program(monkeypatch):
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", lambda *_: (nvrtc.nvrtcResult.NVRTC_ERROR_OUT_OF_MEMORY, None))
    with pytest.raises(KernelError, match=r"unit 'fill': NVRTC 13\.\d+ cannot start on it: NVRTC_ERROR_OUT_OF_MEMORY"):
        jit.compile_unit(UNIT, "sm_90a")


def test_a_program_without_cubin(monkeypatch):
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcGetCUBIN", lambda *_: (nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR,))
    with pytest.raises(CompileError, match="no cubin: NVRTC_ERROR_INTERNAL_ERROR"):
        jit.compile_unit(UNIT, "sm_90a")


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (None, r"no CUDA headers: cuda_fp16\.h is missing: pip install 'nvidia-cuda-runtime==13\.0\.\*', or run"),
        ([], r"no CUDA headers: cuda_fp16\.h is missing in .*: pip install 'nvidia-cuda-runtime"),
    ],
)
def test_without_headers(present, message, tmp_path, monkeypatch):
    import cuda.pathfinder

    for name in present or []:
        (tmp_path / name).touch()
    found = None if present is None else str(tmp_path)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda _: found)
    with pytest.raises(KernelError, match=message):
        jit.compile_unit(UNIT, "sm_90a")


def test_importing_the_runtime_needs_no_cuda_python():
    # torch imports some of it by itself where it is there.
    code = """
import sys
{}
import torch, numba
before = {{name for name in sys.modules if name.startswith("cuda.")}}
import runtime, runtime.jit, runtime.__main__
print({{name for name in sys.modules if name.startswith("cuda.")}} - before)
"""
    for preparation in ("", "sys.modules['cuda.bindings'] = None", "sys.modules['cuda'] = None"):
        done = subprocess.run([sys.executable, "-c", code.format(preparation)], capture_output=True, text=True)
        assert done.stdout == "set()\n", done


# ----------------------------------------------------------------------------------------------------------- cache


def test_the_second_time_nothing_is_compiled(cache, compiles):
    first = jit.compile_unit(UNIT, "sm_90a")
    path = only_entry(cache)
    written = path.stat().st_mtime_ns
    assert jit.compile_unit(UNIT, "sm_90a") == first
    assert jit.report(UNIT, "sm_90a")["fill"].shared == 256
    assert compiles == ["fill"]
    assert path.stat().st_mtime_ns == written


def test_the_key_covers_all_that_decides(tmp_path, monkeypatch):
    keys = [jit._key(UNIT, "sm_90a"), jit._key(UNIT, "sm_80")]
    keys.append(jit._key(Unit("fill", SOURCE + " ", UNIT.entries), "sm_90a"))
    keys.append(jit._key(Unit("fill", SOURCE, ("fill",)), "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setenv("SIGNPOST_LINEINFO", "1")
        keys.append(jit._key(UNIT, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_nvrtc_version", lambda: "13.1")
        keys.append(jit._key(UNIT, "sm_90a"))
    monkeypatch.setattr(jit, "kernel_folder", lambda: tmp_path)
    keys.append(jit._key(UNIT, "sm_90a"))
    (tmp_path / "a.cuh").write_text("int x;")
    keys.append(jit._key(UNIT, "sm_90a"))
    (tmp_path / "a.cuh").write_text("int y;")
    keys.append(jit._key(UNIT, "sm_90a"))
    (tmp_path / "part").mkdir()
    (tmp_path / "a.cuh").rename(tmp_path / "part/a.cuh")
    keys.append(jit._key(UNIT, "sm_90a"))
    assert len(set(keys)) == len(keys)
    # Where the sources lie does not matter: a cache may be shipped.
    moved = tmp_path.rename(tmp_path.parent / "elsewhere")
    monkeypatch.setattr(jit, "kernel_folder", lambda: moved)
    assert jit._key(UNIT, "sm_90a") == keys[-1]


def damage_payload(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    "damage",
    [
        damage_payload,
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"X" + data[1:],
        lambda data: data + b"\0",
    ],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(damage, cache, compiles, monkeypatch):
    first = jit.compile_unit(UNIT, "sm_90a")
    path = only_entry(cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with monkeypatch.context() as patch:
        patch.setenv("SIGNPOST_NO_COMPILE", "1")
        with pytest.raises(KernelError, match="'fill' for sm_90a is corrupt in"):
            jit.compile_unit(UNIT, "sm_90a")
    assert jit.compile_unit(UNIT, "sm_90a") == first
    assert compiles == ["fill", "fill"]
    assert only_entry(cache).read_bytes() == whole


def test_many_processes_share_a_cache(cache):
    units = [Unit(f"u{i}", SOURCE + f"// {i}", UNIT.entries) for i in range(2)]
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        cubins = pool.starmap(jit.compile_unit, [(unit, "sm_90a") for unit in units for _ in range(4)], chunksize=1)
    assert cubins == [jit.compile_unit(unit, "sm_90a") for unit in units for _ in range(4)]
    assert sorted(path.name for path in cache.iterdir()) == sorted(jit._key(unit, "sm_90a") for unit in units)


def test_several_units_are_compiled_at_once(cache):
    """All are kept, in order; the first that the compiler refuses ends it."""
    units = [Unit(f"u{i}", SOURCE + f"// {i}", UNIT.entries) for i in range(4)]
    assert [found[0] for found in jit.precompile(units, "sm_90a")] == units
    assert sorted(path.name for path in cache.iterdir()) == sorted(jit._key(unit, "sm_90a") for unit in units)
    with pytest.raises(CompileError, match="unit 'broken' does not compile"):
        list(jit.precompile([units[0], Unit("broken", "int y = nothing;", ()), *units], "sm_90a"))


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, monkeypatch, compiles):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path / "file/cache"))
    with pytest.warns(
        RuntimeWarning, match=r"cannot write the kernel cache .*file/cache .Not a directory.*SIGNPOST_CACHE_DIR"
    ):
        assert jit.compile_unit(UNIT, "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.compile_unit(UNIT, "sm_90a")
    assert compiles == ["fill", "fill"]
    with pytest.raises(KernelError, match=r"cannot write the kernel cache .*file/cache .Not a directory"):
        list(jit.precompile([UNIT], "sm_90a"))


def test_a_full_disk_leaves_nothing_behind(cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert jit.compile_unit(UNIT, "sm_90a")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_read_is_a_miss(cache, monkeypatch):
    (cache / jit._key(UNIT, "sm_90a")).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot write the kernel cache"):
        assert jit.compile_unit(UNIT, "sm_90a")
    monkeypatch.setenv("SIGNPOST_NO_COMPILE", "1")
    with pytest.raises(KernelError, match=r"is unreadable .Is a directory. in"):
        jit.compile_unit(UNIT, "sm_90a")


def test_compiling_can_be_forbidden(cache, monkeypatch, compiles):
    monkeypatch.setenv("SIGNPOST_NO_COMPILE", "1")
    command = r"python -m runtime compile --bundle B --arch sm_90a"
    with pytest.raises(
        KernelError, match=rf"unit 'fill' for sm_90a is missing in .*cache.*SIGNPOST_NO_COMPILE.*{command}"
    ):
        jit.compile_unit(UNIT, "sm_90a")
    monkeypatch.setenv("SIGNPOST_NO_COMPILE", "0")
    cubin = jit.compile_unit(UNIT, "sm_90a")
    monkeypatch.setenv("SIGNPOST_NO_COMPILE", "1")
    assert jit.compile_unit(UNIT, "sm_90a") == cubin
    assert compiles == ["fill"]


@pytest.mark.parametrize("name", ["SIGNPOST_NO_COMPILE", "SIGNPOST_LINEINFO"])
def test_a_switch_is_on_or_off(name, monkeypatch):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(KernelError, match=f"{name}=yes: 1 or 0"):
        jit.compile_unit(UNIT, "sm_90a")


def test_line_information_is_there_when_asked_for(monkeypatch):
    assert b".debug_line" not in jit.compile_unit(UNIT, "sm_90a")
    monkeypatch.setenv("SIGNPOST_LINEINFO", "1")
    assert b".debug_line" in jit.compile_unit(UNIT, "sm_90a")


def test_where_the_cache_is(monkeypatch):
    assert jit.cache_folder() == Path(os.environ["SIGNPOST_CACHE_DIR"])
    monkeypatch.delenv("SIGNPOST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert jit.cache_folder() == Path("/x/signpost")
    monkeypatch.setenv("HOME", "/h")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert jit.cache_folder() == Path("/h/.cache/signpost")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(KernelError, match="no home folder for the kernel cache: set SIGNPOST_CACHE_DIR"):
        jit.cache_folder()


# --------------------------------------------------------------------------------------------- devices and loading


@pytest.fixture
def pretend(monkeypatch):
    """A machine with two GPUs of a given compute capability, as far as torch tells."""

    def as_if(capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    return as_if


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_architecture_of_a_device(capability, arch, pretend):
    pretend(capability)
    assert [jit.arch_of(device) for device in (0, "cuda", "cuda:1", torch.device("cuda:0"))] == [arch] * 4


def test_a_device_too_old_or_too_new(pretend):
    pretend((7, 5))
    with pytest.raises(
        KernelError, match=r"GPU 1 has compute capability 7\.5; there are kernels for 8\.0, .*or run with"
    ):
        jit.arch_of("cuda")


def test_a_device_that_is_none(pretend):
    with pytest.raises(KernelError, match="device cpu: the kernels run on CUDA devices"):
        jit.load(UNIT, "cpu")
    pretend()
    with pytest.raises(KernelError, match="device cuda:2: this machine has cuda:0 to cuda:1"):
        jit.load(UNIT, "cuda:2")


@pytest.mark.parametrize(
    ("built", "why"), [(None, "built without CUDA"), ("13.0", "no NVIDIA GPU, or no working driver")]
)
def test_no_device(built, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(KernelError, match=rf'no CUDA device .*{why}.*or run with device="cpu"'):
        jit.load(UNIT, "cuda")


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222


class FakeDriver(SimpleNamespace):
    """Stands in for cuda.bindings.driver on a machine without one: contexts and functions are numbers."""

    def __init__(self, load=0, arguments=1):
        from cuda.bindings import driver as real

        names = "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
        super().__init__(
            CUresult=Result,
            CUstream=real.CUstream,
            CUlaunchConfig=real.CUlaunchConfig,
            CUlaunchAttribute=real.CUlaunchAttribute,
            CUlaunchAttributeID=real.CUlaunchAttributeID,
            launches=[],
            CUdevice_attribute=SimpleNamespace(**{names: 0}),
            CUfunction_attribute=SimpleNamespace(
                CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=0, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8
            ),
            current=11,
            history=[],
            cuGetErrorString=lambda code: (Result(0), b"some words"),
            cuDriverGetVersion=lambda: (Result(0), 12080),
            cuDeviceGet=lambda index: (Result(0), index),
            cuDevicePrimaryCtxRetain=lambda device: (Result(0), 70 + device),
            cuDeviceGetAttribute=lambda attribute, device: (Result(0), 232448),
            cuModuleLoadData=lambda cubin: (Result(load), 5),
            cuModuleGetFunction=lambda module, name: (Result(0), len(name)),
            cuFuncLoad=lambda function: (Result(0),),
            cuFuncGetAttribute=lambda attribute, function: (Result(0), 448),
            cuFuncSetAttribute=lambda function, attribute, value: (Result(0),),
            cuFuncGetParamInfo=lambda function, i: (Result(0), 0, 16) if i < arguments else (Result(1), 0, 0),
            cuCtxGetCurrent=lambda: (Result(0), self.current),
        )

    def cuCtxSetCurrent(self, context):
        self.current = context
        self.history.append(context)


@pytest.fixture
def fake(monkeypatch, pretend):
    """Installs a fake driver and returns it.

    Its `launches` tell of each: grid, block, shared bytes, stream, attributes, parameters, context.
    """

    def install(answers=(), **options):
        driver = FakeDriver(**options)
        codes = iter(answers)

        def launch(config, function, pointers, extra):
            assert extra == 0
            assert len(config.attrs) == config.numAttrs
            driver.launches.append(
                (
                    (config.gridDimX, config.gridDimY, config.gridDimZ),
                    (config.blockDimX, config.blockDimY, config.blockDimZ),
                    config.sharedMemBytes,
                    int(config.hStream),
                    [(int(a.id), a.value.programmaticStreamSerializationAllowed) for a in config.attrs],
                    ctypes.string_at(ctypes.c_void_p.from_address(pointers).value, 16),
                    driver.current,
                )
            )
            return (Result(next(codes, 0)),)

        pretend()
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        driver.cuLaunchKernelEx = launch
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
        monkeypatch.setattr(jit, "_modules", {})
        return driver

    return install


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_uint64), ("n", ctypes.c_int32))


def test_a_driver_older_than_nvrtc(fake):
    driver = fake(load=222)
    with pytest.raises(
        KernelError,
        match=r"unit 'fill' not loaded: cuModuleLoadData says CUDA_ERROR_UNSUPPORTED_PTX_VERSION, some words; "
        r'NVRTC is 13\.\d+, the driver for CUDA 12\.8: if older, update the driver or run with device="cpu"',
    ):
        jit.load(UNIT, "cuda")
    assert driver.current == 11


def test_load_without_driver_bindings(fake, monkeypatch):
    fake()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(KernelError, match="no cuda-python"):
        jit.load(UNIT, "cuda")


@pytest.mark.parametrize("arguments", [0, 2])
def test_a_kernel_takes_one_argument(arguments, fake):
    fake(arguments=arguments)
    with pytest.raises(KernelError, match="kernel 'fill' of unit 'fill': it must take one argument, a struct by value"):
        jit.load(UNIT, "cuda")


def test_a_unit_is_loaded_once_per_device(fake, compiles):
    fake()
    module = jit.load(UNIT, "cuda")
    assert jit.load(UNIT, 1) is module
    assert jit.load(UNIT, 0) is not module
    assert compiles == ["fill"]
    kernel = module.kernel("fill")
    assert (kernel.entry, kernel.params_size, kernel.max_shared) == ("fill", 16, 232000)
    with pytest.raises(KernelError, match="unit 'fill' has no entry 'drain': fill, clear"):
        module.kernel("drain")


def test_units_begun_are_compiled_once(fake, compiles):
    fake()
    other = Unit("other", SOURCE, UNIT.entries)
    jit.begin([UNIT, other], "cuda")
    jit.begin([UNIT], 1)
    assert jit.load(UNIT, 1).kernel("fill").entry == "fill"
    jit.begin([UNIT], 1)  # loaded by now
    jit.load(other, 1)
    assert sorted(compiles) == ["fill", "other"]
    assert not jit._begun


def test_errors_of_units_begun_are_told_by_load(fake):
    fake()
    broken = Unit("broken", "int y = nothing;", ())
    jit.begin([broken], "cuda")
    with pytest.raises(CompileError, match="unit 'broken' does not compile"):
        jit.load(broken, "cuda")
    with pytest.raises(CompileError, match="unit 'broken' does not compile"):
        jit.load(broken, "cuda")


def test_a_launch_passes_what_it_was_given(fake):
    driver = fake()
    kernel = jit.load(UNIT, 1).kernel("fill")
    params = Params(7, 9)
    driver.history.clear()
    kernel.launch((1, 2, 3), 128, 1000, params, 40)
    params.n = 10
    kernel.launch((1, 2, 3), 128, 1000, params, 40, overlap=True)
    kernel.launch((1, 2, 3), 128, 1000, bytearray(bytes(params)), 0)
    seven, rest = (7).to_bytes(8, "little"), b"\0" * 7
    shape = ((1, 2, 3), (128, 1, 1), 1000)
    assert driver.launches == [
        (*shape, 40, [], seven + b"\x09" + rest, 11),
        (*shape, 40, [(6, 1)], seven + b"\x0a" + rest, 11),
        (*shape, 0, [], seven + b"\x0a" + rest, 11),
    ]
    assert driver.history == []  # the fast path leaves contexts alone


def test_launch_shapes_are_remembered_within_bounds(fake):
    driver = fake()
    kernel = jit.load(UNIT, 1).kernel("fill")
    for _ in range(2):
        for blocks in range(1, 151):
            kernel.launch((blocks, 1, 1), 32, 0, Params(), 0)
    assert [launch[0][0] for launch in driver.launches] == [*range(1, 151)] * 2
    assert len(kernel._configs) <= jit._CONFIGS


def test_overlap_is_left_out_where_the_device_has_none(fake, pretend):
    driver = fake()
    pretend((8, 9))
    jit.load(UNIT, 1).kernel("fill").launch((1, 1, 1), 32, 0, Params(), 0, overlap=True)
    assert driver.launches[0][4] == []


@pytest.mark.parametrize("params", [ctypes.c_int(), bytearray(17)])
def test_a_struct_of_another_size_is_refused(params, fake):
    fake()
    size = len(params) if isinstance(params, bytearray) else 4
    with pytest.raises(
        KernelError, match=f"kernel 'fill' takes a struct of 16 bytes, not {size}: the two definitions differ"
    ):
        jit.load(UNIT, 1).kernel("fill").launch((1, 1, 1), 32, 0, params, 0)


def test_another_current_device_is_put_back(fake):
    driver = fake()
    kernel = jit.load(UNIT, 0).kernel("fill")
    kernel.launch((1, 1, 1), 32, 0, Params(), 0)
    assert [launch[-1] for launch in driver.launches] == [70]
    assert driver.current == 11


def test_a_thread_without_context_gets_one_for_the_launch(fake):
    driver = fake(answers=[201])
    kernel = jit.load(UNIT, 1).kernel("fill")
    kernel.launch((1, 1, 1), 32, 0, Params(), 0)
    assert [launch[-1] for launch in driver.launches] == [11, 71]
    assert driver.current == 11


def test_a_refused_launch_says_its_shape(fake):
    fake(answers=[1])
    with pytest.raises(
        KernelError,
        match=r"kernel 'fill' does not launch: CUDA_ERROR_INVALID_VALUE, some words "
        r"\(grid \(1, 1, 1\), 32 threads, 999999 of 232000 shared bytes\)",
    ):
        jit.load(UNIT, 1).kernel("fill").launch((1, 1, 1), 32, 999999, Params(), 0)


# --------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A bundle on disk, and a stand-in for what chooses its units."""
    monkeypatch.setattr("runtime.units.units", lambda b: [UNIT])
    monkeypatch.setattr("runtime.pack_units.units", lambda b, arch: [Unit(f"layers{b.model.l}", SOURCE, ("clear",))])
    monkeypatch.setattr("runtime.unpack.units", lambda b: [Unit("unpack", SOURCE, ("clear",))])
    return str(random_bundle([kivi(2, 32)] * 2, 4, 2, 64).save(tmp_path / "bundle"))


def test_compile_command_fills_the_cache(bundle, cache, capsys, monkeypatch):
    assert main(["compile", "--bundle", bundle, "--arch", "sm_90a", "sm_80"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"{arch} {unit}" for arch in ("sm_90a", "sm_80") for unit in ("fill", "layers2", "unpack", "join", "join")
    ]
    assert all("registers, 0 bytes spilled" in line for line in lines[:-1])
    assert lines[-1].startswith("10 units in ")
    assert lines[-1].endswith(f" s, in {cache}")
    assert err == ""
    monkeypatch.setenv("SIGNPOST_NO_COMPILE", "1")
    assert jit.compile_unit(UNIT, "sm_80")


def test_compile_command_reports_errors_in_a_line(bundle, cache, capsys, tmp_path):
    assert main(["compile", "--bundle", str(tmp_path / "nothing"), "--arch", "sm_90a"]) == 2
    assert "nothing" in capsys.readouterr().err
    cache.touch()
    assert main(["compile", "--bundle", bundle, "--arch", "sm_90a"]) == 2
    assert "error: cannot write the kernel cache" in capsys.readouterr().err


def test_compile_command_knows_the_architectures(bundle, capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--bundle", bundle, "--arch", "sm_70"])
    assert "invalid choice: 'sm_70' (choose from" in capsys.readouterr().err


def test_kernel_class_is_what_a_module_gives(fake):
    fake()
    assert isinstance(jit.load(UNIT, 1).kernel("clear"), Kernel)
