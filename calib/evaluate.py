"""Quality of a bundle: how far the model's predictions move when its cache is compressed.

Two modes that must agree. `simulated`: one forward pass per window; every query sees, for each earlier token, what the cache
would hold at that moment (packed page, or full precision while the token is a sink or still in the window). `cache`: the real
cache, token by token, through the page kernels. Both are teacher-forced and start from an empty cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle, Format, PageGeometry
from calib.data import Tokens
from runtime.codec import Codec
from runtime.hf import AttendingCache, SignpostCache
from runtime.rope import Rotation

QUERY_BLOCK = 512  # query rows whose scores are held at a time


class SimulatedCache(AttendingCache):
    """Attention of a whole window at once, each query over the cache as it would be at its turn. One use per window."""

    def __init__(self, model: PreTrainedModel, bundle: Bundle):
        super().__init__(model)
        device = model.device
        self.formats = bundle.layers
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], device)
        self.codecs = [
            tuple(
                Codec(PageGeometry.of(fmt, bundle.model.h_kv, bundle.model.d), bundle.side_tensors(layer, side), device)
                for side, fmt in (("key", formats.key), ("value", formats.value))
            )
            for layer, formats in enumerate(bundle.layers)
        ]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """q [b, h_q, n, d], k and v [b, h_kv, n, d] -> [b, n, h_q, d]. Raises ValueError for padded windows."""
        if valid is not None:
            raise ValueError("windows to evaluate on have no padding")
        formats, (key_codec, value_codec) = self.formats[layer], self.codecs[layer]
        rotation = self.rotation if formats.key.domain == "pre_rope" else None
        k_hat = packed(k, formats.key, key_codec, rotation)
        v_hat = packed(v, formats.value, value_codec, None)
        g = q.shape[1] // k.shape[1]
        k, k_hat, v, v_hat = (x.repeat_interleave(g, 1) for x in (k, k_hat, v, v_hat))
        out = torch.empty_like(q)
        for start in range(0, q.shape[2], QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            out[:, :, rows] = _attend_rows(q[:, :, rows], start, k, k_hat, v, v_hat, formats.key, formats.value, scaling)
        return out.transpose(1, 2)


def _attend_rows(
    q: Tensor, start: int, k: Tensor, k_hat: Tensor, v: Tensor, v_hat: Tensor, key: Format, value: Format, scaling: float
) -> Tensor:
    """Queries q [b, h, m, d], the first at token `start`, over exact and packed keys and values [b, h, n, d]."""
    n = min(k.shape[2], start + q.shape[2])
    k, k_hat, v, v_hat = (x[:, :, :n] for x in (k, k_hat, v, v_hat))
    query, token = torch.arange(start, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    scores = torch.where(_is_packed(key, query, token), q @ k_hat.transpose(2, 3), q @ k.transpose(2, 3))
    weights = (scores * scaling).masked_fill(token > query, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    from_pages = _is_packed(value, query, token)
    return (weights * from_pages) @ v_hat + (weights * ~from_pages) @ v


def _is_packed(fmt: Format, query: Tensor, token: Tensor) -> Tensor:
    """Whether `token` is in a page when `query` (so many tokens are cached by then) looks at it."""
    window = fmt.window
    end = window.sinks + fmt.t * ((query - window.sinks - window.recent).clamp_min(0) // fmt.t)
    return (token >= window.sinks) & (token < end)


def packed(x: Tensor, fmt: Format, codec: Codec, rotation: Rotation | None) -> Tensor:
    """Keys after RoPE or values [b, h_kv, n, d] with all whole pages encoded and decoded; the rest is left as it was."""
    b, h_kv, n, d = x.shape
    first = fmt.window.sinks
    pages = max(0, n - first) // fmt.t
    if not pages:
        return x
    part = x[:, :, first : first + pages * fmt.t]
    positions = torch.arange(first, first + pages * fmt.t, device=x.device)
    part = part.float() if rotation is None else rotation.unrotate(part, positions)
    by_page = part.transpose(1, 2).reshape(b * pages, fmt.t, h_kv, d)
    decoded = codec.encode(by_page)[1].reshape(b, pages * fmt.t, h_kv, d).transpose(1, 2)
    if rotation is not None:
        decoded = rotation.rotate(decoded, positions)
    out = x.clone()
    out[:, :, first : first + pages * fmt.t] = decoded.to(x.dtype)
    return out


@dataclass
class Comparison:
    """Accumulates next-token predictions of the full-precision and the compressed model."""

    loss_full: float = 0.0
    loss: float = 0.0
    same_top: int = 0
    count: int = 0
    divergences: list[Tensor] = field(default_factory=list)

    def add(self, full: Tensor, compressed: Tensor, targets: Tensor) -> None:
        """Logits [n, vocabulary] of both and the true next tokens int64 [n]. Computed in float32 (float64 stays)."""
        for rows in torch.arange(targets.numel()).split(1024):
            p, q = (F.log_softmax(x[rows].to(torch.promote_types(x.dtype, torch.float32)), -1) for x in (full, compressed))
            self.loss_full += F.nll_loss(p, targets[rows], reduction="sum").item()
            self.loss += F.nll_loss(q, targets[rows], reduction="sum").item()
            self.same_top += int((p.argmax(-1) == q.argmax(-1)).sum())
            self.divergences.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).cpu())
            self.count += rows.numel()

    def result(self) -> dict[str, float]:
        """Loss in nats per token, perplexity, KL(full || compressed) in nats per token, share of equal top-1 tokens."""
        kl = torch.cat(self.divergences).double()
        full, compressed = self.loss_full / self.count, self.loss / self.count
        return {
            "loss_full": full,
            "loss": compressed,
            "loss_increase": compressed - full,
            "perplexity_full": exp(full),
            "perplexity": exp(compressed),
            "kl_mean": kl.mean().item(),
            "kl_p999": kl.quantile(0.999).item() if kl.numel() < 10_000_000 else kl.sort().values[int(0.999 * kl.numel())].item(),
            "top1": self.same_top / self.count,
            "tokens": self.count,
        }


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, bundle: Bundle, tokens: Tokens, cache_tokens: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Measures `bundle` on windows of text; what is returned becomes `evaluation.json`.

    cache_tokens: as many tokens of the first window are decoded one by one through the real cache as well, and the result
    gains `cache_check` with both modes' losses on them and the largest difference of their logits.
    """
    n = tokens.ids.shape[1]
    report = _track(progress, "evaluating", tokens.ids.shape[0])
    comparison = Comparison()
    for window in tokens.ids:
        ids = window[None].to(model.device)
        comparison.add(full_logits(model, ids)[0, :-1], simulated_logits(model, bundle, ids)[0, :-1], ids[0, 1:])
        report()
    bits = bundle.geometry.bits(n)
    result: dict[str, Any] = comparison.result()
    result |= {"bits": bits, "compression": 16 / bits, "context": n, "mode": "simulated", "text": tokens.provenance()}
    if cache_tokens:
        result["cache_check"] = _check_cache(model, bundle, tokens.ids[:1, :cache_tokens].to(model.device), progress)
    return result


def full_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [b, n, vocabulary] of the model as it is."""
    return model(ids, use_cache=False).logits


def simulated_logits(model: PreTrainedModel, bundle: Bundle, ids: Tensor) -> Tensor:
    """Logits [b, n, vocabulary] with the cache simulated inside one forward pass."""
    return model(ids, past_key_values=SimulatedCache(model, bundle), use_cache=True).logits


def cached_logits(
    model: PreTrainedModel, bundle: Bundle, ids: Tensor, report: Callable[[], None] = lambda: None
) -> tuple[Tensor, SignpostCache]:
    """Logits [b, n, vocabulary] token by token through the real cache, and the cache as it is afterwards."""
    cache = SignpostCache(model, bundle, max_tokens=ids.shape[1])
    steps = []
    for i in range(ids.shape[1]):
        steps.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
        report()
    return torch.cat(steps, 1), cache


def _check_cache(model: PreTrainedModel, bundle: Bundle, ids: Tensor, progress: Progress | None) -> dict[str, float]:
    report = _track(progress, "checking the real cache", ids.shape[1])
    simulated = simulated_logits(model, bundle, ids)
    real, _ = cached_logits(model, bundle, ids, report)
    targets = ids[0, 1:]
    losses = [F.cross_entropy(x[0, :-1].float(), targets).item() for x in (simulated, real)]
    return {
        "tokens": ids.shape[1],
        "loss_simulated": losses[0],
        "loss_cache": losses[1],
        "largest_logit_difference": (simulated - real).abs().max().item(),
    }


def _track(progress: Progress | None, title: str, total: int) -> Callable[[], None]:
    if progress is None:
        return lambda: None
    task = progress.add_task(title, total=total)
    return lambda: progress.advance(task)

