"""`sparse` in torch: which numbers are outliers, and their lists."""

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.order import TILE, fragment_order
from artifacts.parts import Sparse
from artifacts.parts.sparse import BLOCK, block_bits
from runtime.parts.dense import HALF_MAX

HALF_BITS = 0x7BFF  # the largest finite float16


def select(part: Sparse, shape: PageShape, x: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Outliers of pages x, float32 [p, t, h_kv, d], as a bool mask that never exceeds the page's slots."""
    if part.thresholds == "online":
        per_end = part.per_end(shape)
        if part.axis == "token":
            return _extremes(x.flatten(2), per_end).view_as(x)
        return _extremes(x.movedim(1, -1), per_end).movedim(-1, 1)
    lower, upper = tables["lower"], tables["upper"]
    excess = torch.maximum(lower - x, x - upper) / (0.5 * (upper - lower)).clamp_min(torch.finfo(torch.float32).tiny)
    return _limit_pages((x < lower) | (x > upper), excess, part.slots(shape))


def encode(
    part: Sparse, shape: PageShape, residual: Tensor, outliers: Tensor, tables: dict[str, Tensor], segment: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Stores `residual` (float32 [p, t, h_kv, d], what the parts before left) where the mask `outliers` is set.

    Corrections beyond float16 saturate at its largest finite number that ends with their block.
    """
    p, n = residual.shape[0], part.slots(shape)
    mask = _listed(outliers, shape)
    page, position = mask.nonzero(as_tuple=True)
    per_tile = mask.view(p, -1, TILE * shape.d).sum(-1)
    start = torch.nn.functional.pad(per_tile.cumsum(-1), (1, 0))
    slot = torch.arange(page.numel(), device=page.device) - (start[:, -1].cumsum(0) - start[:, -1])[page]
    numbers = _listed(residual, shape)[page, position]
    half = _ending(numbers.clamp(-HALF_MAX, HALF_MAX).half(), position // BLOCK % _blocks(shape), shape)
    index = torch.zeros(p, n, dtype=torch.uint8, device=residual.device)
    correction = torch.zeros(p, n, dtype=torch.float16, device=residual.device)
    index[page, slot] = (position % BLOCK).to(torch.uint8)
    correction[page, slot] = half
    approximation = torch.zeros_like(mask, dtype=torch.float32)
    approximation[page, position] = half.float()
    fields = {"start": start.to(torch.int32), "index": index, "correction": correction}
    return fields, _by_token(approximation, shape)


def decode(part: Sparse, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """Corrections as numbers float32 [p, t, h_kv, d], zero where there is no outlier."""
    ends, blocks = fields["start"][:, 1:].long(), _blocks(shape)  # [p, tiles of all heads]
    p, tiles = ends.shape
    slots = torch.arange(fields["index"].shape[1], device=ends.device).expand(p, -1)
    used = slots < ends[:, -1:]
    tile = torch.searchsorted(ends, slots.contiguous(), right=True).clamp_max(tiles - 1)
    block = fields["correction"].view(torch.int16).long() & ((1 << block_bits(shape.d)) - 1)
    position = (tile * blocks + block) * BLOCK + fields["index"].long()
    out = torch.zeros(p, tiles * blocks * BLOCK, device=ends.device)
    page = torch.arange(p, device=ends.device)[:, None].expand_as(position)
    out[page[used], position[used]] = fields["correction"][used].float()
    return _by_token(out, shape)


def _blocks(shape: PageShape) -> int:
    """Of a tile."""
    return TILE * shape.d // BLOCK


def _ending(half: Tensor, block: Tensor, shape: PageShape) -> Tensor:
    """For each finite float16 number that of the same sign whose lowest bits are its block's number and which is fewest
    places away; of two that are as near the larger."""
    step = 1 << block_bits(shape.d)
    bits = half.view(torch.int16).int()
    above = ((bits & 0x7FFF) - block.int() + step // 2).clamp(0, HALF_BITS)
    return (above - above % step | block.int() | bits & 0x8000).to(torch.int16).view(torch.float16)


def _listed(x: Tensor, shape: PageShape) -> Tensor:
    """[p, t, h, d] to [p, h * t * d] in the order of lists: by head, then as `fragment_order` says."""
    return x.transpose(1, 2).flatten(2)[..., _order(shape, x.device)].flatten(1)


def _by_token(listed: Tensor, shape: PageShape) -> Tensor:
    """[p, h * t * d] in the order of lists to [p, t, h, d]."""
    out = torch.empty_like(listed).view(-1, shape.h_kv, shape.t * shape.d)
    out[..., _order(shape, listed.device)] = listed.view(out.shape)
    return out.view(-1, shape.h_kv, shape.t, shape.d).transpose(1, 2)


def _order(shape: PageShape, device: torch.device) -> Tensor:
    return torch.from_numpy(fragment_order(shape.t, shape.d, shape.side)).to(device)


def _extremes(x: Tensor, per_end: int) -> Tensor:
    """Mask of the `per_end` smallest and largest of every vector x[..., :]; of equal numbers the first is smaller."""
    order = x.sort(dim=-1, stable=True).indices
    chosen = torch.cat([order[..., :per_end], order[..., max(per_end, x.shape[-1] - per_end) :]], -1)
    return torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter_(-1, chosen, True)


def _limit_pages(mask: Tensor, excess: Tensor, slots: int) -> Tensor:
    """Keeps at most `slots` numbers per page, those with the largest excess (ties: by token, head, channel)."""
    over = (mask.flatten(1).sum(-1) > slots).nonzero()[:, 0]
    for page in over.tolist():
        flat = torch.where(mask[page], excess[page], -torch.inf).flatten()
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[flat.sort(dim=-1, descending=True, stable=True).indices[:slots]] = True
        mask[page] = kept.view_as(mask[page])
    return mask
