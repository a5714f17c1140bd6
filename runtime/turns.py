"""What turns keys that pages hold before RoPE, tile by tile: R(n0 + j) = R(n0) R(j), of which this is R(j).

A key's number becomes own * itself + other * its partner. Scales of channels that are the same in all pages are in
both, so that codes need none, and their zero points become keys of their own, turned alike. The kernels
(`cuda/keys.cuh`) read all three as they are, in the order of first operands.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from artifacts import PageGeometry
from artifacts.order import TILE
from runtime.rope import Rotation
from runtime.units import scale_kind, spread

MOST_TOKENS = 64  # of a unit of work: `Choice` in cuda/plan.cuh
LARGE_PAGE = 64  # tokens from which outliers of keys are added to what is scaled: `CHANNELS_FOLDED` there


def turns(key: PageGeometry, tables: Mapping[str, Tensor], rotation: Rotation, device: torch.device) -> Tensor:
    """float16 [heads, tiles, d / 16, 3, 32, 4, 2]: own, other and zero points of the tokens of a page, at most 64, by
    steps of 16 channels, lanes and registers. One head where all have the same.

    tables: of the keys, as the kernels read them (`PagedAttention`): scale and zero, float32 [h_kv, d].
    """
    fmt, d = key.format, key.shape.d
    t = min(MOST_TOKENS, fmt.t)
    angles = torch.arange(t, device=device, dtype=torch.float64)[:, None] * rotation.inv_freq.to(device).double()
    cosine, sine = angles.cos().float(), angles.sin().float()
    first, second = rotation.first.to(device), rotation.second.to(device)
    own, other, partner = (
        torch.ones(t, d, device=device),
        torch.zeros(t, d, device=device),
        torch.arange(d, device=device),
    )
    own[:, first], own[:, second] = cosine, cosine
    other[:, first], other[:, second] = -sine, sine
    partner[first], partner[second] = second, first
    scale, zero = _folded(key, tables)
    scale, zero = scale.to(device)[:, None], zero.to(device)[:, None]
    made = torch.stack([scale * own, scale[..., partner] * other, zero * own + zero[..., partner] * other])
    # Tokens are rows r and r + 8 of a tile; a register has two channels 2c and 2c + 1 of 8, in either half.
    order = made.half().view(3, -1, t // TILE, 2, 8, 2, d // 16, 4, 2)
    return order.permute(1, 2, 6, 0, 4, 7, 5, 3, 8).reshape(-1, t // TILE, d // 16, 3, 32, 4, 2).contiguous()


def _folded(key: PageGeometry, tables: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scales and zero points [heads, d] that what turns keys has in it: `CHANNELS_FOLDED` in cuda/layout.cuh."""
    fmt = key.format
    if scale_kind(key) != "CHANNEL_BUNDLE" or fmt.lowrank or (fmt.sparse and fmt.t < LARGE_PAGE):
        return torch.ones(1, key.shape.d), torch.zeros(1, key.shape.d)
    scale, zero = tables["scale"] * spread(fmt.dense), tables["zero"]
    if fmt.sparse:  # the power of two that is left is the codes' (`Keys::put_mended`)
        size = 2 * torch.frexp(scale).mantissa
        scale = torch.where(scale >= 1, scale, torch.where(scale >= 2.0**-14, size, 1.0))
    return scale, zero
