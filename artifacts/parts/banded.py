"""`banded`: codes of as many bits as each band of a head's channels deserves, `x = zero + scale * codebook[code]`.

Calibration gives every band (32 channels of one kv head, see `artifacts.order.band_order`) a width of 0 to `most` bits
and a codebook of its own, so that a head's bits go where its loss is; all heads have as many bits in all, so their
pages are alike. Scales and zero points belong to channels and come from the bundle: nothing is found online. A band of
width 0 is stored as nothing and decoded as its one signpost. Source: reverse water-filling (Cover and Thomas, Elements
of Information Theory, 10.3.3), over measured costs instead of Gaussian variances.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from artifacts.codes import RUN
from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec
from artifacts.order import TILE

BAND = RUN  # channels of a band: the codes of one token in it are one run


@dataclass(frozen=True)
class Banded:
    """Parameters of the banded part.

    bits  of a number on average over the bands of a head; times the number of bands it must be whole
    most  bits of the widest band, 1 to 4
    """

    bits: float
    most: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.most <= 4:
            raise FormatError(f"banded.most={self.most} is not supported: the widest band has 1 to 4 bits")
        if not 0 < self.bits <= self.most:
            raise FormatError(
                f"banded.bits={self.bits:g} must be above 0 and at most banded.most={self.most}: it is the mean width"
            )

    def bands(self, shape: PageShape) -> int:
        """Bands of a head."""
        return shape.d // BAND

    def words(self, shape: PageShape) -> int:
        """32-bit words of one token of a head: the sum of its bands' widths."""
        return round(self.bits * self.bands(shape))

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where the part does not fit a page of this shape."""
        if shape.t % TILE:
            raise FormatError(
                f"pages of t={shape.t} tokens are not stored in tiles of {TILE}: take a multiple of {TILE}"
            )
        if shape.d % BAND:
            raise FormatError(f"head dimension {shape.d} is not a multiple of {BAND}, the channels of a band")
        if self.words(shape) != self.bits * (bands := self.bands(shape)):
            raise FormatError(
                f"banded.bits={self.bits:g}: the widths of a head's {bands} bands are whole numbers, so their mean is "
                f"a multiple of 1/{bands}, such as {max(1, self.words(shape)) / bands:g}"
            )

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """band_codes: per head, tile after tile, 16 words for each bit of its bands' widths (`artifacts.order`)."""
        return (Field("band_codes", "uint32", (shape.t // TILE, TILE * self.words(shape)), "head"),)

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """scale, zero: of channels; widths: bits of each band; signposts: values of a band's codes, ascending, of which
        it has 2^width, and the last one again behind them; rounded where codes are written and read
        (`runtime.parts.banded`)."""
        bands = (shape.h_kv, self.bands(shape))
        return {
            "scale": TensorSpec("float32", (shape.h_kv, shape.d)),
            "zero": TensorSpec("float32", (shape.h_kv, shape.d)),
            "widths": TensorSpec("uint8", bands),
            "signposts": TensorSpec("float32", (*bands, 1 << self.most)),
        }

    def check_tensors(self, shape: PageShape, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Raises FormatError for widths and signposts that no page of this shape has: readers rely on them."""
        widths = tensors["widths"]
        if not np.abs(tensors["signposts"]).max() <= 1:
            raise FormatError("signposts of bands lie outside [-1, 1], to which numbers are normalized")
        if widths.max() > self.most:
            raise FormatError(f"widths holds {int(widths.max())}: banded.most={self.most} allows no wider band")
        if (wrong := widths.sum(1, dtype=np.int64) != self.words(shape)).any():
            head = int(wrong.argmax())
            raise FormatError(
                f"widths of head {head} add up to {int(widths[head].sum())}, banded.bits={self.bits:g} asks for "
                f"{self.words(shape)}"
            )
