"""Whole pages: encoding, decoding, and the bytes between them. Tolerances as in test_dense_part.py."""

import numpy as np
import pytest
import torch

from artifacts import Dense, Format, PageGeometry, Sparse
from artifacts.codes import unpack
from artifacts.parts.sparse import BLOCK, block_bits
from runtime.codec import Codec, PagePool
from runtime.parts import sparse
from runtime.parts.dense import codebook
from tests.formats import DENSE_SIDES, SIDES, bare, cache_numbers, plain, random_tensors
from tests.oracles import order
from tests.oracles.codebooks import evenly_spaced, rounded
from tests.oracles.dense import limits

U, H, LEAST = 2.0**-24, 2.0**-11, 2.0**-25
all_sides = pytest.mark.parametrize("name, fmt, h_kv, d, side", SIDES, ids=[side[0] for side in SIDES])
dense_sides = pytest.mark.parametrize("name, fmt, h_kv, d, side", DENSE_SIDES, ids=[side[0] for side in DENSE_SIDES])


def codec_of(fmt, h_kv, d, side="key"):
    return Codec(PageGeometry.of(fmt, h_kv, d, side), random_tensors(fmt, h_kv, d, 0))


def pages_of(fmt, h_kv, d, p=2):
    return torch.from_numpy(cache_numbers((p, fmt.t, h_kv, d), 1))


def poisoned(pool):
    """A pool whose every byte is 0xFF: codes of all ones, NaN in float16, absurd counts."""
    pool.heads.fill_(0xFF)
    pool.records.fill_(0xFF)
    return pool


def poison_unused_slots(pool, page):
    """Overwrites what a page's outlier lists do not use."""
    if pool.geometry.format.sparse:
        used = int(pool.field("start")[page, -1])
        pool.field("index")[page, used:] = 255
        pool.field("correction")[page, used:] = torch.nan


def from_bytes(pool, page, tables):
    """A second decoder: numpy, from the raw bytes at the geometry's offsets. float32 [t, h_kv, d]."""
    fmt, shape = pool.geometry.format, pool.geometry.shape
    stores = {"head": pool.heads[page].numpy(), "layer": pool.records[page].numpy()}

    def field(name):
        placed = pool.geometry.fields[name]
        raw = stores[placed.field.scope][..., placed.offset : placed.offset + placed.field.nbytes]
        lead = (shape.h_kv,) if placed.field.scope == "head" else ()
        return np.frombuffer(raw.tobytes(), np.dtype(placed.field.dtype).newbyteorder("<")).reshape(
            *lead, *placed.field.shape
        )

    def scales_of(name):
        return order.of_scales(field(name).astype(np.float32), shape.side, fmt.dense.axis)

    if "signposts" in tables:
        values = rounded(tables["signposts"], fmt.dense.bits)
    elif "spacing" in tables:
        values = evenly_spaced(tables["spacing"], fmt.dense.bits)
    else:
        values = codebook(fmt.dense, shape.d, {}, torch.device("cpu")).numpy()
    words = order.of_lanes(field("codes"), shape.d, fmt.dense.bits)
    codes = unpack(words.reshape(shape.h_kv, -1, fmt.dense.bits), fmt.dense.bits)
    even = fmt.dense.codebook in ("uniform", "uniform-fit") and fmt.dense.bits in (2, 3, 4) and fmt.sparse is None
    numbers = values[order.of_tokens(codes, shape.t, shape.d, shape.side, fmt.dense.bits, even)]  # [h_kv, t, d]
    if fmt.dense.scales == "bundle":
        scale, zero = (tables[name][:, None] for name in ("scale", "zero"))
    else:
        scale = scales_of("scale")
        zero = scales_of("zero") if "zero" in pool.geometry.fields else np.zeros_like(scale)
        if scale.ndim == 2:
            scale, zero = scale[None], zero[None]
        scale, zero = (x.repeat(shape.t // x.shape[1], 1).repeat(shape.d // x.shape[2], 2) for x in (scale, zero))
    out = zero + scale * numbers
    if fmt.sparse:
        counts = np.diff(field("start").astype(int))
        places = order.fragments(shape.t, shape.d, shape.side)
        for slot, tile in enumerate(np.repeat(np.arange(counts.size), counts)):
            block = int(field("correction")[slot].view(np.uint16)) % (1 << block_bits(shape.d))
            head, place = divmod(
                (tile * (shape.d // 16) + block) * BLOCK + int(field("index")[slot]), shape.t * shape.d
            )
            out[(head, *places[place])] += np.float32(field("correction")[slot])
    return out.transpose(1, 0, 2)


@all_sides
def test_decoding_gives_what_encoding_said(name, fmt, h_kv, d, side):
    codec = codec_of(fmt, h_kv, d, side)
    fields, approximation = codec.encode(pages_of(fmt, h_kv, d))
    assert approximation.dtype == torch.float32
    assert torch.equal(codec.decode(fields), approximation)


@dense_sides
def test_bytes_of_a_page(name, fmt, h_kv, d, side):
    """Written between poisoned pages, the bytes alone give the same numbers; no other byte of the pool is touched."""
    fmt = plain(fmt)
    codec = codec_of(fmt, h_kv, d, side)
    fields, approximation = codec.encode(pages_of(fmt, h_kv, d))
    pool = poisoned(PagePool(codec.geometry, 5))
    ids = torch.tensor([3, 1])
    pool.write(ids, fields)
    for page in ids:
        poison_unused_slots(pool, page)
    for i, page in enumerate(ids.tolist()):
        np.testing.assert_array_equal(from_bytes(pool, page, random_tensors(fmt, h_kv, d, 0)), approximation[i].numpy())
    assert torch.equal(codec.decode(pool.read(ids)), approximation)
    assert (pool.heads[[0, 2, 4]] == 0xFF).all()
    assert (pool.records[[0, 2, 4]] == 0xFF).all()
    grown = pool.grown(7)
    assert torch.equal(codec.decode(grown.read(ids)), approximation)
    assert (grown.capacity, pool.nbytes) == (7, 5 * codec.geometry.page_bytes)


@dense_sides
def test_error_of_every_number(name, fmt, h_kv, d, side):
    """An outlier is off by the rounding of its correction, whose last bits say where it stands, other numbers by as
    much as a number can be from the value of its code: half the widest gap of the codebook, or more with Q-Norm.

    Inside the range, that is: past its end (rounding of online scales, the bundle's ranges on other text) by the rest.
    """
    fmt = plain(fmt)
    codec = codec_of(fmt, h_kv, d, side)
    x = pages_of(fmt, h_kv, d)
    fields, approximation = codec.encode(x)
    dense_alone, outliers = approximation, torch.zeros_like(x, dtype=torch.bool)
    if fmt.sparse:
        outliers = sparse.select(fmt.sparse, codec.geometry.shape, x, codec.tables)
        dense_alone = codec.decode(fields | {"correction": torch.zeros_like(fields["correction"])})
    error, correction = (x - approximation).abs().double(), (x - dense_alone).abs().double()
    step = 1 + 2 ** block_bits(d)  # half of its last places, and half of one
    assert (error <= step * (H * correction + LEAST) + 4 * U * (x.abs() + correction))[outliers].all()
    values = codebook(fmt.dense, d, codec.tables, x.device).double().numpy()
    low, high = dense_range(codec, fields)
    ends = limits(values, random_tensors(fmt, h_kv, d, 0)).clip(-1, 1)
    gap = max(np.abs(values - ends[:-1]).max(), np.abs(values - ends[1:]).max()) * (high - low) / 2
    past = torch.maximum(low - x, x - high).clamp_min(0)
    assert (error <= gap + past + 8 * U * (x.abs() + low.abs() + high.abs()))[~outliers].all()


def dense_range(codec, fields):
    """Where the numbers of pages with these fields can lie without outliers: lowest and highest, [p, t, h_kv, d]."""
    t, h_kv, d = codec.geometry.shape.t, codec.geometry.shape.h_kv, codec.geometry.shape.d
    if codec.geometry.format.dense.scales == "bundle":
        zero, scale = codec.tables["zero"], codec.tables["scale"]
    else:
        side, axis = codec.geometry.shape.side, codec.geometry.format.dense.axis
        scale = torch.from_numpy(order.of_scales(fields["scale"].double().numpy(), side, axis))
        zero = torch.zeros_like(scale)
        if "zero" in fields:
            zero = torch.from_numpy(order.of_scales(fields["zero"].double().numpy(), side, axis))
        zero, scale = (x[:, None] if x.dim() == 3 else x for x in (zero, scale))  # [p, h or 1, T, C]
        zero, scale = (
            x.repeat_interleave(t // x.shape[2], 2).repeat_interleave(d // x.shape[3], 3) for x in (zero, scale)
        )
        zero, scale = (x.expand(-1, h_kv, -1, -1).transpose(1, 2) for x in (zero, scale))
    return zero - scale, zero + scale


TRANSFORMED = [side for side in SIDES if side[1] != bare(side[1])]


@pytest.mark.parametrize("name, fmt, h_kv, d, side", TRANSFORMED, ids=[side[0] for side in TRANSFORMED])
def test_transforms_are_done_and_undone(name, fmt, h_kv, d, side):
    """(x - mean) P is encoded, y P^-1 + mean comes back, off by (d + 2) u of the absolute terms that it is made of, and
    two more where P is not orthogonal and its inverse is rounded."""
    codec, x, tables = codec_of(fmt, h_kv, d, side), pages_of(fmt, h_kv, d), random_tensors(fmt, h_kv, d, 0)
    inner = Codec(PageGeometry.of(bare(fmt), h_kv, d, side), tables)
    mean, rotation = (
        tables.get(n, np.float32(v)).astype(np.float64) for n, v in (("mean", 0), ("rotation", np.eye(d)))
    )
    fields, approximation = codec.encode(x)
    y = inner.decode(fields).double().numpy()
    undo = np.linalg.inv(rotation) if rotation.ndim == 3 else rotation.T
    back, size = times(y, undo) + mean, times(np.abs(y), np.abs(undo)) + np.abs(mean)
    rounded = 2 if rotation.ndim == 3 else 0  # the inverse's last bit, and the float64 solvers' own
    assert (np.abs(approximation.numpy() - back) <= (d + 2 + rounded) * U * size).all()
    there = torch.from_numpy(times(x.numpy() - mean, rotation)).float()
    # A code near an edge may fall to either side, so not every number agrees; but how well they are met does.
    errors = [(there.numpy() - numbers).std() for numbers in (y, inner.encode(there)[1].numpy())]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def times(x, matrix):
    """x [..., h_kv, d] times a matrix, or one for each head."""
    return x @ matrix if matrix.ndim == 2 else np.einsum("...hc,hcd->...hd", x, matrix)


PLAIN = Format(16, Dense(4, "token"), Sparse(0.05, "token", "online"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(bad):
    x = pages_of(PLAIN, 1, 32)
    x[1, 3, 0, 7] = bad
    with pytest.raises(ValueError, match="keys or values hold NaN or infinity: check the model's dtype and weights"):
        codec_of(PLAIN, 1, 32).encode(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_count_as_float32(dtype):
    codec, x = codec_of(PLAIN, 1, 32), pages_of(PLAIN, 1, 32).to(dtype)
    assert torch.equal(codec.encode(x)[1], codec.encode(x.float())[1])


def test_pages_do_not_depend_on_their_neighbours():
    codec, x = codec_of(PLAIN, 2, 32), pages_of(PLAIN, 2, 32, p=3)
    assert torch.equal(codec.encode(x)[1][1:2], codec.encode(x[1:2])[1])


@pytest.mark.parametrize("number", [0.0, 3.25, -65504.0])
def test_constant_pages(number):
    """Zero range everywhere: every number is the zero point, exact where float16 is; a correction of nothing has the
    bits of its block, 0 or 1."""
    found = codec_of(PLAIN, 2, 32).encode(torch.full((1, 16, 2, 32), number))[1]
    assert ((found - number).abs() <= 2.0**-24 + U * abs(number)).all()
