"""Loading a model by folder, hub id or `tiny`, and what is said where that fails."""

from pathlib import Path

import pytest
import torch

from runtime.hf import ModelLoadError, load_causal_lm
from runtime.hf_load import model_path, resolve_device

TINY = Path(__file__).resolve().parents[2] / "calib" / "tiny"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def test_tiny_is_the_embedded_model_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(model_path("tiny")) == TINY
    assert model_path("org/model") == "org/model"
    (tmp_path / "tiny").mkdir()
    assert model_path("tiny") == "tiny"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_models_come_frozen_and_in_eval_mode(dtype):
    model, tokenizer = load_causal_lm("tiny", dtype, "cpu")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer("some text")["input_ids"]
    if dtype != "auto":
        assert model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    "name, dtype, device, message",
    [
        ("tiny", "int8", "cpu", "dtype=int8: allowed are auto, float32, bfloat16, float16"),
        ("tiny", "auto", "gpu", "device=gpu: allowed are auto, cpu, cuda, cuda:0"),
        (
            "./not/there",
            "auto",
            "cpu",
            "cannot load the model './not/there': .* Name a folder that holds a Hugging Face",
        ),
    ],
)
def test_what_cannot_be_loaded(name, dtype, device, message):
    with pytest.raises(ModelLoadError, match=message):
        load_causal_lm(name, dtype, device)


@no_cuda
def test_machines_without_a_gpu():
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ModelLoadError, match="device=cuda:1: torch sees 0 CUDA devices here; use device=cpu"):
        resolve_device("cuda:1")


def test_a_folder_that_holds_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_causal_lm(str(tmp_path), "auto", "cpu")
