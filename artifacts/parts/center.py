"""`center`: the mean of every channel, taken off before the other parts and put back after them.

Softmax does not see a constant added to all scores of a query, so centring keys costs nothing at run time beyond one
product of the query with the means; and numbers spread around zero lose less in a rotated or symmetric code.
"""

from dataclasses import dataclass

from artifacts.fields import Field, PageShape, TensorSpec


@dataclass(frozen=True)
class Center:
    """No parameters: the means come from calibration."""

    def check(self, shape: PageShape) -> None:
        """Fits every shape."""

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """Nothing in pages."""
        return ()

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """mean: of every channel."""
        return {"mean": TensorSpec("float32", (shape.h_kv, shape.d))}
