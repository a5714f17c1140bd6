"""The adapter for transformers 5: `model.generate(..., cache=SignpostCache(model, bundle))`.

Attention runs in here only while the model is called with a `SignpostCache`; with any other cache, or none, the model
computes what it always did. Only `runtime.hf*` and `runtime.lm_eval` import transformers.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    TextStreamer,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from artifacts import Bundle
from artifacts.errors import SignpostError, UnsupportedModelError
from runtime.cache import KVCache
from runtime.hf_load import ModelLoadError, load_causal_lm
from runtime.hf_model import (
    CACHE_KEYWORDS,
    fingerprint,
    kv_heads,
    share_of,
    sliding_windows,
    softcap_of,
    split_of,
    text_config,
)
from runtime.sampling import whole

__all__ = [
    "AttendingCache",
    "ModelLoadError",
    "SignpostCache",
    "TextStreamer",
    "UnsupportedModelError",
    "attach",
    "fingerprint",
    "load_causal_lm",
]

ATTENTION = "signpost"  # our name in transformers' registries

_active: ContextVar["AttendingCache | None"] = ContextVar("signpost_active_cache", default=None)


class AttendingCache(Cache):
    """A transformers cache that computes attention itself, for one model. Subclasses give `attend`: `SignpostCache`.

    sliding, softcap: of the model, as in `ModelFingerprint`; split: which share of its kv heads its attention has here.
    Raises UnsupportedModelError for windows of other kinds.
    """

    def __init__(self, model: PreTrainedModel):
        config = text_config(model)
        super().__init__(layers=cast(Any, [_Layer() for _ in range(config.num_hidden_layers)]))
        self.sliding, self.softcap = sliding_windows(config), softcap_of(config)
        self.split = split_of(model)
        self.h_kv = kv_heads(config) // self.split.world
        self.base = weakref.ref(attach(model))
        self._mask: Tensor | None = None  # the last pass's
        self._valid: Tensor | None = None

    def window(self, layer: int) -> int:
        """How many of the newest tokens a query of this layer sees, itself included; 0: all."""
        return self.sliding[layer] if self.sliding else 0

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of one layer; shapes as in `runtime.layer.CacheLayer.attend`."""
        raise NotImplementedError

    def check(self, base: nn.Module) -> None:
        """Raises ValueError before a pass of `base` that cannot work: another model, or half a pass in the cache."""
        if self.base() is not base:
            raise ValueError("this cache was made for another model: make one for each model")
        if len({self.get_seq_length(layer) for layer in range(len(self.layers))}) > 1:
            raise ValueError(
                "an earlier pass was broken off half-way, and some layers hold tokens that others lack: "
                "use a new cache, or reset() this one"
            )

    def check_mask(self, earlier: Tensor) -> None:
        """Raises ValueError where a padding mask of the earlier tokens, bool [b, n], contradicts what is cached."""

    def valid(self, mask: Tensor | None, m: int) -> Tensor | None:
        """Which of the m new tokens are real by a mask of all tokens, bool [b, m]; None if all are.

        The layers of a pass share one mask: the device is asked once.
        """
        if mask is None:
            return None
        if mask is not self._mask:
            new = mask[:, -m:]
            self._mask, self._valid = mask, None if bool(new.all()) else new
        return self._valid

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands the new tokens on to `attend`. Raises RuntimeError where another attention function would take them."""
        if _active.get() is not self:
            raise RuntimeError(
                "this cache computes attention itself, and was passed around it: call the model that it was made for, "
                f"with the keyword {'= or '.join(CACHE_KEYWORDS)}="
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class SignpostCache(AttendingCache):
    """Compressed cache for one batch of sequences, to be passed as `cache`; before transformers 5.24, as
    `past_key_values`.

    model       any supported decoder (`fingerprint` says); its batches may be padded on the left
    bundle      calibrated for this model, else BundleMismatchError. Where transformers shares the model's heads among
                several ranks, each takes its slice of the bundle and keeps its own heads' pages
    max_tokens  tokens to reserve per sequence (None: grow by doubling), as in `runtime.cache.KVCache`
    Raises UnsupportedModelError for models that cannot be compressed.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle, max_tokens: int | None = None):
        if max_tokens is not None and (not whole(max_tokens) or max_tokens < 1):
            raise ValueError(f"max_tokens={max_tokens!r}: must be at least 1, or None to grow")
        bundle = share_of(model, bundle)
        super().__init__(model)
        self.bundle, self.max_tokens = bundle, max_tokens
        self.kv: KVCache | None = None  # made at the first call, which tells batch, dtype and device

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        if self.kv is None:
            self.kv = KVCache(self.bundle, q.shape[0], self.max_tokens, k.dtype, k.device)
        self._require_batch(q.shape[0])
        return self.kv.layers[layer].attend(q, k, v, positions, valid, scaling)

    def _require_batch(self, b: int) -> None:
        if self.kv and b != self.kv.b:
            raise ValueError(f"a batch of {b} sequences, but this cache holds {self.kv.b}: use a new cache")

    def check_mask(self, earlier: Tensor) -> None:
        self._require_batch(earlier.shape[0])
        shown, held = earlier.sum(1).tolist(), self.kv.lengths if self.kv else [0] * earlier.shape[0]
        if shown != held:
            raise ValueError(
                f"the attention mask shows {shown} earlier tokens, but the cache holds {held} (by sequence): "
                "what is cached cannot be masked any more; pass the mask of all tokens so far"
            )

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.kv.nbytes if self.kv else 0

    @property
    def bits(self) -> float:
        """Bits per cached number, everything counted."""
        return self.kv.bits if self.kv else float("nan")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence i continues old sequence beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the given sequences, in this order."""
        if self.kv is not None:
            self.kv.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence; the copies share full pages."""
        if self.kv is not None:
            self.kv.select([i for i in range(self.kv.b) for _ in range(repeats)])

    def reset(self) -> None:
        """Forgets all sequences."""
        self.kv = None
        for layer in self.layers:
            layer.reset()

    def crop(self, max_length: int) -> None:
        """Raises SignpostError."""
        raise SignpostError("a compressed cache cannot be cropped: packed tokens are final. Use a new cache")


class _Layer(CacheLayerMixin):
    """Tells transformers how many tokens (padding included) have passed; the numbers live in the AttendingCache."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + new, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.seen = 0


@torch.compiler.disable  # compiled layers are compiled around it
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: query [b, h_q, m, d], key and value of the m new tokens."""
    cache = _active.get()
    if cache is None:
        raise RuntimeError(
            f"signpost attention runs only inside a forward pass with {'= or '.join(CACHE_KEYWORDS)}=SignpostCache(...)"
        )
    layer = cast(int, module.layer_idx)
    known = (sliding_window or 0, softcap) == (cache.window(layer), cache.softcap)
    if dropout or not known or s_aux is not None:
        raise UnsupportedModelError(
            f"attention of layer {layer} with dropout={dropout}, softcap={softcap}, sliding_window={sliding_window}, "
            f"{'learned' if s_aux is not None else 'no'} sink logits is not supported: its configuration says "
            f"softcap={cache.softcap} and a window of {cache.window(layer) or 'all'} tokens; no more can be done"
        )
    if query.requires_grad:
        raise RuntimeError("a compressed cache is for inference: call the model under torch.no_grad()")
    if position_ids is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass position_ids to its attention function")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"an attention mask of {attention_mask.dim()} dimensions: only [batch, tokens] is supported")
    if key.shape[1] != cache.h_kv:
        raise UnsupportedModelError(
            f"attention of layer {layer} gets {key.shape[1]} kv heads, and {cache.split} should have {cache.h_kv}: "
            "only plans that give each rank its own heads, or all of them to every rank, are supported"
        )
    m = query.shape[2]
    out = cache.attend(layer, query, key, value, position_ids, cache.valid(attention_mask, m), scaling)
    cast(_Layer, cache.layers[layer]).seen += m
    return out, None


def _padding_mask(
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    """Mask function as transformers calls it: the two-dimensional padding mask itself, or None if nothing is padded.

    What else a mask says, causality and the layer's window (local_size), our attention knows.
    """
    known = sliding_window_causal_mask_function(local_size) if local_size else causal_mask_function
    if not _same(mask_function, known):
        raise UnsupportedModelError("attention masks other than causal ones are not supported yet")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"an attention mask over {attention_mask.shape[1]} tokens, but {kv_length - q_length} have passed and "
            f"{q_length} are new: pass the mask of all tokens so far"
        )
    if cache := _active.get():
        cache.check_mask(attention_mask[:, : kv_length - q_length])
    return attention_mask.bool()


def _same(one: Any, other: Any) -> bool:
    """Whether two functions run the same code over the same values: mask functions are made anew for every pass."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if callable(one) and callable(other):
        alike = getattr(one, "__code__", one) is getattr(other, "__code__", other)
        cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)] if alike else []
        return alike and _same(*cells)
    return type(one) is type(other) is int and one == other


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _padding_mask)


def attach(model: PreTrainedModel) -> nn.Module:
    """Lets `model` use AttendingCaches, and returns its base model, whose forward is wrapped for that. Idempotent."""
    base = model.base_model
    if not isinstance(base.forward, _Forward):
        base.forward = _Forward(base)
    base.forward.configs = list({id(m.config): m.config for m in base.modules() if hasattr(m, "config")}.values())
    return base


class _Forward:
    """Forward pass of an attached base model: our attention under an AttendingCache, the model's own under any other.

    Transformers looks the attention function up in the configuration. It is set for the length of one pass, whatever
    ends it. An object, not a closure, so that a deep copy of the model wraps the copy's own forward.
    """

    configs: list[Any]  # of the base model and of what is in it

    def __init__(self, base: nn.Module):
        self.base, self.forward = base, base.forward
        self.own: list[str] = []  # the model's own attention functions, one per configuration
        update_wrapper(self, base.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = (kwargs.get(name) for name in CACHE_KEYWORDS)
        cache = next((cache for cache in caches if isinstance(cache, AttendingCache)), None)
        if cache is not None:
            cache.check(self.base)
            given = (args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            if any(isinstance(tokens, Tensor) and tokens.ndim > 1 and not tokens.shape[1] for tokens in given):
                raise ValueError(
                    f"no new tokens behind the {cache.get_seq_length()} that this cache holds: "
                    "begin another text with a new cache, or reset() this one"
                )
        before = [config._attn_implementation for config in self.configs]
        if ATTENTION not in before:  # else this pass runs inside of another one
            self.own = before
        token = _active.set(cache)
        try:
            self._set_attention(self.own if cache is None else [ATTENTION] * len(before))
            return self.forward(*args, **kwargs)
        finally:
            self._set_attention(before)
            _active.reset(token)

    def _set_attention(self, names: list[str]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            config._attn_implementation = name
