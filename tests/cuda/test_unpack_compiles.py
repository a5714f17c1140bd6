"""The unpack kernel of every format compiles without a GPU."""

import pytest
import torch

from artifacts import PageGeometry
from runtime import jit
from runtime.jit import ARCHS
from runtime.unpack import launched, shared_bytes, units, unpack_unit
from tests.cuda.compiling import check
from tests.formats import CASES, kivi, kvquant, random_bundle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
STACK = 40  # bytes: what cosf and sinf use for angles beyond 10^5


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path_factory.mktemp("units")))
        yield


def unit_of(case, dtype):
    key, value = (PageGeometry.of(fmt, case.h_kv, case.d, side) for side, fmt in case.sides())
    threads, _ = launched(key, value)
    assert max(shared_bytes(side, case.rope, threads) for side in (key, value)) <= 99 * 1024
    return unpack_unit(key, value, case.rope, dtype)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_all_formats_compile_for_hopper(index):
    check(unit_of(CASES[index], DTYPES[index % 3]), "sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90a"])
def test_other_architectures(arch):
    """Every 17th format on each, others on every one."""
    for index in range(3 * ARCHS.index(arch), len(CASES), 17):
        check(unit_of(CASES[index], DTYPES[index % 3]), arch)


def test_units_of_a_bundle():
    """Layers that are alike share a unit, for models of both dtypes of two bytes; nothing spills."""
    found = units(random_bundle([kvquant(3)] * 3 + [kivi(4)], 32, 8, 128))
    assert ["BF16" in unit.source for unit in found] == [False, True] * 2
    assert len(set(found)) == 4
    for unit in found[::2]:
        resources = jit.report(unit, "sm_90a")["unpack"]
        assert resources.spill_bytes == 0
        assert resources.stack <= STACK
