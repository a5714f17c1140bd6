"""Which device a rank's model runs on, or which GPUs it is spread over."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.hf_load import ModelLoadError, resolve_device


@dataclass(frozen=True)
class Place:
    """device: where inputs go, and tensors that travel between ranks. gpus: over which the model is spread, or none."""

    device: torch.device
    gpus: tuple[int, ...] = ()


def place(name: str, environment: Mapping[str, str] = os.environ) -> Place:
    """Where this rank works, by the option `device` and by what torchrun says of the machine's ranks.

    With several ranks, `auto` and `cuda` are a GPU for each. `split` shares the GPUs out and spreads each rank's model
    over its share. Raises ModelLoadError where there are fewer GPUs than ranks, or no such device.
    """
    rank, ranks = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if name == "split" or (ranks > 1 and (name == "cuda" or (name == "auto" and gpus))):
        share = gpus // ranks
        if not share:
            raise ModelLoadError(
                f"device={name}: {ranks} ranks on this machine, but torch sees {gpus} CUDA devices: start at most as "
                "many ranks (--nproc-per-node) as there are GPUs, or use device=cpu"
            )
        if name != "split":
            return Place(torch.device("cuda", rank))
        first = rank * share
        return Place(torch.device("cuda", first), tuple(range(first, first + share)))
    return Place(resolve_device(name))
