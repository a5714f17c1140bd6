"""Rotary embedding from the bundle's frequencies, as the model computes it: float32 angle = position * frequency."""

import numpy as np
import torch
from torch import Tensor

from artifacts import Rope


class Rotation:
    """Rotates and un-rotates keys by position.

    rope: layout and scaling; inv_freq: float32 [dim / 2]. Keys and positions may be on any device.
    """

    def __init__(self, rope: Rope, inv_freq: np.ndarray | Tensor, device: torch.device | str = "cpu"):
        self.rope = rope
        self.inv_freq = torch.as_tensor(inv_freq).float().to(device)
        pairs = torch.tensor(rope.pairs(), device=device)
        self.first, self.second = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        self._table = self._angles(torch.arange(0, device=device))
        self.derived: dict[object, tuple[Tensor, ...]] = {}  # what kernels read, the same for all layers

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self.inv_freq
        return angles.cos() * self.rope.scaling, angles.sin() * self.rope.scaling

    def table(self, n: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 ... n - 1, float32 [at least n, dim / 2]; kept and doubled as n grows."""
        have = self._table[0].shape[0]
        if have < n:
            self._table = self._angles(torch.arange(max(n, 2 * have, 256), device=self.inv_freq.device))
        return self._table

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """keys [..., n, d] before RoPE and positions int64 [n] (or broadcastable) to float32 keys after it."""
        return self._turn(keys, *self._angles(positions))

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Inverse of `rotate`: the transpose over cos^2 + sin^2, which yarn's attention factor makes differ from 1."""
        cos, sin = self._angles(positions)
        return self._turn(keys, cos / self.rope.scaling**2, -sin / self.rope.scaling**2)

    def pull_back(self, gradients: Tensor, positions: Tensor) -> Tensor:
        """Gradients with respect to keys after RoPE to gradients before it: the transpose of the rotation."""
        cos, sin = self._angles(positions)
        return self._turn(gradients, cos, -sin)

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = keys.float().clone()
        a, b = out[..., self.first], out[..., self.second]
        out[..., self.first], out[..., self.second] = a * cos - b * sin, b * cos + a * sin
        return out
