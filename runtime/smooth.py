"""RoPE over a page as a few functions of the token: what lets kernels turn the query instead of keys.

A key at token j of a page of 64, counted from the middle as t = j - 31.5, adds cos(t f) and sin(t f) of every pair's
frequency f to its score. For slow pairs these are nearly in the span of few functions of t: four even ones for the
cosines and four odd ones for the sines, the best in the least-squares sense (singular value decomposition). The fastest
`FAST_PAIRS` pairs are left out. `python -m benchmarks.rope_columns` says how many functions what precision takes.
"""

from functools import cache

import torch
from torch import Tensor

TOKENS = 64  # of a page
FUNCTIONS = 8  # even ones at even places
FAST_PAIRS = 16  # that are turned one by one
WORST = 1e-4  # of any cosine or sine; a half rounds to 5e-4


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
    """Whether the functions are exact to `WORST` for frequencies inv_freq [pairs]."""
    return _is_smooth(tuple(inv_freq.tolist()))


@cache  # layers of a model ask for the same ones
def _is_smooth(frequencies: tuple[float, ...]) -> bool:
    if len(frequencies) <= FAST_PAIRS:
        return False
    inv_freq = torch.tensor(frequencies, dtype=torch.float64)
    w, g = decompose(inv_freq)
    angles = torch.outer(_times(), inv_freq[FAST_PAIRS:])
    even, odd = ((w[:, first::2] @ g[first::2])[:, FAST_PAIRS:] for first in (0, 1))
    return max((even - angles.cos()).abs().max().item(), (odd - angles.sin()).abs().max().item()) <= WORST


def functions(inv_freq: Tensor) -> Tensor:
    """What kernels read, float32: W, g, and (cos, sin) of t f [TOKENS, pairs], one after the other."""
    angles = torch.outer(_times(), inv_freq.double().cpu())
    parts = (*decompose(inv_freq), torch.stack([angles.cos(), angles.sin()], -1))
    return torch.cat([part.flatten().float() for part in parts])
