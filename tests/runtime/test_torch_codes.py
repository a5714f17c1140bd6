"""Packing in torch is packing in numpy, bit for bit."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts.codes import BITS, RUN
from artifacts.codes import pack as reference
from runtime.codes import pack, unpack


@given(st.sampled_from(BITS), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_words_are_the_reference_and_unpack_inverts(bits, rows, runs, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 2, runs * RUN), np.uint8)
    words = pack(torch.from_numpy(codes), bits)
    assert words.dtype == torch.int32
    np.testing.assert_array_equal(words.numpy().view(np.uint32), reference(codes, bits))
    np.testing.assert_array_equal(unpack(words, bits).numpy(), codes)
