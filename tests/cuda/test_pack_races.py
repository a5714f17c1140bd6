"""Races of packing kernels in shared memory (tests/cuda/races.h): with outliers, in clusters and without; and behind
matrices that all warps of a block multiply with. Needs g++."""

import shutil

import pytest
import torch

from artifacts import Banded, Dense, Format, PageGeometry, Rope, Rotate, Sketch, Sparse
from tests.cuda.test_pack_emulated import ENDS, SOME, check_prompt

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KEYS = Format(32, Dense(4, "channel", scales="bundle"), Sparse(0.02, "channel", "bundle"), domain="pre_rope")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86"])
@pytest.mark.parametrize(
    "fmt, side, h_kv, d",
    [
        (KEYS, "key", 16, 128),  # two CTAs share sines
        (Format(32, Dense(3, "token"), ENDS), "value", 4, 64),
        (Format(32, Dense(2, "token"), ENDS), "value", 11, 256),  # halves of tiles
        (Format(32, Dense(2, "token"), SOME), "key", 4, 64),
    ],
    ids=["keys", "values", "halves", "limited"],
)
def test_no_races(fmt, side, h_kv, d, arch):
    """Where CTAs post each other what they count, and where one has all of a page."""
    geometry, rope = PageGeometry.of(fmt, h_kv, d, side), Rope(d, "half", 1.0, "default")
    packer = check_prompt(geometry, rope, torch.float16, arch, "smooth", pages=1, races=True)
    assert packer.module.races_found() == 0


NORMS = Dense(3, "head", codebook="lloyd", normalize="norm")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86"])
@pytest.mark.parametrize(
    "fmt, side",
    [
        (Format(32, banded=Banded(3.0), rotate=Rotate("learned")), "value"),  # a head's matrix after another one's
        (Format(32, NORMS, rotate=Rotate("haar")), "key"),
        (Format(32, sketch=Sketch(64, "orthogonal", 8, 32)), "key"),
    ],
    ids=["bands", "rotated", "sketched"],
)
def test_no_races_behind_matrices(fmt, side, arch):
    geometry, rope = PageGeometry.of(fmt, 5, 64, side), Rope(64, "half", 1.0, "default")
    packer = check_prompt(geometry, rope, torch.float16, arch, "grid", pages=5, races=True)
    assert packer.module.races_found() == 0
