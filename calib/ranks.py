"""The ranks of `torchrun`: who observes which samples and fits which layers, and how what they saw comes together."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from artifacts.errors import SignpostError
from calib.statistics import LANES, lane_of

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # until a rank that waits gives up: another may be sampling text from the model


class RankError(SignpostError):
    """The ranks of one run do not work together."""


@dataclass(frozen=True)
class Ranks:
    """This process among `world` that calibrate together. Without torchrun: alone.

    device: where tensors have to be to travel, cpu or this rank's GPU.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """Meets the other ranks, if torchrun has started any. Raises RankError for too many or if they do not come."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 or "MASTER_ADDR" not in os.environ:
            return cls(device=device)
        if world > LANES:
            raise RankError(f"--nproc-per-node and nodes make {world} ranks, at most {LANES} can share the samples")
        rank = int(os.environ["RANK"])
        with _others(rank):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        return cls(rank, world, device)

    @property
    def first(self) -> bool:
        """Whether this rank reads and writes files and talks to the user."""
        return self.rank == 0

    def samples(self, n: int) -> range:
        """Which of n samples this rank observes: whole lanes."""
        mine = [i for i in range(n) if lane_of(i, n) * self.world // LANES == self.rank]
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    def owner(self, layer: int) -> int:
        """The rank that merges and fits a layer."""
        return layer % self.world

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raises RankError, on every rank, if one of the values differs between ranks."""
        found = self.gather(dict(values))
        for name in values:
            different = sorted({str(of_rank[name]) for of_rank in found})
            if len(different) > 1:
                raise RankError(
                    f"the ranks have different {name} ({'; '.join(different)}): start all of them by the same command "
                    "from the same versions"
                )

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank. Plain data or CPU tensors."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _others(self.rank):
            dist.all_gather_object(found, value)
        return found

    def share(self, value: T) -> T:
        """The first rank's value, on every rank. Plain data or CPU tensors."""
        if self.world == 1:
            return value
        shared = [value]
        with _others(self.rank):
            dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
        return shared[0]

    def bring(self, tensors: Mapping[str, Tensor], owner: int) -> list[dict[str, Tensor]]:
        """The tensors of all other ranks, in order, on the rank `owner`; nothing on the others."""
        if self.world == 1:
            return []
        forms = self.gather({name: (t.shape, t.dtype) for name, t in tensors.items()})
        with _others(self.rank):
            if self.rank != owner:
                for name in forms[self.rank]:
                    dist.send(tensors[name].to(self.device).contiguous(), owner)
                return []
            found = []
            for rank, form in enumerate(forms):
                if rank != owner:
                    found.append({n: torch.empty(s, dtype=d, device=self.device) for n, (s, d) in form.items()})
                    for tensor in found[-1].values():
                        dist.recv(tensor, rank)
            return found


def leave() -> None:
    """Parts from the other ranks, once nothing more is to be exchanged."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _others(rank: int) -> Iterator[None]:
    """Whatever goes wrong between ranks goes wrong because one of them is gone."""
    try:
        yield
    except RuntimeError as error:  # all of torch.distributed's errors are
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankError(
            f"rank {rank} lost the others ({reason}): see what the rank that ended first says. "
            "The same command continues where this one stopped"
        ) from error
