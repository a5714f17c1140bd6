"""In which order a page stores its numbers: the order in which a warp's matrix instructions want them.

A page is stored in tiles of 16 tokens. Within a tile, lane `4 r + c` (r < 8, c < 4) of a warp finds the d / 2 numbers
that it holds as first operand of the 16 x 8 x 16 matrix instruction, register by register, two in each:

- keys, 16 tokens by d channels: for each step s of d / 16, the channels 8 s + 2 c and the next in the first half of the
  head, of tokens r and r + 8, and then those in the second half. Both channels of a rotary pair lie in one lane, if
  the rotary dimension is a multiple of 16.
- values, d channels by 16 tokens: for each 16 channels, the tokens 2 c and 2 c + 1 of channels r and r + 8, and then
  the tokens 2 c + 8 and 2 c + 9.

The codes of one lane follow each other in runs (`artifacts.codes`), 64 channels of the tile in each, step by step.
Within a step their order depends on their width, so that a few instructions take four codes of one row of the operand
(a token of keys, a channel of values), each in a nibble of its own:

- 3 and 4 bits: a step is a word. Its low half has the four codes of row r, its high half those of row r + 8.
- 2 bits: a step is half a word. A nibble has a code of row r in its low two bits and that of row r + 8 in its high two.
- 1 and 8 bits: register by register, as above.

Evenly spaced values of 2 to 4 bits without outliers (`Format.masked`) become operands by masks, so there a register's
two codes stand 16 bits apart, and 8 bits above those of tokens 2 c and 2 c + 1 stand those of the tokens 8 later.
Within a byte the codes of channels r and r + 8 are neighbours, with 2 bits of one step, then of the next.

Codes whose width depends on the band of channels (`band_order`) are stored tile after tile, and in a tile band after
band: for each bit of the width 32 half words, one a lane (`band_code_order`).

The words of the lanes are interleaved, four of each lane at a time (or two, or one: the most that divides the words of
a run), so that a warp's loads read 512 (256, 128) bytes in a row and runs can be read by different warps. Lists of
outliers go through a tile step by step, register by register, so that 256 numbers in a row (eight of every lane) are
one operand of the instruction. Scales of single channels of keys stand in the order in which a lane needs them, and
scales of tokens of values by group first.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from artifacts.codes import RUN
from artifacts.fields import SideName

TILE = 16  # tokens that a warp takes at once
LANES = 32

# Axes of `_registers` that number the codes of a step, the slowest first, by width of codes.
_OF_REGISTERS, _OF_ROWS, _OF_BOTH_ROWS = (4, 5, 6), (5, 4, 6), (4, 6, 5)
_WITHIN_STEP = {1: _OF_REGISTERS, 2: _OF_BOTH_ROWS, 3: _OF_ROWS, 4: _OF_ROWS, 8: _OF_REGISTERS}


@cache
def code_order(t: int, d: int, side: SideName, bits: int, masked: bool) -> NDArray[np.int64]:
    """Where the codes of one head's page come from: token * d + channel of each, int64 [t * d].

    masked: whether codes of values become operands by masks (`Format.masked`); keys have one order.
    """
    tile, step, r, c = range(4)
    registers = _registers(t, d, side)
    if not masked or side == "key":
        return registers.transpose(tile, r, c, step, *_WITHIN_STEP[bits]).reshape(-1).copy()
    steps = 2 if bits == 2 else 1  # of a word
    half, upper, e = 5, 6, 7
    of_words = registers.reshape(t // TILE, d // (16 * steps), steps, 8, 4, 2, 2, 2)
    return of_words.transpose(tile, 3, 4, 1, e, half, 2, upper).reshape(-1).copy()


@cache
def fragment_order(t: int, d: int, side: SideName) -> NDArray[np.int64]:
    """Where the numbers of one head's page stand whose outliers are listed: token * d + channel of each, int64 [t * d].

    Register by register, and all lanes' numbers of a step come before those of the next step: number
    `256 step + 8 lane + place` of a tile is one of the eight that `lane` holds for that step. So 256 numbers in a row
    are one matrix operand, and where an outlier belongs takes shifts alone.
    """
    return _registers(t, d, side).reshape(-1).copy()


def _registers(t: int, d: int, side: SideName) -> NDArray[np.int64]:
    """token * d + channel of every number by tile, step, r, c, half (of channels; values: of tokens), upper and e."""
    tile, step, r, c, half, upper, e = np.ogrid[: t // TILE, : d // 16, :8, :4, :2, :2, :2]
    if side == "key":
        token, channel = tile * TILE + upper * 8 + r, half * (d // 2) + 8 * step + 2 * c + e
    else:
        token, channel = tile * TILE + half * 8 + 2 * c + e, 16 * step + 8 * upper + r
    return np.broadcast_to(token * d + channel, (t // TILE, d // 16, 8, 4, 2, 2, 2))


@cache
def band_order(d: int, side: SideName) -> NDArray[np.int64]:
    """Channels of a head by bands of 32, int64 [d]: of values 32 neighbours, of keys 16 in each half of the head.

    So both channels of a rotary pair are in one band (if all channels are rotated), and bands are by frequency.
    """
    if side == "value":
        return np.arange(d)
    band, half, k = np.ogrid[: d // RUN, :2, : RUN // 2]
    return (half * (d // 2) + band * (RUN // 2) + k).reshape(-1)


@cache
def band_code_order(t: int, side: SideName, bits: int) -> NDArray[np.int64]:
    """Where the codes of one band of a page come from: token * 32 + place in the band, int64 [t / 16, 16, 32].

    Two neighbouring lanes share a run, each has 16 codes of a tile: 4 of one row of the operand (half, e) by step and
    upper. Of the run's words each lane has 16 bits: with 3 and 4 bits a row a half word, a code in a nibble; with 2
    bits two rows, with 1 bit all four, whose codes of one column share a nibble.
    """
    # Axes: tile, step, r, two lanes, which of them, half, upper, e.
    registers = _registers(t, RUN, side).reshape(t // TILE, 2, 8, 2, 2, 2, 2, 2)
    within = {1: (4, 5, 7, 1, 6), 2: (1, 4, 5, 7, 6)}.get(bits, (1, 6, 4, 5, 7))
    return registers.transpose(0, 2, 3, *within).reshape(t // TILE, LANES // 2, RUN).copy()


@cache
def word_order(d: int, bits: int) -> NDArray[np.int64]:
    """Which word of a tile's lanes, one lane after the other, stands where: int64 [d / 2 * bits].

    Where a lane has no whole number of words (d not a multiple of 64) they stay as they are.
    """
    words = d * TILE // RUN * bits
    if d % 64:
        return np.arange(words)
    per_lane = words // LANES
    width = next(w for w in (4, 2, 1) if bits % w == 0)
    chunk, lane, k = np.ogrid[: per_lane // width, :LANES, :width]
    order = lane * per_lane + chunk * width + k
    return np.broadcast_to(order, (per_lane // width, LANES, width)).reshape(-1).copy()


@cache
def channel_order(d: int) -> NDArray[np.int64]:
    """Which channel's scale stands where in a page of keys with scales of their own per channel: int64 [d].

    A lane reads the scales of two steps with one 16-byte load: four pairs, each of one channel and its like of the next
    step, whose codes stand 16 bits apart.
    """
    steps, c, half, e, odd = np.ogrid[: d // 32, :4, :2, :2, :2]
    order = half * (d // 2) + 8 * (2 * steps + odd) + 2 * c + e
    return np.broadcast_to(order, (d // 32, 4, 2, 2, 2)).reshape(-1).copy()
