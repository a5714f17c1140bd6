"""What activations depend on, in a few bytes: the address under which collected statistics are kept."""

import hashlib
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.hf import fingerprint

PACKAGES = ("signpost-kv", "torch", "transformers", "numpy", "numba", "safetensors")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24  # numbers that are looked at together


def of_model(model: PreTrainedModel) -> dict[str, Any]:
    """The model, its weights, where it runs and on which versions, as plain data."""
    place = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine()
    return {
        "model": {name: value for name, value in asdict(fingerprint(model)).items() if name != "name"},
        "weights": weights_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "place": place,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over the names of all weights and a checksum of every row of each, by their bits.

    The sums are taken where the weights are, modulo 2^64, each number times an odd factor of its place: one changed or
    moved bit changes them. Faster than a hash of all bytes by as much as the device reads faster than one core hashes.
    """
    digest = hashlib.sha256()
    for name, weight in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode())
        digest.update(_row_sums(weight.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _row_sums(weight: Tensor) -> Tensor:
    """int64, one for each row of the weight seen as a matrix."""
    rows = weight.contiguous().reshape(max(1, weight.shape[0] if weight.dim() > 1 else 1), -1)
    bits = rows.view(_INTEGERS[rows.element_size()])
    factors = 2 * torch.arange(bits.shape[1], device=bits.device) + 1
    several = max(1, _CHUNK // max(1, bits.shape[1]))
    return torch.cat([(part.long() * factors).sum(1) for part in bits.split(several)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
