"""Races of the attention kernels in shared memory, found on the CPU (tests/cuda/races.h)."""

import ctypes
import shutil

import pytest

from artifacts import Dense, Format, LayerFormat, LowRank, Rotate, Sketch
from runtime.attention import _Attend
from runtime.units import MOST_ROWS, TYPES, Scoring, Sharing, attend_unit
from tests.cuda.attention_emulated import BANDED, Emulated, Module, build, case, in_pages_of, with_outliers
from tests.cuda.test_attend_emulated import WEIGHED
from tests.formats import Case, kivi, kvquant, turned, without_outliers
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Watched(Emulated):
    """With shared memory watched."""

    library: ctypes.CDLL

    def module(self, rows: int, how: Sharing) -> Module:
        unit = attend_unit(
            self.key, self.value, self.rotation.rope, TYPES[self.dtype], min(rows, MOST_ROWS), self.by_bytes, how,
            self.scoring,
        )  # fmt: skip
        Watched.library = build(unit.source, races=True)
        return Module(Watched.library)


def races(given: Case, lengths: list[int], monkeypatch) -> int:
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Watched)
    return races_of(paged.Scene.of(given, lengths, 1))


def races_of(scene: paged.Scene) -> int:
    scene.run(scene.query())
    return Watched.library.races_found()


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("formats", [kvquant(2), kivi(2)], ids=["kvquant", "kivi"])
def test_no_races(formats, g, monkeypatch):
    assert races(case(formats, 2 * g), [300, 65], monkeypatch) == 0


@pytest.mark.parametrize("d", [128, 256])
def test_no_races_of_layers_in_full_precision(d, monkeypatch):
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Watched)
    assert races_of(paged.Scene.unpaged((4, 2, d), [300, 65], scoring=Scoring(150, 5.0))) == 0


def test_no_races_of_factors_sketches_and_rotations(monkeypatch):
    value = Format(64, Dense(2, "token", 32), lowrank=LowRank(4, 2), rotate=Rotate("haar"))
    key = Format(64, sketch=Sketch(64, "orthogonal", 8, 32))
    for h_q in (2, 8):
        assert races(case(LayerFormat(key, value), h_q), [300, 65], monkeypatch) == 0


@pytest.mark.parametrize("d", [128, 256])
def test_no_races_of_rotated_keys(d, monkeypatch):
    assert races(case(turned(3), 4, d=d), [300, 65], monkeypatch) == 0


@pytest.mark.parametrize("h_q", [2, 16])
def test_no_races_where_blocks_multiply_by_rotations(h_q, monkeypatch):
    monkeypatch.setattr(Watched, "how", Sharing(1, multiplies=True))
    assert races(case(turned(3), h_q), [700, 65, 330], monkeypatch) == 0


@pytest.mark.parametrize("formats", [with_outliers(0.02), BANDED], ids=["outliers", "banded"])
def test_no_races_of_tiles_that_share_columns(formats, monkeypatch):
    assert races(case(formats, 16), [700, 65], monkeypatch) == 0


@pytest.mark.parametrize("how", [Sharing(2), Sharing(1, beside=True)], ids=str)
@pytest.mark.parametrize(
    ("formats", "h_q"),
    [(with_outliers(0.02), 8), (BANDED, 8), (BANDED, 16), (kivi(2), 2)],
    ids=["outliers", "banded", "banded-16", "kivi"],
)
def test_no_races_of_two_blocks_and_in_short_steps(formats, h_q, how, monkeypatch):
    monkeypatch.setattr(Watched, "how", how)
    assert races(case(formats, h_q), [330, 65], monkeypatch) == 0


def test_no_races_of_two_warps_a_tile(monkeypatch):
    factors = Format(64, Dense(2, "channel", 32), lowrank=LowRank(4, 2))
    assert races(case(LayerFormat(factors, factors), 4, d=256), [300, 65], monkeypatch) == 0


def test_no_races_of_many_outliers(monkeypatch):
    """More in a tile than a warp reads ahead."""
    assert races(case(with_outliers(0.15), 8), [300, 65], monkeypatch) == 0


@pytest.mark.parametrize("alone", [False, True])
def test_no_races_of_units_of_several_pages(alone, monkeypatch):
    monkeypatch.setattr(Watched, "how", Sharing(1, alone))
    assert races(case(without_outliers(kvquant(2, 16)), 2), [300, 65, 1], monkeypatch) == 0
    assert races(case(in_pages_of(32, BANDED), 4), [300, 65, 1], monkeypatch) == 0


def test_no_races_where_heads_are_weighed(monkeypatch):
    assert races(case(with_outliers(0.02), 2, d=64), WEIGHED, monkeypatch) == 0


def test_no_races_of_more_sequences_than_lanes(monkeypatch):
    """Blocks go on from one chunk of them to the next."""
    assert races(case(kivi(2), 2), [1, 66, 5, 130, 64, 3, 200] * 10, monkeypatch) == 0


@pytest.mark.parametrize(
    ("formats", "g"),
    [(with_outliers(0.02), 1), (kvquant(2), 1), (BANDED, 1), (kvquant(2), 4), (kivi(2), 4)],
    ids=["outliers", "kvquant", "banded", "kvquant-4", "kivi-4"],
)
def test_no_races_of_warps_alone(formats, g, monkeypatch):
    monkeypatch.setattr(Watched, "how", Sharing(1, alone=True))
    assert races(case(formats, 2 * g), [200, 65, 1, 150], monkeypatch) == 0


@pytest.mark.parametrize("formats", [with_outliers(0.02), kvquant(2), BANDED], ids=["outliers", "kvquant", "banded"])
def test_no_races_of_warps_alone_that_have_all_of_a_sequence(formats, monkeypatch):
    """So many that a warp has pages and exact tokens of the same sequence, and then of the next one."""
    monkeypatch.setattr(Watched, "how", Sharing(1, alone=True))
    assert races(case(formats, 2, d=64), [200, 65, 1, 150] * 10, monkeypatch) == 0


KERNEL = """
struct Shape {{ static constexpr int D = 128; }};
struct Plan {{ static constexpr int THREADS = 64, SHARED = 1024; }};
struct Merging {{ static constexpr int THREADS = 128, SHARED = 4; }};
inline void attend(const signpost::AttendParams& params) {{
    extern __shared__ __align__(128) unsigned char shared[];
    int* numbers = reinterpret_cast<int*>(shared);
    numbers[threadIdx.x] = 1;
    {meeting}
    {then}
}}
inline void merge(const signpost::MergeParams&) {{ __shared__ __align__(16) float shared[2]; }}
inline void write_tokens(const signpost::WriteParams&) {{}}
"""


NEXT_WARP, NEXT_LANE = (
    "const volatile int x = numbers[(threadIdx.x + 32) % 64];",
    "const volatile int x = numbers[threadIdx.x ^ 1];",
)
OVERWRITE = "const volatile int x = numbers[(threadIdx.x + 32) % 64]; {} numbers[threadIdx.x] = 2;"
MADE = "if (threadIdx.x == 0) signpost::make_meeting(512, 2); __syncthreads(); numbers[threadIdx.x] = 3;"
ARRIVE, AWAIT = "signpost::arrive(512);", "signpost::await_arrivals(512, 0);"
COPY = "signpost::copy_async<4>(4 * threadIdx.x, &params.b); signpost::copy_commit(); {} signpost::copy_wait<0>(); {}"


@pytest.mark.parametrize(
    ("meeting", "then", "found"),
    [
        ("", NEXT_WARP, True),
        ("", NEXT_LANE, True),
        ("__syncwarp();", NEXT_WARP, True),
        ("__syncwarp();", NEXT_LANE, False),
        ("__syncthreads();", NEXT_WARP, False),
        ("signpost::group_barrier(1, 64);", NEXT_WARP, False),
        ("signpost::group_barrier(1 + threadIdx.x / 32, 32);", NEXT_WARP, True),
        ("__syncthreads();", OVERWRITE.format(""), True),
        ("__syncthreads();", OVERWRITE.format("__syncthreads();"), False),
        ("__syncthreads();", COPY.format("", "__syncthreads(); " + NEXT_WARP), False),
        ("__syncthreads();", COPY.format("", NEXT_WARP), True),
        ("__syncthreads();", COPY.format("__syncthreads(); " + NEXT_WARP, ""), True),
        (MADE + ARRIVE, AWAIT + NEXT_WARP, False),
        (MADE + ARRIVE, NEXT_WARP, True),
        (MADE, AWAIT.replace("0)", "1)") + NEXT_WARP, True),  # which nobody waits for
        (MADE + ARRIVE, "numbers[threadIdx.x] = 2;" + AWAIT + NEXT_WARP, True),
        ("", "numbers[threadIdx.x] = 2;", False),
    ],
)
def test_races_are_found(meeting, then, found):
    source = '#include "attend.cuh"\n#include "merge.cuh"\n#include "write.cuh"\n' + KERNEL.format(
        meeting=meeting, then=then
    )
    library = build(source, races=True)
    library.run_attend(1, 1, 1, ctypes.byref(_Attend()))
    assert (library.races_found() > 0) == found
