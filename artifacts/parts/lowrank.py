"""`lowrank`: factors of what the parts before left, per kv head and segment: residual ~ left right^T.

A segment is what was packed at once: all pages of a prompt (or of a chunk of it), or one page of decoded tokens. `left`
belongs to tokens and lies in their pages, `right` belongs to the segment and lies in a table of its own that pages
point to. Source: GEAR (algorithm 1, sections 3.2 and 3.3).
"""

from dataclasses import dataclass

from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec


@dataclass(frozen=True)
class LowRank:
    """Parameters of the factors.

    rank        for segments of several pages (the prompt)
    block_rank  for segments of one page (decoded tokens); at most `rank`, and the rest of the factors stays zero
    """

    rank: int
    block_rank: int

    def __post_init__(self) -> None:
        if self.rank < 1 or not 1 <= self.block_rank <= self.rank:
            raise FormatError(
                f"lowrank.rank={self.rank}, lowrank.block_rank={self.block_rank}: at least 1, block_rank at most rank"
            )

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where the rank is above that of the matrix itself."""
        if self.rank > min(shape.d, shape.t):
            raise FormatError(
                f"lowrank.rank={self.rank} is above what {shape.t} tokens x {shape.d} channels can have: "
                f"{min(shape.d, shape.t)} at most"
            )

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """left per head; the page's segment in the record; right in the segment's own entry."""
        return (
            Field("left", "float16", (shape.t, self.rank), "head"),
            Field("segment", "uint32", (1,), "layer"),
            Field("right", "float16", (shape.d, self.rank), "segment"),
        )

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """Nothing: factors are found online."""
        return {}
