"""Models and tokenizers from folders or a hub, onto a device, several of them, or the ranks that share a model."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from artifacts.errors import SignpostError

BAR_AFTER_S = 2.0
_KNOWN = "Name a folder that holds a Hugging Face model, a hub id, or a model that `python -m calib --help` lists"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelLoadError(SignpostError, ValueError):
    """The model, its dtype or its device cannot be had."""


def model_path(name: str) -> str:
    """Folder or hub id to load from: where calibration is installed, by the names that it knows (`calib.names`)."""
    if find_spec("calib") is None:
        return name
    from calib.names import model_path

    return model_path(name)


def _names() -> Collection[str]:
    """The names that calibration knows, where it is installed."""
    if find_spec("calib") is None:
        return ()
    from calib.names import named_models

    return named_models()


def _require_place(name: str, path: str) -> None:
    """Raises ModelLoadError for a folder without a model, and for what is no folder and cannot be a hub id."""
    if os.path.isdir(path):  # unlike pathlib's, not for an empty name
        if not os.path.exists(os.path.join(path, "config.json")):
            raise ModelLoadError(f"cannot load the model {name!r}: the folder has no config.json. {_KNOWN}")
        return
    known = _names()
    if name == "local":  # of `python -m calib`, where model.path= names the folder
        raise ModelLoadError(f"cannot load the model 'local': name its folder. {_KNOWN}")
    if "/" not in name and name not in known and (meant := get_close_matches(name, known, 1, 0.8)):
        # Said before the hub is asked, which takes long where it fails.
        raise ModelLoadError(f"cannot load the model {name!r}: there is no such folder; is {meant[0]} meant?")
    if os.path.exists(path):
        raise ModelLoadError(f"cannot load the model {name!r}: it is a file. {_KNOWN}")
    try:
        hf_hub_url(path, "config.json")
    except HFValidationError as error:
        raise ModelLoadError(f"cannot load the model {name!r}: there is no such folder. {_KNOWN}") from error


@contextmanager
def _bars_of_what_takes_long() -> Iterator[None]:
    """Bars of transformers come up only after some time: a small model is there before."""
    before = logging.set_tqdm_hook(lambda bar, given, named: bar(*given, **{"delay": BAR_AFTER_S} | named))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ModelLoadError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = f"device={name}: allowed are auto, cpu, cuda, cuda:0, ..."
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(allowed) from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(allowed)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device={name}: torch sees {torch.cuda.device_count()} CUDA devices here; use device=cpu")
    return device


def load_causal_lm(
    name: str,
    dtype: str | torch.dtype,
    device: str,
    revision: str | None = None,
    gpus: Sequence[int] = (),
    sharded: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in eval mode with frozen weights, and its tokenizer.

    name      as in `model_path`: folder, hub id, or a name like `tiny`, which is the embedded model
    dtype     float32, bfloat16, float16 (by name or torch's own), or auto for the checkpoint's
    device    as in `resolve_device`
    gpus      over which to spread the layers, by numbers; none: the model stays whole, on `device`
    sharded   the ranks that torchrun has started share the weights of every layer (tensor parallelism), each on a GPU
              of its own if there are any, so `device` is auto. transformers connects them. Only rank 0 shows progress
    Raises ModelLoadError where one of them cannot be had.
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype={dtype}: allowed are auto, {', '.join(DTYPES)}")
    path, target = model_path(name), _shared_device(device) if sharded else resolve_device(device)
    _require_place(name, path)
    try:
        AutoConfig.from_pretrained(path, revision=revision)  # a clear error before gigabytes are read
        where = {"distributed_config": DistributedConfig(tp_plan="auto")} if sharded else _where(target, gpus)
        with _bars_of_what_takes_long():
            model = AutoModelForCausalLM.from_pretrained(
                path, revision=revision, dtype=DTYPES.get(dtype, "auto"), **where
            )
    except SafetensorError as error:
        raise ModelLoadError(
            f"cannot load the model {name!r}: its weights are damaged ({error}): copy or download them again"
        ) from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {_failure(name, path, error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelLoadError(
            f"cannot load the tokenizer of {name!r}: {reason}: its files (tokenizer.json, tokenizer_config.json) lie "
            "beside the model's"
        ) from error
    if {"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()} and gpus:
        raise ModelLoadError(f"{name!r} does not fit GPUs {list(gpus)}: give it more GPUs, or dtype=bfloat16")
    placed = model if gpus or sharded else cast(Any, model).to(target)
    return placed.eval().requires_grad_(False), tokenizer


def _failure(name: str, path: str, error: Exception) -> str:
    """Why a model could not be loaded, and the way out."""
    if isinstance(error, PermissionError):
        return f"{error.filename or path} cannot be read ({error.strerror})"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if Path(path).exists():
        return f"{reason} {_KNOWN}"
    way = f"Download it where there is a network (hf download {path}), or name a folder" if name in _names() else _KNOWN
    return f"there is no such folder, and as {path} on the hub: {reason} {way}"


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
