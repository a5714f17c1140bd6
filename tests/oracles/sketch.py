"""Oracle of QJL in float64, vector by vector, as the paper's definition 1 and equation 3 write it."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def signs(s: Array, k: Array) -> Array:
    """H_S(k) = sign(S k), definition 1: s `[m, d]`, k `[d]` -> +1 or -1 `[m]`; the sign of 0 is +1."""
    return np.where(s.astype(np.float64) @ k.astype(np.float64) >= 0, 1.0, -1.0)


@cache
def mean_size(d: int) -> float:
    """E|x| of one coordinate x of a vector uniform on the sphere of radius sqrt(d), by integrating its density.

    With u = x / sqrt(d) the density is proportional to (1 - u^2)^((d - 3) / 2); as d grows it tends to sqrt(2 / pi).
    """
    u = (np.arange(1_000_000) + 0.5) / 1_000_000
    density = (1 - u**2) ** ((d - 3) / 2)
    return float(np.sqrt(d) * (density @ u) / density.sum())


def factor(rows: str, d: int) -> float:
    """What makes the estimate unbiased: 1 / E|<s, k>| for ||k|| = 1; Gaussian rows: sqrt(pi / 2), equation 3."""
    return float(np.sqrt(np.pi / 2)) if rows == "gaussian" else 1 / mean_size(d)


def estimate(s: Array, q: Array, sign: Array, norm: float, c: float) -> float:
    """Prod_QJL(q, k) = c / m ||k|| <S q, H_S(k)>, equation 3."""
    return float(c / len(s) * norm * (s.astype(np.float64) @ q.astype(np.float64)) @ sign)


def estimate_size(s: Array, q: Array, norm: float, c: float) -> float:
    """The same with every product by its size: what rounding errors of the estimate are relative to."""
    return float(c / len(s) * norm * (np.abs(s.astype(np.float64)) @ np.abs(q.astype(np.float64))).sum())


def distortion_rows(epsilon: float, delta: float) -> float:
    """Rows m that lemma 5 asks for."""
    return 4 / 3 * (1 + epsilon) / epsilon**2 * np.log(2 / delta)


def bernstein_rows(epsilon: float, delta: float) -> float:
    """Rows m from the moments that lemma 5's proof derives, put into the Bernstein inequality that it cites.

    E z^2 = pi / 2 and E|z|^l <= l! / 2 * E z^2 * (2 / 3)^(l - 2) (for ||q|| = ||k|| = 1) give
    P(error > epsilon) <= 2 exp(-m epsilon^2 / (2 (pi / 2 + 2 / 3 epsilon))); the paper has 2 / 3 in
    the place of pi / 2.
    """
    return (np.pi + 4 / 3 * epsilon) / epsilon**2 * np.log(2 / delta)
