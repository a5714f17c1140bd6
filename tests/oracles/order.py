"""Oracle of the order of a page's numbers, written out lane by lane after the prose of `artifacts.order`."""

from functools import cache

import numpy as np
from numpy.typing import NDArray


def operand(lane: int, step: int, d: int, side: str) -> list[tuple[int, int]]:
    """Token in the tile and channel of the eight numbers that a lane holds for one instruction."""
    r, c = lane // 4, lane % 4
    if side == "key":
        pair = [8 * step + 2 * c, 8 * step + 2 * c + 1]
        pairs = [pair, [d // 2 + pair[0], d // 2 + pair[1]]]
        return [(token, channel) for pair in pairs for token in (r, r + 8) for channel in pair]
    pairs = [[2 * c, 2 * c + 1], [2 * c + 8, 2 * c + 9]]
    return [(token, 16 * step + row) for pair in pairs for row in (r, r + 8) for token in pair]


def of_step(numbers: list[tuple[int, int]], bits: int) -> list[tuple[int, int]]:
    """The eight numbers of `operand` in the order of their codes."""
    a, b = numbers[:2] + numbers[4:6], numbers[2:4] + numbers[6:]  # of row r and of row r + 8
    if bits == 2:
        return [number for both in zip(a, b, strict=True) for number in both]
    return a + b if bits in (3, 4) else numbers


def of_masked_values(lane: int, d: int, bits: int) -> list[tuple[int, int]]:
    """Token in the tile and channel of a lane's codes of values that masks take: a word's halves have neighbouring
    tokens, their bytes tokens that are 8 apart."""
    r, c = lane // 4, lane % 4
    steps = 2 if bits == 2 else 1
    return [
        (8 * half + 2 * c + e, 16 * step + 8 * upper + r)
        for first in range(0, d // 16, steps)
        for e in (0, 1)
        for half in (0, 1)
        for step in range(first, first + steps)
        for upper in (0, 1)
    ]


@cache
def codes(t: int, d: int, side: str, bits: int, masked: bool = False) -> list[tuple[int, int]]:
    """Token and channel of every code of a head's page, tile by tile and one lane after the other."""
    found = []
    for first in range(0, t, 16):
        for lane in range(32):
            if masked and side == "value":
                of_lane = of_masked_values(lane, d, bits)
            else:
                of_lane = [x for step in range(d // 16) for x in of_step(operand(lane, step, d, side), bits)]
            found += [(first + token, channel) for token, channel in of_lane]
    return found


@cache
def fragments(t: int, d: int, side: str) -> list[tuple[int, int]]:
    """Token and channel of every number of a head's page as outliers are listed: all lanes of a step, then the next."""
    found = []
    for first in range(0, t, 16):
        for step in range(d // 16):
            for lane in range(32):
                found += [(first + token, channel) for token, channel in operand(lane, step, d, side)]
    return found


@cache
def words(d: int, bits: int) -> list[int]:
    """Which word of a tile, all of a lane's words before those of the next, stands where."""
    count = d * bits // 2  # 16 d codes of so many bits, in words of 32
    if d % 64:
        return list(range(count))
    each = count // 32
    load = {1: 1, 2: 2, 3: 1, 4: 4, 8: 4}[bits]
    found = []
    for first in range(0, each, load):
        for lane in range(32):
            found += [lane * each + first + k for k in range(load)]
    return found


@cache
def channels(d: int) -> list[int]:
    """Which channel's scale stands where, for keys whose channels have scales of their own."""
    found = []
    for first in range(0, d // 16, 2):
        for c in range(4):
            for half in (0, d // 2):
                for e in (0, 1):
                    found += [half + 8 * step + 2 * c + e for step in (first, first + 1)]
    return found


def of_tokens(ordered: NDArray[np.generic], t: int, d: int, side: str, bits: int, masked: bool) -> NDArray[np.generic]:
    """Codes [..., t * d] in the order of `codes` as [..., t, d]."""
    out = np.empty((*ordered.shape[:-1], t, d), ordered.dtype)
    for i, (token, channel) in enumerate(codes(t, d, side, bits, masked)):
        out[..., token, channel] = ordered[..., i]
    return out


def of_lanes(stored: NDArray[np.generic], d: int, bits: int) -> NDArray[np.generic]:
    """Words [..., tile, words] as they stand in a page, one lane's after the other's: [..., words of all tiles]."""
    out = np.empty_like(stored)
    for place, word in enumerate(words(d, bits)):
        out[..., word] = stored[..., place]
    return out.reshape(*stored.shape[:-2], -1)


def of_scales(stored: NDArray[np.generic], side: str, axis: str) -> NDArray[np.generic]:
    """Scales or zero points as a page stores them, with rows of tokens and columns of channels: [..., T, C]."""
    if side == "value" and axis == "token":
        return np.swapaxes(stored, -1, -2)
    if side == "key" and axis == "channel":
        out = np.empty_like(stored)
        for place, channel in enumerate(channels(stored.shape[-1])):
            out[..., channel] = stored[..., place]
        return out
    return stored


def listed(x: NDArray[np.generic], side: str) -> NDArray[np.generic]:
    """Numbers of a page [t, h_kv, d] by head in the order of `fragments`: [h_kv, t * d]."""
    t, h_kv, d = x.shape
    tokens, channels_of = zip(*fragments(t, d, side), strict=True)
    return np.stack([x[list(tokens), head, list(channels_of)] for head in range(h_kv)])


def band_places(side: str, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token and place in the band of each code of a tile: int [16 pairs of lanes, 32 codes] each, number by number.

    The lanes' rows of four codes: with 3 and 4 bits each has a half word, whose nibbles are codes; with 2 bits two of
    them share the nibbles of a half word, with 1 bit all four. Of two lanes the first has the low halves of words.
    """
    tokens, places = np.zeros((2, 16, 32), int)
    for pair in range(16):
        for code in range(32):
            if bits >= 3:
                row, nibble = divmod(code, 8)
            else:
                per_nibble = 4 // bits
                nibble, row = code // per_nibble % 8, code // (8 * per_nibble) * per_nibble + code % per_nibble
            lane, number = 2 * pair + nibble // 4, nibble % 4
            r, c, step, upper, half, e = lane // 4, lane % 4, row // 2, row % 2, number // 2, number % 2
            inner, outer = 8 * half + 2 * c + e, 16 * step + 8 * upper + r
            if side == "key":  # the operand's rows are tokens: of a band's channels 16 stand in each half of the head
                inner, outer = 8 * upper + r, 16 * half + 8 * step + 2 * c + e
            tokens[pair, code], places[pair, code] = inner, outer
    return tokens, places
