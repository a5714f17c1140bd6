"""The order of a page's numbers: by hand, as matrix instructions read it, and what kernels count on."""

import numpy as np
import pytest

from artifacts import Dense, FormatError, PageShape, Sparse
from artifacts.codes import BITS, RUN, pack
from artifacts.order import LANES, TILE, channel_order, code_order, fragment_order, word_order
from tests.oracles import order as oracle

SIDES = pytest.mark.parametrize("side", ["key", "value"])
HEADS = (64, 128, 256)
WIDTHS = pytest.mark.parametrize("d", [32, 64, 96, 128, 256])


def registers(side, d):
    """Numbers that each lane holds of a tile, token * d + channel: [lane, step, register, e]."""
    return fragment_order(TILE, d, side).reshape(d // 16, LANES, 4, 2).swapaxes(0, 1)


@SIDES
@WIDTHS
@pytest.mark.parametrize("bits, masked", [*((bits, False) for bits in BITS), (2, True), (3, True), (4, True)])
@pytest.mark.parametrize("t", [16, 32, 48, 128])
def test_codes(t, bits, masked, d, side):
    found = code_order(t, d, side, bits, masked)
    assert [divmod(place, d) for place in found.tolist()] == oracle.codes(t, d, side, bits, masked)
    np.testing.assert_array_equal(np.sort(found), np.arange(t * d))


@SIDES
@pytest.mark.parametrize("d", [16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("t", [16, 32, 48, 128])
def test_fragments(t, d, side):
    found = fragment_order(t, d, side)
    assert [divmod(place, d) for place in found.tolist()] == oracle.fragments(t, d, side)
    np.testing.assert_array_equal(np.sort(found), np.arange(t * d))


@SIDES
@WIDTHS
@pytest.mark.parametrize("bits", BITS)
def test_an_outliers_place_takes_shifts(d, side, bits):
    """Number 256 step + 8 lane + place of a tile is one of the codes number d / 2 lane + 8 step on."""
    codes, number = code_order(TILE, d, side, bits, False).reshape(-1, 8), np.arange(TILE * d)
    step, lane = number >> 8, number >> 3 & 31
    assert (codes[d // 16 * lane + step] == fragment_order(TILE, d, side)[:, None]).any(1).all()


@SIDES
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_few_instructions_take_four_codes_of_a_row(bits, side):
    """Each in a nibble of 16 bits, in the order of the row's columns: what a byte permutation looks up at once."""
    d = 128
    codes = np.random.default_rng(0).integers(0, 1 << bits, TILE * d)
    words = pack(codes[code_order(TILE, d, side, bits, False)].astype(np.uint8), bits)
    run = words[0]  # of lane 0: four steps
    for step, of_step in enumerate(registers(side, d)[0, :4]):
        if bits == 2:
            rows = [run[step // 2] >> 16 * (step % 2) + 2 * upper & 0x3333 for upper in (0, 1)]
        else:
            last = (run[0] >> 3 & 0x11111111) | (run[1] >> 2 & 0x22222222) | (run[2] >> 1 & 0x44444444)
            word = (last if bits == 3 and step == 3 else run[step]) & (0x77777777 if bits == 3 else 0xFFFFFFFF)
            rows = [word & 0xFFFF, word >> 16]
        for upper, row in enumerate(rows):
            assert [row >> 4 * i & 15 for i in range(4)] == codes[of_step[upper::2]].reshape(-1).tolist()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_mask_takes_a_register_of_evenly_spaced_values(bits):
    """The register's two codes, one in each half of a word; where they stand higher, they count more."""
    d = 128
    codes = np.random.default_rng(0).integers(0, 1 << bits, TILE * d)
    run = pack(codes[code_order(TILE, d, "value", bits, True)].astype(np.uint8), bits)[0]  # of lane 0: four steps
    mask = (1 << bits) - 1
    for step, of_step in enumerate(registers("value", d)[0, :4]):
        word = int(run[step // 2] if bits == 2 else run[min(step, bits - 1)])
        if bits == 3 and step == 3:
            word = int((run[0] >> 3 & 0x11111111) | (run[1] >> 2 & 0x22222222) | (run[2] >> 1 & 0x44444444))
        for register, numbers in enumerate(of_step):
            upper, later = register % 2, register // 2
            place = 4 * (step % 2) + 2 * upper if bits == 2 else 4 * upper
            taken = word >> 8 * later & (mask | mask << 16) << place
            counts = 1 << place
            assert [taken & 0xFFFF, taken >> 16] == [counts * int(codes[number]) for number in numbers]
            assert counts * mask < 1 << 10  # a half too small to be normal


@WIDTHS
@pytest.mark.parametrize("bits", BITS)
def test_words(d, bits):
    found = word_order(d, bits)
    assert found.tolist() == oracle.words(d, bits)
    np.testing.assert_array_equal(np.sort(found), np.arange(TILE * d * bits // 32))


@WIDTHS
def test_channels(d):
    found = channel_order(d)
    assert found.tolist() == oracle.channels(d)
    np.testing.assert_array_equal(np.sort(found), np.arange(d))


@SIDES
@pytest.mark.parametrize("d", HEADS)
def test_registers_are_the_instructions_first_operand(d, side):
    """PTX ISA, mma.m16n8k16, matrix A of 16-bit numbers: register i of lane 4 r + c holds row r + 8 (i % 2) and
    columns 2 c + 8 (i // 2) and the next. Rows are tokens of keys and channels of values; the columns of a step may
    stand for any 16 channels (tokens) as long as they do so in all lanes, because the other operand follows suit."""
    lanes = registers(side, d)
    for step in range(d // 16):
        columns = {}
        for lane in range(LANES):
            r, c = divmod(lane, 4)
            for i in range(4):
                for e in (0, 1):
                    token, channel = divmod(int(lanes[lane, step, i, e]), d)
                    row, column = (token, channel) if side == "key" else (channel - 16 * step, token)
                    assert row == r + 8 * (i % 2)
                    assert columns.setdefault(2 * c + 8 * (i // 2) + e, column) == column
        assert len(set(columns.values())) == len(columns) == 16
        if side == "value":
            assert all(columns[token] == token for token in columns)


@pytest.mark.parametrize("d", HEADS)
def test_rotary_pairs_lie_in_one_lane(d):
    lanes = np.empty(TILE * d, int)
    lanes[registers("key", d)] = np.arange(LANES)[:, None, None, None]
    lanes = lanes.reshape(TILE, d)
    for dim in range(16, d + 1, 16):
        np.testing.assert_array_equal(lanes[:, : dim // 2], lanes[:, dim // 2 : dim])


@pytest.mark.parametrize("d", HEADS)
def test_interleaved_rotary_pairs_share_a_register(d):
    first, second = np.moveaxis(registers("key", d), -1, 0)
    assert (first % 2 == 0).all()
    np.testing.assert_array_equal(second, first + 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", HEADS)
def test_loads_of_a_warp_are_contiguous(d, bits):
    """4, 2 or 1 words a lane, the widest load that divides a run's words: a lane's n-th loads follow each other lane
    by lane, and all of its loads together are its words in their own order."""
    each = d // 2 * bits // LANES
    width = max(w for w in (4, 2, 1) if bits % w == 0)
    loads = word_order(d, bits).reshape(-1, LANES, width)
    for lane in range(LANES):
        np.testing.assert_array_equal(loads[:, lane].reshape(-1), np.arange(lane * each, (lane + 1) * each))


@pytest.mark.parametrize("d", HEADS)
def test_a_load_of_eight_scales_is_what_two_steps_of_a_lane_need(d):
    lanes = registers("key", d).reshape(8, 4, d // 16, 8) % d  # channels, by r, c and step
    for number, scales in enumerate(channel_order(d).reshape(-1, 8)):
        steps, c = divmod(number, 4)
        for odd in (0, 1):
            needed = lanes[:, c, 2 * steps + odd].reshape(8, 2, 2, 2)  # both tokens of a lane have the same channels
            assert (needed == scales[odd::2].reshape(2, 1, 2)).all()


@SIDES
@pytest.mark.parametrize("t", [1, 8, 24, 100])
def test_tokens_that_do_not_fill_tiles(t, side):
    with pytest.raises(FormatError, match=rf"t={t} tokens .* tiles of 16: take a multiple of 16"):
        Dense(4, "token").check(PageShape(t, 2, 128, side))
    with pytest.raises(FormatError, match=rf"t={t} tokens .* tiles of 16: take a multiple of 16"):
        Sparse(0.01, "token", "online").check(PageShape(t, 2, 128, side))


@SIDES
@pytest.mark.parametrize("d", [1, 8, 24, 100])
def test_outliers_of_heads_that_do_not_fill_blocks(d, side):
    with pytest.raises(FormatError, match=rf"head dimension {d} is not a multiple of 16: .* blocks of 256"):
        Sparse(0.01, "token", "online").check(PageShape(32, 2, d, side))


@SIDES
@WIDTHS
@pytest.mark.parametrize("bits", BITS)
def test_codes_of_a_tile_fill_its_words(d, bits, side):
    """Wherever a head's dimension is allowed, tiles have whole runs."""
    (codes, *_) = Dense(bits, "token").page_fields(PageShape(32, 2, d, side))
    assert codes.shape == (2, d * TILE * bits // 32)
    assert codes.shape[1] % bits == d * TILE % RUN == 0
