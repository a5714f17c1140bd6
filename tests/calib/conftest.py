"""Tiny random models, a byte-level tokenizer, and the command line in this process."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from calib import __main__ as command
from calib.config import Settings, register

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so that attention is far from uniform
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def make_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random decoder in eval mode with frozen weights. family: as transformers calls it, or yarn (a Llama)."""
    own = {"yarn": {"rope_parameters": YARN}, "mistral": {"sliding_window": None}}.get(family, {})
    config = AutoConfig.for_model("llama" if family == "yarn" else family, **SIZES | own | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        if dtype == torch.float64 and hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module)
    return model.eval().requires_grad_(False)


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMS normalization in x's dtype. Transformers' own goes through float32, which drowns differences in float64."""
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    return make_model


def byte_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """One token a byte, and three special tokens; bos: whether it puts BOS in front of every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<pad>"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *special])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(bos=False)


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(bos=True)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Folder with a Llama of two layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "two-layers"
    make_model("llama", torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_text(folder: Path) -> Path:
    """2600 bytes of text."""
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i} makes {i * i}. " for i in range(140))[:2600], encoding="utf-8")
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings from the folder conf/ and overrides as on the command line."""

    def make(*overrides: str) -> Settings:
        register()
        with initialize_config_dir(str(command.CONF), version_base="1.3"):
            return Settings.of(compose("config", list(overrides)))

    return make


@pytest.fixture
def calib(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """`python -m calib ...` in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # so that what main() sets is undone
        monkeypatch.setattr(sys, "argv", ["calib", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            command.main()
        except SystemExit as done:
            code = done.code
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run
