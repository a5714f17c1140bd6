"""Random models of a few thousand weights, one for each kind of decoder that the adapter must get right."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from artifacts import Bundle, LayerFormat
from runtime.hf import fingerprint, rotary
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
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama-mha": LlamaConfig(**SIZE | {"num_key_value_heads": 4}),
    "llama-yarn": LlamaConfig(**SIZE, rope_parameters=YARN),
    "llama-llama3": LlamaConfig(**SIZE, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "qwen2-bias": Qwen2Config(**SIZE | {"hidden_size": 128}),
    "qwen3-norm": Qwen3Config(**SIZE | {"head_dim": 64}),
    "cohere-interleaved": CohereConfig(**SIZE | {"hidden_size": 128}),
}


def tiny(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model in eval mode, weights frozen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # biases and norms start as zeros and ones: give them a say
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def bundle_for(model: PreTrainedModel, formats: LayerFormat) -> Bundle:
    """A random bundle for the model, all layers in the same formats, with the model's own frequencies."""
    model_print = fingerprint(model)
    layers = [formats] * model_print.l
    inv_freq = rotary(model)[1].numpy()
    return random_bundle(layers, model_print.h_q, model_print.h_kv, model_print.d, model=model_print, inv_freq=inv_freq)
