"""What a transformers model is to us: fingerprint, rotations, its share of the heads, and whether we support it."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache as cached
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artifacts import Bundle, LayerFormat, ModelFingerprint, Rope
from artifacts.errors import UnsupportedModelError
from artifacts.model import WHOLE, Split
from runtime.rope import Rotation

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on the length
CACHE_KEYWORDS = ("cache", "past_key_values")  # of a pass, since transformers 5.24 and before
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")  # whose output holds the keys, as models call them

# Configuration entries that change the model's mathematics and are the same under every version of transformers.
_HASHED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "rope_parameters", "query_pre_attn_scalar", "clip_qkv", "final_logit_softcapping",
    "num_local_experts", "num_experts_per_tok",
)  # fmt: skip


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """`cache` as the keyword argument of a pass of `model`, or of its `generate()`: transformers 5.24 renamed it."""
    return {_cache_keyword(type(model).forward): cache}


@cached
def _cache_keyword(forward: Callable[..., Any]) -> str:
    return next(name for name in CACHE_KEYWORDS if name in inspect.signature(forward).parameters)


def text_config(model: PreTrainedModel) -> Any:
    """Configuration of the language model. Raises TypeError for what is no model."""
    if not hasattr(model, "config"):
        raise TypeError(
            f"a {type(model).__name__} is no model: load one with transformers, or runtime.hf.load_causal_lm(name, "
            "'auto', 'auto')"
        )
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

    Raises as `require_fit`, FormatError where the ranks cannot share the kv heads evenly, and TypeError for what is no
    bundle.
    """
    if not isinstance(bundle, Bundle):
        what = f"{bundle!r} is a" if isinstance(bundle, str | bytes | PathLike | None) else "a"
        raise TypeError(f"{what} {type(bundle).__name__}, not a Bundle: load it with runtime.load(path)")
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
