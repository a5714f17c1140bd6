"""Races of the attention kernels in shared memory, found on the CPU (tests/cuda/races.h)."""

import ctypes
import shutil

import pytest

from artifacts import Dense, Format, LayerFormat, LowRank, Rotate, Sketch
from runtime.attention import _NAMES, _Attend
from runtime.units import MOST_ROWS, attend_unit
from tests.cuda.test_attend_emulated import Emulated, Module, build, case
from tests.formats import Case, kivi, kvquant
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Watched(Emulated):
    """With shared memory watched."""

    library: ctypes.CDLL

    def module(self, rows: int) -> Module:
        unit = attend_unit(
            self.key, self.value, self.rotation.rope, _NAMES[self.dtype], min(rows, MOST_ROWS), self.by_bytes
        )
        Watched.library = build(unit.source, races=True)
        return Module(Watched.library)


def races(given: Case, lengths: list[int], monkeypatch) -> int:
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Watched)
    scene = paged.Scene.of(given, lengths, 1)
    scene.run(scene.query())
    return Watched.library.races_found()


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("formats", [kvquant(2), kivi(2)], ids=["kvquant", "kivi"])
def test_no_races(formats, g, monkeypatch):
    assert races(case(formats, 2 * g), [300, 65], monkeypatch) == 0


def test_no_races_of_factors_sketches_and_rotations(monkeypatch):
    value = Format(64, Dense(2, "token", 32), lowrank=LowRank(4, 2), rotate=Rotate("haar"))
    formats = LayerFormat(Format(64, sketch=Sketch(64, "orthogonal", 8, 32)), value)
    assert races(case(formats, 4), [300, 65], monkeypatch) == 0


KERNEL = """
struct Shape {{ static constexpr int D = 128; }};
struct Plan {{ static constexpr int THREADS = 64, SHARED = 1024; }};
inline void attend(const signpost::AttendParams&) {{
    extern __shared__ __align__(128) unsigned char shared[];
    int* numbers = reinterpret_cast<int*>(shared);
    numbers[threadIdx.x] = 1;
    {meeting}
    const volatile int other = numbers[{other}];
}}
inline void merge(const signpost::MergeParams&) {{ __shared__ float shared[2]; }}
"""


@pytest.mark.parametrize(
    ("meeting", "other", "found"),
    [
        ("", "(threadIdx.x + 32) % 64", True),  # of the other warp
        ("", "threadIdx.x ^ 1", True),  # of another lane
        ("__syncwarp();", "(threadIdx.x + 32) % 64", True),
        ("__syncwarp();", "threadIdx.x ^ 1", False),
        ("__syncthreads();", "(threadIdx.x + 32) % 64", False),
        ("", "threadIdx.x", False),
    ],
)
def test_races_are_found(meeting, other, found):
    source = '#include "attend.cuh"\n#include "merge.cuh"\n' + KERNEL.format(meeting=meeting, other=other)
    library = build(source, races=True)
    library.run_attend(1, 1, ctypes.byref(_Attend()))
    assert (library.races_found() > 0) == found
