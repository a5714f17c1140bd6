"""Rotary embedding in torch against complex numbers in float64.

Tolerance: cos and sin of float32 angles are off by at most 1 ulp, which is u = 2^-24 below 1; the scaling, a product
and a sum round once each. So a rotated number is off by 4u (|a| + |b|) * scaling of its pair (a, b), to first order;
5u is used.
"""

import numpy as np
import pytest
import torch

from artifacts import Rope
from runtime.rope import Rotation
from tests.oracles.rope import rotate

U = 2.0**-24
POSITIONS = torch.tensor([0, 1, 2, 63, 64, 4095, 131071])
rotations = pytest.mark.parametrize(
    "rope",
    [
        Rope(dim, layout, scaling, "default")
        for dim in (64, 32, 2)
        for layout in ("half", "interleaved")
        for scaling in (1.0, 1.2)
    ],
    ids=str,
)


def rotation_of(rope):
    return Rotation(rope, (500000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def pair_size(x, rope):
    """|a| + |b| of the pair that each channel belongs to, 0 for channels that are not rotated."""
    size = torch.zeros_like(x)
    for a, b in rope.pairs():
        size[..., a] = size[..., b] = x[..., a].abs() + x[..., b].abs()
    return size.numpy()


@rotations
def test_rotate_and_unrotate_are_the_oracles(rope):
    rotation, keys = rotation_of(rope), numbers(3, POSITIONS.numel(), 64)
    frequencies = rotation.inv_freq.numpy()
    expected = rotate(keys.numpy(), POSITIONS.numpy(), frequencies, rope.layout, rope.scaling)
    bound = 5 * U * rope.scaling * pair_size(keys, rope)
    assert (np.abs(rotation.rotate(keys, POSITIONS).numpy() - expected) <= bound).all()
    expected = rotate(keys.numpy(), -POSITIONS.numpy(), frequencies, rope.layout, 1 / rope.scaling)
    # cos / scaling^2 instead of cos: one rounding of scaling^2 more, and one of the quotient.
    assert (np.abs(rotation.unrotate(keys, POSITIONS).numpy() - expected) <= (7 / 5) * bound / rope.scaling**2).all()


@rotations
def test_unrotate_inverts_rotate(rope):
    rotation, keys = rotation_of(rope), numbers(3, POSITIONS.numel(), 64)
    back = rotation.unrotate(rotation.rotate(keys, POSITIONS), POSITIONS)
    # Both directions are off by less than 7u of |a| + |b|, which a rotation makes at most 2 ** 0.5 larger.
    assert ((back - keys).abs().numpy() <= 7 * U * (1 + 2**0.5) * pair_size(keys, rope) * 2**0.5).all()


@rotations
def test_pull_back_is_the_transpose(rope):
    """<rotate(x), g> = <x, pull_back(g)>, scaling included: the inverse would be off by scaling^2."""
    rotation, x, g = (
        rotation_of(rope),
        numbers(POSITIONS.numel(), 64).double(),
        numbers(POSITIONS.numel(), 64).flip(0).double(),
    )
    there = (rotation.rotate(x, POSITIONS).double() * g).sum(-1)
    back = (x * rotation.pull_back(g, POSITIONS).double()).sum(-1)
    size = torch.from_numpy(pair_size(x, rope) * pair_size(g, rope)).sum(-1)
    assert ((there - back).abs() <= 2 * 5 * U * rope.scaling * size + 2 * U * (x * g).abs().sum(-1)).all()


@rotations
def test_other_channels_stay(rope):
    rotation, keys = rotation_of(rope), numbers(3, POSITIONS.numel(), 64)
    for turn in (rotation.rotate, rotation.unrotate, rotation.pull_back):
        assert torch.equal(turn(keys, POSITIONS)[..., rope.dim :], keys[..., rope.dim :])


def test_the_argument_stays_and_float32_comes_back():
    rotation, keys = rotation_of(Rope(64, "half", 1.0, "default")), numbers(7, 64).bfloat16()
    before = keys.clone()
    assert rotation.rotate(keys, POSITIONS).dtype == torch.float32
    assert torch.equal(keys, before)


def test_table_grows_and_keeps_its_rows():
    rotation = rotation_of(Rope(32, "half", 1.2, "yarn"))
    small = [x.clone() for x in rotation.table(3)]
    assert small[0].shape == (256, 16)
    assert rotation.table(256)[0] is rotation.table(1)[0]
    large = rotation.table(257)
    assert large[0].shape == (512, 16)
    assert rotation.table(5000)[0].shape == (5000, 16)
    ones = torch.tensor([1.0] * 16 + [0.0] * 16).expand(512, 32)  # which a rotation turns into cos and sin
    assert torch.equal(torch.cat(large, -1), rotation.rotate(ones, torch.arange(512)))
    for before, after in zip(small, large, strict=True):
        assert torch.equal(before, after[:256])
