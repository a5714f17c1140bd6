"""Oracle of causal attention in float64, and how far float32 arithmetic may be from it."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
U = 2.0**-24  # unit roundoff of float32


def attention(q: Array, k: Array, v: Array, scaling: float, window: int = 0, softcap: float | None = None) -> Array:
    """q `[h_q, m, d]` are the queries of the last m of n tokens, k and v `[h_kv, n, d]` -> `[h_q, m, d]`.

    window: a query sees the newest so many tokens, itself included (0: all); softcap: Gemma 2, equation of section 2.
    """
    weights, _ = _weights(q, k, scaling, window, softcap)
    return weights @ _spread(v, q)


def float32_bound(
    q: Array, k: Array, v: Array, scaling: float, key_error: Array, value_error: Array, window: int = 0,
    softcap: float | None = None,
) -> Array:  # fmt: skip
    """How far `[h_q, m, d]` a float32 evaluation may be from `attention`, to first order in U.

    key_error, value_error: how far `[h_kv, n, d]` the keys and values it starts from may be from k and v.
    A sum of n products in any order is off by at most n U times the sum of the absolute products (Higham, 3.1). So a
    score is off by  e = scaling * (d + 2) U |q||k| + scaling |q| key_error; a softmax weight, relatively, by twice the
    largest e (it stands above and below the line), plus 2 U (1 + |s|) for the exponential of a rounded difference, plus
    (n + 2) U for the sum and the quotient; and the output by that times |w||v|, plus n U |w||v| + w value_error.
    A cap makes errors of scores no larger, its slope is at most 1, and rounds three times more.
    """
    n, d = k.shape[1], k.shape[2]
    weights, scores = _weights(q, k, scaling, window, softcap)
    keys, values = _spread(k, q), _spread(v, q)
    off = scaling * (
        (d + 2) * U * np.abs(q) @ np.abs(keys).transpose(0, 2, 1) + np.abs(q) @ _spread(key_error, q).transpose(0, 2, 1)
    )
    span = np.abs(np.where(np.isfinite(scores), scores, 0)).max(-1, keepdims=True)
    visible = np.where(np.isfinite(scores), off, 0).max(-1, keepdims=True)
    relative = 2 * visible + 2 * U * (1 + 2 * span) + (n + 2) * U + (6 * U * softcap if softcap else 0)
    return (relative + n * U) * (weights @ np.abs(values)) + weights @ _spread(value_error, q)


def _weights(q: Array, k: Array, scaling: float, window: int = 0, softcap: float | None = None) -> tuple[Array, Array]:
    scores = q.astype(np.float64) @ _spread(k, q).transpose(0, 2, 1) * scaling
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    m, n = scores.shape[1:]
    token, query = np.arange(n), np.arange(n - m, n)[:, None]
    scores = np.where((token <= query) & (token > query - (window or n)), scores, -np.inf)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True), scores


def _spread(x: Array, q: Array) -> Array:
    """`[h_kv, n, d]` to `[h_q, n, d]`: query heads of a kv head are neighbours."""
    return np.repeat(x.astype(np.float64), q.shape[0] // x.shape[0], axis=0)
