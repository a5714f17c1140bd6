"""How a step's work is dealt out, at the edges."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from artifacts import LowRank, Rotate, Sketch
from runtime.cache import KVCache
from runtime.dealing import aligned_blocks, merged
from runtime.sources import kernel_folder
from runtime.units import (
    ANY,
    ENOUGH_GROUPED,
    LITTLE,
    MANY,
    MANY_BY_TILES,
    MANY_SKETCHED,
    MANY_UNSHARED,
    MOST_ALONE,
    SHORT,
    Sharing,
    Ways,
    multiplies,
    sharing,
    sharings,
    spans,
)
from tests.formats import kivi, kvquant, without_outliers

GRID, PLAIN = 132, kivi(2)
HAAR = Rotate("haar")
TURNED = replace(PLAIN, key=replace(PLAIN.key, rotate=HAAR))
SKETCHED = replace(PLAIN, key=replace(PLAIN.key, rotate=HAAR, sketch=Sketch(64)))
BROUGHT_BACK = replace(SKETCHED, value=replace(PLAIN.value, rotate=Rotate("learned")))
FACTORS = replace(PLAIN, value=replace(PLAIN.value, lowrank=LowRank(4, 2)))


def plain_nuq(bits):
    return without_outliers(kvquant(bits))


BY_BYTES, ALONE, GROUPED = Ways(takes=True, alone=True), Ways(alone=True), Ways(alone=True, grouped=True)
CROWDED = Ways(alone=True, two=False, grouped=True)
NEARLY_ALL = int(ENOUGH_GROUPED * GRID)


@pytest.mark.parametrize(
    ("formats", "can", "pairs", "tokens", "said"),
    [
        (PLAIN, ALONE, GRID, 100, Sharing(1)),
        (PLAIN, ALONE, GRID + 1, 100000, Sharing(2)),
        (PLAIN, GROUPED, NEARLY_ALL, 2 * SHORT, Sharing(1)),
        (PLAIN, GROUPED, NEARLY_ALL + 1, 2 * SHORT, Sharing(2)),
        (PLAIN, GROUPED, GRID, 2 * SHORT + 1, Sharing(1)),
        (PLAIN, GROUPED, GRID + 1, 2 * SHORT + 1, Sharing(2)),
        (PLAIN, ALONE, MANY_BY_TILES * GRID - 1, SHORT, Sharing(2)),
        (PLAIN, ALONE, MANY_BY_TILES * GRID, SHORT, Sharing(1, alone=True)),
        (PLAIN, Ways(), MANY_BY_TILES * GRID, SHORT, Sharing(2)),
        (PLAIN, ALONE, MANY_BY_TILES * GRID, SHORT + 1, Sharing(2)),
        (SKETCHED, ALONE, MANY_SKETCHED * GRID - 1, SHORT, Sharing(2)),
        (SKETCHED, ALONE, MANY_SKETCHED * GRID, SHORT, Sharing(1, alone=True)),
        (kvquant(2), BY_BYTES, GRID, SHORT, Sharing(1)),
        (kvquant(2), BY_BYTES, GRID + 1, 2 * SHORT, Sharing(2)),
        (kvquant(2), BY_BYTES, GRID + 1, 2 * SHORT + 1, Sharing(1)),
        (kvquant(2), BY_BYTES, MANY * GRID - 1, 2 * SHORT + 1, Sharing(1)),
        (kvquant(2), BY_BYTES, MANY * GRID, 2 * SHORT + 1, Sharing(1, alone=True)),
        (plain_nuq(3), BY_BYTES, GRID + 1, 2 * SHORT + 1, Sharing(2)),
        (plain_nuq(4), BY_BYTES, GRID + 1, 2 * SHORT + 1, Sharing(1)),
        (kvquant(4), CROWDED, int(MANY_UNSHARED * GRID) - 1, SHORT, Sharing(1)),
        (kvquant(4), CROWDED, int(MANY_UNSHARED * GRID), SHORT, Sharing(1, alone=True)),
        (kvquant(4), CROWDED, int(MANY_UNSHARED * GRID), SHORT + 1, Sharing(1)),
        (plain_nuq(4), ALONE, 8, LITTLE * GRID // 8, Sharing(1, beside=True)),
        (plain_nuq(4), ALONE, 8, LITTLE * GRID // 8 + 1, Sharing(1)),
        (plain_nuq(4), ALONE, GRID // 4, 100, Sharing(1, beside=True)),
        (plain_nuq(4), ALONE, GRID // 4 + 1, 100, Sharing(1)),
        (plain_nuq(4), BY_BYTES, 8, 100, Sharing(1)),
        (FACTORS, ALONE, 8, 100, Sharing(1, beside=True)),
        (TURNED, ALONE, GRID, 1 << 20, Sharing(1, multiplies=True)),
        (TURNED, ALONE, GRID + 1, 100, Sharing(2)),
        (replace(FACTORS, value=replace(FACTORS.value, rotate=HAAR)), ALONE, 8, 100, Sharing(1, False, True, True)),
        (replace(PLAIN, value=replace(PLAIN.value, rotate=Rotate("learned"))), ALONE, 8, 100, Sharing(1, beside=True)),
        (replace(TURNED, key=SKETCHED.key), ALONE, 8, 100, Sharing(1)),
        (BROUGHT_BACK, ALONE, GRID // 8, 1 << 20, Sharing(1, beside=True)),
        (BROUGHT_BACK, ALONE, GRID // 8 + 1, 100, Sharing(1)),
        (BROUGHT_BACK, BY_BYTES, GRID // 4, 4 * LITTLE, Sharing(1, beside=True)),
        (BROUGHT_BACK, BY_BYTES, GRID // 4, 4 * LITTLE + 1, Sharing(1)),
        (BROUGHT_BACK, BY_BYTES, GRID // 4 + 1, 100, Sharing(1)),
        (BROUGHT_BACK, Ways(eight=True), 8, LITTLE * GRID // 8, Sharing(1, beside=True)),
        (BROUGHT_BACK, Ways(eight=True), 8, LITTLE * GRID // 8 + 1, Sharing(1)),
        (replace(BROUGHT_BACK, key=FACTORS.value), ALONE, 8, LITTLE * GRID // 8, Sharing(1, beside=True)),
        (replace(BROUGHT_BACK, key=FACTORS.value), ALONE, 8, LITTLE * GRID // 8 + 1, Sharing(1)),
    ],
)
def test_how_a_step_is_dealt_out(formats, can, pairs, tokens, said):
    multiply = multiplies(formats, 128, 8)
    can = can._replace(multiplies=multiply, matrix=bool(formats.value.rotate) and not multiply)
    assert sharing(formats, can, pairs, 1, tokens, GRID) == said
    assert said in sharings(formats, can)


def test_two_blocks_that_do_not_fit_are_not_said():
    for pairs in (1, GRID, GRID + 1, 100 * GRID):
        assert sharing(kvquant(4), CROWDED, pairs, 1, ANY, GRID) == Sharing(1)
    assert Sharing(2) not in sharings(kvquant(4), CROWDED)


@pytest.mark.parametrize(("d", "rows", "can"), [(128, 8, True), (64, 1, True), (256, 1, False), (128, 9, False)])
def test_heads_whose_blocks_rotate(d, rows, can):
    assert multiplies(TURNED, d, rows) == can


def test_more_sequences_than_warps_alone_find():
    assert sharing(PLAIN, Ways(alone=True), MOST_ALONE, 8, 100, GRID) == Sharing(1, alone=True)
    assert sharing(PLAIN, Ways(alone=True), MOST_ALONE + 1, 8, 100, GRID) == Sharing(2)
    (chunks,) = re.findall(r"MOST_CHUNKS = (\d+)", (kernel_folder() / "layout.cuh").read_text())
    assert 32 * int(chunks) == MOST_ALONE


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (SHORT, [SHORT]),
        (SHORT + 1, [SHORT, SHORT + 1]),
        (4 * SHORT, [SHORT, 2 * SHORT, 4 * SHORT]),
        (None, [SHORT << i for i in range(20)] + [ANY]),
    ],
)
def test_lengths_that_steps_are_dealt_out_for(most, expected):
    assert spans(most) == expected


@pytest.mark.parametrize(
    ("formats", "can", "b", "most", "expected"),
    [
        (plain_nuq(4), ALONE, 1, 65536, [32768, 65536]),  # 8 kv heads of up to 33792 tokens leave room
        (plain_nuq(4), ALONE, 1, 32768, [32768]),
        (plain_nuq(4), ALONE, 256, 65536, [SHORT, 65536]),
        (kivi(2), ALONE, 1, 65536, [65536]),
        (kivi(2), ALONE, 256, 65536, [SHORT, 65536]),
        (kivi(2), GROUPED, 16, 65536, [2 * SHORT, 65536]),
        (kivi(2), GROUPED, 32, 65536, [65536]),
    ],
)
def test_lengths_that_have_steps_of_their_own(formats, can, b, most, expected):
    kernels = SimpleNamespace(sharing=lambda b, tokens: sharing(formats, can, b, 8, tokens, GRID))
    layers = [SimpleNamespace(step=lambda h_q: kernels)]
    cache = SimpleNamespace(
        room=SimpleNamespace(max_tokens=most), layers=layers, bundle=SimpleNamespace(model=SimpleNamespace(h_q=32))
    )
    assert KVCache.spans(cache, b) == expected


@pytest.mark.parametrize(
    ("at_once", "most", "results", "expected"),
    [
        (1, 1, 1, 1),
        (1, 1, 10**6, 1),
        (8, 8, 1, 8),
        (8, 8, 10**6, 8),
        (16, 128, 1, 8),
        (16, 128, 1056, 8),
        (16, 128, 1057, 16),
        (16, 128, 4224, 16),  # two blocks of 16 for each of 132 multiprocessors
        (16, 128, 4225, 32),
        (16, 128, 10**6, 128),
    ],
)
def test_sequences_of_a_block_of_the_merge(at_once, most, results, expected):
    assert merged(at_once, most, 8, results, GRID) == expected


@pytest.mark.parametrize(
    ("heads", "blocks", "expected"),
    [
        (1, 132, (132, 1, 1 / 132)),
        (8, 132, (128, 1, 1 / 128)),
        (132, 132, (132, 1, 1 / 132)),
        (133, 132, (67, 2, 2 / 133)),
        (256, 132, (128, 2, 2 / 256)),
        (512, 264, (256, 2, 2 / 512)),
        (9, 2, (2, 5, 5 / 9)),
        (10**6, 132, (132, 7576, 7576 / 10**6)),
    ],
)
def test_blocks_that_have_whole_heads(heads, blocks, expected):
    aligned, whole, share = aligned_blocks(heads, blocks)
    assert (aligned, whole, share) == expected
    assert aligned <= blocks
    assert heads <= blocks or (aligned - 1) * whole < heads <= aligned * whole  # each has some, and all are dealt out
