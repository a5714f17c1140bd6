"""The kernel that projects queries compiles for every format that has one, without a GPU."""

import re

import pytest
import torch

from artifacts import Dense, Format, LayerFormat, PageGeometry, Rotate
from runtime import jit
from runtime.attention import PagedAttention
from runtime.jit import ARCHS
from runtime.project import _Project, columns, project_unit, units
from runtime.rope import Rotation
from runtime.sources import kernel_folder
from tests.cuda.compiling import check
from tests.formats import CASES, kivi, random_bundle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KEYS = dict.fromkeys(PageGeometry.of(case.key, case.h_kv, case.d, "key") for case in CASES)
PROJECTED = [key for key in KEYS if columns(key)]
ROTATED = Format(64, Dense(3, "head", codebook="lloyd", normalize="norm"), rotate=Rotate("haar"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path_factory.mktemp("units")))
        yield


@pytest.mark.parametrize("index", range(len(PROJECTED)))
def test_all_formats_compile_for_hopper(index):
    check(project_unit(PROJECTED[index], DTYPES[index % 3]), "sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90a"])
def test_other_architectures(arch):
    for index in range(ARCHS.index(arch), len(PROJECTED), 20):
        check(project_unit(PROJECTED[index], DTYPES[index % 3]), arch)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_nothing_spills_for_models_in_halves(d):
    resources = jit.report(project_unit(PageGeometry.of(ROTATED, 8, d, "key"), torch.float16), "sm_90a")["project"]
    assert resources.spill_bytes == resources.stack == 0


def test_parameters_are_laid_out_as_the_kernel_sees_them():
    """The same fields in the same order; the unit compares sizes."""
    body = re.search(r"struct ProjectParams \{(.*?)\n\};", (kernel_folder() / "project.cuh").read_text(), re.S).group(1)
    code = " ".join(line.split("//")[0].strip() for line in body.splitlines())
    declared = [re.findall(r"\w+", part)[-1] for line in code.split(";") if line.strip() for part in line.split(",")]
    assert declared == [field for field, *_ in _Project._fields_]


def test_what_is_compiled_ahead_is_what_is_loaded(monkeypatch):
    """Each unit once; none where keys are neither rotated nor sketched."""
    bundle = random_bundle([LayerFormat(ROTATED, ROTATED), LayerFormat(ROTATED, ROTATED), kivi(2)], 8, 8, 128)
    found = units(bundle)
    assert len(found) == len(set(found)) == 2  # two model types
    loaded = []
    monkeypatch.setattr(jit, "load", lambda unit, device: loaded.append(unit))
    monkeypatch.setattr(PagedAttention, "_device", staticmethod(lambda device: torch.device("cpu")))
    monkeypatch.setattr(PagedAttention, "_processors", lambda self: 4)
    monkeypatch.setattr("runtime.project.Projection", lambda *args: args)
    rotation = Rotation(bundle.model.rope, torch.as_tensor(bundle.tensors["rope.inv_freq"]))
    for layer, pair in enumerate(bundle.geometry.pairs):
        given = (bundle.side_tensors(layer, side.shape.side) for side in pair)
        tables = [{name: torch.as_tensor(x) for name, x in of_side.items()} for of_side in given]
        kernels = PagedAttention(*pair, *tables, rotation, 8, torch.float16, "cpu")
        made = kernels.projection(torch.empty(0), 1.0, (1, 8, 1, 1))
        assert (made is None) == (layer == 2)
    assert set(loaded) == {found[0]}
