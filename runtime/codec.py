"""Pages in torch: encoding, decoding and storage. The readable reference, on any device."""

from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from artifacts import PageGeometry
from runtime.parts import MODULES

_TORCH = {"uint8": torch.uint8, "uint32": torch.int32, "float16": torch.float16, "float32": torch.float32}


class Codec:
    """Encodes and decodes pages of one side (keys or values) of one layer.

    tensors: the bundle's tensors of this side (numpy or torch); they are moved to `device`.
    """

    def __init__(
        self, geometry: PageGeometry, tensors: Mapping[str, np.ndarray | Tensor], device: torch.device | str = "cpu"
    ):
        self.geometry = geometry
        self.device = torch.device(device)
        self.tables = {name: torch.as_tensor(t).to(self.device) for name, t in tensors.items()}

    def encode(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Encodes pages x [p, t, h_kv, d] (any float dtype, computed in float32, finite).

        Returns the fields, each [p, h_kv, ...] or [p, ...] by scope, and the decoded pages in float32.
        Raises ValueError for NaN or infinity.
        """
        x = x.float().contiguous()
        if not torch.isfinite(x).all():
            raise ValueError("keys or values hold NaN or infinity: check the model's dtype and weights")
        for name in self.geometry.format.transforms:
            x = MODULES[name].forward(x, self.tables)
        shape, parts = self.geometry.shape, self.geometry.format.parts
        masks = [MODULES[n].select(p, shape, x, self.tables) for n, p in parts.items() if hasattr(MODULES[n], "select")]
        outliers = masks[0] if masks else None
        fields: dict[str, Tensor] = {}
        terms: list[Tensor] = []
        for name, part in parts.items():
            residual = x - reduce(torch.add, terms) if terms else x
            stored, approximation = MODULES[name].encode(part, shape, residual, outliers, self.tables)
            fields |= stored
            terms.append(approximation)
        return fields, self._restored(reduce(torch.add, terms))

    def decode(self, fields: dict[str, Tensor]) -> Tensor:
        """Pages float32 [p, t, h_kv, d] from their fields."""
        shape = self.geometry.shape
        terms = [MODULES[n].decode(p, shape, fields, self.tables) for n, p in self.geometry.format.parts.items()]
        return self._restored(reduce(torch.add, terms))

    def _restored(self, x: Tensor) -> Tensor:
        """x [..., h_kv, d] with the transforms undone."""
        x = x.contiguous()  # the same numbers in another layout may be multiplied in another order
        for name in reversed(self.geometry.format.transforms):
            x = MODULES[name].inverse(x, self.tables)
        return x


class PagePool:
    """Bytes of `capacity` pages of one side of one layer: heads' pages and records, and typed views of their fields."""

    def __init__(self, geometry: PageGeometry, capacity: int, device: torch.device | str = "cpu"):
        self.geometry = geometry
        h_kv = geometry.shape.h_kv
        self.heads = torch.zeros(capacity, h_kv, geometry.head_bytes, dtype=torch.uint8, device=device)
        self.records = torch.zeros(capacity, geometry.record_bytes, dtype=torch.uint8, device=device)

    @property
    def capacity(self) -> int:
        """Pages that fit."""
        return self.heads.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.heads.nbytes + self.records.nbytes

    def grown(self, capacity: int) -> "PagePool":
        """A larger pool with the same pages at the same ids."""
        pool = PagePool(self.geometry, capacity, self.heads.device)
        pool.heads[: self.capacity] = self.heads
        pool.records[: self.capacity] = self.records
        return pool

    def field(self, name: str) -> Tensor:
        """View of a field over all pages, [capacity, (h_kv,) *shape]; 32-bit words come as int32."""
        placed = self.geometry.fields[name]
        store = self.heads if placed.field.scope == "head" else self.records
        raw = store[..., placed.offset : placed.offset + placed.field.nbytes]
        return raw.view(_TORCH[placed.field.dtype]).unflatten(-1, placed.field.shape)

    def write(self, pages: Tensor, fields: dict[str, Tensor]) -> None:
        """Stores fields of pages, ids int64 [p]."""
        for name, values in fields.items():
            view = self.field(name)
            view[pages] = values.reshape(pages.numel(), *view.shape[1:])

    def read(self, pages: Tensor) -> dict[str, Tensor]:
        """Fields of pages, ids int64 [p]."""
        return {name: self.field(name)[pages] for name in self.geometry.fields}
