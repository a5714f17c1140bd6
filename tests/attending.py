"""Steps of attention over a filled cache, what float64 says of them, and how far float32 may be from it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from artifacts import Bundle
from runtime import KVCache
from runtime.cache import Side
from runtime.parts import MODULES
from runtime.parts.rotate import inverse_matrix
from tests.formats import Case, cache_numbers
from tests.oracles.attention import U, attention, float32_bound
from tests.oracles.rope import rotate
from tests.oracles.sketch import factor

Array = NDArray[np.float64]


def step(case: Case, lengths: list[int], m: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of m tokens behind sequences of these lengths, as `LayerCache.attend` takes them."""
    b = len(lengths)
    q = torch.randn(b, case.h_q, m, case.d, generator=torch.Generator().manual_seed(seed)) * 2
    k, v = (torch.from_numpy(cache_numbers((b, m, case.h_kv, case.d), seed + i)).transpose(1, 2) for i in (1, 2))
    positions = start(b) + torch.tensor(lengths)[:, None] + torch.arange(m)
    return q, k, v, positions


def start(b: int) -> Tensor:
    """Positions of the sequences' first tokens: not zero, as where padding was counted."""
    return 5 + 3 * torch.arange(b)[:, None]


def filled(case: Case, lengths: list[int]) -> KVCache:
    """A cache whose sequences have these lengths, filled by one left-padded prompt."""
    kv, longest = KVCache(case.bundle(), len(lengths)), max(lengths)
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    q, k, v, _ = step(case, [0] * len(lengths), longest, 10)
    positions = start(len(lengths)) + valid.long().cumsum(-1) - 1
    kv.layers[0].attend(q, k, v, positions, valid, case.d**-0.5)
    assert kv.lengths == lengths
    return kv


def pool_bytes(bundle: Bundle, tokens: int, b: int, most: int) -> int:
    """A float32 cache's budget: windows and tables for b sequences of at most `most` tokens, pages for `tokens`."""
    windows = bundle.geometry.cache_bytes(0, 4)
    sides = [side.format for layer in bundle.geometry.layers for side in layer]
    tables = sum(4 * fmt.window.pages(most, fmt.t) for fmt in sides)
    return b * (windows + tables) + bundle.geometry.cache_bytes(tokens, 4) - windows


def decoding_error(side: Side, sequence: int, n: int) -> Array:
    """How far decoded numbers `[tokens, h_kv, d]` of a sequence may be off, where n of them were added up before.

    Codes and outliers alone come out the same, bit for bit, wherever they are read. Otherwise, twice, once where they
    are decoded and once where the kernels transform the query or the output instead, relative to the absolute terms:
    * factors: r products and sums, (r + 2) U of |left| |right|^T;
    * the sum of up to four parts: 3 U of all of them;
    * sketches: `test_scores_from_bytes` counts 4 d + 9 / 8 m + 17 roundings for both ways, transforms included;
    * transforms: numbers are mean + y P^T, d + 2 roundings; and n more where n were added up before.
    The worst case of the last two, many roundings all in one direction, would allow anything. k roundings are a random
    walk: beyond 6 sqrt(k) U once in 10^7 times at most (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
    """

    def walk(k: float) -> float:
        return min(k, 6 * k**0.5)

    fmt, d, tables = side.format, side.geometry.shape.d, side.codec.tables
    fields = side.pool.read(side.pages_of(sequence).long())
    if not (fmt.lowrank or fmt.sketch or fmt.transforms):
        return np.zeros((side.used[sequence] * fmt.t, side.geometry.shape.h_kv, d))
    sizes = {name: _size(side, name, fields) for name in fmt.parts}
    total = sum(sizes.values())
    inner = 6 * total if fmt.lowrank or fmt.sketch else 0 * total
    if fmt.lowrank:
        inner = inner + 2 * (fmt.lowrank.rank + 2) * sizes["lowrank"]
    if fmt.sketch:
        inner = inner + walk(4 * d + 9 / 8 * fmt.sketch.m + 17) * sizes["sketch"]
    outer = walk(2 * (d + 2) + n) if fmt.transforms else 0
    undo = inverse_matrix(tables) if fmt.rotate else torch.eye(d)
    mean = tables.get("mean", torch.zeros(1)).double().numpy()
    return U * (transformed(inner + outer * total, undo.double().abs().numpy()) + outer * np.abs(mean))


def transformed(x: Array, matrix: Array) -> Array:
    """x [tokens, h_kv, d] times a matrix [d, d], or one for each head."""
    return x @ matrix if matrix.ndim == 2 else np.einsum("nhc,hcd->nhd", x, matrix)


def _size(side: Side, name: str, fields: dict[str, Tensor]) -> Array:
    """What rounding errors of one part are relative to, `[tokens, h_kv, d]`: its terms by their absolute values."""
    shape, tables, part = side.geometry.shape, side.codec.tables, side.format.parts[name]
    if name == "lowrank":
        fields = fields | {side_name: fields[side_name].abs() for side_name in ("left", "right")}
    if name != "sketch":
        return MODULES[name].decode(part, shape, fields, tables).abs().double().flatten(0, 1).numpy()
    total, outliers = 0.0, tables.get("outlier_mask", torch.zeros(shape.h_kv, shape.d)).double()
    for prefix, channels in (("", 1 - outliers), ("outlier_", outliers)):
        if f"{prefix}sketch" in tables:
            s = tables[f"{prefix}sketch"].double()
            columns = factor(part.rows, shape.d) / s.shape[0] * s.abs().sum(0) * channels  # [h_kv, d]
            total = total + fields[f"{prefix}norm"].double().transpose(1, 2)[..., None] * columns
    return total.flatten(0, 1).numpy()


def expected(case: Case, kv: KVCache, i: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Array, Array]:
    """Attention in float64 over what sequence i holds and the new tokens, and how far float32 may be from it."""
    layer, n = kv.layers[0], kv.lengths[i]
    (sinks, newest), packed = layer.key.exact(i, n), layer.key.dense(i).double().numpy()
    uncertain = decoding_error(layer.key, i, 1)
    if case.key.domain == "pre_rope":
        first = int(start(i + 1)[i]) + case.key.window.sinks
        positions = np.arange(first, first + packed.shape[0])[:, None]
        for a, b in case.rope.pairs():  # test_rotation.py derives the 5
            pair = 5 * U * (np.abs(packed[..., a]) + np.abs(packed[..., b])) + uncertain[..., a] + uncertain[..., b]
            uncertain[..., a] = uncertain[..., b] = case.rope.scaling * pair
        inv_freq = kv.bundle.tensors["rope.inv_freq"]
        packed = rotate(packed, positions, inv_freq, case.rope.layout, case.rope.scaling)
    keys = np.concatenate([sinks, packed, newest, k.transpose(0, 1)]).transpose(1, 0, 2)
    key_error = np.concatenate([0 * sinks, uncertain, 0 * newest, 0 * k.transpose(0, 1)]).transpose(1, 0, 2)
    (sinks, newest), packed = layer.value.exact(i, n), layer.value.dense(i).double().numpy()
    uncertain = decoding_error(layer.value, i, n)
    values = np.concatenate([sinks, packed, newest, v.transpose(0, 1)]).transpose(1, 0, 2)
    value_error = np.concatenate([0 * sinks, uncertain, 0 * newest, 0 * v.transpose(0, 1)]).transpose(1, 0, 2)
    exact = q.double().numpy()
    bound = float32_bound(exact, keys, values, case.d**-0.5, key_error, value_error)
    return attention(exact, keys, values, case.d**-0.5), bound
