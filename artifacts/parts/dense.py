"""`dense`: b-bit codes of a normalized number, `x = zero + scale * codebook[code]`.

A vector (the numbers that share one scale and zero point) runs along tokens (`axis: channel`) or along channels
(`axis: token`), whole or in groups. Sources: KVQuant (per channel before RoPE, offline; per token, online), KIVI
(groups).
"""

from dataclasses import dataclass
from math import gcd
from typing import Literal

from artifacts.codes import RUN, check_bits
from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec
from artifacts.order import TILE

GRID = 2047  # units of one, in which a bundle says where evenly spaced values lie: so many halves can hold apart


@dataclass(frozen=True)
class Dense:
    """Parameters of the dense part.

    bits      width of a code: 1, 2, 3, 4 or 8
    axis      `channel`: one scale per channel; `token`: one per token; `head`: one per token and kv head
    group     numbers per scale along the vector; 0 = the whole vector. Whole means: with axis `channel`, all tokens
              ever (so the scales come from the bundle); with axis `token`, all channels of all kv heads of the token;
              with axis `head`, the d channels of the head
    codebook  `uniform` (evenly spaced over the whole range), `uniform-fit` (evenly spaced, and the bundle says where; 2
              to 4 bits), `nf` (NormalFloat), `nuq` (signposts from the bundle, rounded to a grid up to 4 bits where
              codes are written and read: `runtime.parts.dense`), `nuq-qnorm` (signposts, stretched and
              shifted so that mean and deviation of what is decoded are those of the data, while codes are chosen as
              before: KVQuant's Q-Norm) or `lloyd` (Lloyd-Max for coordinates of a random direction, TurboQuant; needs
              normalize `norm`)
    scales    `bundle` (calibrated offline; axis `channel`, group 0) or `online` (from the page itself, float16)
    normalize `range`: scale and zero point from the smallest and largest number; `norm`: the scale is the vector's
              Euclidean norm and there is no zero point (axis `head`)
    """

    bits: int
    axis: Literal["channel", "token", "head"]
    group: int = 0
    codebook: Literal["uniform", "nf", "nuq", "nuq-qnorm", "lloyd", "uniform-fit"] = "uniform"
    scales: Literal["bundle", "online"] = "online"
    normalize: Literal["range", "norm"] = "range"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group < 0:
            raise FormatError(f"dense.group={self.group} must be 0 (the whole vector) or a positive number of numbers")
        if self.scales == "bundle" and (self.axis != "channel" or self.group):
            raise FormatError(
                f"dense.scales=bundle needs axis=channel and group=0 (calibrated scales belong to channels), "
                f"not axis={self.axis}, group={self.group}: set scales=online"
            )
        if self.scales == "online" and self.axis == "channel" and not self.group:
            raise FormatError(
                "dense.axis=channel with scales=online needs a group of tokens (group=32, say): "
                "the whole channel is known only to calibration (scales=bundle)"
            )
        if self.axis == "head" and self.group:
            raise FormatError(
                f"dense.axis=head takes whole heads, not group={self.group}: set axis=token for groups of channels"
            )
        if self.normalize == "norm" and self.axis != "head":
            raise FormatError(
                f"dense.normalize=norm needs axis=head, not axis={self.axis}: norms are those of heads' vectors"
            )
        if self.codebook == "lloyd" and self.normalize != "norm":
            raise FormatError("dense.codebook=lloyd is made for vectors of norm 1: set dense.normalize=norm")
        if self.codebook == "uniform-fit" and self.bits not in (2, 3, 4):
            raise FormatError(
                f"dense.codebook=uniform-fit has 2 to 4 bits, not {self.bits}: set dense.codebook=nuq with 1 bit, "
                "whose two values are evenly spaced anyway, and uniform with 8"
            )

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where the part does not fit a page of this shape."""
        if shape.t % TILE:
            raise FormatError(
                f"pages of t={shape.t} tokens are not stored in tiles of {TILE}: take a multiple of {TILE}"
            )
        if shape.d % RUN:
            raise FormatError(f"head dimension {shape.d} is not a multiple of {RUN}, which packed codes need")
        length, what = (shape.t, "page of {} tokens") if self.axis == "channel" else (shape.d, "head dimension {}")
        if self.group and length % self.group:
            raise FormatError(
                f"dense.group={self.group} does not divide the {what.format(length)}: set a divisor of {length}, such "
                f"as {gcd(self.group, length)}"
            )

    @property
    def spans_heads(self) -> bool:
        """Whether one scale belongs to all kv heads of a token."""
        return self.axis == "token" and not self.group

    @property
    def evenly_spaced(self) -> bool:
        """Whether the numbers of the codebook are evenly spaced, of codes of 2 to 4 bits."""
        return 2 <= self.bits <= 4 and self.codebook in ("uniform", "uniform-fit")

    def scale_shape(self, shape: PageShape) -> tuple[int, int, int]:
        """Scales per page over (tokens, kv heads, channels): 1 where they are shared along an axis."""
        if self.axis == "head":
            return (shape.t, shape.h_kv, 1)
        if self.axis == "token":
            return (shape.t, shape.h_kv, shape.d // self.group) if self.group else (shape.t, 1, 1)
        return (shape.t // self.group, shape.h_kv, shape.d) if self.group else (1, shape.h_kv, shape.d)

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """What a page stores: codes per head; online scales per head, or per layer where they span the heads.

        In which order, says `artifacts.order`.
        """
        codes = Field("codes", "uint32", (shape.t // TILE, shape.d * TILE // RUN * self.bits), "head")
        if self.scales == "bundle":
            return (codes,)
        size = self.scale_shape(shape)[::2]
        if shape.side == "value" and self.axis == "token":
            size = size[::-1]  # groups first: a lane takes the scales of neighbouring tokens
        scope: Literal["head", "layer"] = "layer" if self.spans_heads else "head"
        names = ("scale", "zero") if self.normalize == "range" else ("scale",)
        return (codes, *(Field(name, "float16", size, scope) for name in names))

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """What the bundle holds per layer and side.

        scale, zero: of channels; signposts: the values of the codes before they are rounded; edges: between which
        numbers take which code, where that is not the nearest value; spacing: the lowest value and the distance of
        neighbours, in units of 1 / `GRID`.
        """
        tensors: dict[str, TensorSpec] = {}
        if self.scales == "bundle":
            tensors |= {name: TensorSpec("float32", (shape.h_kv, shape.d)) for name in ("scale", "zero")}
        if self.codebook == "uniform-fit":
            tensors["spacing"] = TensorSpec("int16", (2,))
        if self.codebook in ("nuq", "nuq-qnorm"):
            tensors["signposts"] = TensorSpec("float32", (1 << self.bits,))
        if self.codebook == "nuq-qnorm":
            tensors["edges"] = TensorSpec("float32", ((1 << self.bits) - 1,))
        return tensors
