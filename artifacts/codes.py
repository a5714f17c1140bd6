"""Where the bits of a code lie: the one description of packed codes, for every floor.

Codes are packed in runs of 32. A run of `bits`-wide codes takes exactly `bits` little-endian 32-bit words, so 3-bit
codes cost 3 bits and not 3.2. For 1, 2, 4 and 8 bits the codes of a word follow each other from its low end. For 3 bits
each word takes eight whole codes, in the low three bits of its nibbles, and the nibbles' top bits hold the last eight
codes of the run: bit b of code 24 + i is the top bit of nibble i of word b. So a reader handles eight codes as if they
had 4 bits, and six instructions make such a word of the three words' top bits.
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


def field_bits(bits: int) -> int:
    """From a code of a word to the next. Raises FormatError for an unknown width."""
    check_bits(bits)
    return 4 if bits == 3 else bits


@cache
def pieces(bits: int) -> tuple[Piece, ...]:
    """The pieces of one run, ordered by code and then by bit. Raises FormatError for an unknown width."""
    stride = field_bits(bits)
    per_word = 32 // stride
    whole = [Piece(i, i // per_word, stride * (i % per_word), bits, 0) for i in range(per_word * bits)]
    spread = [(i, low) for i in range(RUN - len(whole)) for low in range(bits)]
    return (*whole, *(Piece(len(whole) + i, low, stride * i + bits, 1, low) for i, low in spread))


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
