"""Attention kernels on the CPU (tests/cuda/attend_emulator.h), in the place of `PagedAttention`, and what tests compare
and run of them. Needs g++."""

import ctypes
import functools
from dataclasses import replace

import torch

from artifacts import Banded, Dense, Format, LayerFormat, Rope, Rotate, Sparse, Window
from runtime.attention import PagedAttention, _Attend, _Merge, _Write
from runtime.jit import Unit
from runtime.units import ALL_PLAIN, INTEGERS, WRITE_THREADS, Scoring, Sharing
from tests.cuda import emulated
from tests.cuda.emulated import WATCHED, compiled
from tests.formats import Case
from tests.gpu import paged

ALLOWED, FLOOR = 2.0, 4e-4  # as tests/gpu/test_attention.py
# Where keys are halves, a number is rounded when its outlier is added and twice when RoPE turns it, by a factor that is
# rounded, and so is the query: five times, which for fp16 attention are one.
ROUNDED = 5**0.5
BLOCKS = 3  # of a launch: stretches that begin and end within heads


@functools.cache
def build(source: str, races: bool = False, arch: int = 900) -> ctypes.CDLL:
    """The unit as a library of this machine: attend(grid, tiles, params), merge(pairs, tiles, params). races: it finds
    those in shared memory, and `races_found()` says how many. arch: whose shared memory there is."""
    for before, after in (
        (
            "extern __shared__ __align__(128) unsigned char shared[];",
            "unsigned char* shared = signpost::shared_memory();",
        ),
        (
            "__shared__ __align__(16) float shared[",
            "float* shared = reinterpret_cast<float*>(signpost::shared_memory()); float unused[",
        ),
    ):
        assert before in source
        source = source.replace(before, after)
    source += (
        'extern "C" int attend_shared_bytes() { return Plan::SHARED; }\n'
        'extern "C" void run_attend(int grid, int tiles, int, const signpost::AttendParams* params) {\n'
        "    emulator::launch([&] { attend(*params); }, grid, tiles, 1, Plan::THREADS, 1, Plan::SHARED, 0xFF);\n}\n"
        'extern "C" void run_merge(int pairs, int rows, int slices, const signpost::MergeParams* params) {\n'
        "    constexpr int shared = sizeof(float) * Merging::SHARED;\n"
        "    emulator::launch([&] { merge(*params); }, pairs, rows, slices, Merging::THREADS, 1, shared, 0xFF);\n}\n"
        'extern "C" void run_write_tokens(int sequences, int tokens, int, const signpost::WriteParams* params) {\n'
        "    emulator::launch([&] { write_tokens(*params); }, sequences, tokens, 2, "
        f"{WRITE_THREADS}, 1, 16, 0xFF);\n}}\n"
    )
    # To compile takes longer than to run, but where accesses are watched.
    flags = (*WATCHED, "-g1") if races else ("-O0",)
    flags += ("-fno-strict-aliasing", f"-D__CUDA_ARCH__={arch}")
    return ctypes.CDLL(str(compiled(source, "attend_emulator.h", flags)))


class Kernel:
    """`runtime.jit.Kernel` on the CPU."""

    def __init__(self, entry, params: type[ctypes.Structure]):
        self.entry, self.params = entry, params

    def launch(self, grid, block, shared, params, stream, overlap=False) -> None:
        assert isinstance(params, self.params)
        self.entry(*grid, ctypes.byref(params))


class Module:
    """`runtime.jit.Module` on the CPU."""

    def __init__(self, library: ctypes.CDLL):
        structs = {"attend": _Attend, "merge": _Merge, "write_tokens": _Write}
        self.kernels = {name: Kernel(getattr(library, f"run_{name}"), struct) for name, struct in structs.items()}
        self.integers = {"attend_threads": 0, "attend_shared": library.attend_shared_bytes()}
        for name in set(INTEGERS) - set(self.integers):
            self.integers[name] = ctypes.c_int.in_dll(library, name).value

    def kernel(self, name: str) -> Kernel:
        return self.kernels[name]


class Emulated(PagedAttention):
    """`PagedAttention` without a GPU."""

    @staticmethod
    def _device(device) -> torch.device:
        return torch.device("cpu")

    how = Sharing()
    arch = 900

    def _processors(self) -> int:
        return BLOCKS

    def sharing(self, rows: int, b: int, tokens: int) -> Sharing:
        return self.how

    @staticmethod
    def _stream(device: torch.device) -> int:
        return 0

    def _load(self, unit: Unit) -> Module | emulated.Module:
        if unit.name != "attend":
            return emulated.Module(unit)
        return Module(build(unit.source, arch=self.arch))


def check(case: Case, lengths: list[int], m: int = 1, scoring: Scoring = ALL_PLAIN) -> None:
    check_scene(paged.Scene.of(case, lengths, m, scoring=scoring))


def check_scene(scene: paged.Scene) -> None:
    q, lengths = scene.query(), scene.lengths.tolist()
    floor = 2**-8 if q.dtype == torch.bfloat16 else FLOOR  # whose output alone has 2**-9
    out = scene.run(q)
    for i in range(len(lengths)):
        reference = scene.oracle(q, i)
        ours, theirs = paged.relative(out[i], reference), paged.relative(scene.half(q, i), reference)
        assert ours <= max(ALLOWED * theirs, floor), (lengths[i], ours, theirs)


def times_half(given: Case, lengths: list[int]) -> float:
    """Our error over fp16 attention's, both as root mean squares over the sequences."""
    scene = paged.Scene.of(given, lengths)
    q = scene.query()
    out = scene.run(q)
    squares = torch.zeros(2, dtype=torch.float64)
    for i in range(len(lengths)):
        reference = scene.oracle(q, i)
        squares += torch.tensor([paged.relative(x, reference) ** 2 for x in (out[i], scene.half(q, i))])
    return (squares[0] / squares[1]).sqrt().item()


def case(formats: LayerFormat, h_q: int = 2, h_kv: int = 2, d: int = 128, rope: Rope | None = None) -> Case:
    return Case("given", formats.key, formats.value, h_q, h_kv, d, rope or Rope(d, "half", 1.0, "default"))


def with_outliers(share: float, bits: int = 2, codebook: str = "nuq") -> LayerFormat:
    """Formats that go by bytes."""
    window = Window(sinks=1)
    key = Dense(bits, "channel", codebook=codebook, scales="bundle")
    value = Dense(bits, "token", codebook=codebook)
    return LayerFormat(
        Format(64, key, Sparse(share, "channel", "bundle"), window, "pre_rope"),
        Format(64, value, Sparse(share, "token", "online"), window),
    )


BANDED = LayerFormat(
    Format(64, banded=Banded(2.5), window=Window(sinks=1), domain="pre_rope"),
    Format(64, banded=Banded(1.5), window=Window(sinks=1), rotate=Rotate("learned")),
)


def in_pages_of(t: int, formats: LayerFormat) -> LayerFormat:
    return LayerFormat(replace(formats.key, t=t), replace(formats.value, t=t))
