"""`sparse`: outliers, kept as float16 corrections on top of the dense part: `x = dense + correction`.

A kernel adds its outliers without knowing their codes, so parts stay a plain sum. Outliers of all kv heads of a page
share one list, sorted by head and position (`artifacts.order.fragment_order`), so a head that is rich in outliers
borrows from one that is poor. A position is (tile of 16 tokens, block of 256 numbers, index in the block): 4 bytes a
tile say where its list begins, a byte of an outlier is its index, and the lowest bits of its correction are the block:
of all float16 numbers that end so the nearest one is stored (`block_bits`; 3 bits for 128 channels, so that it is off
by 2**-8 of itself at most). That is 3 bytes an outlier, and a reader need not look for its block. A block is what a
warp's matrix instruction takes at once. Sources: KVQuant (dense-and-sparse, per vector and per matrix), GEAR (filter).
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec
from artifacts.order import TILE

BLOCK = 256  # numbers per block: an index fits one byte
LARGEST = 0.25  # fraction
BLOCK_BITS_LIMIT = 4  # of a correction, which has eleven significant ones


def block_bits(d: int) -> int:
    """Lowest bits of a correction that say which of its tile's blocks an outlier belongs to."""
    return (TILE * d // BLOCK - 1).bit_length()


@dataclass(frozen=True)
class Sparse:
    """Parameters of the sparse part.

    fraction    share of numbers treated as outliers, half at each end; 0.01 is KVQuant's 1%
    axis        what a vector is: `channel`, `token` (all kv heads of a token), or `matrix` (the layer as a whole)
    thresholds  `bundle`: calibrated offline (axis channel or matrix); `online`: the ceil(fraction/2 * n) largest and
                smallest of each vector's n numbers (axis token, or axis channel over the tokens of the page)
    capacity    with thresholds from the bundle: slots per page as a multiple of the expected number. If a page has more
                outliers, those that exceed their range by most (in units of the range) are kept and the rest are
                clipped to the range
    """

    fraction: float
    axis: Literal["channel", "token", "matrix"]
    thresholds: Literal["bundle", "online"]
    capacity: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= LARGEST:
            raise FormatError(
                f"sparse.fraction={self.fraction} must be above 0 and at most {LARGEST}; leave the part out for none"
            )
        if (self.axis, self.thresholds) in (("token", "bundle"), ("matrix", "online")):
            raise FormatError(
                f"sparse.axis={self.axis} does not go with thresholds={self.thresholds}: "
                "thresholds of tokens are online, those of the matrix come from the bundle, channels can have either"
            )
        if not 1 <= self.capacity <= 8:
            raise FormatError(f"sparse.capacity={self.capacity} must lie between 1 and 8 times the expected number")

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where the part does not fit a page of this shape."""
        if shape.t % TILE:
            raise FormatError(
                f"outliers of t={shape.t} tokens are not listed in tiles of {TILE}: take a multiple of {TILE}"
            )
        if TILE * shape.d % BLOCK:
            raise FormatError(
                f"head dimension {shape.d} is not a multiple of {BLOCK // TILE}: tiles of {TILE} tokens need whole "
                f"blocks of {BLOCK} numbers to list outliers"
            )
        if block_bits(shape.d) > BLOCK_BITS_LIMIT:
            raise FormatError(
                f"head dimension {shape.d} is too large to list outliers: a tile of {TILE} tokens may have "
                f"{1 << BLOCK_BITS_LIMIT} blocks of {BLOCK} numbers, which is head dimension "
                f"{(BLOCK << BLOCK_BITS_LIMIT) // TILE}; leave the sparse part out"
            )

    def per_end(self, shape: PageShape) -> int:
        """Outliers at each end of one vector (a token's h_kv * d numbers, a channel's t), for online thresholds."""
        return ceil(self.fraction / 2 * (shape.h_kv * shape.d if self.axis == "token" else shape.t))

    def slots(self, shape: PageShape) -> int:
        """Outliers that a page has room for, all heads."""
        if self.thresholds == "online":
            vectors = shape.t if self.axis == "token" else shape.h_kv * shape.d
            return vectors * 2 * self.per_end(shape)
        return min(shape.numbers, ceil(self.capacity * self.fraction * shape.numbers))

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """start: where the list of each head and tile begins, and the end; index, correction: lists."""
        n = self.slots(shape)
        return (
            Field("start", "uint32", (shape.h_kv * shape.t // TILE + 1,), "layer"),
            Field("index", "uint8", (n,), "layer"),
            Field("correction", "float16", (n,), "layer"),
        )

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """lower, upper: numbers strictly outside are outliers."""
        if self.thresholds == "online":
            return {}
        size = (shape.h_kv, shape.d) if self.axis == "channel" else (1, 1)
        return {name: TensorSpec("float32", size) for name in ("lower", "upper")}
