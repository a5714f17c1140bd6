"""Loading a model and its tokenizer."""

import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from artifacts.errors import SignpostError
from calib.config import ConfigError, ModelConfig

TINY = Path(__file__).parent / "tiny"  # the embedded default model
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(SignpostError, ValueError):
    """The model cannot be loaded."""


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name}: allowed are auto, cpu, cuda, cuda:0, ...") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: this machine (or this build of torch) has no CUDA device; use device=cpu")
    return device


def load_model(config: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in eval mode without weight gradients, and tokenizer. dtype auto: float32 on the CPU, the checkpoint's on a GPU.

    Raises ModelError where there is no such model, ConfigError for an unknown dtype.
    """
    if config.dtype != "auto" and config.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype={config.dtype}: allowed are auto, {', '.join(_DTYPES)}")
    path = str(TINY) if config.path == "tiny" else config.path
    dtype = _DTYPES.get(config.dtype) or (torch.float32 if device.type == "cpu" else "auto")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            AutoConfig.from_pretrained(path, revision=config.revision)  # a clear error before gigabytes are read
            model = AutoModelForCausalLM.from_pretrained(path, revision=config.revision, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(path, revision=config.revision)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot load model.path={path}: {reason} Name a folder with a Hugging Face model, or a hub id") from error
    model = model.to(device).eval().requires_grad_(False)
    return model, tokenizer
