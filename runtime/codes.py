"""Packing and unpacking of codes in torch, any device; the bit layout is `artifacts.codes`."""

import torch
from torch import Tensor

from artifacts.codes import RUN, field_bits
from artifacts.fields import PageShape
from artifacts.order import TILE, code_order, word_order


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs integer codes [..., c] below 2**bits into int32 words [..., c / 32, bits]; c is a multiple of 32."""
    stride = field_bits(bits)
    runs = codes.unflatten(-1, (-1, RUN)).to(torch.int32)
    whole = 32 // stride * bits
    words = runs[..., :whole].unflatten(-1, (bits, -1))  # fields of words
    if whole < RUN:
        words = words | ((runs[..., None, whole:] >> _column(bits, words.device)) & 1) << bits
    while words.shape[-1] > 1:  # neighbours become one, of twice the bits
        words = words[..., ::2] | words[..., 1::2] << stride
        stride *= 2
    return words.squeeze(-1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`: int32 words [..., r, bits] to int64 codes [..., 32 r]."""
    stride = field_bits(bits)
    fields = words[..., None] >> torch.arange(0, 32, stride, dtype=torch.int32, device=words.device)
    runs = (fields & ((1 << bits) - 1)).flatten(-2)
    if runs.shape[-1] < RUN:
        spread = ((fields >> bits) & 1) << _column(bits, words.device)
        runs = torch.cat([runs, spread.sum(-2, dtype=torch.int32)], -1)
    return runs.flatten(-2).to(torch.int64)


def _column(bits: int, device: torch.device) -> Tensor:
    """Which bit of the last codes a word has, where a field's top bit is theirs: int32 [bits, 1]."""
    return torch.arange(bits, dtype=torch.int32, device=device)[:, None]


def pack_page(codes: Tensor, shape: PageShape, bits: int, masked: bool) -> Tensor:
    """Packs integer codes [..., t, d] of pages into int32 words [..., t / 16, d / 2 * bits] in the page's order.

    masked: `Format.masked`.
    """
    order = torch.from_numpy(code_order(shape.t, shape.d, shape.side, bits, masked)).to(codes.device)
    words = pack(codes.flatten(-2)[..., order].unflatten(-1, (shape.t // TILE, -1)), bits).flatten(-2)
    return words[..., torch.from_numpy(word_order(shape.d, bits)).to(codes.device)]


def unpack_page(words: Tensor, shape: PageShape, bits: int, masked: bool) -> Tensor:
    """Inverse of `pack_page`: int64 codes [..., t, d]."""
    places = torch.from_numpy(word_order(shape.d, bits)).to(words.device)
    lanes = torch.empty_like(words).index_copy_(-1, places, words)
    ordered = unpack(lanes.unflatten(-1, (-1, bits)), bits).flatten(-2)
    order = torch.from_numpy(code_order(shape.t, shape.d, shape.side, bits, masked)).to(words.device)
    return torch.empty_like(ordered).index_copy_(-1, order, ordered).unflatten(-1, (shape.t, shape.d))
