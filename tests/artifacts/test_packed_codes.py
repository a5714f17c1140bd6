"""Packed codes: the layout of the docstring, bit for bit, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.codes import BITS, RUN, pack, pieces, unpack
from artifacts.errors import FormatError
from tests.oracles.codes import pack_run

WIDTHS = st.sampled_from(BITS)


@given(WIDTHS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_pack_follows_the_layout_and_unpack_inverts_it(bits, rows, runs, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, runs * RUN), np.uint8)
    words = pack(codes, bits)
    expected = [[pack_run(row[i : i + RUN], bits) for i in range(0, len(row), RUN)] for row in codes.tolist()]
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words, np.array(expected, np.uint32).reshape(rows, runs, bits))
    unpacked = unpack(words, bits)
    assert unpacked.dtype == np.uint8
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", BITS)
def test_pieces_use_every_bit_of_words_and_codes_once(bits):
    of_words = [(p.word, p.shift + i) for p in pieces(bits) for i in range(p.width)]
    of_codes = [(p.code, p.low + i) for p in pieces(bits) for i in range(p.width)]
    assert sorted(of_words) == [(word, i) for word in range(bits) for i in range(32)]
    assert of_codes == [(code, i) for code in range(RUN) for i in range(bits)]  # and in this order


@pytest.mark.parametrize("bits", [-1, 0, 5, 16])
@pytest.mark.parametrize(
    "use", [pieces, lambda bits: pack(np.zeros(RUN, np.uint8), bits), lambda bits: unpack(np.zeros((1, 5)), bits)]
)
def test_unknown_width(use, bits):
    with pytest.raises(FormatError, match=rf"bits={bits} is not supported: allowed are 1, 2, 3, 4, 8"):
        use(bits)


def test_codes_that_do_not_fill_a_run():
    with pytest.raises(FormatError, match="33 codes do not fill runs of 32: pad the last axis to a multiple of 32"):
        pack(np.zeros((2, 33), np.uint8), 4)


def test_code_too_wide():
    with pytest.raises(FormatError, match="code 8 does not fit 3 bits"):
        pack(np.full(32, 8, np.uint8), 3)


def test_words_of_another_width():
    with pytest.raises(FormatError, match="runs of 4 words do not hold 3-bit codes: the last axis must be 3"):
        unpack(np.zeros((2, 4), np.uint32), 3)
