"""Attention with projected queries, of sketched and rotated keys, and with factors, on the CPU against float64."""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import Center, Dense, Format, LayerFormat, LowRank, Rotate, Sketch, Sparse, Window
from runtime.units import ALL_PLAIN, ONE_BLOCK, Scoring, Sharing, multiplies
from tests.cuda.attention_emulated import BANDED, Emulated, case, check, check_scene
from tests.formats import kvquant, without_outliers
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


def test_values_ahead_of_keys_without_pages_of_both():
    """Values are packed, and multiplied by a matrix, where the keys of the same tokens are exact still, and no block
    that takes these has a page of both sides."""
    keys = replace(PLAIN_VALUES, dense=Dense(2, "channel", 32))
    check(case(LayerFormat(keys, replace(TURNED, t=16)), 8), [30, 60, 66, 120, 130])


HADAMARD = Format(64, Dense(2, "token"), Sparse(0.02, "token", "online"), rotate=Rotate("hadamard"), center=Center())
FACTORS = replace(PLAIN_VALUES, rotate=Rotate("haar"), lowrank=LowRank(4, 2))
PRE_ROPE = without_outliers(kvquant(2)).key
ROTATED = {
    "turned": LayerFormat(TURNED, TURNED), "keys": LayerFormat(TURNED, PLAIN_VALUES),
    "values": LayerFormat(PLAIN_VALUES, TURNED), "outliers": LayerFormat(TURNED, HADAMARD),
    "factors": LayerFormat(TURNED, FACTORS), "rope": LayerFormat(PRE_ROPE, replace(TURNED, window=PRE_ROPE.window)),
    "bytes": LayerFormat(BANDED.key, replace(BANDED.value, rotate=Rotate("haar"))),
}  # fmt: skip


def check_rotating(formats, lengths, monkeypatch, g=1, d=128, m=1, dtype=torch.float16, scoring=ALL_PLAIN) -> None:
    """Against float64, when the blocks of attention have rotated whatever is rotated."""
    assert multiplies(formats, d, g * m)
    monkeypatch.setattr(Emulated, "how", Sharing(1, beside=True, multiplies=True))
    scene = paged.Scene.of(case(formats, 2 * g, d=d), lengths, m, dtype, scoring)
    integers = scene.kernels.module(g * m, Emulated.how).integers
    assert integers["attend_projects"] == bool(formats.key.rotate)
    assert integers["attend_restores"] == bool(formats.value.rotate)
    check_scene(scene)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", ROTATED.values(), ids=ROTATED)
def test_blocks_that_multiply_by_rotations_themselves(formats, dtype, monkeypatch):
    """Queries and results of eight rows and fewer, of blocks that go on to another head or have no page of it."""
    check_rotating(formats, [1, 66, 330, 130], monkeypatch, 8, dtype=dtype)
    check_rotating(formats, [3, 200, 64], monkeypatch, 2, 64, 2, dtype)
    check_rotating(formats, [330, 1200, 7], monkeypatch, 1, dtype=dtype)


LEARNED = replace(PLAIN_VALUES, rotate=Rotate("learned"), center=Center())


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [
        (BANDED, torch.float16),
        (LayerFormat(SKETCHED.key, TURNED), torch.bfloat16),
        (LayerFormat(PRE_ROPE, replace(LEARNED, window=PRE_ROPE.window)), torch.float32),
    ],
    ids=["bands", "sketched", "learned"],
)
def test_merges_that_multiply_beside_blocks(formats, dtype, monkeypatch):
    """By halves of the columns, also where a block has no page."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, beside=True))
    for g, lengths, m in ((1, [330, 1], 1), (4, [1, 66, 330, 130], 1), (2, [1100], 2)):
        scene = paged.Scene.of(case(formats, 2 * g), lengths, m, dtype)
        assert scene.kernels.module(g * m, Emulated.how).integers["merge_slices"] == 2
        check_scene(scene)


def test_windows_and_caps_where_blocks_multiply_by_rotations(monkeypatch):
    check_rotating(ROTATED["turned"], [66, 700, 330], monkeypatch, 3, m=2, scoring=Scoring(150, 5.0))


@pytest.mark.parametrize("rotation", [Rotate("learned"), None], ids=["learned", "sketched"])
def test_other_matrices_have_kernels_of_their_own(rotation):
    formats = LayerFormat(replace(TURNED, rotate=rotation), BROUGHT_BACK) if rotation else SKETCHED
    assert not multiplies(formats, 128, 1)
    check(case(formats), [1, 300])


@pytest.mark.parametrize(("g", "d"), [(12, 128), (1, 256)])
def test_more_rows_or_channels_than_blocks_multiply_themselves(g, d, monkeypatch):
    """Though they are told to."""
    formats, how = ROTATED["turned"], Sharing(1, multiplies=True)
    assert not multiplies(formats, d, g)
    monkeypatch.setattr(Emulated, "how", how)
    scene = paged.Scene.of(case(formats, 2 * g, d=d), [1, 300])
    assert scene.kernels.module(g, how).integers["attend_restores"] == 0
    check_scene(scene)


@pytest.mark.parametrize(("m", "outlier_m"), [(32, 0), (64, 32), (96, 160), (224, 96), (512, 224)])
@pytest.mark.parametrize(("d", "g"), [(64, 1), (128, 4), (128, 12), (256, 5)])
def test_sizes_of_sketches(m, outlier_m, d, g):
    """Of four words a lane has one for itself, two that are left are two lanes', one is all four's; with 256 channels
    two warps share them, and one may have a word less."""
    sketch = Sketch(m, "orthogonal", 8 if outlier_m else 0, outlier_m)
    check(case(LayerFormat(Format(64, sketch=sketch), Format(64, GROUPS_OF_TOKENS)), 2 * g, d=d), [1, 200])
