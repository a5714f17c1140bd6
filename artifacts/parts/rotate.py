"""`rotate`: a matrix applied to every head's vectors before the other parts, and undone after them.

The query is rotated once per step, the output un-rotated once; pages never are. That costs the same for any invertible
matrix, so a learned one need not be orthogonal. Sources: TurboQuant (random rotation), QuaRot (randomized Hadamard);
the Karhunen-Loeve transform in the metric of the loss (`calib/fits/rotate.py`).
"""

from dataclasses import dataclass
from typing import Literal

from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec


@dataclass(frozen=True)
class Rotate:
    """Parameters of the rotation.

    kind  `haar`: uniformly random; `hadamard`: Sylvester's matrix with random signs (d a power of two); `learned`: from
          second moments of numbers and gradients, a matrix for each head, in eight bits
    """

    kind: Literal["haar", "hadamard", "learned"]

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where there is no such matrix."""
        if self.kind == "hadamard" and shape.d & (shape.d - 1):
            raise FormatError(
                f"rotate.kind=hadamard needs a head dimension that is a power of two, not {shape.d}: use haar"
            )

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """Nothing in pages."""
        return ()

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """rotation: the matrix P, a row vector x becomes x P; one for all heads of the layer, or one for each."""
        if self.kind == "learned":
            return {"rotation": TensorSpec("int8", (shape.h_kv, shape.d, shape.d))}
        return {"rotation": TensorSpec("float32", (shape.d, shape.d), coarse=True)}

    def derived_bytes(self, shape: PageShape) -> int:
        """Bytes that a GPU holds beside a learned matrix: the same as halves, which packing multiplies with, and its
        inverse as floats, that of keys also transposed, for queries. Not counted: that of values once more, which steps
        of many sequences have."""
        numbers = shape.h_kv * shape.d * shape.d if self.kind == "learned" else 0
        return numbers * (6 if shape.side == "value" else 10)
