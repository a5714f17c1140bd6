"""RoPE over a page as functions of the token, and which codebooks are whole numbers."""

import pytest
import torch

from artifacts import Dense, Format, Sketch
from runtime.parts.dense import codebook
from runtime.smooth import FAST_PAIRS, FUNCTIONS, TOKENS, WARPS, WORST, decompose, functions, is_smooth
from runtime.units import byte_grid, evenly_spaced, fits_bytes


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
    assert not is_smooth(frequencies(80))  # which lanes cannot share out


def test_angles_that_sines_are_not_exact_for():
    inv_freq = frequencies(128)
    for fastest, found in ((9.8, True), (9.9, False)):
        inv_freq[0] = fastest  # one of those that are turned one by one
        assert is_smooth(inv_freq) == found


def test_what_kernels_read():
    """By a second way: number by number, as `cuda/bytes_layout.cuh` says where it lies."""
    inv_freq = frequencies(64)
    pairs, (w, g), f = 32, decompose(inv_freq), inv_freq.double()
    found = functions(inv_freq).numpy().tobytes()

    def turn(angle):
        return [angle.cos().item(), angle.sin().item()]

    numbers = [
        w[16 * tile + lane // 4 + 8 * upper, 2 * (lane % 4) + e].item()
        for tile in range(4)
        for lane in range(32)
        for upper in range(2)
        for e in range(2)
    ]
    numbers += g.flatten().tolist()
    for odd in range(2):
        for half in range(2):
            for pair in range(FAST_PAIRS):
                numbers += turn((16 * (2 * half + odd) - 31.5) * f[pair])
    for token in range(16):
        for pair in range(FAST_PAIRS):
            numbers += turn(token * f[pair])
    numbers += f.tolist()
    floats = torch.frombuffer(bytearray(found[: 4 * len(numbers)]), dtype=torch.float32)
    torch.testing.assert_close(floats, torch.tensor(numbers), atol=1e-7, rtol=1e-6)
    pages = [number for page in range(1, WARPS + 1) for pair in range(pairs) for number in turn(64 * page * f[pair])]
    turns = torch.frombuffer(bytearray(found[-4 * len(pages) :]), dtype=torch.float32)
    torch.testing.assert_close(turns, torch.tensor(pages), atol=1e-7, rtol=1e-6)
    assert len(found) == 4 * (len(numbers) + len(pages))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebooks_are_whole_numbers_of_units(bits):
    part = Dense(bits, "token", codebook="nuq")
    drawn = torch.rand(1 << bits, generator=torch.Generator().manual_seed(bits)).mul(2).sub(1).sort().values
    values = codebook(part, 128, {"signposts": drawn}, torch.device("cpu")).double()
    unit, origin = byte_grid(Format(64, part))
    numbers = (values - origin) / unit
    assert (numbers - numbers.round()).abs().max() < 1e-4
    assert numbers.round().abs().max() <= 127
    assert bits < 4 or numbers.round().min() >= 0


@pytest.mark.parametrize(
    "part", [None, Dense(8, "token"), Dense(2, "token", codebook="nf"), Dense(3, "token", codebook="nuq-qnorm")]
)
def test_other_codebooks_are_not(part):
    assert not evenly_spaced(Format(64, part, sketch=None if part else Sketch(64)))
    assert byte_grid(Format(64, part, sketch=None if part else Sketch(64))) == (0.0, 0.0)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("name", ["uniform", "uniform-fit"])
def test_evenly_spaced_codebooks(bits, name):
    part = Dense(bits, "token", codebook=name)
    values = codebook(
        part, 128, {"spacing": torch.tensor([-1450, 181], dtype=torch.int16)}, torch.device("cpu")
    ).double()
    assert evenly_spaced(Format(64, part))
    assert byte_grid(Format(64, part)) == (0.0, 0.0)
    unit = values[1] - values[0]  # as kernels find it: codes of up to 15 times that, each value off by 2^-24
    torch.testing.assert_close(values[0] + unit * torch.arange(1 << bits), values, atol=32 * 2**-24, rtol=0)


def test_numbers_beyond_one_do_not_fit_bytes():
    inside, outside = torch.tensor([-1.0, 0.5, 1.0]), torch.tensor([-1.1, 0.5])
    assert fits_bytes(frequencies(128), [inside])
    assert not fits_bytes(frequencies(128), [inside, outside])
    assert not fits_bytes(torch.linspace(1.0, 0.1, 64), [inside])
