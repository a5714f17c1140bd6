"""What turns keys by their place in a page, against rotating them in float64."""

from typing import Literal

import pytest
import torch

from artifacts import Dense, Format, LowRank, PageGeometry, Rope, Sparse, Window
from runtime.rope import Rotation
from runtime.turns import turns

H_KV, D = 3, 128
CHANNELS = Dense(2, "channel", scales="bundle", codebook="nuq")


def key_format(t: int = 64, **parts) -> Format:
    return Format(t, parts.pop("dense", CHANNELS), window=Window(sinks=1), domain="pre_rope", **parts)


def rope(dim: int, layout: Literal["half", "interleaved"]) -> Rope:
    return Rope(dim, layout, 1.0, "default")


def made(fmt: Format, rotary: Rope, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, Rotation]:
    """[heads, 3, t, d] in plain order."""
    inv_freq = 10000.0 ** -(torch.arange(0, rotary.dim, 2) / rotary.dim)
    rotation = Rotation(rotary, inv_freq)
    key = PageGeometry.of(fmt, H_KV, D, "key")
    found = turns(key, {"scale": scale, "zero": zero}, rotation, torch.device("cpu"))
    heads, tiles = found.shape[:2]
    assert found.shape == (heads, tiles, D // 16, 3, 32, 4, 2)
    assert found.dtype == torch.float16
    plain = torch.empty(heads, 3, tiles * 16, D)
    for step in range(D // 16):
        for lane in range(32):
            for register in range(4):  # tokens r and r + 8, then channels of the head's second half
                token, channel = lane // 4 + register % 2 * 8, register // 2 * D // 2 + 8 * step + lane % 4 * 2
                plain[:, :, token::16, channel : channel + 2] = (
                    found[:, :, step, :, lane, register].permute(0, 2, 1, 3).float()
                )
    return plain, rotation


def turned(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """x [..., t, d] by positions 0 ... t - 1, float64."""
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rotation.inv_freq.double()
    out = x.double().clone()
    a, b = x[..., rotation.first].double(), x[..., rotation.second].double()
    out[..., rotation.first], out[..., rotation.second] = (
        a * angles.cos() - b * angles.sin(),
        b * angles.cos() + a * angles.sin(),
    )
    return out


@pytest.mark.parametrize("t", [16, 64, 128])
@pytest.mark.parametrize("rotary", [rope(D, "half"), rope(D, "interleaved"), rope(32, "half"), rope(32, "interleaved")])
def test_numbers_times_the_operands_are_turned_and_scaled(rotary, t):
    torch.manual_seed(t)
    scale, zero = torch.rand(H_KV, D) * 4 + 0.01, torch.randn(H_KV, D) * 3
    operands, rotation = made(key_format(t), rotary, scale, zero)
    own, other, zeros = operands.unbind(1)
    code = torch.randn(H_KV, own.shape[1], D)  # numbers of codes, times SPREAD's inverse
    partner = torch.arange(D)
    partner[rotation.first], partner[rotation.second] = rotation.second, rotation.first
    spread = 128 / 127  # of nuq's codes, whose numbers are divided by it
    expected = turned(code * scale[:, None] * spread, rotation)
    got = own.double() * code.double() + other.double() * code[..., partner].double()
    # Both operands are rounded to 11 bits.
    most = (code.abs() * scale[:, None] + (code * scale[:, None])[..., partner].abs()) * spread
    assert ((got - expected).abs() <= 2.0**-11 * most + 1e-6).all()
    both = zero.abs() + zero[:, partner].abs()
    assert ((zeros - turned(zero[:, None].expand_as(code), rotation)).abs() <= 2.0**-10 * both[:, None]).all()
    assert own.shape[1] == min(t, 64)


def test_scales_that_tokens_have_are_not_in_it():
    ones, zeros = torch.full((H_KV, D), 7.0), torch.full((H_KV, D), 5.0)
    by_token = key_format(dense=Dense(2, "token", 32))
    for fmt in (by_token, key_format(lowrank=LowRank(2, 1)), key_format(16, sparse=Sparse(0.01, "channel", "bundle"))):
        own, _, zero = made(fmt, rope(D, "half"), ones, zeros)[0].unbind(1)
        assert len(own) == 1
        assert own.abs().max() == 1
        assert (zero == 0).all()


def test_outliers_are_divided_by_sizes_of_at_least_one():
    """Of a scale its power of two is left to codes; of next to nothing all of it."""
    scale = torch.tensor([3.0, 1.0, 0.75, 2.0**-14 * 1.5, 2.0**-15, 0.0]).repeat(22)[:D].repeat(H_KV, 1)
    fmt = key_format(sparse=Sparse(0.01, "channel", "bundle"))
    own = made(fmt, rope(D, "half"), scale * 127 / 128, 0 * scale)[0][:, 0]
    expected = torch.tensor([3.0, 1.0, 1.5, 1.5, 1.0, 1.0]).repeat(22)[:D]
    assert torch.allclose(own[:, 0], expected.expand(H_KV, D), rtol=2.0**-11)  # of token 0, whose angles are 0
