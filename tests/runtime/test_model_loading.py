"""Loading a model by folder, hub id or `tiny`, and what is said where that fails."""

from pathlib import Path

import pytest
import torch

from calib.names import named_models
from runtime.hf import ModelLoadError, load_causal_lm
from runtime.hf_load import model_path, resolve_device

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "calib" / "tiny"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def test_tiny_is_the_embedded_model_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(model_path("tiny")) == TINY
    assert model_path("org/model") == "org/model"
    (tmp_path / "tiny").mkdir()  # of a bundle
    assert Path(model_path("tiny")) == TINY
    (tmp_path / "tiny/config.json").touch()
    assert model_path("tiny") == "tiny"


def test_names_of_calib_are_the_models_that_it_takes_them_for():
    assert model_path("llama2-7b") == "meta-llama/Llama-2-7b-hf"
    assert "local" not in named_models()
    assert named_models().keys() | {"local"} == {file.stem for file in (ROOT / "conf/model").glob("*.yaml")}
    with pytest.raises(
        ModelLoadError, match="'llama2-7b': there is no such folder, and as meta-llama/Llama-2-7b-hf on"
    ):
        load_causal_lm("llama2-7b", "auto", "cpu")


def test_without_calib_names_are_only_names(monkeypatch):
    monkeypatch.setattr("runtime.hf_load.find_spec", lambda name: None)
    assert model_path("llama2-7b") == "llama2-7b"


@pytest.mark.parametrize("delay, shown", [(2.0, False), (0.0, True)])
def test_loading_shows_no_bar_where_it_takes_no_time(monkeypatch, capsys, delay, shown):
    monkeypatch.setattr("runtime.hf_load.BAR_AFTER_S", delay)
    load_causal_lm("tiny", "float32", "cpu")
    assert ("Loading weights" in capsys.readouterr().err) is shown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.bfloat16, "auto"])
def test_models_come_frozen_and_in_eval_mode(dtype):
    model, tokenizer = load_causal_lm("tiny", dtype, "cpu")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer("some text")["input_ids"]
    if dtype != "auto":
        assert model.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))


@pytest.mark.parametrize(
    "name, dtype, device, message",
    [
        ("tiny", "int8", "cpu", "dtype=int8: allowed are auto, float32, bfloat16, float16"),
        ("tiny", "auto", "gpu", "device=gpu: allowed are auto, cpu, cuda, cuda:0"),
        ("tiny", "auto", "meta", "device=meta: allowed are auto, cpu, cuda, cuda:0"),
        (
            "./not/there",
            "auto",
            "cpu",
            "model './not/there': there is no such folder. Name a folder that holds a Hugging",
        ),
        ("", "auto", "cpu", "model '': there is no such folder. Name a folder"),
        (__file__, "auto", "cpu", "it is a file. Name a folder"),
        (str(ROOT), "auto", "cpu", "the folder has no config.json. Name a folder"),
        ("tinny", "auto", "cpu", "model 'tinny': there is no such folder; is tiny meant?"),
        ("llama3-8B", "auto", "cpu", "is llama3-8b meant?"),
        ("local", "auto", "cpu", "model 'local': name its folder. Name a folder"),
        ("llama2-7b", "auto", "cpu", r"Download it where there is a network \(hf download meta-llama/Llama-2-7b-hf\)"),
        ("not/there", "auto", "cpu", "there is no such folder, and as not/there on the hub: .* Name a folder"),
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


def copied(folder: Path, *names: str) -> Path:
    """The embedded model, or some of its files."""
    folder.mkdir()
    for name in names or [file.name for file in TINY.iterdir()]:
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def test_weights_that_end_too_early(tmp_path):
    folder = copied(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=r"model': its weights are damaged .*: copy or download them again"):
        load_causal_lm(str(folder), "auto", "cpu")


def test_a_model_without_its_tokenizer(tmp_path):
    folder = copied(tmp_path / "model", "config.json", "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"the tokenizer of .*: its files \(tokenizer.json, tokenizer_config.json"):
        load_causal_lm(str(folder), "auto", "cpu")
