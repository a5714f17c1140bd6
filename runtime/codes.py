"""Packing and unpacking of codes in torch, any device; the bit layout is `artifacts.codes`."""

import torch
from torch import Tensor

from artifacts.codes import RUN, pieces


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
