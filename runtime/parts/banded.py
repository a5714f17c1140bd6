"""`banded` in torch: the readable reference that the CPU kernels are held against.

All arithmetic is float32, as in `runtime.parts.dense`: a number is normalized with its channel's scale and zero point
from the bundle and takes the nearest signpost of its band (a tie goes to the lower one).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.order import band_order
from artifacts.parts import Banded
from artifacts.parts.banded import BAND
from runtime import codes


def encode(
    part: Banded, shape: PageShape, x: Tensor, outliers: Tensor | None, tables: dict[str, Tensor], segment: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Encodes pages x, float32 [p, t, h_kv, d]; numbers in `outliers`, which another part holds, like all others.

    Returns the page's field, [p, h_kv, *field shape], and the decoded numbers.
    """
    normalized = normalize(x, tables)[..., _order(shape, x.device)].unflatten(-1, (-1, BAND))
    words = x.new_zeros(*x.shape[:3], part.words(shape), dtype=torch.int32)
    values = torch.empty_like(normalized)
    for width, head, band, places in _widths(tables):
        chosen, book = normalized[:, :, head, band], _book(tables, width, head, band)
        edges = 0.5 * (book[:, :-1] + book[:, 1:])
        flat = chosen.movedim(2, 0).flatten(1).contiguous()
        found = torch.searchsorted(edges.contiguous(), flat).view(-1, *chosen.shape[:2], BAND).movedim(0, 2)
        values[:, :, head, band] = _looked_up(book, found)
        if width:
            words[:, :, head[:, None], places] = codes.pack(found, width).squeeze(-2)
    return {"band_codes": words.transpose(1, 2)}, _restored(values, shape, tables)


def decode(part: Banded, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Numbers float32 [p, t, h_kv, d] from the page's fields."""
    words = fields["band_codes"].transpose(1, 2)
    values = torch.empty(*words.shape[:3], part.bands(shape), BAND, device=words.device)
    for width, head, band, places in _widths(tables):
        if width:
            found = codes.unpack(words[:, :, head[:, None], places].unsqueeze(-2), width)
        else:
            found = words.new_zeros(*words.shape[:2], head.numel(), BAND, dtype=torch.int64)
        values[:, :, head, band] = _looked_up(_book(tables, width, head, band), found)
    return _restored(values, shape, tables)


def normalize(x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """(x - zero) * (1 / scale) of x [..., h_kv, d]; a channel without range gives 0."""
    scale, zero = tables["scale"], tables["zero"]
    return (x - zero) * torch.where(scale > 0, 1.0 / scale, 0.0)


def _order(shape: PageShape, device: torch.device) -> Tensor:
    return torch.from_numpy(band_order(shape.d, shape.side)).to(device)


def _restored(values: Tensor, shape: PageShape, tables: dict[str, Tensor]) -> Tensor:
    """zero + scale * values [p, t, h_kv, bands, 32] as [p, t, h_kv, d]."""
    ordered = values.flatten(-2)
    channels = torch.empty_like(ordered).index_copy_(-1, _order(shape, values.device), ordered)
    return tables["zero"] + tables["scale"] * channels


def _widths(tables: dict[str, Tensor]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Each width that occurs, heads and bands (int64 [n]) that have it, and where the words of each stand in a token of
    the head, int64 [n, width]."""
    widths = tables["widths"].long()
    starts = widths.cumsum(1) - widths
    for width in widths.unique().tolist():
        head, band = (widths == width).nonzero(as_tuple=True)
        yield width, head, band, starts[head, band, None] + torch.arange(width, device=widths.device)


def _book(tables: dict[str, Tensor], width: int, head: Tensor, band: Tensor) -> Tensor:
    """Signposts of bands of one width, float32 [n, 2^width]."""
    return tables["signposts"][head, band, : 1 << width]


def _looked_up(book: Tensor, found: Tensor) -> Tensor:
    """book [n, k] at codes [p, t, n, 32]."""
    return book[torch.arange(book.shape[0], device=book.device)[:, None], found]
