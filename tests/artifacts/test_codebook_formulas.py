"""Codebooks against published tables, an oracle and their own symmetries."""

import numpy as np
import pytest

from artifacts.codebooks import lloyd_max, normal_float, uniform
from artifacts.codes import BITS
from artifacts.errors import FormatError
from tests.oracles import codebooks as oracle

# QLoRA, arXiv 2305.14314, appendix E
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
EPS = float(np.finfo(np.float32).eps)


def test_nf4_is_the_published_table():
    # Theirs was computed from probabilities in float32, off by eps/4 in [0.5, 1); a quantile x moves by sqrt(2 pi)
    # e^(x^2/2) times as much, 13.8 at the largest, 1.848, by which all are divided; then it is rounded to float32.
    np.testing.assert_allclose(normal_float(4), NF4, rtol=0, atol=2 * EPS / 4 * 13.8 / 1.848 + EPS)


@pytest.mark.parametrize("bits", [b for b in BITS if b > 1])
def test_normal_float_is_the_authors_formula(bits):
    np.testing.assert_allclose(normal_float(bits), oracle.normal_float(bits), rtol=EPS, atol=0)


@pytest.mark.parametrize("bits", [b for b in BITS if b > 1])
def test_normal_float_has_one_zero_and_one_more_value_above_than_below(bits):
    values = normal_float(bits)
    half = 1 << (bits - 1)
    assert [(values < 0).sum(), (values == 0).sum(), (values > 0).sum()] == [half - 1, 1, half]


@pytest.mark.parametrize("bits", BITS)
def test_uniform_is_symmetric_and_equally_spaced(bits):
    values = uniform(bits)
    np.testing.assert_array_equal(values, -values[::-1])
    expected = [-1 + 2 * code / ((1 << bits) - 1) for code in range(1 << bits)]
    np.testing.assert_allclose(values, expected, rtol=0, atol=EPS / 2)


@pytest.mark.parametrize("codebook", [uniform, normal_float])
@pytest.mark.parametrize("bits", BITS)
def test_codebooks_span_the_range_in_strictly_ascending_order(codebook, bits):
    values = codebook(bits)
    assert values.dtype == np.float32
    assert values.shape == (1 << bits,)
    assert (values[0], values[-1]) == (-1, 1)
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("codebook", [uniform, normal_float])
def test_unknown_width(codebook):
    with pytest.raises(FormatError, match="bits=5 is not supported"):
        codebook(5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_lloyd_max_is_a_fixed_point_of_the_coordinates_law(bits: int, d: int) -> None:
    """Every value is the mean of its cell under the density (1 - u^2)^((d-3)/2), here by scipy's quadrature."""
    from scipy.integrate import quad

    values = lloyd_max(bits, d).astype(np.float64)
    assert np.array_equal(values, -values[::-1])
    edges = np.concatenate([[-1.0], 0.5 * (values[:-1] + values[1:]), [1.0]])
    law = lambda u: (1 - u * u) ** ((d - 3) / 2)  # noqa: E731
    for i in range(0, values.size, max(1, values.size // 4)):
        mass = quad(law, edges[i], edges[i + 1], epsabs=0)[0]
        mean = quad(lambda u: u * law(u), edges[i], edges[i + 1], epsabs=0)[0] / mass
        # The grid of 2^16 points over 16 standard deviations places an edge to 1.2e-4 standard deviations.
        assert abs(values[i] - mean) < 1e-3 / np.sqrt(d)


def test_lloyd_max_of_two_dimensions_is_refused() -> None:
    with pytest.raises(FormatError, match="at least 4 dimensions, not 2"):
        lloyd_max(2, 2)
