"""`sketch` in torch: the quantized Johnson-Lindenstrauss transform (QJL, section 3)."""

from math import exp, lgamma, pi, sqrt

import torch
from torch import Tensor

from artifacts.fields import PageShape
from artifacts.parts.sketch import Sketch

BITS = 32  # signs per word, the first one lowest


def unbiasing(part: Sketch, d: int) -> float:
    """The constant c of the estimate c / m * ||k|| * S^T sign(S k) of k.

    Gaussian rows: sqrt(pi / 2). Rows uniform on the sphere of radius sqrt(d): 1 / (sqrt(d) E|u_1|) with u uniform on
    the unit sphere, E|u_1| = Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2)); 0.2% smaller at d = 128.
    """
    if part.rows == "gaussian":
        return sqrt(pi / 2)
    return sqrt(pi / d) * exp(lgamma((d + 1) / 2) - lgamma(d / 2))


def encode(
    part: Sketch,
    shape: PageShape,
    residual: Tensor,
    outliers: Tensor | None,
    tables: dict[str, Tensor],
    segment: int = 1,
) -> tuple[dict[str, Tensor], Tensor]:
    """Signs and norms of residual, float32 [p, t, h_kv, d]; and vectors whose products with queries estimate."""
    by_head = residual.transpose(1, 2)
    rest = by_head * kept_channels(tables) if part.outliers else by_head
    fields = _stored("", rest, tables["sketch"])
    if part.outliers:
        fields |= _stored("outlier_", by_head - rest, tables["outlier_sketch"])
    return fields, decode(part, shape, fields, tables)


def decode(part: Sketch, shape: PageShape, fields: dict[str, Tensor], tables: dict[str, Tensor]) -> Tensor:
    """c / m * ||k|| * S^T sign(S k), float32 [p, t, h_kv, d], for the rest and, on their channels, the outliers."""
    c = unbiasing(part, shape.d)
    vectors = _estimate(c, fields["signs"], fields["norm"], tables["sketch"])
    if part.outliers:
        kept = kept_channels(tables)
        outliers = _estimate(c, fields["outlier_signs"], fields["outlier_norm"], tables["outlier_sketch"])
        vectors = vectors * kept + outliers * (1 - kept)
    return vectors.transpose(1, 2)


def kept_channels(tables: dict[str, Tensor]) -> Tensor:
    """1 for channels of the main sketch, 0 for outlier channels: float32 [h_kv, 1, d]."""
    return 1 - tables["outlier_mask"].float()[:, None]


def _stored(prefix: str, x: Tensor, s: Tensor) -> dict[str, Tensor]:
    """Fields of vectors x [p, h_kv, t, d]: signs as words of 32 (bit set: not negative), norm as float16."""
    bits = (x @ s.T >= 0).unflatten(-1, (-1, BITS)).long()
    words = (bits << torch.arange(BITS, device=x.device)).sum(-1)
    return {f"{prefix}signs": words.to(torch.int32), f"{prefix}norm": x.norm(dim=-1).clamp_max(65504.0).half()}


def _estimate(c: float, words: Tensor, norm: Tensor, s: Tensor) -> Tensor:
    bits = (words.long()[..., None] >> torch.arange(BITS, device=words.device)) & 1
    signs = (2 * bits - 1).flatten(-2).float()
    return (signs @ s) * (c / s.shape[0] * norm.float())[..., None]
