"""What tests of packing share: numbers and tables whose sums are exact in any order, the torch codec's pages."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import Dense, Format, PageGeometry, Rotate, Sketch
from artifacts.geometry import SEGMENT_PAGES
from runtime.codec import Codec, PagePool, join_fields
from runtime.parts import MODULES
from runtime.rope import Rotation
from tests.formats import CASES, cache_numbers, kivi, kvquant, random_tensors

GRID = 8.0  # numbers on a grid of 1 / 8


def exact_tensors(fmt: Format, h_kv: int, d: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of the bundle with which every sum over channels is exact, or one of two terms.

    The rotation is a permutation with signs, rows of a sketch have two entries, means lie on the grid.
    """
    rng = np.random.default_rng(seed)
    tensors = dict(random_tensors(fmt, h_kv, d, seed))
    if fmt.rotate:
        matrices = [np.eye(d)[rng.permutation(d)] * rng.choice([-1, 1], d) for _ in range(h_kv)]
        learned = fmt.rotate.kind == "learned"
        tensors["rotation"] = np.stack(matrices).astype(np.int8) if learned else matrices[0].astype(np.float32)
        if "scale" in tensors:  # of numbers behind this matrix
            x = cache_numbers((256, h_kv, d), seed).astype(np.float64)
            x = np.einsum("nhc,hcd->nhd", x, tensors["rotation"].astype(np.float64)) if learned else x @ matrices[0]
            low, high = x.min(0), x.max(0)
            tensors |= {"scale": ((high - low) / 2).astype(np.float32), "zero": ((high + low) / 2).astype(np.float32)}
    if fmt.center:
        tensors["mean"] = on_grid(tensors["mean"])
    for name in ("sketch", "outlier_sketch"):
        if name in tensors:
            rows = np.zeros_like(tensors[name])
            for row in rows:
                row[rng.permutation(d)[:2]] = rng.choice([-1, 1], 2)
            tensors[name] = rows
    return tensors


def on_grid(x: np.ndarray) -> np.ndarray:
    return (np.round(x * GRID) / GRID).astype(np.float32)


def numbers(kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers [..., h_kv, d] of a kind.

    smooth: like a cache's. grid: on a grid, so that many are equal and squares add up exactly. equal: few distinct.
    huge: one head holds nearly all outliers. full: one head holds nothing else, many of them equal.
    """
    x = cache_numbers(shape, seed)
    if kind == "grid":
        x = on_grid(x.clip(-31, 31))
    elif kind == "equal":
        x = np.sign(x) * (np.abs(x) > 2) + 0.0  # which of two zeros a range ends at is open
    elif kind == "huge":
        x[..., 0, :] *= 50
    elif kind == "full":
        x[..., 0, :] = 60 + on_grid(x[..., 0, :].clip(-1, 1))
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def leaving(
    codec: Codec, rotation: Rotation | None, x: Tensor, first_page: int, pages: int, offset: int
) -> list[Tensor]:
    """What the codec is given of x [n, h_kv, d], all tokens of a sequence: [p, t, h_kv, d] of each segment."""
    t, sinks = codec.geometry.shape.t, codec.geometry.format.window.sinks
    first = sinks + first_page * t
    found = x[first : first + pages * t]
    if rotation is not None and codec.geometry.format.domain == "pre_rope":
        positions = torch.arange(offset + first, offset + first + found.shape[0], device=x.device)
        found = rotation.unrotate(found.transpose(0, 1), positions).transpose(0, 1)
    return [group.unflatten(0, (-1, t)) for group in found.split(SEGMENT_PAGES * t)]


def reference(
    codec: Codec, rotation: Rotation | None, x: Tensor, first_page: int, pages: int, offset: int
) -> dict[str, Tensor]:
    """Fields of pages of one sequence x [n, h_kv, d] (all its tokens) by the torch codec, like `runtime.cache.Side`."""
    groups = leaving(codec, rotation, x, first_page, pages, offset)
    return join_fields([codec.encode(group, group.shape[0])[0] for group in groups])


def ring_of(x: Tensor, n: int, capacity: int, sinks: int) -> Tensor:
    """The window of a sequence x [.., h_kv, d] of which n tokens have come: token k behind the sinks at k % capacity.

    What no token has reached is NaN.
    """
    ring = torch.full((capacity, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    for k in range(max(0, n - sinks - capacity), n - sinks):
        ring[k % capacity] = x[sinks + k]
    return ring


def poisoned(geometry: PageGeometry, capacity: int, device: torch.device | str = "cpu", segments: int = 0) -> PagePool:
    """A pool whose every byte is 0xFF."""
    pool = PagePool(geometry, capacity, device, segments)
    for store in (pool.heads, pool.records, pool.segments):
        store.fill_(0xFF)
    return pool


def differences(got: PagePool, wanted: PagePool, loose: Iterable[str] = ()) -> list[str]:
    """What differs between two pools, byte for byte; those in `loose` may, by one unit of float16 in the last place."""
    found = []
    got, wanted = (_copied(pool) for pool in (got, wanted))
    for name in loose:
        mine, theirs = got.field(name).view(torch.int16).int(), wanted.field(name).view(torch.int16).int()
        if (worst := int((mine - theirs).abs().max())) > 1:
            found.append(f"{name}: off by {worst} units in the last place")
        got.field(name).copy_(wanted.field(name))
    for name, placed in wanted.geometry.fields.items():
        if placed.field.scope == "segment":
            continue
        mine, theirs = got.field(name), wanted.field(name)
        if mine.dtype == torch.float16:
            mine, theirs = mine.view(torch.int16), theirs.view(torch.int16)
            if name in ("scale", "zero"):  # which zero the middle of a range of zeros is, the order of comparisons says
                mine, theirs = (torch.where(x == -32768, 0, x) for x in (mine, theirs))
        if not torch.equal(mine, theirs):
            where = (mine != theirs).nonzero()
            first = tuple(where[0].tolist())
            values = f"{mine[first]} instead of {theirs[first]}"
            found.append(f"{name}: {len(where)} of {mine.numel()} differ, first at {first}: {values}")
    for name in ("scale", "zero"):
        if name in wanted.geometry.fields and not found:
            got.field(name).copy_(wanted.field(name))
    if not found:
        for name in ("heads", "records"):
            if not torch.equal(getattr(got, name), getattr(wanted, name)):
                found.append(f"{name}: bytes between fields or of other pages are touched")
    return found


def before_factors(codec: Codec, x: Tensor) -> Tensor:
    """What the parts before the factors leave of pages x [p, t, h_kv, d]."""
    shape, parts, tables = codec.geometry.shape, codec.geometry.format.parts, codec.tables
    x = x.float()
    for name in codec.geometry.format.transforms:
        x = MODULES[name].forward(x, tables)
    masks = [MODULES[n].select(p, shape, x, tables) for n, p in parts.items() if hasattr(MODULES[n], "select")]
    terms: list[Tensor] = []
    for name in list(parts)[: list(parts).index("lowrank")]:
        left = x - sum(terms) if terms else x
        terms.append(MODULES[name].encode(parts[name], shape, left, masks[0] if masks else None, tables, 1)[1])
    return x - sum(terms) if terms else x


def check_factors(codec: Codec, got: PagePool, wanted: PagePool, ids: Tensor, groups: list[Tensor]) -> None:
    """Pages of one sequence, ids [p], of numbers `leaving`: what codes and outliers are to the bit, factors by the
    error of their product against numpy's SVD, sketches by what these factors leave."""
    geometry, part = codec.geometry, codec.geometry.format.lowrank
    assert part is not None
    for name in ("codes", "band_codes", "scale", "zero", "start", "count", "index", "correction", "segment"):
        if name in geometry.fields:
            mine, theirs = (pool.field(name)[ids].contiguous().view(torch.uint8) for pool in (got, wanted))
            assert torch.equal(mine, theirs), name
    for k, group in enumerate(groups):
        pages = ids[k * SEGMENT_PAGES :][: group.shape[0]]
        before = before_factors(codec, group)
        right = got.field("right")[got.field("segment")[pages[0], 0].long()]
        product = (got.field("left")[pages].float() @ right.float().mT).transpose(1, 2)
        rank = part.rank if group.shape[0] > 1 else part.block_rank
        matrices = before.flatten(0, 1).transpose(0, 1).double()
        lost = (matrices - product.flatten(0, 1).transpose(0, 1)).norm(dim=(1, 2))
        least = torch.linalg.svdvals(matrices)[:, rank:].norm(dim=1)
        # Rounded to 11 bits: factors, and what directions are chosen by.
        assert (lost <= 1.02 * least + 2**-10 * matrices.norm(dim=(1, 2))).all(), (lost / least).max()
        if geometry.format.sketch:
            fields, of_before = (
                MODULES["sketch"].encode(geometry.format.sketch, geometry.shape, x, None, codec.tables)[0]
                for x in (before - product, before)
            )
            _check_sketch(got, pages, fields, of_before)


def _check_sketch(pool: PagePool, ids: Tensor, fields: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Norms up to the rounding of three halves: what factors are taken off (whose norm is that of `before`, and may be
    many times what they leave), what they leave, and the norm itself. Nearly all signs: a row of the sketch tells a
    vector from one that is off by so little in that share of cases that the angle between them is of pi."""
    for name, expected in fields.items():
        mine, norm = pool.field(name)[ids], name.replace("signs", "norm")
        left = fields[norm].float()
        off = 2**-11 * (before[norm].float() + 2 * left)
        if name == norm:
            assert ((mine.float() - left).abs() <= off + 1e-6).all(), name
        else:
            wrong = (mine ^ expected.view_as(mine)).view(torch.uint8).unsqueeze(-1)
            wrong = (wrong >> torch.arange(8, device=ids.device, dtype=torch.uint8)) & 1
            angle = torch.atan2(off, left)
            assert wrong.float().mean() < 2e-3 + float(angle.mean()) / torch.pi, name


def check_unpacked(layer: Any, i: int, got: Tensor) -> None:
    """Keys and values [2, room, h_kv, d] that a kernel made of a sequence, against the torch codec; what is behind the
    sequence is NaN still."""
    n, dtype = layer.lengths[i], got.dtype
    assert got[:, n:].isnan().all()
    for mine, side in zip(got, (layer.key, layer.value), strict=True):
        wanted = layer._dense_side(i, side, mine[:0].transpose(0, 1), torch.float32).transpose(0, 1)
        # Sums of floats in another order, then rounded to the model's: one unit in the last place. Matrices have
        # 16 bits where that rounds to 11 or 8; where they have 24, tensor cores add up six pieces of sixteen numbers at
        # a time, and cut each sum off.
        slack = 4e-6
        if side.format.rotate or side.format.sketch:
            slack = 3e-5 if dtype != torch.float32 else side.geometry.shape.d / 16 * 6 * 2**-23
        wrong = (mine[:n].float() - wanted).abs() > wanted.abs() * torch.finfo(dtype).eps + slack * wanted.abs().amax()
        assert not wrong.any(), (side.geometry.shape.side, wrong.nonzero()[:4], int(wrong.sum()))
        exact = [*range(min(n, side.format.window.sinks)), n - 1]
        assert torch.equal(mine[exact].float(), wanted[exact])


def _copied(pool: PagePool) -> PagePool:
    copy = PagePool(pool.geometry, pool.capacity, "cpu", pool.segments.shape[0])
    for name in ("heads", "records", "segments"):
        getattr(copy, name).copy_(getattr(pool, name))
    return copy


def sides() -> list[tuple[str, PageGeometry, Any]]:
    """Name, geometry and the model's RoPE of both sides of all cases and of the recipes that are fast."""
    found = []
    for case in CASES:
        for side, fmt in case.sides():
            found.append((f"{case.name}.{side}", PageGeometry.of(fmt, case.h_kv, case.d, side), case.rope))
    for name, formats in (("kvquant4", kvquant(4)), ("kvquant2", kvquant(2)), ("kivi2", kivi(2))):
        rope = CASES[1].rope
        for side, fmt in (("key", formats.key), ("value", formats.value)):
            found.append((f"{name}.{side}", PageGeometry.of(fmt, 8, 128, side), rope))
    return found


def direct_sides() -> list[tuple[str, PageGeometry, Any]]:
    """Formats that `cuda/pack_direct.cuh` packs: rotated with norms, and sketches alone; as in `sides`."""
    rope, found = CASES[1].rope, []
    rotated = [(3, 4, 128, 64), (2, 3, 64, 16), (1, 1, 256, 32), (4, 8, 128, 32), (8, 2, 64, 64), (3, 5, 256, 16)]
    for bits, h_kv, d, t in rotated:
        dense = Dense(bits, "head", codebook="lloyd" if bits < 8 else "uniform", normalize="norm")
        fmt = Format(t, dense, rotate=Rotate("haar"))
        for side in ("key", "value"):
            found.append((f"rotated-{bits}bit-d{d}-{h_kv}.{side}", PageGeometry.of(fmt, h_kv, d, side), rope))
    few, many = Sketch(256, "orthogonal", 8, 64), Sketch(96, "gaussian", 20, 32)
    sketches = ((few, 4, 128, 64), (Sketch(32, "gaussian"), 3, 64, 16), (Sketch(128), 2, 256, 16), (many, 1, 256, 32))
    for part, h_kv, d, t in sketches:
        geometry = PageGeometry.of(Format(t, sketch=part), h_kv, d, "key")
        found.append((f"sketch-{part.m}-d{d}-{h_kv}.key", geometry, rope))
    return found
