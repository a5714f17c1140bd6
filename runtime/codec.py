"""Pages in torch: encoding, decoding and storage. The readable reference, on any device."""

from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from artifacts import PageGeometry
from runtime.parts import MODULES, rotate

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
        if geometry.format.rotate:
            self.tables = rotate.prepared(self.tables)
        self.derived: dict[object, dict[str, Tensor]] = {}  # what kernels read, made of the tables once

    def encode(self, x: Tensor, segment: int = 1) -> tuple[dict[str, Tensor], Tensor]:
        """Encodes pages x [p, t, h_kv, d] (any float dtype, computed in float32, finite).

        segment: as many pages at a time are packed together (see `artifacts.parts.LowRank`); the last ones may be
        fewer. Returns the fields, each [p, h_kv, ...], [p, ...] or [segments, h_kv, ...] by scope, and the decoded
        pages in float32. Raises ValueError for NaN or infinity.
        """
        if segment > 1 and x.shape[0] % segment:
            whole = x.shape[0] // segment * segment
            head = [self.encode(x[:whole], segment)] if whole else []
            return self._joined([*head, self.encode(x[whole:], x.shape[0] - whole)])
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
            stored, approximation = MODULES[name].encode(part, shape, residual, outliers, self.tables, segment)
            fields |= stored
            terms.append(approximation)
        return fields, self._restored(reduce(torch.add, terms))

    def decode(self, fields: dict[str, Tensor]) -> Tensor:
        """Pages float32 [p, t, h_kv, d] from their fields."""
        shape = self.geometry.shape
        terms = [MODULES[n].decode(p, shape, fields, self.tables) for n, p in self.geometry.format.parts.items()]
        return self._restored(reduce(torch.add, terms))

    def _joined(self, groups: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        """Fields and numbers of groups of pages as if they had been encoded at once."""
        return join_fields([fields for fields, _ in groups]), torch.cat([numbers for _, numbers in groups])

    def _restored(self, x: Tensor) -> Tensor:
        """x [..., h_kv, d] with the transforms undone."""
        x = x.contiguous()  # the same numbers in another layout may be multiplied in another order
        for name in reversed(self.geometry.format.transforms):
            x = MODULES[name].inverse(x, self.tables)
        return x


def join_fields(groups: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Fields of several groups of pages as those of one group; segments are counted on."""
    fields = {name: torch.cat([group[name] for group in groups]) for name in groups[0]}
    if "segment" in fields:
        starts = torch.tensor([0, *(group["right"].shape[0] for group in groups)]).cumsum(0).tolist()
        fields["segment"] = torch.cat([g["segment"] + start for g, start in zip(groups, starts, strict=False)])
    return fields


class PagePool:
    """Bytes of `capacity` pages and `segments` segments of one side of one layer, and typed views of their fields."""

    def __init__(
        self, geometry: PageGeometry, capacity: int, device: torch.device | str = "cpu", segments: int | None = None
    ):
        self.geometry = geometry
        h_kv = geometry.shape.h_kv
        entries = (capacity if segments is None else segments) if geometry.segment_bytes else 0
        self.segments = torch.zeros(entries, h_kv, geometry.segment_bytes, dtype=torch.uint8, device=device)
        self.heads = torch.zeros(capacity, h_kv, geometry.head_bytes, dtype=torch.uint8, device=device)
        self.records = torch.zeros(capacity, geometry.record_bytes, dtype=torch.uint8, device=device)

    @classmethod
    def over(cls, geometry: PageGeometry, memory: Tensor, segments: int = 0) -> "PagePool":
        """A pool in memory of the caller's: as many pages as fit, and so many segments behind them.

        memory: uint8 [bytes] at a multiple of 16, on any device; it is neither copied nor cleared, and must live as
        long as the pool. Raises ValueError for other memory and where not one page fits.
        """
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.data_ptr() % 16:
            raise ValueError(
                f"memory of pages: contiguous uint8 [bytes] at a multiple of 16, not {memory.dtype} "
                f"{list(memory.shape)} with strides {memory.stride()} at {memory.data_ptr()}"
            )
        h_kv, entry = geometry.shape.h_kv, geometry.shape.h_kv * geometry.segment_bytes
        segments = segments if entry else 0
        capacity = (memory.numel() - segments * entry) // geometry.page_bytes
        if capacity < 1:
            raise ValueError(
                f"{memory.numel()} bytes hold no page: one takes {geometry.page_bytes}, and {segments} segments "
                f"{segments * entry}"
            )
        pool = cls(geometry, 0, memory.device)
        sizes = [capacity * h_kv * geometry.head_bytes, capacity * geometry.record_bytes, segments * entry]
        heads, records, rest = memory[: sum(sizes)].split(sizes)
        pool.heads = heads.view(capacity, h_kv, geometry.head_bytes)
        pool.records = records.view(capacity, geometry.record_bytes)
        pool.segments = rest.view(segments, h_kv, geometry.segment_bytes)
        return pool

    @property
    def capacity(self) -> int:
        """Pages that fit."""
        return self.heads.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.heads.nbytes + self.records.nbytes + self.segments.nbytes

    def grown(self, capacity: int, segments: int | None = None) -> "PagePool":
        """A larger pool with the same pages and segments at the same ids."""
        pool = PagePool(self.geometry, capacity, self.heads.device, segments)
        for name in ("heads", "records", "segments"):
            old, new = getattr(self, name), getattr(pool, name)
            new[: old.shape[0]] = old
        return pool

    def field(self, name: str) -> Tensor:
        """View of a field over all pages, [capacity, (h_kv,) *shape]; 32-bit words come as int32."""
        placed = self.geometry.fields[name]
        store = {"head": self.heads, "layer": self.records, "segment": self.segments}[placed.field.scope]
        raw = store[..., placed.offset : placed.offset + placed.field.nbytes]
        return raw.view(_TORCH[placed.field.dtype]).unflatten(-1, placed.field.shape)

    def write(self, pages: Tensor, fields: dict[str, Tensor], segments: Tensor | None = None) -> None:
        """Stores fields of pages, ids int64 [p], and of the segments that they form, ids int64 (None: from 0 on)."""
        if "segment" in fields and segments is not None:
            fields = fields | {"segment": segments[fields["segment"].long()].int()}
        for name, values in fields.items():
            view = self.field(name)
            ids = segments if self.geometry.fields[name].field.scope == "segment" else pages
            if ids is None:
                ids = torch.arange(values.shape[0], device=values.device)
            view[ids] = values.reshape(ids.numel(), *view.shape[1:])

    def read(self, pages: Tensor) -> dict[str, Tensor]:
        """Fields of pages, ids int64 [p]; those of segments come whole, for `segment` to point into."""
        scopes = {name: placed.field.scope for name, placed in self.geometry.fields.items()}
        return {n: self.field(n) if scope == "segment" else self.field(n)[pages] for n, scope in scopes.items()}
