"""Attention over codes of evenly spaced numbers that are operands as they stand, on the CPU against float64."""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import Center, Dense, Format, LayerFormat, LowRank, Rotate, Sketch, Window
from runtime.units import ONE_BLOCK, Sharing
from tests.cuda.attention_emulated import FLOOR, Emulated, case, check, times_half, with_outliers
from tests.formats import kivi, without_outliers
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
WAYS = pytest.mark.parametrize("how", [ONE_BLOCK, Sharing(2), Sharing(1, alone=True)], ids=str)
BITS = pytest.mark.parametrize("bits", [2, 3, 4])
TURNED = Format(64, Dense(3, "channel", codebook="nuq", scales="bundle"), None, Window(sinks=1), "pre_rope")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Emulated)


def of_all_pages(bits: int) -> LayerFormat:
    """Scales of channels that all pages share, and of whole tokens."""
    window = Window(sinks=1)
    key = Format(64, Dense(bits, "channel", codebook="uniform-fit", scales="bundle"), None, window)
    return LayerFormat(key, Format(64, Dense(bits, "token", codebook="uniform-fit"), None, window))


@WAYS
@BITS
def test_scales_of_pages_channels_and_of_groups(bits, how, monkeypatch):
    monkeypatch.setattr(Emulated, "how", how)
    check(case(kivi(bits), 8), [1, 66, 330, 130])


@pytest.mark.parametrize("g", [1, 2, 3, 6, 8, 12])
def test_query_rows(g):
    """Of one to four phases; with more than four rows keys are looked up, with more than eight values, too."""
    check(case(kivi(2), 2 * g), [700, 130])


@pytest.mark.parametrize("d", [64, 128, 256])
@BITS
def test_scales_that_all_pages_share(bits, d):
    check(case(of_all_pages(bits), 8, d=d), [1, 400, 66])


@pytest.mark.parametrize(
    "g, how", [(4, ONE_BLOCK), (8, ONE_BLOCK), (4, Sharing(1, alone=True)), (12, ONE_BLOCK)], ids=str
)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bits", [2, 4])
def test_values_beside_turned_keys(bits, group, g, how, monkeypatch):
    """Keys are looked up, values are not, but with twelve query rows, for which their codes change places."""
    monkeypatch.setattr(Emulated, "how", how)
    check(case(LayerFormat(TURNED, Format(64, Dense(bits, "token", group), None, TURNED.window)), 2 * g), [1, 66, 330])


def test_three_bits_change_places():
    """Those of a run's last step lie between the others'."""
    check(case(kivi(3), 24), [1, 66, 330])


@pytest.mark.parametrize("sides", [("key", "value"), ("key",), ("value",)], ids="-".join)
def test_with_outliers_they_are_looked_up(sides):
    """Keys that are not turned; the other side is codes."""
    given = with_outliers(0.05, 2, "uniform-fit")
    given = LayerFormat(replace(given.key, domain="post_rope"), given.value)
    bare = without_outliers(given)
    key, value = (getattr(given if side in sides else bare, side) for side in ("key", "value"))
    check(case(LayerFormat(key, value), 8), [300, 65])


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_groups_of_channels(group):
    """Of 16 channels a warp has more groups than it takes that way."""
    formats = LayerFormat(Format(64, Dense(2, "channel", 16)), Format(64, Dense(2, "token", group)))
    check(case(formats, 8), [1, 330])
    check(case(formats, 4, d=256), [130])


@pytest.mark.parametrize("g", [1, 4, 8])
def test_factors_beside_codes(g):
    dense = Dense(2, "channel", 32), Dense(2, "token", 32)
    check(case(LayerFormat(*(Format(64, each, lowrank=LowRank(4, 2)) for each in dense)), 2 * g), [1, 300, 640])


@pytest.mark.parametrize("side", ["key", "value"])
def test_factors_of_one_side(side):
    formats = kivi(2)
    check(case(replace(formats, **{side: replace(getattr(formats, side), lowrank=LowRank(4, 2))}), 8), [1, 300])


@pytest.mark.parametrize(
    "more",
    [{"center": Center()}, {"rotate": Rotate("hadamard")}, {"sketch": Sketch(64)}],
    ids=["center", "rotate", "sketch"],
)
def test_what_keys_have_beside_codes(more):
    """Means, a rotation, a sketch of what codes leave: with scales of pages' channels, and with those of all pages."""
    for formats in (kivi(2), of_all_pages(2)):
        check(case(replace(formats, key=replace(formats.key, **more)), 8), [1, 66, 300])


@pytest.mark.parametrize("t", [16, 32, 128])
def test_pages_of_other_sizes(t):
    formats = LayerFormat(Format(t, Dense(2, "channel", 16)), Format(t, Dense(2, "token", 32)))
    for g in (1, 4):
        check(case(formats, 2 * g), [1, 2 * t + 3, 300])


@pytest.mark.parametrize("times", [2.0**-9, 300.0])
@pytest.mark.parametrize("formats", [kivi(2), kivi(4), of_all_pages(2)], ids=["2", "4", "all"])
def test_values_far_from_one(formats, times, monkeypatch):
    """What probabilities come to with their scales, halves hold."""
    numbers = paged.numbers
    seen = []

    def scaled(n, h_kv, d, seed, dtype):
        seen.append(seed)
        return numbers(n, h_kv, d, seed, dtype) * (times if seed >= 100 else 1.0)

    monkeypatch.setattr(paged, "numbers", scaled)
    check(case(formats, 8), [400, 66])
    assert any(seed >= 100 for seed in seen), "none of these were values"


@pytest.fixture
def growing(monkeypatch):
    """Values whose scales are small at first, then above 2, then above 512: what was summed up before follows. The last
    third of the tokens decides, in one sequence a few of them, whose error is then 2.4 times fp16's."""
    numbers = paged.numbers

    def grown(n, h_kv, d, seed, dtype):
        x = numbers(n, h_kv, d, seed, dtype)
        steps = torch.tensor([2.0**-6, 1.0, 2.0**8])[torch.arange(n) * 3 // n].to(dtype)
        return x * steps[:, None, None] if seed >= 100 else x

    monkeypatch.setattr(paged, "numbers", grown)
    return [1500, 700, 800, 900, 1000, 1100]


@pytest.mark.parametrize("factors", [None, LowRank(4, 2)], ids=["", "factors"])
@pytest.mark.parametrize(("alone", "g"), [(False, 1), (False, 4), (True, 4)])
def test_values_that_grow(alone, g, factors, growing, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone))
    formats = LayerFormat(*(replace(fmt, lowrank=factors) for fmt in (kivi(2).key, kivi(2).value)))
    assert times_half(case(formats, 2 * g), growing) <= 2


@pytest.mark.parametrize("g", [1, 4, 8])
def test_values_that_grow_beside_turned_keys(g, growing):
    """With eight query rows two tiles share columns, and a maximum that makes room for both."""
    assert times_half(case(LayerFormat(TURNED, replace(kivi(2).value, window=TURNED.window)), 2 * g), growing) <= 2


def test_small_values_of_many_light_tokens(monkeypatch):
    """One token weighs 2^16 times as much as each of the others, which a warp meets behind it, with scales below 2^-8:
    what these come to together is not lost."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    numbers, lengths = paged.numbers, [400] * 24
    q = torch.randn((len(lengths), 8, 1, 128), generator=torch.Generator().manual_seed(5)).half()

    def given(n, h_kv, d, seed, dtype):
        x = numbers(n, h_kv, d, seed, dtype)
        if seed >= 100:
            return x * 2.0**-10
        x = x * 2.0**-4
        x[3] = q[seed, :, 0].view(h_kv, -1, d).sum(1)  # meets each of its queries
        return x

    monkeypatch.setattr(paged, "numbers", given)
    scene = paged.Scene.of(case(kivi(2), 8), lengths)
    assert torch.equal(scene.query(), q)
    out = scene.run(q)
    for i in range(len(lengths)):
        reference = scene.oracle(q, i)
        assert paged.relative(out[i], reference) <= max(2 * paged.relative(scene.half(q, i), reference), FLOOR)


@BITS
def test_they_are_rounded_as_little_as_in_fp16(bits):
    lengths = [300, 700, 513]
    assert times_half(case(kivi(bits), 8), lengths) < 1.42
    assert times_half(case(of_all_pages(bits), 8), lengths) < 1.42
