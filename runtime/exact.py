"""Exact causal attention over dense keys and values, as prompts need it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = torch.float16, torch.bfloat16
# Queries of which scores are held at a time where nobody's kernel computes them, at most, and numbers of these scores.
ROWS, SCORES = 512, 1 << 26


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int = 0, softcap: float | None = None
) -> Tensor:
    """Attention of the last m of n tokens: q [b, h_q, m, d], k and v [b, h_kv, n, d] -> [b, h_q, m, d].

    window: how many of the newest tokens a query sees, itself included (0: all); softcap: see `capped`.
    Half precision on CUDA devices runs on flash attention, which never holds m x n scores, unless there is a softcap:
    then scores of some queries are held at a time, as with windows elsewhere.
    """
    if q.shape[2] == 1 and window:
        k, v, window = k[:, :, -window:], v[:, :, -window:], 0
    m, n, on_gpu = q.shape[2], k.shape[2], q.device.type == "cuda"
    if softcap is not None:
        return _in_blocks(q, k, v, window, partial(_capped, scaling=scaling, softcap=softcap))
    grouped = q.shape[1] != k.shape[1]
    if grouped and on_gpu and q.dtype == torch.float32:
        # enable_gqa in float32 would take the kernel that writes all scores; repeated heads take one that does not.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    if 0 < window < n:
        if on_gpu and q.dtype in HALVES:
            return _sliding_flash(q, k, v, scaling, window)
        return _in_blocks(q, k, v, window, partial(_masked, scaling=scaling, grouped=grouped))
    if m == n or m == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=m > 1, scale=scaling, enable_gqa=grouped)
    mask = _lower_right(m, n) if on_gpu else visible(m, n, 0, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _sliding_flash(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int) -> Tensor:
    """Flash attention of queries that see a window; of PyTorch's own functions none hands one on to it."""
    rows, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    sizes = q.shape[2], k.shape[2]
    found = torch.ops.aten._flash_attention_forward(
        rows, keys, values, None, None, *sizes, 0.0, True, False, scale=scaling, window_size_left=window - 1,
        window_size_right=0,
    )  # fmt: skip
    out: Tensor = found[0]
    return out.transpose(1, 2)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """A block of queries after the other, over the keys and values that these see; attend: q, k, v and a mask bool
    [rows, keys], where one of the rows sees a key."""
    (b, h_q, m, _), n, out = q.shape, k.shape[2], torch.empty_like(q)
    seen = min(n, window + ROWS) if window else n
    block = max(1, min(ROWS, SCORES // (b * h_q * seen)))
    for start in range(0, m, block):
        rows = slice(start, min(start + block, m))
        end = n - m + rows.stop
        first = max(0, n - m + start + 1 - window) if window else 0
        mask = visible(rows.stop - start, end - first, window, q.device)
        out[:, :, rows] = attend(q[:, :, rows], k[:, :, first:end], v[:, :, first:end], mask)
    return out


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, grouped: bool) -> Tensor:
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


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """No kernel of PyTorch's bends scores. These are float32; on CUDA devices weights are rounded to what the values
    are, as flash attention does."""
    (b, h_q, m, d), h_kv = q.shape, k.shape[1]
    q, k, v = q.reshape(b * h_kv, -1, d), k.flatten(0, 1), v.flatten(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cuda" and q.dtype in HALVES:
        scores = torch.bmm(q, k.transpose(1, 2), out_dtype=wide)
    else:
        scores, v = q.to(wide) @ k.to(wide).transpose(1, 2), v.to(wide)
    scores = capped(scores * scaling, softcap).unflatten(1, (-1, m)).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1).flatten(1, 2).to(v.dtype) @ v
    return out.view(b, h_q, m, d).to(q.dtype)
