"""The adapter for transformers 5: `model.generate(..., past_key_values=SignpostCache(model, bundle))`.

Attention runs in here only while the model is called with a `SignpostCache`; with any other cache, or none, the model
computes what it always did. Only this file, `runtime.hf_decoder` and `runtime.lm_eval` import
transformers.
"""

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.utils import logging

from artifacts import Bundle, LayerFormat, ModelFingerprint, Rope
from artifacts.errors import SignpostError, UnsupportedModelError
from artifacts.model import WHOLE, Split
from runtime.cache import KVCache
from runtime.rope import Rotation
from runtime.side import has_kernels
from runtime.units import require_kernels

__all__ = [
    "AttendingCache",
    "ModelLoadError",
    "SignpostCache",
    "TextStreamer",
    "UnsupportedModelError",
    "fingerprint",
    "kv_heads",
    "load_causal_lm",
    "require_fit",
    "require_keys_and_values",
    "require_one_rope",
    "rotary",
    "rotary_by_layer",
    "share_of",
    "sliding_windows",
    "split_of",
    "tensor_mesh",
]

ATTENTION = "signpost"  # our name in transformers' registries
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on the length
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")  # whose output holds the keys, as models call them

# Configuration entries that change the model's mathematics and are the same under every version of transformers.
_HASHED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "rope_parameters", "query_pre_attn_scalar", "clip_qkv", "final_logit_softcapping",
    "num_local_experts", "num_experts_per_tok",
)  # fmt: skip

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
                "with the keyword past_key_values="
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class SignpostCache(AttendingCache):
    """Compressed cache for one batch of sequences, to be passed as `past_key_values`.

    model       any supported decoder (`fingerprint` says); its batches may be padded on the left
    bundle      calibrated for this model, else BundleMismatchError. Where transformers shares the model's heads among
                several ranks, each takes its slice of the bundle and keeps its own heads' pages
    max_tokens  tokens to reserve per sequence (None: grow by doubling), as in `runtime.cache.KVCache`
    Raises UnsupportedModelError for models that cannot be compressed, or not on the device where this one is.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle, max_tokens: int | None = None):
        bundle = share_of(model, bundle)
        if has_kernels(model.device):
            require_kernels(bundle)
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

    def check_mask(self, earlier: Tensor) -> None:
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
        raise RuntimeError("signpost attention runs only inside a forward pass with past_key_values=SignpostCache(...)")
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
        cache = kwargs.get("past_key_values")
        cache = cache if isinstance(cache, AttendingCache) else None
        if cache is not None:
            cache.check(self.base)
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


def text_config(model: PreTrainedModel) -> Any:
    """Configuration of the language model."""
    return model.config.get_text_config()


def fingerprint(model: PreTrainedModel) -> ModelFingerprint:
    """What a bundle remembers of `model`. Raises UnsupportedModelError, with the reason, where it has no support."""
    config = text_config(model)
    _require_supported(model, config)
    rope, _ = rotary(model)
    h_q = config.num_attention_heads
    return ModelFingerprint(
        name=_public_name(str(config.name_or_path or type(model).__name__)),
        architecture=type(model).__name__,
        l=config.num_hidden_layers,
        h_q=h_q,
        h_kv=kv_heads(config),
        d=getattr(config, "head_dim", None) or config.hidden_size // h_q,
        rope=rope,
        config_hash=config_hash(config),
        weights_hash=_digest(_weights_index(model)),
        sliding=sliding_windows(config),
        softcap=softcap_of(config),
    )


def _weights_index(model: PreTrainedModel) -> list[tuple[str, list[int]]]:
    """Names and shapes of all parameters, of the whole model also where each rank holds a part of it."""
    weights = list(model.named_parameters())
    if tensor_mesh(model) and not any(isinstance(weight, DTensor) for _, weight in weights):
        raise UnsupportedModelError(
            f"{type(model).__name__} is shared among ranks as plain tensors, which do not say of which shape the whole "
            "ones are: load it with transformers 5.17 or newer, its weights not quantized"
        )
    return [(name, list(weight.shape)) for name, weight in weights]  # a DTensor's shape is the whole one's


def config_hash(config: Any) -> str:
    """SHA-256 of what a language model's configuration says of its mathematics."""
    return _digest({name: getattr(config, name) for name in _HASHED if hasattr(config, name)})


def kv_heads(config: Any) -> int:
    """Heads of keys and values, as configurations call them."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    named = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"))
    return next(heads for heads in named if heads)


def softcap_of(config: Any) -> float | None:
    """At what the model caps its attention logits, or None."""
    return getattr(config, "attn_logit_softcapping", None)


def sliding_windows(config: Any) -> tuple[int, ...]:
    """The layers' windows, as in `ModelFingerprint.sliding`. Raises UnsupportedModelError for layers of other kinds."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    sliding = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [sliding] * config.num_hidden_layers
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(
            f"{config.model_type} has layers of kind {', '.join(unknown)}: supported are full_attention and "
            "sliding_attention"
        )
    found = tuple(int(window) if window and kind == "sliding_attention" else 0 for kind in kinds)
    return found if any(found) else ()


def require_fit(model: PreTrainedModel, bundle: Bundle) -> None:
    """Raises BundleMismatchError for a bundle of another model, and what `fingerprint` and `require_one_rope` raise.

    A whole bundle is held against the whole model, also where this rank has a part of it; a slice must be this rank's.
    """
    found = fingerprint(model)
    if bundle.split != WHOLE:
        split = split_of(model)
        bundle.shard(split.rank, split.world)  # raises for another slice
        found = found.share(split.world)
    bundle.model.require(found)
    require_one_rope(model, bundle.layers)


def share_of(model: PreTrainedModel, bundle: Bundle) -> Bundle:
    """What this process needs of a bundle for `model`: the slice of its kv heads, or all where it has all of them.

    Raises as `require_fit`, and FormatError where the ranks cannot share the kv heads evenly.
    """
    require_fit(model, bundle)
    split = split_of(model)
    return bundle.shard(split.rank, split.world)


def tensor_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """The ranks that share the model's weights by transformers' tensor parallelism; None where these are whole."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    mesh = cast(DeviceMesh, model._device_mesh)
    return mesh["tp"] if mesh.ndim > 1 else mesh


def split_of(model: PreTrainedModel) -> Split:
    """Which share of the kv heads this process's attention gets, by the plan that transformers has shared it by.

    All of them also on ranks whose plan gathers what projections give (OLMo 2, Phi-3): these attend alike.
    """
    mesh = tensor_mesh(model)
    if mesh is None:
        return WHOLE
    cut = any(
        style == "colwise" and name.rpartition(".")[2] in KEY_PROJECTIONS for name, style in model.tp_plan.items()
    )
    return Split(mesh.get_local_rank(), mesh.size()) if cut else WHOLE


def require_one_rope(model: PreTrainedModel, layers: Sequence[LayerFormat | None]) -> None:
    """Raises UnsupportedModelError where keys are to be packed before a RoPE that is not the bundle's.

    A bundle holds the frequencies of the layers that see all tokens; Gemma 3 turns the keys of the others otherwise.
    """
    rope, frequencies = rotary(model)
    for layer, (formats, (its, own)) in enumerate(zip(layers, rotary_by_layer(model), strict=True)):
        if formats and formats.key.domain == "pre_rope" and not (its == rope and torch.equal(own, frequencies)):
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} has a rotary embedding of its own, and a bundle holds one: "
                f"keep it in full precision (method.layers={{{layer}: null}}) or pack its keys with domain=post_rope"
            )


def rotary(model: PreTrainedModel) -> tuple[Rope, Tensor]:
    """The model's rotary embedding and its inverse frequencies, float32 [dim / 2], on the CPU.

    Where layers differ, that of the layers that see all tokens. Raises UnsupportedModelError for what is none of ours.
    """
    windows = sliding_windows(text_config(model))
    return rotary_by_layer(model)[windows.index(0) if 0 in windows else 0]


def rotary_by_layer(model: PreTrainedModel) -> list[tuple[Rope, Tensor]]:
    """As `rotary`, by layer."""
    config, modules = text_config(model), [m.rotary_emb for m in model.modules() if hasattr(m, "rotary_emb")]
    kinds = getattr(modules[0], "rope_type", "default") if modules else None
    if not isinstance(kinds, dict):
        return [_rotary(model, modules, kinds, "")] * config.num_hidden_layers
    by_type = {name: _rotary(model, modules, kind, name) for name, kind in kinds.items()}
    return [by_type[name] for name in config.layer_types]


def _rotary(model: PreTrainedModel, modules: list[Any], kind: str | None, layer_type: str) -> tuple[Rope, Tensor]:
    """That of layers of one type, "" where all types have the same.

    The layout is found by comparing with the model's own rotation of random keys, not guessed from the model's name.
    """
    name, prefix = type(model).__name__, f"{layer_type}_" if layer_type else ""
    if not modules or not hasattr(modules[0], f"{prefix}inv_freq"):
        raise UnsupportedModelError(
            f"{name} has no rotary embedding that applies to all layers alike; supported are decoders with rotary "
            "embeddings (Llama, Mistral, Qwen2, Qwen3 and relatives)"
        )
    embedding = cast(Any, modules[0])
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{name}: RoPE of type {kind!r} changes its frequencies with the length; "
            f"supported are {', '.join(ROPE_KINDS)}"
        )
    frequencies = getattr(embedding, f"{prefix}inv_freq").detach().float().cpu()
    scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    for layout in ("half", "interleaved"):
        rope = Rope(2 * frequencies.numel(), layout, scaling, kind)
        if _rotates_alike(model, embedding, layer_type, rope, frequencies):
            return rope, frequencies
    raise UnsupportedModelError(f"{name} rotates its keys in a way that is neither half nor interleaved RoPE")


def _rotates_alike(model: PreTrainedModel, embedding: Any, layer_type: str, rope: Rope, frequencies: Tensor) -> bool:
    attention = next(m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention"))
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    device = next(embedding.buffers()).device
    keys = torch.randn(1, 1, 4, rope.dim, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 7, 100]])
    cos, sin = embedding(keys.to(device), positions.to(device), *([layer_type] if layer_type else []))
    theirs = apply(keys.to(device), keys.to(device), cos, sin)[1].float().cpu()
    ours = Rotation(rope, frequencies).rotate(keys, positions[0])
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, atol=1e-4 * rope.scaling)


def require_keys_and_values(config: Any) -> None:
    """Raises UnsupportedModelError for the configuration of a model that caches something else."""
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{config.model_type} caches a latent vector (MLA), not keys and values: there is nothing to compress"
        )


def _require_supported(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    require_keys_and_values(config)
    if not all(getattr(config, "no_rope_layers", None) or [True]):
        raise UnsupportedModelError(f"{name} has layers without rotary embedding: all layers must have it")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} does not take an attention function from transformers' AttentionInterface")


def _public_name(name_or_path: str) -> str:
    """A hub id as it is; of a folder, only the last part: bundles travel, and paths tell of their owners."""
    path = Path(name_or_path)
    return path.resolve().name if path.is_absolute() or path.is_dir() else name_or_path


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelLoadError(SignpostError, ValueError):
    """The model, its dtype or its device cannot be had."""


def model_path(name: str) -> str:
    """Folder or hub id to load from; `tiny` is the embedded model."""
    spec = find_spec("calib") if name == "tiny" and not Path(name).exists() else None
    return str(Path(spec.origin).parent / "tiny") if spec and spec.origin else name


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ModelLoadError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device={name}: allowed are auto, cpu, cuda, cuda:0, ...") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device={name}: torch sees {torch.cuda.device_count()} CUDA devices here; use device=cpu")
    return device


def load_causal_lm(
    name: str,
    dtype: str,
    device: str,
    revision: str | None = None,
    gpus: Sequence[int] = (),
    sharded: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in eval mode with frozen weights, and its tokenizer.

    name      folder, hub id, or `tiny` for the embedded model
    dtype     float32, bfloat16, float16, or auto for the checkpoint's
    device    as in `resolve_device`
    gpus      over which to spread the layers, by numbers; none: the model stays whole, on `device`
    sharded   the ranks that torchrun has started share the weights of every layer (tensor parallelism), each on a GPU
              of its own if there are any, so `device` is auto. transformers connects them. Only rank 0 shows progress
    Raises ModelLoadError where one of them cannot be had.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype={dtype}: allowed are auto, {', '.join(DTYPES)}")
    path, target = model_path(name), _shared_device(device) if sharded else resolve_device(device)
    try:
        AutoConfig.from_pretrained(path, revision=revision)  # a clear error before gigabytes are read
        where = {"distributed_config": DistributedConfig(tp_plan="auto")} if sharded else _where(target, gpus)
        model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=DTYPES.get(dtype, "auto"), **where)
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"cannot load the model {name!r}: {reason} Name a folder that holds a Hugging Face model, or a hub id"
        ) from error
    if {"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()} and gpus:
        raise ModelLoadError(f"{name!r} does not fit GPUs {list(gpus)}: give it more GPUs, or dtype=bfloat16")
    placed = model if gpus or sharded else cast(Any, model).to(target)
    return placed.eval().requires_grad_(False), tokenizer


def _shared_device(name: str) -> torch.device:
    """The kind of device that transformers puts a model's shares on. Raises ModelLoadError where it has no such."""
    kind, gpus = "cuda" if torch.cuda.is_available() else "cpu", torch.cuda.device_count()
    if name not in ("auto", kind):
        raise ModelLoadError(f"device={name}: ranks that share a model work on {kind} here; use device=auto")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind == "cuda" and gpus < ranks:
        raise ModelLoadError(
            f"device={name}: {ranks} ranks on this machine, but torch sees {gpus} CUDA devices: start at most as many "
            "ranks (--nproc-per-node) as there are GPUs"
        )
    if int(os.environ.get("RANK", "0")):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return torch.device(kind)


def _where(device: torch.device, gpus: Sequence[int]) -> dict[str, Any]:
    """Where transformers loads weights to: to a GPU at once, never into the host's memory as a whole."""
    if gpus:
        # A tenth stays free for what calibration and attention need beside the weights.
        return {"device_map": "balanced", "max_memory": {i: int(0.9 * torch.cuda.mem_get_info(i)[0]) for i in gpus}}
    return {"device_map": {"": device}} if device.type == "cuda" else {}
