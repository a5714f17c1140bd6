"""Attention in the emulator where two blocks share a multiprocessor, and by kernels for short steps."""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import LayerFormat, Window
from runtime.units import ALL_PLAIN, ONE_BLOCK, Scoring, Sharing
from tests.cuda.attention_emulated import BANDED, Emulated, case, check, check_scene, in_pages_of, with_outliers
from tests.formats import kivi, kvquant, without_outliers
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Emulated)


@pytest.mark.parametrize("g", [1, 4, 8])
@pytest.mark.parametrize(
    "formats",
    [kvquant(2), kvquant(3), kivi(2), BANDED, without_outliers(kvquant(4))],
    ids=["2 bits", "3 bits", "kivi", "banded", "codes of 4 bits"],
)
def test_two_blocks_share_a_multiprocessor(formats, g, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(2))
    check(case(formats, 2 * g), [1, 66, 330, 130])


@pytest.mark.parametrize("g", [4, 8])
@pytest.mark.parametrize(
    "formats",
    [kvquant(2), kvquant(4), without_outliers(kvquant(2)), in_pages_of(32, without_outliers(kvquant(3)))],
    ids=["2 bits", "4 bits", "plain", "pages-of-32"],
)
def test_short_steps(formats, g, monkeypatch):
    """Groups of warps take whole turns: some have one unit less, some none."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, beside=True))
    check(case(formats, 2 * g), [1, 65, 130, 200, 330, 1100])


@pytest.mark.parametrize("d", [64, 256])
def test_short_steps_of_other_heads(d, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, beside=True))
    check(case(kvquant(2), 8, d=d), [65, 200, 330])


@pytest.mark.parametrize("recent", [(5, 77), (77, 5)], ids=["keys first", "values first"])
@pytest.mark.parametrize("scoring", [ALL_PLAIN, Scoring(100)], ids=["whole", "window"])
def test_short_steps_of_windows(recent, scoring, monkeypatch):
    """Also where one side is packed before the other."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, beside=True))
    plain = without_outliers(kvquant(2))
    key, value = (replace(f, window=Window(1, r)) for f, r in zip((plain.key, plain.value), recent, strict=True))
    check(case(LayerFormat(key, value), 8), [1, 66, 300, 500], 1, scoring)
    check(case(with_outliers(0.02), 8), [1, 66, 300, 500], 1, scoring)


def blocks_of(formats: LayerFormat, lengths: list[int], h_q: int = 8) -> list[list[int]]:
    """[first, last] of the blocks that have a result, for the two kv heads of one sequence after the other. What comes
    of it is checked."""
    scene = paged.Scene.of(case(formats, h_q), lengths)
    check_scene(scene)
    return scene.kernels.workspace.take("ranges", 4 * len(lengths)).view(torch.int32).view(-1, 2).tolist()


@pytest.mark.parametrize("formats", [kvquant(2), kivi(2), BANDED], ids=["kvquant", "kivi", "banded"])
def test_blocks_take_whole_heads_where_sequences_are_as_long(formats, monkeypatch):
    """Three for each of three blocks, the last of which has one less: so no head has two results."""
    monkeypatch.setattr(Emulated, "how", ONE_BLOCK)
    assert blocks_of(formats, [330, 331, 332, 333]) == [[i // 3, i // 3] for i in range(8)]
    assert any(first < last for first, last in blocks_of(formats, [330, 200, 330, 330]))
    assert blocks_of(formats, [330] * 33) == [[i // 22, i // 22] for i in range(66)]


def test_blocks_of_whole_heads_may_be_fewer(monkeypatch):
    """Two heads for each of two blocks; a third one has nothing. By bytes, where beginning a head takes longest."""
    monkeypatch.setattr(Emulated, "how", ONE_BLOCK)
    assert blocks_of(without_outliers(kvquant(2)), [200, 201], 2) == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_fewer_blocks_only_where_that_is_sooner_done(monkeypatch):
    """Four heads of many pages for three blocks: two for each of two would take half as long again."""
    monkeypatch.setattr(Emulated, "how", ONE_BLOCK)
    assert blocks_of(kivi(2), [3000, 3000])[-1][-1] == 2


@pytest.mark.parametrize("how", [ONE_BLOCK, Sharing(2)], ids=str)
def test_a_block_begins_in_the_middle_of_many_sequences(how, monkeypatch):
    monkeypatch.setattr(Emulated, "how", how)
    check(case(kivi(2), 8), [1 + 53 * i % 290 for i in range(70)])
