"""`banded` in torch: the readable reference that the CPU and CUDA kernels are held against.

All arithmetic is float32, as in `runtime.parts.dense`: a number is normalized with its channel's scale and zero point
from the bundle and takes the nearest signpost of its band (a tie goes to the lower one). Signposts are rounded as
there, so that kernels can hold them as bytes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from artifacts.codes import RUN
from artifacts.fields import PageShape
from artifacts.order import LANES, TILE, band_code_order, band_order
from artifacts.parts import Banded
from artifacts.parts.banded import BAND
from runtime import codes, pack_codebook
from runtime.parts.dense import signpost_steps


def encode(
    part: Banded, shape: PageShape, x: Tensor, outliers: Tensor | None, tables: dict[str, Tensor], segment: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Encodes pages x, float32 [p, t, h_kv, d]; numbers in `outliers`, which another part holds, like all others.

    Returns the page's field, [p, h_kv, *field shape], and the decoded numbers.
    """
    normalized = normalize(x, tables)[..., _order(shape, x.device)].unflatten(-1, (-1, BAND))
    words = _words(part, shape, x.shape[0], x.device)
    values, rounded = torch.empty_like(normalized), signposts(tables)
    for width, head, band, rows in _widths(tables):
        chosen, book = normalized[:, :, head, band], rounded[head, band, : 1 << width]
        flat = chosen.movedim(2, 0).flatten(1).contiguous()
        found = torch.searchsorted(edges(book), flat).view(-1, *chosen.shape[:2], BAND).movedim(0, 2)
        values[:, :, head, band] = _looked_up(book, found)
        if width:
            words[:, head[:, None], :, rows] = _packed(found, shape, width)
    return {"band_codes": words.flatten(-2)}, _restored(values, shape, tables)


def decode(part: Banded, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Numbers float32 [p, t, h_kv, d] from the page's fields."""
    words = fields["band_codes"].unflatten(-1, (part.words(shape), LANES // 2))
    pages, rounded = words.shape[0], signposts(tables)
    values = torch.empty(pages, shape.t, shape.h_kv, part.bands(shape), BAND, device=words.device)
    for width, head, band, rows in _widths(tables):
        found = torch.zeros(pages, shape.t, head.numel(), BAND, dtype=torch.int64, device=words.device)
        if width:
            found = _unpacked(words[:, head[:, None], :, rows], shape, width)
        values[:, :, head, band] = _looked_up(rounded[head, band, : 1 << width], found)
    return _restored(values, shape, tables)


def signposts(tables: dict[str, Tensor]) -> Tensor:
    """Values of the bands' codes as kernels have them, float32 [h_kv, bands, 2**most]."""
    # A tensor, as in `dense.codebook`.
    steps = torch.tensor([signpost_steps(width) for width in range(5)], dtype=torch.float32)
    of_band = steps.to(tables["signposts"].device)[tables["widths"].long()][..., None]
    return torch.round(tables["signposts"] * of_band) / of_band


BINS = 128  # of a band, as in cuda/pack_bands.cuh
UNITS = 128  # of one, in which kernels count a band's numbers


def kernel_tables(tables: dict[str, Tensor], shape: PageShape) -> dict[str, Tensor]:
    """What attention reads of a side: numbers are zero + scale * byte / UNITS, where bytes of 4 bits count from 64 on.

    bands: uint8 [h_kv, bands, 32], `Band` of cuda/bands.cuh: 16 bytes of the codes, -127 to 127 (of 4 bits: 0 to 127),
    then the width and how many bits stand before, as 32-bit numbers. scale, zero: float32 [h_kv, d]. A band of width 0
    has scale 0.
    """
    widths, side = tables["widths"].long(), tables["signposts"].shape
    device = widths.device
    steps = torch.tensor([signpost_steps(width) for width in range(5)], device=device)[widths]
    origin = torch.where(widths == 4, steps + 1, 0)
    whole = torch.round(tables["signposts"] * steps[..., None]).long() + origin[..., None]
    unused = torch.arange(side[-1], device=device) >= 1 << widths[..., None]
    book = torch.nn.functional.pad(whole.masked_fill(unused | (widths == 0)[..., None], 0), (0, 16 - side[-1]))
    numbers = torch.stack([widths, row_starts(widths), 0 * widths, 0 * widths], -1).int()
    bands = torch.cat([book.to(torch.int8).view(torch.uint8), numbers.view(torch.uint8)], -1)
    of_channel = torch.empty(shape.d, dtype=torch.int64, device=device)
    of_channel[_order(shape, device)] = torch.arange(shape.d, device=device) // BAND
    only = torch.where(widths == 0, signposts(tables)[..., 0], 0.0)  # what a band without codes stands for
    return {
        "bands": bands,
        "scale": tables["scale"] * torch.where(widths == 0, 0.0, UNITS / steps)[:, of_channel],
        "zero": tables["zero"] + tables["scale"] * only[:, of_channel],
    }


def pack_tables(tables: dict[str, Tensor]) -> Tensor:
    """What packing reads of a side: uint8 [h_kv, bands, 288], `BandBook` of cuda/pack_bands.cuh.

    The edges and infinity, float32 [16]; the codes' values, float32 [16]; the width and how many bits stand before,
    int32; of widths that are found so, bins.
    """
    widths, values = tables["widths"].long(), signposts(tables)
    numbers = torch.zeros(*widths.shape, 32, device=values.device)
    numbers[..., :16] = torch.inf
    numbers[..., 16 : 16 + values.shape[-1]] = values
    places = torch.stack([widths, row_starts(widths), 0 * widths, 0 * widths], -1).int()
    bins = torch.zeros(*widths.shape, 16 + BINS, dtype=torch.uint8, device=values.device)
    for width in range(1, values.shape[-1].bit_length()):
        chosen = widths == width
        between = edges(values[chosen][:, : 1 << width])
        numbers[..., : between.shape[-1]][chosen] = between
        if width in pack_codebook.WIDTHS and len(between):
            bins[chosen] = pack_codebook.binned(between, BINS)
    return torch.cat([numbers.view(torch.uint8), places.view(torch.uint8), bins], -1)


def edges(book: Tensor) -> Tensor:
    """Between the codes' normalized numbers: float32 [..., n - 1] of values [..., n]; a number on one goes below it."""
    return (0.5 * (book[..., :-1] + book[..., 1:])).contiguous()


def normalize(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """(x - zero) * (1 / scale) of x [..., h_kv, d]; a channel without range gives 0."""
    scale, zero = tables["scale"], tables["zero"]
    return (x - zero) * torch.where(scale > 0, 1.0 / scale, 0.0)


def row_starts(widths: Tensor) -> Tensor:
    """How many bits, rows of a tile's words, stand before each band's: int64 of widths [h_kv, bands]."""
    return widths.long().cumsum(-1) - widths.long()


def _words(part: Banded, shape: PageShape, pages: int, device: torch.device) -> Tensor:
    """int32 [pages, h_kv, tiles, bits of a head's bands, 16]."""
    size = (pages, shape.h_kv, shape.t // TILE, part.words(shape), LANES // 2)
    return torch.zeros(size, dtype=torch.int32, device=device)


def _packed(found: Tensor, shape: PageShape, width: int) -> Tensor:
    """Codes [p, t, n, 32] as words [n, width, p, tiles, 16]: so indexed assignment takes them."""
    order = torch.from_numpy(band_code_order(shape.t, shape.side, width)).to(found.device)
    runs = found.transpose(1, 2).flatten(2)[..., order]  # [p, n, tiles, 16, 32]
    return codes.pack(runs, width).squeeze(-2).permute(1, 4, 0, 2, 3)


def _unpacked(words: Tensor, shape: PageShape, width: int) -> Tensor:
    """Inverse of `_packed`."""
    order = torch.from_numpy(band_code_order(shape.t, shape.side, width)).to(words.device)
    runs = codes.unpack(words.permute(2, 0, 3, 4, 1).unsqueeze(-2), width)
    found = torch.empty(*runs.shape[:2], shape.t * BAND, dtype=runs.dtype, device=runs.device)
    found[..., order] = runs
    return found.unflatten(-1, (shape.t, RUN)).transpose(1, 2)


def _order(shape: PageShape, device: torch.device) -> Tensor:
    return torch.from_numpy(band_order(shape.d, shape.side)).to(device)


def _restored(values: Tensor, shape: PageShape, tables: dict[str, Tensor]) -> Tensor:
    """zero + scale * values [p, t, h_kv, bands, 32] as [p, t, h_kv, d]."""
    ordered = values.flatten(-2)
    channels = torch.empty_like(ordered).index_copy_(-1, _order(shape, values.device), ordered)
    return tables["zero"] + tables["scale"] * channels


def _widths(tables: dict[str, Tensor]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Each width that occurs, heads and bands (int64 [n]) that have it, and which rows of a tile's words are theirs,
    int64 [n, width]."""
    widths = tables["widths"].long()
    starts = row_starts(widths)
    for width in widths.unique().tolist():
        head, band = (widths == width).nonzero(as_tuple=True)
        yield width, head, band, starts[head, band, None] + torch.arange(width, device=widths.device)


def _looked_up(book: Tensor, found: Tensor) -> Tensor:
    """book [n, k] at codes [p, t, n, 32]."""
    return book[torch.arange(book.shape[0], device=book.device)[:, None], found]
