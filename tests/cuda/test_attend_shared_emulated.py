"""Attention in the emulator where two blocks share a multiprocessor, and by kernels for short steps."""

import shutil
from dataclasses import replace

import pytest

from artifacts import LayerFormat, Window
from runtime.units import ALL_PLAIN, Scoring, Sharing
from tests.cuda.attention_emulated import BANDED, Emulated, case, check, in_pages_of, with_outliers
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
