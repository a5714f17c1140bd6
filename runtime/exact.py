"""Exact causal attention over dense keys and values, as prompts need it."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 512  # queries of which scores are held at a time where nobody's kernel computes them


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int = 0, softcap: float | None = None
) -> Tensor:
    """Attention of the last m of n tokens: q [b, h_q, m, d], k and v [b, h_kv, n, d] -> [b, h_q, m, d].

    window: how many of the newest tokens a query sees, itself included (0: all); softcap: see `capped`.
    Half precision on CUDA devices runs on flash attention, which never holds m x n scores, unless one of them is set.
    """
    m, n, on_gpu = q.shape[2], k.shape[2], q.device.type == "cuda"
    if softcap is not None:
        return _capped_attention(q, k, v, scaling, window, softcap)
    grouped = q.shape[1] != k.shape[1]
    if grouped and on_gpu and q.dtype == torch.float32:
        # enable_gqa in float32 would take the kernel that writes all scores; repeated heads take one that does not.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    hidden = 0 < window < n
    if (m == n or m == 1) and not hidden:
        return F.scaled_dot_product_attention(q, k, v, is_causal=m > 1, scale=scaling, enable_gqa=grouped)
    mask = _lower_right(m, n) if on_gpu and not hidden else visible(m, n, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _lower_right(m: int, n: int) -> Tensor:
    """The mask of the last m of n tokens, in the form for which flash attention needs none."""
    from torch.nn.attention.bias import causal_lower_right  # here: it brings torch's compiler, which takes a second

    mask: Tensor = causal_lower_right(m, n)
    return mask


def visible(m: int, n: int, window: int, device: torch.device) -> Tensor:
    """Which of n tokens the last m of them see, bool [m, n]; window as in `causal_attention`."""
    mask = torch.ones(m, n, dtype=torch.bool, device=device).tril(n - m)
    return mask.triu(n - m - window + 1) if window else mask


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scaled scores bent so that they stay between -softcap and softcap (Gemma 2); None leaves them."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int, softcap: float) -> Tensor:
    """In float32, a block of queries after the other: no kernel of PyTorch's bends scores."""
    m, n, g = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(g, 1) for x in (k, v))
    out = torch.empty_like(q)
    for start in range(0, m, ROWS):
        rows = slice(start, min(start + ROWS, m))
        seen = n - m + rows.stop
        scores = capped(q[:, :, rows].to(wide) @ keys[:, :, :seen].transpose(2, 3) * scaling, softcap)
        scores = scores.masked_fill(~visible(rows.stop - start, seen, window, q.device), -torch.inf)
        out[:, :, rows] = (scores.softmax(-1) @ values[:, :, :seen]).to(q.dtype)
    return out
