"""The adapter for transformers 5: `model.generate(..., past_key_values=SignpostCache(model, bundle))`, model unpatched.

Attention runs in here only while the model is called with a `SignpostCache`; with any other cache, or none, the model is as it
was. This is the only file of the runtime that imports transformers.
"""

import hashlib
import json
import sys
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from artifacts import Bundle, ModelFingerprint, Rope
from artifacts.errors import SignpostError
from runtime.cache import KVCache
from runtime.rope import Rotation

ATTENTION = "signpost"  # our name in transformers' registries
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on the length

# Configuration entries that change the model's mathematics and are the same under every version of transformers.
_HASHED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "rope_parameters",
)  # fmt: skip

_active: ContextVar["AttendingCache | None"] = ContextVar("signpost_active_cache", default=None)


class UnsupportedModelError(SignpostError, ValueError):
    """The model's attention is of a kind that cannot be compressed (yet)."""


class AttendingCache(Cache):
    """A transformers cache that computes attention itself. Subclasses give `attend`; see `SignpostCache`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(layers=cast(Any, [_Layer() for _ in range(text_config(model).num_hidden_layers)]))
        attach(model)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of one layer; shapes as in `runtime.cache.LayerCache.attend`."""
        raise NotImplementedError


class SignpostCache(AttendingCache):
    """Compressed cache for one batch of sequences, to be passed as `past_key_values`.

    model       any supported decoder (`fingerprint` says); its batches may be padded on the left
    bundle      calibrated for this model, else BundleMismatchError
    max_tokens  tokens to reserve per sequence (None: grow by doubling), as in `runtime.cache.KVCache`
    Raises UnsupportedModelError for models that cannot be compressed.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle, max_tokens: int | None = None):
        bundle.model.require(fingerprint(model))
        super().__init__(model)
        self.bundle, self.max_tokens = bundle, max_tokens
        self.kv: KVCache | None = None  # made at the first call, which tells batch, dtype and device

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        if self.kv is None:
            self.kv = KVCache(self.bundle, q.shape[0], self.max_tokens, k.dtype, k.device)
        if q.shape[0] != self.kv.b:
            raise ValueError(f"a batch of {q.shape[0]} sequences, but this cache holds {self.kv.b}: use a new cache")
        return self.kv.layers[layer].attend(q, k, v, positions, valid, scaling)

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
        self.seen += key_states.shape[-2]
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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: query [b, h_q, m, d], key and value of the m new tokens."""
    cache = _active.get()
    if cache is None:
        raise RuntimeError("signpost attention runs only inside a forward pass with past_key_values=SignpostCache(...)")
    if dropout or softcap or sliding_window:
        raise UnsupportedModelError(
            f"attention with dropout={dropout}, softcap={softcap}, sliding_window={sliding_window} is not supported yet"
        )
    if query.requires_grad:
        raise RuntimeError("a compressed cache is for inference: call the model under torch.no_grad()")
    if position_ids is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass position_ids to its attention function")
    valid = None if attention_mask is None else attention_mask[:, -query.shape[2] :]
    layer = cast(int, module.layer_idx)
    return cache.attend(layer, query, key, value, position_ids, valid, scaling), None


def _padding_mask(
    batch_size: int, attention_mask: Tensor | None = None, device: Any = None, **_: Any
) -> Tensor | None:
    """Mask function as transformers calls it: the two-dimensional padding mask itself, or None if nothing is padded."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"an attention mask of {attention_mask.dim()} dimensions: only [batch, tokens] is supported")
    return attention_mask.bool()


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _padding_mask)


def attach(model: PreTrainedModel) -> None:
    """Lets `model` use AttendingCaches. Idempotent; forward passes without such a cache are unchanged."""
    base = cast(nn.Module, model.base_model)
    if getattr(base, "_signpost_attached", False):
        return
    configs = list({id(m.config): m.config for m in base.modules() if hasattr(m, "config")}.values())
    saved: list[Any] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, AttendingCache):
            saved.append((_active.set(cache), [c._attn_implementation for c in configs]))
            for config in configs:
                config._attn_implementation = ATTENTION

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(kwargs.get("past_key_values"), AttendingCache) and saved:
            token, implementations = saved.pop()
            for config, implementation in zip(configs, implementations, strict=True):
                config._attn_implementation = implementation
            _active.reset(token)

    base.register_forward_pre_hook(enter, with_kwargs=True)
    base.register_forward_hook(leave, with_kwargs=True, always_call=True)
    base._signpost_attached = True  # type: ignore[assignment]


def text_config(model: PreTrainedModel) -> Any:
    """Configuration of the language model."""
    return model.config.get_text_config()


def fingerprint(model: PreTrainedModel) -> ModelFingerprint:
    """What a bundle remembers of `model`. Raises UnsupportedModelError with the reason where it cannot be compressed."""
    config = text_config(model)
    _require_supported(model, config)
    rope, _ = rotary(model)
    h_q = config.num_attention_heads
    known = {name: getattr(config, name) for name in _HASHED if hasattr(config, name)}
    index = [(name, list(p.shape)) for name, p in model.named_parameters()]
    return ModelFingerprint(
        name=str(config.name_or_path or type(model).__name__),
        architecture=type(model).__name__,
        l=config.num_hidden_layers,
        h_q=h_q,
        h_kv=getattr(config, "num_key_value_heads", None) or h_q,
        d=getattr(config, "head_dim", None) or config.hidden_size // h_q,
        rope=rope,
        config_hash=_digest(known),
        weights_hash=_digest(index),
    )


def rotary(model: PreTrainedModel) -> tuple[Rope, Tensor]:
    """The model's rotary embedding and its inverse frequencies, float32 [dim / 2], on the CPU.

    The layout is found by comparing with the model's own rotation of random keys, not guessed from the model's name.
    """
    name = type(model).__name__
    modules = [m.rotary_emb for m in model.modules() if hasattr(m, "rotary_emb")]
    if not modules or not hasattr(modules[0], "inv_freq"):
        raise UnsupportedModelError(
            f"{name} has no rotary embedding that applies to all layers alike; supported are decoders with rotary embeddings "
            "(Llama, Mistral, Qwen2, Qwen3 and relatives)"
        )
    embedding = cast(Any, modules[0])
    kind = getattr(embedding, "rope_type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{name}: RoPE of type {kind!r} changes its frequencies with the length; supported are {', '.join(ROPE_KINDS)}"
        )
    frequencies = embedding.inv_freq.detach().float().cpu()
    scaling = float(getattr(embedding, "attention_scaling", 1.0))
    for layout in ("half", "interleaved"):
        rope = Rope(2 * frequencies.numel(), layout, scaling, kind)  # type: ignore[arg-type]
        if _rotates_alike(model, embedding, rope, frequencies):
            return rope, frequencies
    raise UnsupportedModelError(f"{name} rotates its keys in a way that is neither half nor interleaved RoPE")


def _rotates_alike(model: PreTrainedModel, embedding: Any, rope: Rope, frequencies: Tensor) -> bool:
    attention = next(m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention"))
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    device = embedding.inv_freq.device
    keys = torch.randn(1, 1, 4, rope.dim, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 7, 100]])
    cos, sin = embedding(keys.to(device), positions.to(device))
    theirs = apply(keys.to(device), keys.to(device), cos, sin)[1].float().cpu()
    ours = Rotation(rope, frequencies).rotate(keys, positions[0])
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, atol=1e-4 * rope.scaling)


def _require_supported(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name} caches a latent vector (MLA), not keys and values: there is nothing to compress")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (window and getattr(config, "use_sliding_window", True)):
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))} and sliding_window={window}: "
            "only full attention in all layers is supported yet"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} does not take an attention function from transformers' AttentionInterface")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
