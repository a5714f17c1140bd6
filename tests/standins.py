"""The pack and attention kernels as torch does them, behind the same interface: what launches them runs anywhere.

They read what the kernels read (tables, lengths, offsets, cyclic windows, bytes of pages) and nothing else.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import runtime.behind
import runtime.cache
import runtime.decoding
import runtime.engine
import runtime.exact_layer
import runtime.intake
import runtime.joined
import runtime.layer
import runtime.prompts
import runtime.side
import runtime.step
import runtime.units
from artifacts import PageGeometry
from artifacts.geometry import SEGMENT_PAGES
from runtime.attention import PagedSide
from runtime.codec import Codec, PagePool
from runtime.joined import Bounds
from runtime.rope import Rotation
from runtime.side import Side
from runtime.units import ALL_PLAIN, Scoring, Sharing
from tests.oracles.attention import attention


class Packer:
    """`runtime.pack.Packer` by the torch codec."""

    def __init__(self, codecs: Codec | list[Codec], rotation: Rotation | None, dtype: torch.dtype):
        self.codecs = codecs if isinstance(codecs, list) else [codecs]
        self.codec, self.rotation, self.dtype = self.codecs[0], rotation, dtype
        self.format = self.codec.geometry.format
        self.status = torch.zeros(1, dtype=torch.int32)

    def reserve(self, b: int) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Numbers are checked when they are packed."""

    def prompt(self, pool, table, x, first_page, pages, first_token=0, ring=None, offsets=None, segments=None):
        assert table.dtype == offsets.dtype == torch.int32
        assert x.dtype == self.dtype
        t, sinks = self.format.t, self.format.window.sinks
        for i in range(table.shape[0]):
            tokens = range(sinks + first_page * t, sinks + (first_page + pages) * t)
            rows = [x[i, n - first_token] if n >= first_token else ring[i, (n - sinks) % ring.shape[1]] for n in tokens]
            self._write(
                self.codec,
                pool,
                table[i, first_page : first_page + pages],
                torch.stack(rows),
                int(offsets[i]),
                tokens,
                self._places(segments, table, i, first_page, pages),
            )

    def prompts(
        self, layers, pools, table, numbers, pages, offsets=None, segments=None, rows=None, first_page=0, first_token=0,
        rings=None,
    ):  # fmt: skip
        for place, (layer, pool, x) in enumerate(zip(layers, pools, numbers, strict=True)):
            alone = Packer([self.codecs[layer]], self.rotation, self.dtype)
            given = x if rows is None else x[rows.long()]
            ring = None if rings is None else rings[place].expand(len(given), -1, -1, -1)
            alone.prompt(pool, table, given, first_page, pages, first_token, ring, offsets, segments)

    def _places(self, segments, table, i, first_page, pages):
        """Ids of the segments that pages of a sequence form, from the table that says it of each page."""
        if not self.format.lowrank:
            return None
        assert segments.dtype == torch.int32
        assert segments.shape == table.shape
        held = segments[i, first_page : first_page + pages].split(SEGMENT_PAGES)
        assert all((part == part[0]).all() for part in held)
        return torch.stack([part[0] for part in held]).long()

    def step(self, pools, table, rings, lengths, fresh=1, offsets=None, segments=None, rows=None):
        if isinstance(pools, PagePool):
            pools, rings = [pools], [rings]
        for codec, pool, ring in zip(self.codecs, pools, rings, strict=True):
            self._step(codec, pool, table, ring, lengths, fresh, offsets, segments, rows)

    def _step(self, codec, pool, table, ring, lengths, fresh, offsets, segments, rows):
        t, window = self.format.t, self.format.window
        for i, n in enumerate(lengths.tolist()):
            if (page := window.pages(n, t) - 1) < window.pages(n - fresh, t):
                continue
            tokens = range(window.sinks + page * t, window.sinks + (page + 1) * t)
            own = ring[i if rows is None else rows[i]]
            x = torch.stack([own[(n - window.sinks) % ring.shape[1]] for n in tokens])
            places = self._places(segments, table, i, page, 1)
            self._write(codec, pool, table[i, page : page + 1], x, int(offsets[i]), tokens, places)

    def _write(
        self, codec: Codec, pool: PagePool, ids: Tensor, x: Tensor, offset: int, tokens: range, segments: Tensor | None
    ) -> None:
        if self.rotation is not None:
            at = torch.arange(offset + tokens.start, offset + tokens.stop)
            x = self.rotation.unrotate(x.transpose(0, 1), at).transpose(0, 1)
        for k, pages in enumerate(x.unflatten(0, (-1, self.format.t)).split(SEGMENT_PAGES)):
            fields, _ = codec.encode(pages, pages.shape[0])
            place = None if segments is None else segments[k : k + 1]
            pool.write(ids[k * SEGMENT_PAGES :][: pages.shape[0]].long(), fields, place)


class PagedAttention:
    """`runtime.attention.PagedAttention` in float64 over decoded pages. planned: sequences and tokens of all plans."""

    planned: ClassVar[list[tuple[int, int]]] = []

    def __init__(
        self, key, value, key_tables, value_tables, rotation, h_q, dtype, device, scoring: Scoring = ALL_PLAIN,
        workspace=None,
    ):  # fmt: skip
        self.sides = [Codec(key, key_tables), Codec(value, value_tables)]
        self.dtype, self.scoring = dtype, scoring
        self.rotation = rotation if key.format.domain == "pre_rope" else None
        self.g = h_q // key.shape.h_kv

    def sharing(self, rows, b, tokens):
        return Sharing(1, alone=tokens <= runtime.units.SHORT)

    def plan(self, key, value, lengths, offsets, m, scale, tokens=None) -> "Step":
        PagedAttention.planned.append((lengths.numel(), tokens))
        return Step(self, (key, value), lengths, offsets, m, scale)


class Step:
    """A step that reads everything when it runs."""

    newest: "Step | None" = None  # to have launched something

    def __init__(self, kernels, sides, lengths, offsets, m, scale):
        assert lengths.dtype == offsets.dtype == sides[0].table.dtype == torch.int32
        self.kernels, self.sides, self.lengths, self.offsets, self.m, self.scale = (
            kernels, sides, lengths, offsets, m, scale,
        )  # fmt: skip

    def write(self, k: Tensor, v: Tensor) -> None:
        Step.newest = self
        for i, n in enumerate(self.lengths.tolist()):
            for codec, side, x in zip(self.kernels.sides, self.sides, (k, v), strict=True):
                assert x.dtype == side.window.dtype
                for token in range(max(0, n - self.m), n):  # of a sequence of nobody: none
                    behind, new = token - codec.geometry.format.window.sinks, x[i, :, token - n + self.m]
                    if behind < 0:
                        side.sinks[i, token] = new
                    else:
                        side.window[i, behind % side.window.shape[1]] = new

    def run(self, q: Tensor, out: Tensor, follows: bool = False) -> None:
        assert not follows or Step.newest is self, "something else was launched behind `write`"
        for i, n in enumerate(self.lengths.tolist()):
            if n == 0:
                continue  # a sequence of nobody
            keys, values = (
                self._tokens(codec, side, i, n).transpose(0, 1).numpy()
                for codec, side in zip(self.kernels.sides, self.sides, strict=True)
            )
            found = attention(q[i].double().numpy(), keys, values, self.scale, *self.kernels.scoring)
            out[i] = torch.from_numpy(found).to(out.dtype)

    def _tokens(self, codec: Codec, side: PagedSide, i: int, n: int) -> Tensor:
        fmt, geometry = codec.geometry.format, codec.geometry
        if not fmt.parts:  # the newest that are kept
            capacity = side.window.shape[1]
            return side.window[i, torch.arange(max(0, n - capacity), n) % capacity].double()
        window, pages = fmt.window, fmt.window.pages(n - self.m, fmt.t)
        pool = _pool(geometry, side)
        paged = codec.decode(pool.read(side.table[i, :pages].long())).flatten(0, 1)
        if self.kernels.rotation is not None and codec is self.kernels.sides[0]:
            first = int(self.offsets[i]) + window.sinks
            at = torch.arange(first, first + paged.shape[0])
            paged = self.kernels.rotation.rotate(paged.transpose(0, 1), at).transpose(0, 1)
        rest = [
            side.window[i, (k - window.sinks) % side.window.shape[1]] for k in range(window.sinks + pages * fmt.t, n)
        ]
        newest = torch.stack(rest) if rest else paged[:0].to(side.window.dtype)
        return torch.cat([side.sinks[i, : min(n, window.sinks)].double(), paged.double(), newest.double()])


def _pool(geometry: PageGeometry, side: PagedSide) -> PagePool:
    """The bytes that the kernels were given, as a pool."""
    pool = PagePool(geometry, 0)
    pool.heads, pool.records, pool.segments = side.heads, side.records, side.segments
    return pool


class Unpacker:
    """`runtime.unpack.Unpacker` by the torch codec."""

    def __init__(self, key: Side, value: Side, rotation: Rotation):
        self.sides, self.rotation = (key, value), rotation

    def run(self, which: Tensor, keys: Tensor, values: Tensor) -> None:
        assert which.dtype == torch.int32
        sequence, n, offset = which.tolist()
        for side, out in zip(self.sides, (keys, values), strict=True):
            window = side.format.window
            pages, sinks = window.pages(n, side.format.t), min(n, window.sinks)
            packed = side.codec.decode(side.pool.read(side.table[sequence, :pages].long())).flatten(0, 1)
            if side.rotation is not None:
                at = offset + window.sinks + torch.arange(packed.shape[0])
                packed = side.rotation.rotate(packed.transpose(0, 1), at).transpose(0, 1)
            newest = torch.arange(sinks + packed.shape[0], n) - window.sinks
            out[:sinks] = side.sinks[sequence, :sinks]
            out[sinks : sinks + packed.shape[0]] = packed
            out[sinks + packed.shape[0] : n] = side.window[sequence, newest % side.capacity]


def flash(q, k, v, bounds, most, causal, scaling):
    """`runtime.joined._flash` in float64, of bounds too that are known when it runs."""
    if bounds is None:
        whole = Bounds(*2 * [torch.tensor([0, q.shape[1]])])
        found = [flash(*row, whole, most, causal, scaling) for row in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in found]), torch.stack([sums for _, sums in found])
    g, outs, sums = q.shape[1] // k.shape[1], [], []
    k, v = (x.double().repeat_interleave(g, 1) for x in (k, v))
    for i in range(len(bounds.queries) - 1):
        own, there = (slice(*x[i : i + 2].tolist()) for x in bounds)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[there]) * scaling
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        of_rows = scores.logsumexp(-1)
        weights = (scores - of_rows[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights, v[there]))
        sums.append(torch.where(of_rows == -torch.inf, torch.inf, of_rows))
    return torch.cat(outs).to(q.dtype), torch.cat(sums, 1).float()


def join(before, of_before, own, of_own):
    """`runtime.joined._join` in torch."""
    b, m, h, _ = own.shape
    parts = torch.cat([before.unflatten(0, (-1, b, m)), own[None]])
    sums = torch.cat([of_before.view(h, -1, b, m).permute(1, 2, 3, 0), of_own.transpose(1, 2)[None]])
    weights = sums.masked_fill(sums == torch.inf, -torch.inf).softmax(0)
    return (parts * weights[..., None]).sum(0).to(own.dtype)


def keep(sides: list[tuple[Tensor, Tensor]], tokens: Tensor) -> None:
    """`runtime.keep.keep`."""
    assert tokens.dtype == torch.int32
    rows, numbers, places = tokens.long().T
    for x, to in sides:
        assert x.dtype == to.dtype
        to[places] = x[rows, numbers]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on caches on the CPU launch kernels as caches on a GPU do, and torch stands in for these."""
    monkeypatch.setattr(runtime.side, "Packer", Packer)
    for module in (runtime.cache, runtime.exact_layer):
        monkeypatch.setattr(module, "PagedAttention", PagedAttention)
    monkeypatch.setattr(runtime.step, "Packer", Packer)
    for module in (runtime.step, runtime.intake):
        monkeypatch.setattr(module, "keep", keep)
    monkeypatch.setattr(runtime.cache, "Unpacker", Unpacker)
    monkeypatch.setattr(runtime.cache, "_begin_kernels", lambda *given: None)
    for module in (
        runtime.side, runtime.layer, runtime.cache, runtime.decoding, runtime.engine, runtime.intake, runtime.prompts,
    ):  # fmt: skip
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


class Graph:
    """A captured pass: runs again what was captured, and leaves the result where the first run left it."""

    def __init__(self, work: Callable[[], Any]):
        self.work, self.result, self.replays = work, work(), 0

    def replay(self) -> None:
        self.replays += 1
        result = self.work()
        if self.result is not None:
            self.result.copy_(result)


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on passes can be captured without a GPU."""

    def captured(work: Callable[[], Any], pool: Any = None) -> tuple[Graph, Any]:
        graph = Graph(work)
        return graph, graph.result

    monkeypatch.setattr(runtime.decoding.torch.cuda, "graph_pool_handle", lambda: object())
    for module in (runtime.decoding, runtime.prompts):
        monkeypatch.setattr(module, "captured", captured)
    monkeypatch.setattr(runtime.behind, "has_flash", lambda dtype, device: True)
    monkeypatch.setattr(runtime.joined, "_flash", flash)
    monkeypatch.setattr(runtime.joined, "_join", join)
    monkeypatch.setattr(runtime.joined, "stretches_for", lambda rows, device: max(1, 40 // rows))


def run_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on caches work as on this kind of device: `cpu`, `stand-in`, or `graphs`, whose passes are captured."""
    if device != "cpu":
        stand_in(monkeypatch)
    if device == "graphs":
        capture(monkeypatch)
