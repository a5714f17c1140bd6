"""RoPE over a page as functions of the token, and which codebooks are whole numbers."""

import pytest
import torch

from artifacts import Dense
from runtime.parts.dense import codebook
from runtime.smooth import FAST_PAIRS, FUNCTIONS, TOKENS, WORST, decompose, functions, is_smooth
from runtime.units import byte_grid, fits_bytes


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return base ** -(torch.arange(0, dim, 2) / dim)


@pytest.mark.parametrize(("dim", "base"), [(128, 1e4), (128, 5e5), (64, 1e4)])
def test_functions_make_cosines_and_sines(dim, base):
    inv_freq = frequencies(dim, base)
    w, g = decompose(inv_freq)
    times = torch.arange(TOKENS) - (TOKENS - 1) / 2
    for pair in range(FAST_PAIRS, dim // 2):
        angle = times.double() * inv_freq[pair].double()
        for first, exact in ((0, angle.cos()), (1, angle.sin())):
            found = sum(w[:, m] * g[m, pair] for m in range(first, FUNCTIONS, 2))
            assert (found - exact).abs().max() <= WORST
    assert g.abs().max() <= 1 + 1e-12
    assert not g[:, :FAST_PAIRS].any()
    assert is_smooth(inv_freq)


def test_fast_pairs_are_not_smooth():
    assert not is_smooth(torch.linspace(1.0, 0.1, 64))
    assert not is_smooth(frequencies(32))  # no pair but the fastest


def test_what_kernels_read():
    inv_freq = frequencies(128)
    found, (w, g) = functions(inv_freq), decompose(inv_freq)
    torch.testing.assert_close(found[: w.numel()], w.flatten().float())
    torch.testing.assert_close(found[w.numel() :][: g.numel()], g.flatten().float())
    turns = found[w.numel() + g.numel() :].view(TOKENS, 64, 2)
    angles = -31.5 * inv_freq.double()
    torch.testing.assert_close(turns[0].double(), torch.stack([angles.cos(), angles.sin()], -1), atol=1e-7, rtol=0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["uniform", "nuq"])
def test_codebooks_are_whole_numbers_of_units(bits, name):
    part = Dense(bits, "token", codebook=name)
    drawn = torch.rand(1 << bits, generator=torch.Generator().manual_seed(bits)).mul(2).sub(1).sort().values
    values = codebook(part, 128, {"signposts": drawn}, torch.device("cpu")).double()
    unit, origin = byte_grid(part)
    numbers = (values - origin) / unit
    assert (numbers - numbers.round()).abs().max() < 1e-4
    assert numbers.round().abs().max() <= 127
    assert bits < 4 or numbers.round().min() >= 0


@pytest.mark.parametrize(
    "part", [None, Dense(8, "token"), Dense(2, "token", codebook="nf"), Dense(3, "token", codebook="nuq-qnorm")]
)
def test_other_codebooks_are_not(part):
    assert byte_grid(part) == (0.0, 0.0)


def test_numbers_beyond_one_do_not_fit_bytes():
    inside, outside = torch.tensor([-1.0, 0.5, 1.0]), torch.tensor([-1.1, 0.5])
    assert fits_bytes(frequencies(128), [inside])
    assert not fits_bytes(frequencies(128), [inside, outside])
    assert not fits_bytes(torch.linspace(1.0, 0.1, 64), [inside])
