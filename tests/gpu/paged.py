"""A filled cache as the kernels take it, made by the torch codec, and what float64 says of attention over it."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts import PageGeometry, Rope
from runtime.attention import PagedAttention, PagedSide
from runtime.codec import Codec, PagePool
from runtime.exact import capped, visible
from runtime.rope import Rotation
from runtime.units import ALL_PLAIN, Scoring
from runtime.unpaged import unpaged
from tests.formats import Case, cache_numbers

DEVICE = "cuda"
SPARE = 8  # window slots beyond the format's own: new tokens of one step


@dataclass
class FilledSide:
    """One side: what the kernels see, and the numbers in full precision and as decoded, [b] of float64 [n, h_kv, d]."""

    paged: PagedSide
    decoded: list[Tensor]


def numbers(n: int, h_kv: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[n, h_kv, d] on the device, as `dtype` holds them."""
    return torch.from_numpy(cache_numbers((n, h_kv, d), seed)).to(DEVICE).to(dtype)


def fill(
    geometry: PageGeometry,
    tables: dict[str, Tensor],
    rotation: Rotation | None,
    lengths: list[int],
    offsets: list[int],
    m: int,
    dtype: torch.dtype,
    seed: int,
    sliding: int = 0,
) -> FilledSide:
    """Sequences of these lengths, the last m tokens new; free pages, slots and table entries hold poison.

    rotation: of keys stored before RoPE. sliding: without pages, tokens that are kept besides new ones (0: all).
    """
    fmt, shape = geometry.format, geometry.shape
    h_kv, d, t, window, b = shape.h_kv, shape.d, fmt.t, fmt.window, len(lengths)
    codec = Codec(geometry, tables, DEVICE)
    pages = [window.pages(n - m, t) if fmt.parts else 0 for n in lengths]
    total = sum(pages) + 3
    pool = PagePool(geometry, total, DEVICE)
    for store in (pool.heads, pool.records, pool.segments):
        store.fill_(0xFF)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((b, max(pages) + 2), 0, dtype=torch.int32, device=DEVICE)
    capacity = window.recent + t + SPARE if fmt.parts else sliding + m - 1 if sliding else max(lengths)
    ring = torch.full((b, capacity, h_kv, d), torch.nan, dtype=dtype, device=DEVICE)
    sinks = torch.full((b, window.sinks, h_kv, d), torch.nan, dtype=dtype, device=DEVICE)
    decoded, segments = [], 0
    for i, n in enumerate(lengths):
        x = numbers(n, h_kv, d, seed + i, dtype)
        first, packed = window.sinks, pages[i] * t
        exact = x.double()
        if pages[i]:
            inside = x[first : first + packed].float()
            positions = torch.arange(offsets[i] + first, offsets[i] + first + packed, device=DEVICE)
            if rotation is not None:
                inside = rotation.unrotate(inside.transpose(0, 1), positions).transpose(0, 1)
            prompt = max(1, pages[i] - 1)  # the last page is one of decoded tokens
            paged = inside.unflatten(0, (-1, t))
            for done, part in ((0, paged[:prompt]), (prompt, paged[prompt:])):
                if not part.shape[0]:
                    continue
                fields, approximation = codec.encode(part, part.shape[0])
                ids = torch.tensor([order.pop() for _ in range(part.shape[0])], device=DEVICE)
                places = None
                if "segment" in fields:
                    count = fields["right"].shape[0]
                    places = torch.arange(segments, segments + count, device=DEVICE)
                    segments += count
                pool.write(ids, fields, places)
                table[i, done : done + part.shape[0]] = ids.int()
                y = approximation.flatten(0, 1).double()
                at = positions[done * t : done * t + y.shape[0]]
                exact[first + done * t : first + done * t + y.shape[0]] = turned(y, rotation, at) if rotation else y
        sinks[i, : min(n, first)] = x[:first]
        for token in range(first + packed, n):
            ring[i, (token - first) % capacity] = x[token]
        decoded.append(exact)
    return FilledSide(PagedSide(pool.heads, pool.records, pool.segments, table, sinks, ring), decoded)


def turned(x: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """Keys float64 [n, h_kv, d] after RoPE, with angles in float64."""
    angles = positions.double()[:, None, None] * rotation.inv_freq.double()
    cos, sin = angles.cos() * rotation.rope.scaling, angles.sin() * rotation.rope.scaling
    out = x.clone()
    a, b = x[..., rotation.first], x[..., rotation.second]
    out[..., rotation.first], out[..., rotation.second] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = ALL_PLAIN) -> Tensor:
    """Causal attention of the last m of n tokens, q [h_q, m, d], k and v [n, h_kv, d]: [h_q, m, d] in their dtype."""
    h_q, m, _ = q.shape
    k, v = (x.transpose(0, 1).repeat_interleave(h_q // x.shape[1], 0) for x in (k, v))
    scores = capped(q @ k.transpose(1, 2) * scale, scoring.softcap)
    scores = scores.masked_fill(~visible(m, k.shape[1], scoring.window, q.device), -torch.inf)
    return scores.softmax(-1) @ v


@dataclass
class Scene:
    """A batch behind the kernels of one case."""

    kernels: PagedAttention
    key: FilledSide
    value: FilledSide
    lengths: Tensor
    offsets: Tensor
    m: int

    @classmethod
    def of(
        cls, case: Case, lengths: list[int], m: int = 1, dtype: torch.dtype = torch.float16,
        scoring: Scoring = ALL_PLAIN,
    ) -> "Scene":  # fmt: skip
        bundle = case.bundle()
        rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], DEVICE)
        offsets = [3 * i for i in range(len(lengths))]
        sides, geometries, tables = [], [], []
        for number, (side, fmt) in enumerate(case.sides()):
            geometry = PageGeometry.of(fmt, case.h_kv, case.d, side)
            found = {name: torch.as_tensor(x).to(DEVICE) for name, x in bundle.side_tensors(0, side).items()}
            turn = rotation if side == "key" and fmt.domain == "pre_rope" else None
            sides.append(fill(geometry, found, turn, lengths, offsets, m, dtype, 100 * number))
            geometries.append(geometry)
            tables.append(found)
        kernels = PagedAttention(*geometries, *tables, rotation, case.h_q, dtype, DEVICE, scoring)
        on_device = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, offsets))
        return cls(kernels, *sides, *on_device, m)

    @classmethod
    def unpaged(
        cls, sizes: tuple[int, int, int], lengths: list[int], m: int = 1, dtype: torch.dtype = torch.float16,
        scoring: Scoring = ALL_PLAIN,
    ) -> "Scene":  # fmt: skip
        """Of a layer in full precision of (h_q, h_kv, d)."""
        h_q, h_kv, d = sizes
        rotation = Rotation(Rope(d, "half", 1.0, "default"), np.ones(d // 2, np.float32), DEVICE)
        offsets, pair = [0] * len(lengths), unpaged(h_kv, d)
        sides = [
            fill(side, {}, None, lengths, offsets, m, dtype, 100 * number, scoring.window)
            for number, side in enumerate(pair)
        ]
        kernels = PagedAttention(*pair, {}, {}, rotation, h_q, dtype, DEVICE, scoring)
        on_device = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, offsets))
        return cls(kernels, *sides, *on_device, m)

    def query(self, seed: int = 5) -> Tensor:
        """[b, h_q, m, d] in the kernels' dtype."""
        h_q = self.kernels.g * self.kernels.h_kv
        shape = (self.lengths.numel(), h_q, self.m, self.kernels.d)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, self.kernels.dtype)

    def run(self, q: Tensor) -> Tensor:
        """What the kernels say, [b, h_q, m, d]; the output is poisoned before, and so are the new tokens' places."""
        new = [self._new(side.paged) for side in (self.key, self.value)]
        step = self.kernels.plan(
            self.key.paged, self.value.paged, self.lengths, self.offsets, self.m, q.shape[-1] ** -0.5
        )
        out = torch.full_like(q, torch.nan)
        step.write(*new)
        step.run(q, out)
        return out

    def _new(self, side: PagedSide) -> Tensor:
        """The new tokens [b, h_kv, m, d], a view of [b, m, h_kv, d]; their places are poisoned."""
        sinks, found = side.sinks.shape[1], []
        for i, n in enumerate(self.lengths.tolist()):
            for token in range(n - self.m, n):
                behind = token - sinks
                place = side.sinks[i, token] if behind < 0 else side.window[i, behind % side.window.shape[1]]
                found.append(place.clone())
                place.fill_(torch.nan)
        return torch.stack(found).unflatten(0, (-1, self.m)).transpose(1, 2)

    def oracle(self, q: Tensor, i: int) -> Tensor:
        """float64 [h_q, m, d] of sequence i."""
        found = self.key.decoded[i], self.value.decoded[i]
        return attention(q[i].double(), *found, q.shape[-1] ** -0.5, self.kernels.scoring)

    def half(self, q: Tensor, i: int) -> Tensor:
        """fp16 attention by PyTorch on the decoded keys and values, [h_q, m, d]."""
        scoring = self.kernels.scoring
        if scoring.softcap is not None:  # no kernel of PyTorch's bends scores: what is rounded to halves
            k, v = (x[i].half().float() for x in (self.key.decoded, self.value.decoded))
            return attention(q[i].half().float(), k, v, q.shape[-1] ** -0.5, scoring).half()
        k, v = (
            x[i].half().transpose(0, 1).repeat_interleave(self.kernels.g, 0)
            for x in (self.key.decoded, self.value.decoded)
        )
        mask = visible(self.m, k.shape[1], scoring.window, q.device)
        return F.scaled_dot_product_attention(q[i].half()[None], k[None], v[None], attn_mask=mask)[0]


def relative(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||; not a number where x has one."""
    return ((x.double() - reference).norm() / reference.norm()).item()
