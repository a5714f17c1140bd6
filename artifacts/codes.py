"""Where the bits of a code lie: the one description of packed codes, for every floor.

Codes are packed in runs of 32. A run of `bits`-wide codes takes exactly `bits` little-endian 32-bit words, so 3-bit
codes cost 3 bits and not 3.2. For 1, 2, 4 and 8 bits the codes of a word follow each other from its low end. For 3 bits
each word takes ten whole codes (30 bits), and the two bits left at the top of the three words hold the last two codes
of the run, code 30 before code 31, each from its low bit up: a reader handles ten codes of a word with constant shifts
and joins two words only for these two.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import FormatError

RUN = 32  # codes per run
BITS = (1, 2, 3, 4, 8)  # widths that have a layout


@dataclass(frozen=True)
class Piece:
    """`width` bits of code number `code` of a run: bits `low...` of the code, at `shift...` of word number `word`."""

    code: int
    word: int
    shift: int
    width: int
    low: int


def check_bits(bits: int) -> None:
    """Raises FormatError unless `bits` has a layout."""
    if bits not in BITS:
        raise FormatError(f"bits={bits} is not supported: allowed are {', '.join(map(str, BITS))}")


@cache
def pieces(bits: int) -> tuple[Piece, ...]:
    """The pieces of one run, ordered by code and then by bit. Raises FormatError for an unknown width."""
    check_bits(bits)
    per_word = RUN // bits if RUN % bits == 0 else 10
    whole = [Piece(i, i // per_word, bits * (i % per_word), bits, 0) for i in range(per_word * bits)]
    if bits != 3:
        return tuple(whole)
    return (*whole, Piece(30, 0, 30, 2, 0), Piece(30, 1, 30, 1, 2), Piece(31, 1, 31, 1, 0), Piece(31, 2, 30, 2, 1))


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Packs codes [..., c] into words [..., c / 32, bits]; c must be a multiple of 32, every code below 2**bits."""
    check_bits(bits)
    if codes.shape[-1] % RUN:
        raise FormatError(
            f"{codes.shape[-1]} codes do not fill runs of {RUN}: pad the last axis to a multiple of {RUN}"
        )
    if codes.size and int(codes.max()) >= 1 << bits:
        raise FormatError(f"code {int(codes.max())} does not fit {bits} bits")
    runs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // RUN, RUN).astype(np.uint32)
    words = np.zeros((*runs.shape[:-1], bits), np.uint32)
    for p in pieces(bits):
        words[..., p.word] |= ((runs[..., p.code] >> np.uint32(p.low)) & np.uint32((1 << p.width) - 1)) << np.uint32(
            p.shift
        )
    return words


def unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Inverse of `pack`: words [..., r, bits] to codes [..., 32 r]."""
    check_bits(bits)
    if words.shape[-1] != bits:
        raise FormatError(f"runs of {words.shape[-1]} words do not hold {bits}-bit codes: the last axis must be {bits}")
    runs = np.zeros((*words.shape[:-1], RUN), np.uint8)
    for p in pieces(bits):
        field = (words[..., p.word] >> np.uint32(p.shift)) & np.uint32((1 << p.width) - 1)
        runs[..., p.code] |= (field << np.uint32(p.low)).astype(np.uint8)
    return runs.reshape(*words.shape[:-2], words.shape[-2] * RUN)
