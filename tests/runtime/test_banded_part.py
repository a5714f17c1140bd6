"""`banded`: codes of a width by band, against a reader of the bytes of its own and against float64."""

import dataclasses

import numpy as np
import pytest
import torch

from artifacts import Banded, Dense, Format, FormatError, LayerFormat, PageGeometry, PageShape, Rotate
from artifacts.codes import unpack
from artifacts.order import TILE, band_order
from artifacts.parts.banded import BAND
from runtime import pack_codebook
from runtime.codec import Codec, PagePool
from runtime.parts import banded, rotate
from tests.formats import cache_numbers, random_bundle, random_tensors
from tests.oracles.bins import check_bins
from tests.oracles.codebooks import rounded
from tests.oracles.order import band_places

U = 2.0**-24
H, T = 3, 32
CASES = [(1.5, 4, 64), (2.25, 4, 128), (0.75, 2, 128), (2.5, 3, 64), (4.0, 4, 256), (2.5, 4, 256)]
cases = pytest.mark.parametrize("bits, most, d", CASES)


def codec_of(bits: float, most: int, d: int, side: str = "key") -> Codec:
    fmt = Format(T, banded=Banded(bits, most))
    return Codec(PageGeometry.of(fmt, H, d, side), random_tensors(fmt, H, d, 3))


def pages(d: int) -> torch.Tensor:
    return torch.from_numpy(cache_numbers((2, T, H, d), 1))


@pytest.mark.parametrize("side", ["key", "value"])
@cases
def test_codes_are_the_nearest_signposts_of_their_band(bits, most, d, side):
    """Found again from the bytes: no other signpost of the band is nearer, up to the roundings of normalizing (three of
    the number's and the zero point's size over the scale) and of the edge (two)."""
    codec = codec_of(bits, most, d, side)
    x = pages(d)
    fields, decoded = codec.encode(x)
    pool = PagePool(codec.geometry, 2)
    pool.heads.fill_(0xFF)
    pool.write(torch.tensor([0, 1]), fields)
    tables = {name: table.numpy() for name, table in codec.tables.items()}
    assert len(set(tables["widths"].flatten())) > 1 or bits == most
    size = 4 * T * round(bits * d // BAND)
    stored = pool.heads.numpy()[..., :size].copy().view("<u4").reshape(2, H, T // TILE, -1, 16)
    for head in range(H):
        start = 0
        for band, width in enumerate(tables["widths"][head].tolist()):
            words = stored[:, head, :, start : start + width].swapaxes(-1, -2)  # page, tile, two lanes, word
            start += width
            codes = np.zeros((2, T // TILE, TILE, BAND), int)
            if width:
                tokens, places = band_places(side, width)
                codes[:, :, tokens, places] = unpack(np.ascontiguousarray(words)[..., None, :], width)
            codes = codes.reshape(2, T, BAND)
            half = np.arange(BAND // 2) + band * BAND // 2  # of keys: as many channels of each half of the head
            channels = np.concatenate([half, half + d // 2]) if side == "key" else np.arange(BAND) + band * BAND
            book = rounded(tables["signposts"][head, band, : 1 << width], width or 1).astype(np.float64)
            scale, zero = (tables[name][head, channels].astype(np.float64) for name in ("scale", "zero"))
            numbers = x[:, :, head, channels].double().numpy()
            value = zero + scale * book[codes]
            got = decoded[:, :, head, channels].double().numpy()
            assert (np.abs(got - value) <= 2 * U * (np.abs(zero) + np.abs(scale * book[codes]))).all()
            exact = (numbers - zero) / scale
            slack = 4 * U * (np.abs(numbers) + np.abs(zero)) / scale + 2 * U
            nearest = np.abs(exact[..., None] - book).min(-1)
            assert (np.abs(exact - book[codes]) <= nearest + 2 * slack).all()
        assert start == round(bits * d // BAND)


@cases
def test_pages_cost_the_mean_width(bits, most, d):
    geometry = codec_of(bits, most, d).geometry
    assert geometry.bits == bits
    assert geometry.page_bytes == T * H * d * bits / 8


def test_equal_widths_are_dense_codes():
    """With one width, and signposts as `dense` rounds them, it decodes to what that does, bit for bit."""
    d, bits = 128, 3
    fmt = Format(T, dense=Dense(bits, "channel", 0, "nuq", "bundle"))
    tables = random_tensors(fmt, H, d, 0)
    alike = {
        "scale": tables["scale"],
        "zero": tables["zero"],
        "widths": np.full((H, d // BAND), bits, np.uint8),
        "signposts": np.tile(np.pad(rounded(tables["signposts"], bits), (0, 8), "edge"), (H, d // BAND, 1)),
    }
    one = Codec(PageGeometry.of(fmt, H, d, "key"), tables)
    other = Codec(PageGeometry.of(Format(T, banded=Banded(bits)), H, d, "key"), alike)
    assert torch.equal(one.encode(pages(d))[1], other.encode(pages(d))[1])


def test_a_channel_without_range_is_its_zero_point():
    codec = codec_of(2.25, 4, 128)
    codec.tables["scale"][:, 5] = 0.0
    _, decoded = codec.encode(pages(128))
    assert torch.equal(decoded[:, :, :, 5], codec.tables["zero"][:, 5].expand(2, T, H))


def test_edges_are_what_a_tie_falls_below():
    part, shape = Banded(1.0, 1), PageShape(16, 1, 32, "key")
    tables = {
        "scale": torch.ones(1, 32),
        "zero": torch.zeros(1, 32),
        "widths": torch.ones(1, 1, dtype=torch.uint8),
        "signposts": torch.tensor([[[-63 / 127, 1.0]]]),
    }
    book = banded.signposts(tables)[0, 0]
    edge = banded.edges(book)
    x = torch.cat([edge, torch.nextafter(edge, torch.tensor(1.0)), torch.tensor([-2.0, 3.0])])
    fields, decoded = banded.encode(part, shape, x.repeat(128).reshape(1, 16, 1, 32), None, tables)
    assert torch.equal(decoded.flatten()[:4], book.repeat(2))
    assert torch.equal(banded.decode(part, shape, fields, tables), decoded)


def test_learned_rotations_are_undone_by_their_inverse():
    """x P P^-1 = x to the roundings of both products, which P's condition number magnifies."""
    d = 64
    tables = rotate.prepared({"rotation": torch.from_numpy(learned(d)["rotation"])})
    x = torch.randn(4, H, d, generator=torch.Generator().manual_seed(0))
    p, back = tables["rotation"].double(), tables["unrotation"].double()
    bound = 2 * (d + 2) * U * torch.einsum("nhc,hcd,hde->nhe", x.abs().double(), p.abs(), back.abs())
    assert ((rotate.inverse(rotate.forward(x, tables), tables) - x).abs() <= bound).all()
    assert (p @ back - torch.eye(d)).abs().max() < 1e-4


def learned(d: int) -> dict[str, np.ndarray]:
    return random_tensors(Format(T, banded=Banded(2.0), rotate=Rotate("learned")), H, d, 0)


def test_learned_gradients_are_those_of_autograd():
    d = 64
    tables = {"rotation": torch.from_numpy(learned(d)["rotation"])}
    y = torch.randn(5, H, d, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    p = tables["rotation"].double()
    x = torch.einsum("nhc,hcd->nhd", y, torch.linalg.inv(p))
    weights = torch.randn(5, H, d, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (x * weights).sum().backward()
    found = rotate.forward_gradient(weights.float(), tables).double()
    bound = (d + 4) * U * torch.einsum("nhc,hdc->nhd", weights.abs(), torch.linalg.inv(p).abs())
    assert ((found - y.grad).abs() <= bound).all()


def test_a_singular_rotation_is_refused():
    fmt = Format(T, banded=Banded(2.0), rotate=Rotate("learned"))
    tables = random_tensors(fmt, H, 64, 0) | {"rotation": np.ones((H, 64, 64), np.int8)}
    with pytest.raises(FormatError, match="singular"):
        Codec(PageGeometry.of(fmt, H, 64, "value"), tables)


# What is refused


@pytest.mark.parametrize(
    "bits, most, words",
    [(0, 4, "above 0"), (4.5, 4, "at most banded.most=4"), (2, 5, "1 to 4 bits"), (0.5, 0, "1 to 4 bits")],
)
def test_impossible_widths(bits, most, words):
    with pytest.raises(FormatError, match=words):
        Banded(bits, most)


@pytest.mark.parametrize(
    "bits, d, words",
    [(2.3, 128, r"a multiple of 1/4, such as 2.25"), (0.1, 64, "such as 0.5"), (2.0, 80, "not a multiple of 32")],
)
def test_widths_that_no_head_has(bits, d, words):
    with pytest.raises(FormatError, match=words):
        PageGeometry.of(Format(T, banded=Banded(bits)), H, d, "key")


def test_two_kinds_of_codes():
    with pytest.raises(FormatError, match="set one of them"):
        Format(T, dense=Dense(2, "token"), banded=Banded(2.0))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda widths: widths.__setitem__((1, 0), 5), r"layers.1.value.widths holds 5: banded.most=4"),
        (lambda widths: widths.__setitem__((1, 0), widths[1, 0] ^ 1), r"layers.1.value.widths of head 1 add up to"),
    ],
)
def test_bundles_with_widths_that_pages_lack(change, words):
    """They would let a reader run over the end of a page."""
    bundle = random_bundle([banded_layer()] * 2, 6, H, 128)
    tensors = dict(bundle.tensors)
    tensors["layers.1.value.widths"] = tensors["layers.1.value.widths"].copy()
    change(tensors["layers.1.value.widths"])
    with pytest.raises(FormatError, match=words):
        dataclasses.replace(bundle, tensors=tensors)


def banded_layer() -> LayerFormat:
    return LayerFormat(
        Format(T, banded=Banded(2.25), domain="pre_rope"), Format(T, banded=Banded(1.5), rotate=Rotate("learned"))
    )


@pytest.mark.parametrize("side", ["key", "value"])
def test_kernels_read_the_same_numbers(side):
    """zero + scale * byte / 128 of what attention reads is what the codec decodes to: up to roundings of scales, zero
    points and their product, of the number's size and that of scale and zero point."""
    codec = codec_of(2.25, 4, 128, side)
    codec.tables["widths"][0] = torch.tensor([0, 4, 4, 1])
    fields, decoded = codec.encode(pages(128))
    known = banded.kernel_tables(codec.tables, codec.geometry.shape)
    books = known["bands"][..., :16].view(torch.int8).double()
    numbers = known["bands"][..., 16:].contiguous().view(torch.int32)
    assert torch.equal(numbers[..., 0], codec.tables["widths"].int())
    assert numbers[..., 1].tolist() == [[sum(row[:i]) for i in range(4)] for row in codec.tables["widths"].tolist()]
    plain = codec.tables | {"scale": torch.ones(H, 128), "zero": torch.zeros(H, 128)}
    values = banded.decode(codec.geometry.format.banded, codec.geometry.shape, fields, plain)
    rounded_values = banded.signposts(codec.tables)
    order = torch.from_numpy(band_order(128, side))
    for head in range(H):
        for band in range(4):
            width, channels = int(codec.tables["widths"][head, band]), order[band * BAND : (band + 1) * BAND]
            chosen = (values[:, :, head, channels, None] == rounded_values[head, band, : 1 << width]).int().argmax(-1)
            byte = books[head, band][chosen] - 64 * (width == 4)
            scale, zero = (known[name][head, channels].double() for name in ("scale", "zero"))
            got, wanted = zero + scale * byte / banded.UNITS, decoded[:, :, head, channels].double()
            size = codec.tables["scale"][head, channels].double() + zero.abs() + (scale * byte / banded.UNITS).abs()
            assert ((got - wanted).abs() <= 6 * U * size).all()


def test_what_packing_knows_of_a_band():
    """Edges and numbers, width and bits before, and bins that find the code that the codec finds."""
    codec = codec_of(2.25, 4, 128)
    for head, (widths, books) in enumerate(zip(codec.tables["widths"], banded.pack_tables(codec.tables), strict=True)):
        for band, (width, found) in enumerate(zip(widths.tolist(), books, strict=True)):
            values = banded.signposts(codec.tables)[head, band, : 1 << width]
            between = banded.edges(values)
            numbers, places = found[:128].view(torch.float32), found[128:144].view(torch.int32)
            assert torch.equal(numbers[: len(between)], between)
            assert (numbers[len(between) : 16] == torch.inf).all()
            assert torch.equal(numbers[16 : 16 + (1 << width)], values)
            assert places.tolist() == [width, int(widths[:band].sum()), 0, 0]
            if width in pack_codebook.WIDTHS:
                check_bins(found[144:].numpy(), between.numpy())


def test_signposts_beyond_the_range_of_numbers_are_refused():
    """A byte would not hold them."""
    bundle = random_bundle([banded_layer()], 6, H, 128)
    tensors = dict(bundle.tensors)
    tensors["layers.0.key.signposts"] = tensors["layers.0.key.signposts"] * 3
    with pytest.raises(FormatError, match=r"layers.0.key.signposts of bands lie outside \[-1, 1\]"):
        dataclasses.replace(bundle, tensors=tensors)
