"""Packing and unpacking of codes in torch, any device; the bit layout is `artifacts.codes`."""

import torch
from torch import Tensor

from artifacts.codes import RUN, pieces
from artifacts.fields import PageShape
from artifacts.order import TILE, code_order, word_order


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs integer codes [..., c] below 2**bits into int32 words [..., c / 32, bits]; c is a multiple of 32."""
    runs = codes.unflatten(-1, (-1, RUN)).to(torch.int64)
    words = runs.new_zeros(*runs.shape[:-1], bits)
    for p in pieces(bits):
        words[..., p.word] |= ((runs[..., p.code] >> p.low) & ((1 << p.width) - 1)) << p.shift
    return words.to(torch.int32)  # keeps the low 32 bits


def unpack(words: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`: int32 words [..., r, bits] to int64 codes [..., 32 r]."""
    words = words.to(torch.int64)
    runs = words.new_zeros(*words.shape[:-1], RUN)
    for p in pieces(bits):
        runs[..., p.code] |= ((words[..., p.word] >> p.shift) & ((1 << p.width) - 1)) << p.low
    return runs.flatten(-2)


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
