"""`dense` in torch: the readable reference that the CPU and CUDA kernels are held against.

All arithmetic is float32. A number x of a vector with range (lo, hi) has `zero = (hi + lo) / 2`,
`scale = (hi - lo) / 2`, is normalized to `a = (x - zero) * (1 / scale)`, and takes the nearest value of the codebook (a
tie goes to the lower one; with Q-Norm it is the value that was the nearest before all of them were moved). With
`normalize: norm` the scale is the vector's Euclidean norm and the zero point 0.
"""

import torch
from torch import Tensor

from artifacts import codebooks
from artifacts.errors import FormatError
from artifacts.fields import PageShape
from artifacts.order import channel_order
from artifacts.parts import Dense
from artifacts.parts.dense import GRID
from runtime import codes

HALF_MAX = 65504.0


def signpost_steps(bits: int) -> int:
    """What makes signposts whole numbers that fit a byte; of up to 4 bits: wider ones are not rounded."""
    return 127 if bits < 4 else 63


def codebook(part: Dense, d: int, tables: dict[str, Tensor], device: torch.device) -> Tensor:
    """Values of the codes, ascending, float32 [2**bits].

    Signposts of up to 4 bits are rounded here, so that kernels can hold them as bytes; a bundle has them as fitted.
    """
    if part.codebook in ("nuq", "nuq-qnorm"):
        if part.bits > 4:
            return tables["signposts"]
        # A tensor: by a number torch on CUDA would not divide, but multiply with its reciprocal.
        steps = torch.full_like(tables["signposts"], signpost_steps(part.bits))
        return torch.round(tables["signposts"] * steps) / steps
    if part.codebook == "uniform-fit":
        start, step = tables["spacing"].float()
        return (start + step * torch.arange(1 << part.bits, device=start.device)) / torch.full_like(start, GRID)
    if part.codebook == "lloyd":
        values = codebooks.lloyd_max(part.bits, d)
    else:
        values = {"uniform": codebooks.uniform, "nf": codebooks.normal_float}[part.codebook](part.bits)
    return torch.from_numpy(values).to(device)


def edges(part: Dense, values: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Between the codes' normalized numbers, ascending, float32 [2**bits - 1]; a number on an edge goes below it."""
    return tables["edges"] if part.codebook == "nuq-qnorm" else 0.5 * (values[:-1] + values[1:])


def encode(
    part: Dense, shape: PageShape, x: Tensor, outliers: Tensor | None, tables: dict[str, Tensor], segment: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Encodes pages x, float32 [p, t, h_kv, d]. Numbers in `outliers` (bool, same shape, or None) do not widen ranges.

    Formats with outliers give a mask of them, and all others None.

    Returns the page's fields, each [p, (h_kv,) *field shape], and the decoded numbers.
    Raises FormatError if an online scale or zero point exceeds float16.
    """
    scale, zero = _ranges(part, shape, x, outliers, tables)
    values = codebook(part, shape.d, tables, x.device)
    chosen = torch.bucketize(_normalized(x, scale, zero, shape), edges(part, values, tables))
    fields = {
        "codes": codes.pack_page(chosen.transpose(1, 2), shape, part.bits, part.evenly_spaced and outliers is None)
    }
    if part.scales == "online":
        fields["scale"] = _stored(part, shape, scale)
        if part.normalize == "range":
            fields["zero"] = _stored(part, shape, zero)
    return fields, _spread(zero, shape) + _spread(scale, shape) * values[chosen]


def normalize(
    part: Dense, shape: PageShape, x: Tensor, outliers: Tensor | None, tables: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Normalized numbers of pages x (float32 [p, t, h_kv, d]) and the scales, which broadcast over them."""
    scale, zero = _ranges(part, shape, x, outliers, tables)
    return _normalized(x, scale, zero, shape), _spread(scale, shape)


def decode(part: Dense, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Numbers float32 [p, t, h_kv, d] from the page's fields."""
    masked = part.evenly_spaced and "correction" not in fields  # Format.masked, as for `encode`
    chosen = codes.unpack_page(fields["codes"], shape, part.bits, masked).transpose(1, 2)
    values = codebook(part, shape.d, tables, chosen.device)
    scale, zero = (_scales(part, shape, name, fields, tables) for name in ("scale", "zero"))
    return _spread(zero, shape) + _spread(scale, shape) * values[chosen]


def _normalized(x: Tensor, scale: Tensor, zero: Tensor, shape: PageShape) -> Tensor:
    """(x - zero) * (1 / scale); a vector without range gives 0."""
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return (x - _spread(zero, shape)) * _spread(inverse, shape)


def _scales(part: Dense, shape: PageShape, name: str, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Scales (or zero points) as float32 [p or 1, *part.scale_shape]; no zero points: 0."""
    if part.scales == "bundle":
        return tables[name].reshape(1, *part.scale_shape(shape))
    if name == "zero" and part.normalize == "norm":
        return torch.zeros(1, *part.scale_shape(shape), device=fields["scale"].device)
    stored = fields[name].float()
    if shape.side == "value" and part.axis == "token":
        stored = stored.transpose(-2, -1)
    elif shape.side == "key" and part.axis == "channel":
        stored = torch.empty_like(stored).index_copy_(-1, _channels(shape, stored.device), stored)
    return stored.unsqueeze(2) if part.spans_heads else stored.transpose(1, 2)


def _stored(part: Dense, shape: PageShape, scales: Tensor) -> Tensor:
    """[p, T, H, C] as the page field: float16 [p, H, T, C], or [p, T, C] where all heads share whole vectors.

    In the page's order: values' tokens by group first, keys' channels as lanes take them.
    """
    stored = scales.half().squeeze(2) if part.spans_heads else scales.half().transpose(1, 2)
    if shape.side == "value" and part.axis == "token":
        return stored.transpose(-2, -1)
    if shape.side == "key" and part.axis == "channel":
        return stored[..., _channels(shape, stored.device)]
    return stored


def _channels(shape: PageShape, device: torch.device) -> Tensor:
    return torch.from_numpy(channel_order(shape.d)).to(device)


def _ranges(
    part: Dense, shape: PageShape, x: Tensor, outliers: Tensor | None, tables: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Scale and zero point, float32 [p or 1, *part.scale_shape], rounded as they are stored."""
    if part.scales == "bundle":
        return tuple(_scales(part, shape, name, {}, tables) for name in ("scale", "zero"))  # type: ignore[return-value]
    if part.normalize == "norm":
        inside = x if outliers is None else x.masked_fill(outliers, 0.0)
        norm = _half(_grouped(inside, part, shape).square().sum((2, 4, 6)).sqrt())
        return norm, torch.zeros_like(norm)
    keep = None if outliers is None else ~outliers
    low = _grouped(x if keep is None else torch.where(keep, x, torch.inf), part, shape).amin((2, 4, 6))
    high = _grouped(x if keep is None else torch.where(keep, x, -torch.inf), part, shape).amax((2, 4, 6))
    empty = low > high  # every number of the vector is an outlier
    low, high = (torch.where(empty, 0.0, bound) for bound in (low, high))
    return _half(0.5 * (high - low)), _half(0.5 * (high + low))


def _half(numbers: Tensor) -> Tensor:
    """Rounded to float16, as float32. Raises FormatError for numbers that do not fit."""
    worst = numbers.abs().max().item() if numbers.numel() else 0.0
    if not worst <= HALF_MAX:
        raise FormatError(
            f"a scale or zero point of {worst:g} does not fit float16 (largest {HALF_MAX:g}): is the model sound?"
        )
    return numbers.half().float()


def _grouped(x: Tensor, part: Dense, shape: PageShape) -> Tensor:
    """[p, t, h, d] as [p, T, t/T, H, h/H, C, d/C], where (T, H, C) = part.scale_shape."""
    groups = part.scale_shape(shape)
    sizes = [s for g, n in zip(groups, (shape.t, shape.h_kv, shape.d), strict=True) for s in (g, n // g)]
    return x.reshape(x.shape[0], *sizes)


def _spread(scales: Tensor, shape: PageShape) -> Tensor:
    """[p, T, H, C] repeated to [p, t or 1, h or 1, d or 1] so that it broadcasts over the page."""
    for axis, size in ((1, shape.t), (3, shape.d)):
        if 1 < scales.shape[axis] < size:
            scales = scales.repeat_interleave(size // scales.shape[axis], axis)
    return scales
