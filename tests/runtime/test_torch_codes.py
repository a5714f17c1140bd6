"""Packing in torch is packing in numpy, bit for bit; pages are packed in the order of the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts.codes import BITS, RUN
from artifacts.codes import pack as reference
from artifacts.fields import PageShape
from runtime.codes import pack, pack_page, unpack, unpack_page
from tests.oracles import order
from tests.oracles.codes import pack_run


@given(st.sampled_from(BITS), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_words_are_the_reference_and_unpack_inverts(bits, rows, runs, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 2, runs * RUN), np.uint8)
    words = pack(torch.from_numpy(codes), bits)
    assert words.dtype == torch.int32
    np.testing.assert_array_equal(words.numpy().view(np.uint32), reference(codes, bits))
    np.testing.assert_array_equal(unpack(words, bits).numpy(), codes)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits, masked", [*((bits, False) for bits in BITS), (2, True), (3, True), (4, True)])
@pytest.mark.parametrize("t, d", [(16, 32), (32, 64), (48, 96), (64, 128), (16, 256)])
def test_pages(t, d, bits, masked, side):
    """Lane by lane and run by run after the oracles, then the words where lanes load them from."""
    shape = PageShape(t, 2, d, side)
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 2, t, d))
    words = pack_page(torch.from_numpy(codes), shape, bits, masked)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2, t // 16, d * bits // 2)
    ordered = [int(codes[2, 1, token, channel]) for token, channel in order.codes(t, d, side, bits, masked)]
    lanes = np.array([pack_run(ordered[i : i + RUN], bits) for i in range(0, t * d, RUN)]).reshape(t // 16, -1)
    np.testing.assert_array_equal(words[2, 1].numpy().view(np.uint32), lanes[:, order.words(d, bits)])
    np.testing.assert_array_equal(unpack_page(words, shape, bits, masked).numpy(), codes)
