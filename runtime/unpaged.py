"""Layers in full precision as the attention kernels see them: no pages, all tokens in the window."""

from dataclasses import dataclass

from artifacts import Format, PageGeometry

UNIT = 64  # tokens that the kernels deal out at once


@dataclass(frozen=True)
class Unpaged(Format):
    """A format without parts. t: tokens of a unit of work."""

    t: int = UNIT

    def __post_init__(self) -> None:
        assert not self.parts


def unpaged(h_kv: int, d: int) -> tuple[PageGeometry, PageGeometry]:
    """Keys and values of a layer of h_kv kv heads of d channels."""
    return PageGeometry.of(Unpaged(), h_kv, d, "key"), PageGeometry.of(Unpaged(), h_kv, d, "value")
