"""Every format's pack kernel compiles without a GPU, and how its pages are cut."""

import re

import pytest
import torch

from artifacts import Dense, Format, LowRank, PageGeometry, Sketch, Sparse
from runtime import jit, pack_factors, pack_units
from runtime.jit import ARCHS, KernelError
from runtime.keep import keep_unit
from tests.cuda.compiling import check
from tests.formats import kivi, kvquant, random_bundle
from tests.packing import sides

SIDES = sides()
INPUTS = list(pack_units.INPUTS)
STACK = 40  # bytes: what cosf and sinf use for angles beyond 10^5


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path_factory.mktemp("units")))
        yield


@pytest.mark.parametrize("index", range(len(SIDES)), ids=[side[0] for side in SIDES])
def test_all_formats_compile_for_hopper(index):
    _, geometry, rope = SIDES[index]
    assert pack_units.plan(geometry, rope, INPUTS[index % 3], "sm_90a").shared <= 227 * 1024
    check(pack_units.pack_unit("pack", geometry, rope, INPUTS[index % 3], "sm_90a"), "sm_90a")
    for unit in pack_units.factor_units("pack", geometry, "sm_90a"):
        check(unit, "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("d", pack_units.HEAD_DIMS)
def test_factors_compile_for_all_ranks(d, arch):
    """On Hopper, others for the largest; for several layers at once, one with a sketch behind: nothing spills."""
    for rank in (1, 4, 8) if arch == "sm_90a" else (8,):
        fmt = Format(64, Dense(2, "token"), lowrank=LowRank(rank, 1), sketch=Sketch(64) if rank != 1 else None)
        geometry = PageGeometry.of(fmt, 8, d, "key")
        found = jit.report(pack_factors.factor_unit("factors", geometry, rank), arch)
        for entry, launch in pack_factors.launches(geometry).items():
            assert found[entry].spill_bytes == found[entry].stack == 0, entry
            assert found[entry].registers * launch.threads * launch.blocks <= 65536, entry
            assert launch.shared <= 99 * 1024


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90a"])
def test_other_architectures(arch):
    """Every 17th format on each, others on every one: so all types of numbers, keys and values."""
    for index in range(3 * ARCHS.index(arch), len(SIDES), 17):
        _, geometry, rope = SIDES[index]
        check(pack_units.pack_unit("pack", geometry, rope, INPUTS[index % 3], arch), arch)


def test_units_of_a_bundle():
    """Layers that are alike share a unit, for models of both dtypes of two bytes."""
    bundle = random_bundle([kivi(2, 32)] * 3 + [kivi(4, 32)], 4, 2, 64)
    kept, *found = pack_units.units(bundle, "sm_90a")
    assert kept == keep_unit()
    layers = [re.search(r"layer\[(\d+)\]", unit.source)[1] for unit in found]
    assert layers == ["3", "1"] * 4 + ["1"] * 4  # keys and values
    assert ["BF16" in unit.source for unit in found] == [False, False, True, True] * 2 + [False, True] * 2
    assert len(set(found)) == 12


@pytest.mark.parametrize("arch", ARCHS)
def test_what_keeps_tokens_of_prompts_compiles(arch):
    found = jit.report(keep_unit(), arch)["keep"]
    assert found.spill_bytes == found.stack == 0


LLAMA = [
    (f"{name}.{side}", PageGeometry.of(fmt, 32, 128, side))
    for name, formats in (("kvquant4", kvquant(4)), ("kvquant2", kvquant(2)), ("kivi2", kivi(2, 128)))
    for side, fmt in (("key", formats.key), ("value", formats.value))
]


@pytest.mark.parametrize("name, geometry", LLAMA, ids=[side[0] for side in LLAMA])
def test_recipes_at_full_size(name, geometry):
    """Llama-2-7B's layer: nothing spills, and every number is read once."""
    rope = SIDES[-1][2]
    made = pack_units.plan(geometry, rope, torch.float16, "sm_90a")
    found = jit.report(pack_units.pack_unit("pack", geometry, rope, torch.float16, "sm_90a"), "sm_90a")["pack"]
    assert found.registers * made.threads <= 65536
    assert found.spill_bytes == 0
    assert found.stack <= STACK
    assert made.store == "SHARED"
    assert made.ctas == geometry.shape.t // made.tokens * -(-32 // made.heads)


def test_plans_are_the_same_without_a_gpu():
    """Slices of keys with outliers: at most eight, a cluster; of values with whole tokens' scales: all heads."""
    rope = SIDES[-1][2]
    key, value = LLAMA[0][1], LLAMA[1][1]
    made = pack_units.plan(key, rope, torch.float16, "sm_90a")
    assert made.cluster
    assert 1 < made.ctas <= pack_units.CLUSTER_LIMIT
    made = pack_units.plan(value, None, torch.float16, "sm_90a")
    assert (made.heads, made.cluster, made.select) == (32, True, "TOKEN")
    made = pack_units.plan(key, rope, torch.float16, "sm_80")
    assert (made.ctas, made.cluster) == (1, False)
    assert pack_units.plan(LLAMA[-1][1], None, torch.float16, "sm_86").ctas > 1


def test_what_has_no_kernel():
    rope = SIDES[-1][2]
    with pytest.raises(KernelError, match="head dimension 96"):
        pack_units.plan(PageGeometry.of(kivi(2).value, 2, 96, "value"), None, torch.float16, "sm_90a")
    with pytest.raises(KernelError, match=r"torch\.int8"):
        pack_units.plan(LLAMA[0][1], rope, torch.int8, "sm_90a")
    with pytest.raises(KernelError, match="rotary embedding"):
        pack_units.plan(LLAMA[0][1], None, torch.float16, "sm_90a")
    fmt = Format(512, Dense(2, "token"), Sparse(0.01, "token", "online"))
    with pytest.raises(KernelError, match="take pages of fewer tokens"):
        pack_units.plan(PageGeometry.of(fmt, 256, 256, "value"), None, torch.float16, "sm_86")


def test_the_kernels_count_shared_memory_alike():
    """A plan that disagrees does not compile."""
    _, geometry, rope = SIDES[-1]
    unit = pack_units.pack_unit("pack", geometry, rope, torch.float16, "sm_90a")
    size = pack_units.plan(geometry, rope, torch.float16, "sm_90a").shared
    wrong = jit.Unit(unit.name, unit.source.replace(f"BYTES == {size}", f"BYTES == {size + 16}"), unit.entries)
    with pytest.raises(jit.CompileError, match="counts shared memory alike"):
        jit.compile_unit(wrong, "sm_90a")
