"""`dense` in torch against float64: ranges, nearest codes, and how far a number may be from its approximation.

Tolerances. u = 2^-24 and h = 2^-11 are the unit roundoffs of float32 and float16, 2^-25 half the least float16.
* A stored scale or zero point is a float16 rounding of a float32 sum, halved: off by h + u, relatively, or by 2^-25. A
  norm is the root of a sum of n squares: off by h + (n + 2) u / 2 + u.
* A normalized number is the rounded product of a rounded difference and a rounded reciprocal: off by 3u, relatively;
  an edge between two values of at most 1 is off by u. So a code must be the nearest but for 4u (1 + |a|).
* zero + scale * value is a rounded product and a rounded sum: off by 2u (|zero| + 2 |scale|).
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from artifacts import Dense, PageShape
from artifacts.errors import FormatError
from runtime.codes import unpack_page
from runtime.parts import dense
from tests.formats import DENSE_SIDES, cache_numbers, random_tensors
from tests.oracles import order
from tests.oracles.codebooks import rounded
from tests.oracles.dense import kivi_group, limits, middle_and_half, nearest, norm, vectors

U, H, LEAST = 2.0**-24, 2.0**-11, 2.0**-25
SMALL = PageShape(16, 2, 32, "key")


def tables_of(fmt, h_kv, d):
    return {name: torch.from_numpy(tensor) for name, tensor in random_tensors(fmt, h_kv, d, 0).items()}


def encode(part, x, outliers=None, tables=None, side="key"):
    """One page x [t, h_kv, d] through `dense.encode`: fields, approximation, zero point and scale of each number."""
    shape, tables = PageShape(*x.shape, side), tables or {}
    mask = None if outliers is None else torch.from_numpy(outliers)[None]
    fields, approximation = dense.encode(part, shape, torch.from_numpy(x)[None], mask, tables)
    stored = tables if part.scales == "bundle" else {name: field[0] for name, field in fields.items()}
    scale, zero = (
        of_each_number(part, stored[name].double().numpy(), x.shape, side) if name in stored else np.zeros(x.shape)
        for name in ("scale", "zero")
    )
    return fields, approximation[0].double().numpy(), zero, scale


def of_each_number(part, scales, page, side):
    """Scales [h, d] from the bundle, or as a page stores them, repeated to the page's [t, h_kv, d]."""
    if part.scales == "bundle":
        return np.broadcast_to(scales, page)
    scales = order.of_scales(scales, side, part.axis)
    scales = scales[:, None] if part.spans_heads else scales.transpose(1, 0, 2)
    for axis in range(3):
        scales = scales.repeat(page[axis] // scales.shape[axis], axis)
    return scales


def exact_zero_and_scale(part, x, outliers):
    of = vectors(*x.shape, part.axis, part.group)
    if part.normalize == "norm":
        return np.zeros(x.shape), norm(x, of, outliers)
    return middle_and_half(x, of, outliers)


def rounding(exact, numbers=0):
    """How far a stored scale or zero point may be from the exact one; a norm adds up so many squares first."""
    return (H + (numbers / 2 + 2) * U) * (1 + H) * np.abs(exact) + LEAST


@pytest.mark.parametrize("name, fmt, h_kv, d, side", DENSE_SIDES, ids=[side[0] for side in DENSE_SIDES])
def test_page_is_the_oracles(name, fmt, h_kv, d, side):
    part, tables = fmt.dense, tables_of(fmt, h_kv, d)
    x = cache_numbers((fmt.t, h_kv, d), 1)
    outliers = np.random.default_rng(2).random(x.shape) < 0.03
    fields, approximation, zero, scale = encode(part, x, outliers, tables, side)
    for field in part.page_fields(PageShape(*x.shape, side)):
        heads = (h_kv,) if field.scope == "head" else ()
        assert fields[field.name].shape == (1, *heads, *field.shape)
    if part.scales == "online":
        exact_zero, exact_scale = exact_zero_and_scale(part, x, outliers)
        assert (np.abs(zero - exact_zero) <= rounding(exact_zero)).all()
        assert (np.abs(scale - exact_scale) <= rounding(exact_scale, d)).all()
    some = tuple(np.random.default_rng(3).integers(0, size, 2000) for size in x.shape)
    x, approximation, zero, scale = (array[some].astype(np.float64) for array in (x, approximation, zero, scale))
    values = dense.codebook(part, d, tables, torch.device("cpu")).double().numpy()
    a = np.clip((x - zero) / np.where(scale > 0, scale, np.inf), -1e6, 1e6)
    chosen = (approximation - zero) / np.where(scale > 0, scale, np.inf)
    off = 4 * U * (1 + np.abs(a)) + 2 * U * (np.abs(zero) / np.where(scale > 0, scale, np.inf) + 2)
    assert (np.abs(chosen[:, None] - values).min(1) <= off).all()
    between = limits(values, {name: table.numpy() for name, table in tables.items()})
    # Signposts may be rounded to the same number: codes first ... last.
    first, last = nearest(chosen, values), len(values) - 1 - nearest(chosen, values[::-1])
    assert ((between[first] - 2 * off <= a) & (a <= between[last + 1] + 2 * off)).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_uniform_groups_are_kivis(axis, bits):
    """Nobody is further off than under KIVI's formula, but for the rounding of its zero point and scale to float16."""
    x = cache_numbers((32, 2, 64), 5)
    _, approximation, zero, scale = encode(Dense(bits, axis, 32), x)
    groups = vectors(*x.shape, axis, 32)
    for group in range(groups.max() + 1):
        numbers = x[groups == group].astype(np.float64)
        error = np.abs(numbers - kivi_group(numbers, bits))
        slack = rounding(zero[groups == group]) + rounding(scale[groups == group]) + 8 * U * np.abs(numbers).max()
        assert (np.abs(numbers - approximation[groups == group]) <= error + slack).all()


def widest_gap(values):
    """The furthest that a number in [-1, 1] can be from the values."""
    return max(np.diff(values).max(initial=0) / 2, values[0] + 1, 1 - values[-1])


@pytest.mark.parametrize("codebook", ["nuq", "nuq-qnorm"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_signposts_are_on_the_grid(bits, codebook):
    """Also where they lie beyond 1, and halfway between two of its numbers."""
    part, tables = Dense(bits, "token", 0, codebook), signposts(bits)
    tables["signposts"][0], tables["signposts"][-1] = -2.5 / 127, 1.25
    found = dense.codebook(part, 64, tables, torch.device("cpu")).numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rounded(tables["signposts"].numpy(), bits))
    if bits < 8:
        whole = found.astype(np.float64) * (63 if bits == 4 else 127)
        assert np.abs(whole - whole.round()).max() < 1e-5


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fitted_uniform_values(bits):
    tables = {"spacing": torch.tensor([-661, 81], dtype=torch.int16)}
    found = dense.codebook(Dense(bits, "token", 0, "uniform-fit"), 64, tables, torch.device("cpu"))
    expected = np.arange(-661, -661 + 81 * 2**bits, 81, dtype=np.float32) / np.float32(2047)
    np.testing.assert_array_equal(found.numpy(), expected, strict=True)


NUMBERS = st.floats(-(2.0**13), 2.0**13, width=32)  # the norm of 32 of them fits float16
PARTS = st.builds(
    lambda bits, codebook, kind: Dense(bits, *kind, "nf" if codebook == "uniform-fit" and bits in (1, 8) else codebook),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["uniform", "uniform-fit", "nf", "nuq"]),
    st.sampled_from([("token", 0), ("token", 16), ("channel", 2), ("channel", 4), ("head", 0)]),
)
NORM_PARTS = st.builds(
    lambda bits, codebook: Dense(bits, "head", 0, codebook, "online", "norm"),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["lloyd", "nf", "nuq"]),
)
PAGES = arrays(np.float32, (SMALL.t, SMALL.h_kv, SMALL.d), elements=NUMBERS, fill=NUMBERS)
MASKS = arrays(bool, (SMALL.t, SMALL.h_kv, SMALL.d))


def signposts(bits):
    """What fitted codebooks of so many bits may be."""
    values = np.sort(np.random.default_rng(bits).uniform(-1, 1, 1 << bits))
    spacing = torch.tensor([-1500, 3000 // (1 << bits)], dtype=torch.int16)
    return {"signposts": torch.from_numpy(values).float(), "spacing": spacing}


@given(PARTS | NORM_PARTS, PAGES, MASKS)
def test_error_is_at_most_half_the_widest_gap(part, x, outliers):
    tables = signposts(part.bits)
    _, approximation, zero, scale = encode(part, x, outliers, tables)
    exact_zero, exact_scale = exact_zero_and_scale(part, x, outliers)
    values = dense.codebook(part, x.shape[-1], tables, torch.device("cpu")).double().numpy()
    # Rounding moves the ends of the range by so much, and the arithmetic of a number by 8u of what it is made of.
    moved = np.abs(zero - exact_zero) + np.abs(scale - exact_scale)
    bound = scale * widest_gap(values) + moved + 8 * U * (np.abs(zero) + scale + np.abs(x))
    error = np.abs(x - approximation)
    assert np.isfinite(approximation).all()
    assert (error <= bound)[~outliers].all()
    assert (moved <= rounding(exact_zero) + rounding(exact_scale, 32)).all()


@given(
    PARTS.filter(lambda part: part.codebook in ("uniform", "nf")),
    st.floats(-100, 100),
    st.floats(1, 100),
    st.integers(0, 10**6),
)
def test_what_was_encoded_encodes_to_itself(part, middle, spread, seed):
    """Online scales reproduce themselves where the codebook ends at -1 and 1 (not signposts), the vector's extremes
    take these ends (they may miss them by the rounding of the scales, which half a gap of 8 bits outweighs up to
    |zero| = 2 scale), and zero - scale and zero + scale are exact (float16s within 2^12 of each other, in float32)."""
    x = (middle + spread * np.random.default_rng(seed).normal(size=(16, 2, 32))).astype(np.float32)
    _, once, zero, scale = encode(part, x)
    limit = 2 if part.bits == 8 else 16
    assume((np.abs(zero) <= limit * scale).all() and (scale <= 4096 * np.abs(zero)).all())
    _, twice, *_ = encode(part, once.astype(np.float32))
    np.testing.assert_array_equal(twice, once)


@pytest.mark.parametrize(
    "bits, codebook",
    [(bits, name) for name in ("uniform", "nf", "nuq") for bits in (1, 2, 3, 4, 8)]
    + [(bits, "uniform-fit") for bits in (2, 3, 4)],
)
def test_what_was_encoded_with_the_bundles_scales_encodes_to_itself(bits, codebook):
    """Where the rounding of zero + scale * value, normalized 3u (|zero| / scale + 2), is below half the least gap."""
    part, tables = Dense(bits, "channel", 0, codebook, "bundle"), signposts(bits)
    tables |= {"scale": torch.rand(2, 32) + 0.5, "zero": torch.randn(2, 32)}
    x = cache_numbers((16, 2, 32), 1)
    values = dense.codebook(part, x.shape[-1], tables, torch.device("cpu")).double().numpy()
    assert 3 * U * (tables["zero"].abs().max() / 0.5 + 2) < np.diff(np.unique(values)).min() / 2
    _, once, *_ = encode(part, x, None, tables)
    _, twice, *_ = encode(part, once.astype(np.float32), None, tables)
    np.testing.assert_array_equal(twice, once)


@pytest.mark.parametrize("number", [0.0, -3.7, 1e-30, 65504.0])
@pytest.mark.parametrize("kind", [("token", 0), ("token", 32), ("channel", 4), ("head", 0)])
def test_constant_vectors(kind, number):
    x = np.full((16, 2, 32), number, np.float32)
    fields, approximation, zero, scale = encode(Dense(3, *kind), x)
    assert (scale == 0).all()
    assert (approximation == zero).all()
    assert (unpack_page(fields["codes"], SMALL, 3, True) == 3).all()  # of 0, midway between values 3 and 4
    assert np.abs(approximation - x).max() <= rounding(number)


@pytest.mark.parametrize("kind", [("token", 0), ("token", 32), ("channel", 4), ("head", 0)])
def test_vectors_of_outliers_alone_are_zero(kind):
    x = cache_numbers((16, 2, 32), 1)
    _, approximation, *_ = encode(Dense(2, *kind), x, np.ones(x.shape, bool))
    assert (approximation == 0).all()


def test_channels_without_range_take_their_zero_point():
    part = Dense(4, "channel", 0, "uniform", "bundle")
    tables = {"scale": torch.zeros(1, 32), "zero": torch.full((1, 32), 0.3)}
    _, approximation, *_ = encode(part, cache_numbers((16, 1, 32), 1), None, tables)
    assert (approximation == np.float32(0.3)).all()


def test_ties_go_to_the_lower_value():
    part, tables = Dense(1, "channel", 0, "uniform", "bundle"), {"scale": torch.ones(1, 32), "zero": torch.zeros(1, 32)}
    _, approximation, *_ = encode(part, np.zeros((16, 1, 32), np.float32), None, tables)
    assert (approximation == -1).all()


@pytest.mark.parametrize("numbers, worst", [([65520, 65536], "65528"), ([-3e38, 3e38], "inf"), ([-7e4, 7e4], "70000")])
def test_scales_beyond_float16(numbers, worst):
    x = np.zeros((16, 1, 32), np.float32)
    x[2] = np.resize(np.array(numbers, np.float32), 32)
    with pytest.raises(FormatError, match=rf"a scale or zero point of {worst} does not fit float16 \(largest 65504\)"):
        encode(Dense(4, "token"), x)
