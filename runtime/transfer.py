"""Numbers between the host and a device, without waiting for what is queued on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers (nested sequences alike, or the host's tensor) as a tensor. The copy is queued on PyTorch's current
    stream."""
    pinned = device.type == "cuda"
    if isinstance(numbers, Tensor):
        here = torch.empty(numbers.shape, dtype=dtype, pin_memory=pinned).copy_(numbers)
    else:
        here = torch.tensor(numbers, dtype=dtype, pin_memory=pinned)
    return here.to(device, non_blocking=True)


class Arriving:
    """Numbers on their way to the host. The copy is queued on PyTorch's current stream when this is made."""

    def __init__(self, numbers: Tensor):
        on_device = numbers.device.type == "cuda"
        self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=on_device)
        self._numbers.copy_(numbers, non_blocking=on_device)
        self._event = torch.cuda.Event() if on_device else None
        if self._event:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> list[Any]:
        """The numbers, when they are there; what was queued behind them is not waited for."""
        if self._event:
            self._event.synchronize()
        return self._numbers.tolist()
