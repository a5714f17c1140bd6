"""Attention with projected queries, of sketched and rotated keys, and with factors, on the CPU against float64."""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import Center, Dense, Format, LayerFormat, LowRank, Rotate, Sketch, Sparse, Window
from runtime.units import ONE_BLOCK, Sharing, multiplies
from tests.cuda.attention_emulated import BANDED, Emulated, case, check, check_scene
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Emulated)


GROUPS_OF_TOKENS = Dense(2, "token", 32)
PLAIN_VALUES = Format(64, GROUPS_OF_TOKENS)
BROUGHT_BACK = replace(BANDED.value, window=Window())
SKETCHED = LayerFormat(Format(64, sketch=Sketch(256, "orthogonal", 8, 64)), Format(64, GROUPS_OF_TOKENS))
TURNED = Format(64, Dense(3, "head", codebook="lloyd", normalize="norm"), rotate=Rotate("haar"))


def test_factors_sketches_and_rotation():
    group = Dense(2, "channel", 32), GROUPS_OF_TOKENS
    factors = LayerFormat(*(Format(64, dense, lowrank=LowRank(4, 2)) for dense in group))
    for formats in (factors, SKETCHED, LayerFormat(TURNED, TURNED)):
        check(case(formats), [1, 300])


@pytest.mark.parametrize("how", [ONE_BLOCK, Sharing(2), Sharing(1, alone=True)], ids=str)
@pytest.mark.parametrize("formats", [SKETCHED, LayerFormat(TURNED, TURNED)], ids=["sketched", "turned"])
def test_projected_queries_however_work_is_dealt_out(formats, how, monkeypatch):
    """Of eight query rows and two: blocks that share a multiprocessor have six warps, or four."""
    monkeypatch.setattr(Emulated, "how", how)
    check(case(formats, 16), [1, 66, 330, 130])
    check(case(formats, 4, d=64), [3, 200, 64], 2)


HADAMARD = Format(64, Dense(2, "token"), Sparse(0.02, "token", "online"), rotate=Rotate("hadamard"), center=Center())
FACTORS = replace(PLAIN_VALUES, rotate=Rotate("haar"), lowrank=LowRank(4, 2))
ROTATED = {
    "turned": LayerFormat(TURNED, TURNED), "keys": LayerFormat(TURNED, PLAIN_VALUES),
    "values": LayerFormat(PLAIN_VALUES, TURNED), "outliers": LayerFormat(TURNED, HADAMARD),
    "factors": LayerFormat(TURNED, FACTORS),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", ROTATED.values(), ids=ROTATED)
def test_blocks_that_multiply_by_rotations_themselves(formats, dtype, monkeypatch):
    """Queries and results of eight rows and fewer, of blocks that go on to another head or have no page of it."""
    assert multiplies(formats)
    monkeypatch.setattr(Emulated, "how", Sharing(1, multiplies=True))
    if formats.key.rotate:
        monkeypatch.setattr(Emulated, "projection", None)  # no kernel does
    for h_q, d, m, lengths in ((16, 128, 1, [1, 66, 330, 130]), (4, 64, 2, [3, 200, 64]), (2, 128, 1, [330, 1200, 7])):
        check_scene(paged.Scene.of(case(formats, h_q, d=d), lengths, m, dtype))


@pytest.mark.parametrize("rotation", [Rotate("learned"), None], ids=["learned", "sketched"])
def test_other_matrices_have_kernels_of_their_own(rotation, monkeypatch):
    """Also with more rows or channels than blocks multiply by themselves."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, multiplies=True))
    formats = LayerFormat(replace(TURNED, rotate=rotation), BROUGHT_BACK) if rotation else SKETCHED
    assert not multiplies(formats)
    check(case(formats), [1, 300])
    check(case(LayerFormat(TURNED, TURNED), 24), [1, 300])
    check(case(LayerFormat(TURNED, TURNED), 2, d=256), [1, 300])


@pytest.mark.parametrize(("m", "outlier_m"), [(32, 0), (64, 32), (96, 160), (224, 96), (512, 224)])
@pytest.mark.parametrize(("d", "g"), [(64, 1), (128, 4), (128, 12), (256, 5)])
def test_sizes_of_sketches(m, outlier_m, d, g):
    """Of four words a lane has one for itself, two that are left are two lanes', one is all four's; with 256 channels
    two warps share them, and one may have a word less."""
    sketch = Sketch(m, "orthogonal", 8 if outlier_m else 0, outlier_m)
    check(case(LayerFormat(Format(64, sketch=sketch), Format(64, GROUPS_OF_TOKENS)), 2 * g, d=d), [1, 200])
