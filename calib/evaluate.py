"""Quality of a bundle: how far the model's predictions move when its cache is compressed.

Two modes that must agree. `simulated`: one forward pass per window; every query sees, for each earlier token, what the
cache would hold at that moment (packed page, or full precision while the token is a sink or still in the window).
`cache`: the real cache, token by token, through the page kernels. Both are teacher-forced from an empty cache.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle, Format
from artifacts.geometry import SEGMENT_PAGES
from calib.data import Tokens
from calib.forward import Head, at_least_float32, blocks, hidden_states, kl_divergence, require_finite
from calib.progress import track
from runtime.codec import Codec
from runtime.exact import capped, causal_attention, visible
from runtime.hf import AttendingCache, SignpostCache
from runtime.hf_model import with_cache
from runtime.rope import Rotation


class SimulatedCache(AttendingCache):
    """Attention of a whole window at once, each query over the cache as it would be at its turn. One use per window.

    newest: False packs every token behind the sinks at once, the query's own included: how the papers simulate.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle, newest: bool = True):
        super().__init__(model)
        self.newest = newest
        device = model.device
        self.formats = bundle.layers
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], device)
        self.codecs = [
            tuple(Codec(side, bundle.side_tensors(layer, side.shape.side), device) for side in pair or ())
            for layer, pair in enumerate(bundle.geometry.layers)
        ]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """q [b, h_q, n, d], k and v [b, h_kv, n, d] -> [b, n, h_q, d]. Raises ValueError for padded windows."""
        if valid is not None:
            raise ValueError("windows to evaluate on have no padding")
        formats, window = self.formats[layer], self.window(layer)
        if formats is None:
            return causal_attention(q, k, v, scaling, window, self.softcap).transpose(1, 2)
        key_codec, value_codec = self.codecs[layer]
        rotation = self.rotation if formats.key.domain == "pre_rope" else None
        k_hat = packed(k, formats.key, key_codec, rotation, tail=not self.newest)
        v_hat = packed(v, formats.value, value_codec, None, tail=not self.newest)
        if not self.newest:
            k, v = k_hat, v_hat  # sinks are as they were in both
        key, value = Both(k, k_hat, formats.key), Both(v, v_hat, formats.value)
        return attend_both(q, key, value, scaling, window, self.softcap)


class Both(NamedTuple):
    """Keys or values [b, heads, n, d] as the model made them and as pages hold them."""

    exact: Tensor
    packed: Tensor
    format: Format

    def repeated(self, g: int) -> "Both":
        """For the g query heads of each kv head, [b, g * h_kv, n, d], in float32 at least."""
        exact, packed = (at_least_float32(x).repeat_interleave(g, 1) for x in self[:2])
        return Both(exact, packed, self.format)


def attend_both(
    q: Tensor, key: Both, value: Both, scaling: float, window: int = 0, softcap: float | None = None
) -> Tensor:
    """Attention of a whole window q [b, h_q, n, d] as it would find keys and values at each turn -> [b, n, h_q, d].

    window, softcap: as in `runtime.exact.causal_attention`.
    """
    g = q.shape[1] // key.exact.shape[1]
    key, value = (side.repeated(g) for side in (key, value))
    out = torch.empty_like(q)
    for rows in blocks(q.shape[2]):
        queries = at_least_float32(q[:, :, rows]) * scaling
        out[:, :, rows] = _attend_rows(queries, rows.start, key, value, window, softcap)
    return out.transpose(1, 2)


def _attend_rows(q: Tensor, start: int, key: Both, value: Both, window: int, softcap: float | None) -> Tensor:
    """Scaled queries q [b, h_q, m, d], the first at token `start`, over all keys and values up to each query."""
    n = start + q.shape[2]
    query, token = torch.arange(start, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    k, k_hat, v, v_hat = (x[:, :, :n] for both in (key, value) for x in both[:2])
    scores = torch.where(_is_packed(key.format, query, token), q @ k_hat.transpose(2, 3), q @ k.transpose(2, 3))
    seen = visible(q.shape[2], n, window, q.device)
    weights = capped(scores, softcap).masked_fill(~seen, -torch.inf).softmax(-1)
    from_pages = _is_packed(value.format, query, token)
    return (weights * from_pages) @ v_hat + (weights * ~from_pages) @ v


def _is_packed(fmt: Format, query: Tensor, token: Tensor) -> Tensor:
    """Whether `token` is in a page when `query` (so many tokens are cached by then) looks at it."""
    window = fmt.window
    end = window.sinks + fmt.t * ((query - window.sinks - window.recent).clamp_min(0) // fmt.t)
    return (token >= window.sinks) & (token < end)


def packed(x: Tensor, fmt: Format, codec: Codec, rotation: Rotation | None, tail: bool = False) -> Tensor:
    """Keys after RoPE or values [b, h_kv, n, d] with all whole pages encoded and decoded; the rest is left as it was.

    rotation: un-rotates keys before they are encoded, or None. tail: the tokens are packed at once, as a prompt is, and
    the last, unfinished page counts as well, filled up with copies of its last token. Otherwise every page is packed by
    itself, as decoded tokens are.
    """
    b, h_kv, n, d = x.shape
    first = fmt.window.sinks
    stop = n if tail else n - max(0, n - first) % fmt.t
    if stop <= first:
        return x
    positions = torch.arange(first, stop, device=x.device)
    part = x[:, :, first:stop].float()
    part = part if rotation is None else rotation.unrotate(part, positions)
    missing = (first - stop) % fmt.t
    part = torch.cat([part, part[:, :, -1:].expand(-1, -1, missing, -1)], 2)
    sequences = part.transpose(1, 2).contiguous().view(b, -1, fmt.t, h_kv, d)
    pages = [codec.encode(by_page, SEGMENT_PAGES if tail else 1)[1] for by_page in sequences]
    decoded = torch.stack(pages).view(b, -1, h_kv, d).transpose(1, 2)[:, :, : stop - first]
    if rotation is not None:
        decoded = rotation.rotate(decoded, positions)
    out = x.clone()
    out[:, :, first:stop] = decoded.to(x.dtype)
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
        """Logits [n, vocabulary] of both and the true next tokens int64 [n]. Computed in float32 (float64 stays).

        Raises ActivationError for NaN or infinity.
        """
        require_finite(full, "logits in full precision")
        require_finite(compressed, "logits with a compressed cache")
        p, q = (F.log_softmax(at_least_float32(x), -1) for x in (full, compressed))
        self.loss_full += F.nll_loss(p, targets, reduction="sum").item()
        self.loss += F.nll_loss(q, targets, reduction="sum").item()
        self.same_top += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.divergences.append(kl_divergence(p, q).cpu())
        self.count += targets.numel()

    def result(self) -> dict[str, float]:
        """Loss in nats per token, perplexity, KL(full || compressed) in nats per token, share of equal top-1 tokens."""
        kl = torch.cat(self.divergences).double().numpy()
        full, compressed = self.loss_full / self.count, self.loss / self.count
        return {
            "loss_full": full,
            "loss": compressed,
            "loss_increase": compressed - full,
            "perplexity_full": _perplexity(full),
            "perplexity": _perplexity(compressed),
            "kl_mean": float(kl.mean()),
            "kl_p999": float(np.quantile(kl, 0.999)),
            "top1": self.same_top / self.count,
            "tokens": self.count,
        }


def _perplexity(loss: float) -> float:
    """exp(loss), at most the largest float: JSON has no infinity."""
    return exp(min(loss, log(sys.float_info.max)))


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    bundle: Bundle,
    tokens: Tokens,
    cache_tokens: int = 0,
    progress: Progress | None = None,
    window: bool = True,
) -> dict[str, Any]:
    """Measures `bundle` on windows of text; what is returned becomes `evaluation.json`.

    window: False measures without the full-precision window, as the papers do (see `SimulatedCache`).
    cache_tokens: as many tokens of the first window are decoded one by one through the real cache as well, and the
    result gains `cache_check` with both modes' losses on them and the largest difference of their logits.
    """
    n = tokens.ids.shape[1]
    report = track(progress, "evaluating", tokens.ids.shape[0])
    comparison, head = Comparison(), Head(model)
    for sample in tokens.ids:
        ids = sample[None].to(model.device)
        full = hidden_states(model, ids)
        require_finite(full, "the model's hidden states")
        compressed = hidden_states(model, ids, SimulatedCache(model, bundle, window))
        for rows in blocks(n - 1):
            targets = ids[0, rows.start + 1 : rows.stop + 1]
            comparison.add(head(full[:, rows])[0], head(compressed[:, rows])[0], targets)
        report()
    bits = bundle.geometry.bits(n)
    mode = "simulated" if window else "simulated without window"
    result: dict[str, Any] = comparison.result()
    result |= {"bits": bits, "compression": 16 / bits, "context": n, "mode": mode, "text": tokens.provenance()}
    if cache_tokens:
        result["cache_check"] = _check_cache(model, bundle, tokens.ids[:1, :cache_tokens].to(model.device), progress)
    return result


def simulated_logits(model: PreTrainedModel, bundle: Bundle, ids: Tensor, window: bool = True) -> Tensor:
    """Logits [b, n, vocabulary] with the cache simulated inside one forward pass; `window` as in `SimulatedCache`."""
    return model(ids, **with_cache(model, SimulatedCache(model, bundle, window)), use_cache=True).logits


def cached_logits(
    model: PreTrainedModel, bundle: Bundle, ids: Tensor, report: Callable[[], None] = lambda: None
) -> tuple[Tensor, SignpostCache]:
    """Logits [b, n, vocabulary] token by token through the real cache, and the cache as it is afterwards."""
    cache = SignpostCache(model, bundle, max_tokens=ids.shape[1])
    steps = []
    for i in range(ids.shape[1]):
        steps.append(model(ids[:, i : i + 1], **with_cache(model, cache), use_cache=True).logits)
        report()
    return torch.cat(steps, 1), cache


def _check_cache(model: PreTrainedModel, bundle: Bundle, ids: Tensor, progress: Progress | None) -> dict[str, float]:
    report = track(progress, "checking the real cache", ids.shape[1])
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
