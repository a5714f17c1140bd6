"""Exact causal attention over dense keys and values, as prompts need it."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Attention of the last m of n tokens: q [b, h_q, m, d], k and v [b, h_kv, n, d] -> [b, h_q, m, d].

    Half precision on CUDA devices runs on flash attention, which never holds m x n scores.
    """
    m, n, on_gpu = q.shape[2], k.shape[2], q.device.type == "cuda"
    grouped = q.shape[1] != k.shape[1]
    if grouped and on_gpu and q.dtype == torch.float32:
        # enable_gqa in float32 would take the kernel that writes all scores; repeated heads take one that does not.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    if m == n or m == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=m > 1, scale=scaling, enable_gqa=grouped)
    if on_gpu:
        mask: Tensor = causal_lower_right(m, n)
    else:
        mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
