"""Matrices of eight bits: what rounding does to a number, and that bundles hold nothing else."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Dense, Format, FormatError, LayerFormat, Rotate, Sketch, load
from artifacts.matrices import eight_bits
from tests.formats import random_bundle

TINY = 2.0**-14  # the smallest normal float16


@given(st.lists(st.floats(-65000, 65000, width=32), min_size=1, max_size=20))
def test_the_nearest_number_that_both_types_hold(numbers):
    x = np.array(numbers, np.float32)
    found = eight_bits(x)
    assert found.dtype == np.float32
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(torch.from_numpy(found).to(dtype).float(), torch.from_numpy(found))
    assert np.array_equal(eight_bits(found), found)
    off = np.abs(found.astype(np.float64) - x)
    assert (off <= np.maximum(np.abs(x) * 2.0**-8, 2.0**-25 + TINY * 2.0**-8)).all()


def test_ties_go_to_even():
    assert eight_bits(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [1.0, 1 + 2.0**-6]


def test_shape_and_strides():
    x = np.arange(24.0).reshape(4, 6).T
    assert np.array_equal(eight_bits(x), x)


@pytest.mark.parametrize("number", [65408.0, -1e30, np.inf, np.nan])
def test_what_float16_cannot_hold(number):
    assert eight_bits(np.array([65407.0])) == 65280
    with pytest.raises(FormatError, match="beyond float16 in eight bits: below 65408 is allowed"):
        eight_bits(np.array([1.0, number]))


def bundle():
    rotated = Format(64, Dense(3, "head", codebook="lloyd", normalize="norm"), rotate=Rotate("haar"))
    sketched = Format(64, sketch=Sketch(96, "orthogonal", 4, 32))
    values = Format(64, Dense(2, "token", 32))
    return random_bundle([LayerFormat(rotated, rotated), LayerFormat(sketched, values)], 2, 2, 64)


MATRICES = ("layers.0.key.rotation", "layers.0.value.rotation", "layers.1.key.sketch", "layers.1.key.outlier_sketch")


def test_a_bundle_takes_its_matrices_in_eight_bits(tmp_path):
    """Also one that was calibrated before they had: its file has other numbers."""
    made = bundle()
    assert made.tensors is dataclasses.replace(made).tensors  # nothing to round
    finer = {name: (made.tensors[name] * np.float32(1.001)).astype(np.float32) for name in MATRICES}
    taken = dataclasses.replace(made, tensors={**made.tensors, **finer})
    for name in MATRICES:
        assert np.array_equal(taken.tensors[name], eight_bits(finer[name]))
        assert not np.array_equal(taken.tensors[name], finer[name])
    object.__setattr__(taken, "tensors", {**made.tensors, **finer})
    saved = load(taken.save(tmp_path / "b"))
    for name in MATRICES:
        assert np.array_equal(saved.tensors[name], eight_bits(finer[name]))


def test_a_matrix_beyond_float16_is_named():
    made = bundle()
    large = made.tensors[MATRICES[2]] * np.float32(1e5)
    with pytest.raises(FormatError, match=r"tensor layers\.1\.key\.sketch: a matrix holds .* beyond float16"):
        dataclasses.replace(made, tensors={**made.tensors, MATRICES[2]: large})
