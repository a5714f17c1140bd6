"""Random models of a few thousand weights, one for each kind of decoder that the adapter must get right."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from artifacts import Bundle, LayerFormat
from runtime.hf import fingerprint
from runtime.hf_model import rotary
from tests.formats import random_bundle

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that tokens differ clearly in what they predict
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LOCAL: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
}
WHOLE_HEADS = {name: value for name, value in SIZE.items() if name != "head_dim"} | {"hidden_size": 128}
FUSED = {name: value for name, value in WHOLE_HEADS.items() if name != "num_key_value_heads"}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama-mha": LlamaConfig(**SIZE | {"num_key_value_heads": 4}),
    "llama-yarn": LlamaConfig(**SIZE, rope_parameters=YARN),
    "llama-llama3": LlamaConfig(**SIZE, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "qwen2-bias": Qwen2Config(**SIZE | {"hidden_size": 128}),
    "qwen3-norm": Qwen3Config(**SIZE | {"head_dim": 64}),
    "cohere-interleaved": CohereConfig(**SIZE | {"hidden_size": 128}),
    "mistral-sliding": MistralConfig(**SIZE, sliding_window=20),
    "mixtral": MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
    "gemma2-capped": Gemma2Config(**SIZE, **LOCAL, query_pre_attn_scalar=32, attn_logit_softcapping=3.0),
    "gemma3-two-ropes": Gemma3TextConfig(**SIZE, **LOCAL, query_pre_attn_scalar=32, rope_parameters=TWO_ROPES),
    "gemma3-with-images": Gemma3Config(
        text_config={**SIZE, **LOCAL, "query_pre_attn_scalar": 32, "rope_parameters": TWO_ROPES},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=64,
        boi_token_index=65,
        eoi_token_index=66,
        mm_tokens_per_image=4,
    ),
    "phi-partial": PhiConfig(**WHOLE_HEADS, partial_rotary_factor=0.5),
    "phi3-fused": Phi3Config(**SIZE | {"hidden_size": 128}),
    "gpt-neox-partial": GPTNeoXConfig(**FUSED, rotary_pct=0.25),
    "olmo": OlmoConfig(**WHOLE_HEADS, clip_qkv=2.0),
    "olmo2-norm": Olmo2Config(**WHOLE_HEADS),
}
# Not behind the cache: Falcon takes no attention function from transformers; DeepSeek's MLA caches no keys and values.
FALCON: dict[str, PreTrainedConfig] = {
    "falcon-multi-query": FalconConfig(**FUSED, multi_query=True),
    "falcon-grouped": FalconConfig(**FUSED, new_decoder_architecture=True, num_kv_heads=2),
}
MLA = DeepseekV3Config(
    **SIZE, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2,
)  # fmt: skip


def tiny(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model in eval mode, weights frozen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # biases and norms start as zeros and ones: give them a say
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def bundle_for(model: PreTrainedModel, formats: LayerFormat) -> Bundle:
    """A random bundle for the model with its own frequencies: all layers in the same formats, but those that slide
    while others do not are in full precision, as calibration leaves them."""
    model_print = fingerprint(model)
    mixed = 0 in model_print.sliding
    layers = [None if mixed and model_print.window(layer) else formats for layer in range(model_print.l)]
    inv_freq = rotary(model)[1].numpy()
    return random_bundle(layers, model_print.h_q, model_print.h_kv, model_print.d, model=model_print, inv_freq=inv_freq)
