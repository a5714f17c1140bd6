"""`sketch`: signs of a random projection and norms, from which inner products are estimated without bias.

<q, k> ~ c / m * ||k|| * <S q, sign(S k)>. The query is projected once and never quantized. A few channels of large norm
can have a sketch of their own, and the rest is sketched without them. On its own or on the residual of the parts before
(TurboQuant's product variant). Keys only: an estimate of products with the query, not of the vector. Source: QJL.
"""

from dataclasses import dataclass
from typing import Literal

from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec


@dataclass(frozen=True)
class Sketch:
    """Parameters of the sketch.

    m            rows of S: sign bits per token and head, a multiple of 32
    rows         `orthogonal`: blocks of d orthogonal rows of norm sqrt(d); `gaussian`: independent
    outliers     most channels per head that may have their own sketch (0: none); which ones, the bundle's mask says
    outlier_m    sign bits of that sketch, a multiple of 32 (0 without outlier channels)
    """

    m: int
    rows: Literal["orthogonal", "gaussian"] = "orthogonal"
    outliers: int = 0
    outlier_m: int = 0

    def __post_init__(self) -> None:
        if self.m < 32 or self.m % 32 or self.outlier_m % 32 or self.outlier_m < 0:
            raise FormatError(f"sketch.m={self.m}, sketch.outlier_m={self.outlier_m}: multiples of 32, m at least 32")
        if self.outliers < 0 or bool(self.outliers) != bool(self.outlier_m):
            raise FormatError(
                f"sketch.outliers={self.outliers} and sketch.outlier_m={self.outlier_m}: both 0, or both above 0"
            )

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where there are more outlier channels than channels."""
        if self.outliers >= shape.d:
            raise FormatError(
                f"sketch.outliers={self.outliers} must be below the head dimension {shape.d}: outlier channels are few"
            )

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """signs, norm of the rest and of the outlier channels, per head and token."""
        fields = [
            Field("signs", "uint32", (shape.t, self.m // 32), "head"),
            Field("norm", "float16", (shape.t,), "head"),
        ]
        if self.outliers:
            fields.append(Field("outlier_signs", "uint32", (shape.t, self.outlier_m // 32), "head"))
            fields.append(Field("outlier_norm", "float16", (shape.t,), "head"))
        return tuple(fields)

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """sketch, outlier_sketch: the matrices S; outlier_mask: 1 where a channel has the second one."""
        tensors = {"sketch": TensorSpec("float32", (self.m, shape.d), coarse=True)}
        if self.outliers:
            tensors["outlier_sketch"] = TensorSpec("float32", (self.outlier_m, shape.d), coarse=True)
            tensors["outlier_mask"] = TensorSpec("uint8", (shape.h_kv, shape.d))
        return tensors
