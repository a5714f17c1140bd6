"""RoPE over a page as a few functions of the token: what lets kernels turn the query instead of keys.

A key at token j of a page of 64, counted from the middle as t = j - 31.5, adds cos(t f) and sin(t f) of every pair's
frequency f to its score. For slow pairs these are nearly in the span of few functions of t: four even ones for the
cosines and four odd ones for the sines, the best in the least-squares sense (singular value decomposition). The fastest
`FAST_PAIRS` pairs are left out. `python -m benchmarks.rope_columns` says how many functions what precision takes.
"""

import math
from functools import cache

import torch
from torch import Tensor

TOKENS = 64  # of a page
FUNCTIONS = 8  # even ones at even places
FAST_PAIRS = 16  # that are turned one by one
WARPS = 16  # of a block, at most: a warp's next page is so many pages on
WORST = 1e-4  # of any cosine or sine; a half rounds to 5e-4
WIDEST = 100 * math.pi  # angle whose cosine and sine kernels find to 2^-14, for outliers of keys


def _times() -> Tensor:
    return torch.arange(TOKENS, dtype=torch.float64) - (TOKENS - 1) / 2


def decompose(inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Functions W float64 [TOKENS, FUNCTIONS] and shares g [FUNCTIONS, pairs], at most 1, of pairs with frequencies
    inv_freq [pairs]: cos(t f) = sum of W g over even functions, sin(t f) over odd ones. Zero for the fastest pairs."""
    slow = inv_freq.double().cpu()[FAST_PAIRS:]
    w, g = torch.zeros(TOKENS, FUNCTIONS).double(), torch.zeros(FUNCTIONS, inv_freq.numel()).double()
    for first, function in enumerate((torch.cos, torch.sin)):
        u, s, v = torch.linalg.svd(function(torch.outer(_times(), slow)), full_matrices=False)
        kept = min(FUNCTIONS // 2, s.numel())
        size = v[:kept].abs().amax(1)
        w[:, first : first + 2 * kept : 2] = u[:, :kept] * (s[:kept] * size)
        g[first : first + 2 * kept : 2, FAST_PAIRS:] = v[:kept] / size[:, None]
    return w, g


def is_smooth(inv_freq: Tensor) -> bool:
    """Whether the functions are exact to `WORST` for frequencies inv_freq [pairs], and no angle is beyond `WIDEST`."""
    return _is_smooth(tuple(inv_freq.tolist()))


@cache  # layers of a model ask for the same ones
def _is_smooth(frequencies: tuple[float, ...]) -> bool:
    if len(frequencies) <= FAST_PAIRS or len(frequencies) % 32:  # kernels have 32 pairs to a warp
        return False
    inv_freq = torch.tensor(frequencies, dtype=torch.float64)
    if inv_freq.abs().max().item() * TOKENS / 2 > WIDEST:
        return False
    w, g = decompose(inv_freq)
    angles = torch.outer(_times(), inv_freq[FAST_PAIRS:])
    even, odd = ((w[:, first::2] @ g[first::2])[:, FAST_PAIRS:] for first in (0, 1))
    return max((even - angles.cos()).abs().max().item(), (odd - angles.sin()).abs().max().item()) <= WORST


def functions(inv_freq: Tensor) -> Tensor:
    """What a block of the kernels copies to its shared memory, uint8, laid out as `cuda/bytes_layout.cuh` says:

    W, as lanes of a tile need it, and g (float32); (cos, sin) in float32 of what turns the fastest pairs from a page's
    middle to the start of each tile, and of what turns them by 0 ... 15 tokens; inv_freq itself, [pairs], pairs a
    multiple of 32; and (cos, sin) of what turns pairs by 1 ... `WARPS` pages.
    """
    f = inv_freq.double().cpu()
    fast = f[:FAST_PAIRS]
    w, g = decompose(inv_freq)
    tokens = (TOKENS // 16, 2, 8)  # tile, upper, r
    tiles = torch.arange(0, TOKENS, 16, dtype=torch.float64) - (TOKENS - 1) / 2
    parts = [
        w.view(*tokens, 4, 2).permute(0, 2, 3, 1, 4).float(),
        g.float(),
        _turns(torch.outer(tiles, fast)).view(2, 2, FAST_PAIRS, 2).transpose(0, 1).float(),
        _turns(torch.outer(torch.arange(16).double(), fast)).float(),
        inv_freq.float().cpu(),
        _turns(torch.outer(TOKENS * torch.arange(1, WARPS + 1).double(), f)).float(),
    ]
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])


def _turns(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()], -1)
