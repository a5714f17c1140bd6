"""Oracles of dense quantization in float64, vector by vector, as the papers write it."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nearest(numbers: Array, values: Array) -> NDArray[np.int64]:
    """Index of the value `[k]` nearest to each of the numbers `[...]`; of two equally near ones, the first."""
    return np.abs(np.asarray(numbers, np.float64)[..., None] - np.asarray(values, np.float64)).argmin(-1)


def kivi_group(numbers: Array, bits: int) -> Array:
    """KIVI, section 3.1, on one group `[n]`: zero point = min, step = (max - min) / (2^b - 1), nearest integer code."""
    zero, step = numbers.min(), (numbers.max() - numbers.min()) / (2**bits - 1)
    if step == 0:
        return np.full_like(numbers, zero)
    return zero + step * np.round((numbers - zero) / step)


def vectors(t: int, h_kv: int, d: int, axis: str, group: int) -> NDArray[np.int64]:
    """Which vector each number of a page `[t, h_kv, d]` belongs to, int64 of that shape.

    Token, whole: one for all heads of a token. Token, grouped: `group` channels of a head. Channel: `group` tokens.
    Head: one for each head of a token.
    """
    token, head, channel = np.meshgrid(range(t), range(h_kv), range(d), indexing="ij")
    if axis == "head":
        return token * h_kv + head
    if axis == "token":
        return token if group == 0 else (token * h_kv + head) * (d // group) + channel // group
    return (token // (group or t) * h_kv + head) * d + channel


def middle_and_half(x: Array, of: NDArray[np.int64], outliers: NDArray[np.bool_]) -> tuple[Array, Array]:
    """KVQuant, section 3.1: the middle of each vector of a page and half its width, which normalize it to [-1, 1].

    x, of (its `vectors`), outliers (left out): `[t, h_kv, d]`; so is what is returned. Nothing but outliers: 0 and 0.
    """
    low, high = np.full(of.max() + 1, np.inf), np.full(of.max() + 1, -np.inf)
    np.minimum.at(low, of[~outliers], x[~outliers].astype(np.float64))
    np.maximum.at(high, of[~outliers], x[~outliers].astype(np.float64))
    low[low == np.inf], high[high == -np.inf] = 0, 0
    return ((high + low) / 2)[of], ((high - low) / 2)[of]


def norm(x: Array, of: NDArray[np.int64], outliers: NDArray[np.bool_]) -> Array:
    """TurboQuant, section 3.1: the Euclidean norm of each vector of a page, for each number; outliers left out."""
    squares = np.where(outliers, 0.0, x.astype(np.float64) ** 2)
    return np.sqrt(np.bincount(of.reshape(-1), squares.reshape(-1)))[of]


def limits(values: Array, tables: Mapping[str, Array]) -> Array:
    """Between which normalized numbers `[k + 1]` a code stands, from -inf to inf: half way between the values, or where
    Q-Norm has moved these, at the edges that the bundle has kept."""
    between = tables["edges"].astype(np.float64) if "edges" in tables else (values[:-1] + values[1:]) / 2
    return np.concatenate([[-np.inf], between, [np.inf]])
