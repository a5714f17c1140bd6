"""Page geometry: where every field of a page lies, and what a cache costs. Derived from the format and nothing else.

A page covers t tokens. Each kv head has its own bytes (scope `head`), what tokens share across heads stands in one
record per page (scope `layer`), and what pages share that were packed together stands, per kv head, in the entry of
their segment (scope `segment`). Every field starts at a multiple of 16 bytes and all three are padded to 16 bytes, so
any page can be read in 16-byte loads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from artifacts.fields import Field, PageShape, SideName
from artifacts.format import Format, LayerFormat

ALIGN = 16
TABLE_BYTES = 4  # an entry of a block table: one int32 id of a page or of its segment
SEGMENT_PAGES = 64  # pages of a prompt that are packed together at most


@dataclass(frozen=True)
class Placed:
    """A field and its offset in bytes from the start of the head's page or of the record."""

    field: Field
    offset: int


@dataclass(frozen=True)
class PageGeometry:
    """Layout of one page of `format` over `shape`. Raises FormatError where they do not fit."""

    format: Format
    shape: PageShape

    def __post_init__(self) -> None:
        self.format.check(self.shape)

    @classmethod
    def of(cls, format: Format, h_kv: int, d: int, side: SideName) -> "PageGeometry":
        """Geometry for h_kv kv heads of d channels of keys or values."""
        return cls(format, PageShape(format.t, h_kv, d, side))

    @cached_property
    def _placed(self) -> tuple[dict[str, Placed], dict[str, int]]:
        ends = {"head": 0, "layer": 0, "segment": 0}
        placed = {}
        for field in self.format.page_fields(self.shape):
            placed[field.name] = Placed(field, ends[field.scope])
            ends[field.scope] += -(-field.nbytes // ALIGN) * ALIGN
        return placed, ends

    @property
    def fields(self) -> dict[str, Placed]:
        """All fields by name."""
        return self._placed[0]

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv head's page."""
        return self._placed[1]["head"]

    @property
    def record_bytes(self) -> int:
        """Bytes of the layer's record of one page."""
        return self._placed[1]["layer"]

    @property
    def segment_bytes(self) -> int:
        """Bytes of one kv head's entry of a segment; 0 for formats without segments."""
        return self._placed[1]["segment"]

    @property
    def table_bytes(self) -> int:
        """Bytes of block tables for a page: its id and, for formats with segments, that of its segment."""
        return TABLE_BYTES * (2 if self.segment_bytes else 1)

    def segments(self, pages: int, prompt_pages: int) -> int:
        """Segments behind so many pages: a prompt's are packed up to 64 together, each page of decoded tokens alone."""
        return -(-prompt_pages // SEGMENT_PAGES) + pages - prompt_pages if self.segment_bytes else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the layer: all heads and the record."""
        return self.shape.h_kv * self.head_bytes + self.record_bytes

    @property
    def bits(self) -> float:
        """Bits per number inside pages (segments, window, tables and bundle not counted)."""
        return 8 * self.page_bytes / self.shape.numbers

    @property
    def bundle_bytes(self) -> int:
        """Bytes of the bundle's tensors that decoding this side of the layer reads."""
        return sum(spec.nbytes for spec in self.format.bundle_tensors(self.shape).values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that the bundle's tensors take on a GPU, with the other forms of large matrices that kernels read. Not
        counted: what turns keys before RoPE, of which only steps that go by tiles have a table (`runtime.turns`)."""
        return self.bundle_bytes + (self.format.rotate.derived_bytes(self.shape) if self.format.rotate else 0)

    def cache_bytes(self, n: int, full_bytes: int, prompt: int = 0) -> int:
        """Bytes that a cache with room for n tokens of one sequence allocates for this side.

        full_bytes: bytes of a full-precision number (2 for float16 and bfloat16). prompt: how many of the tokens come
        as one prompt, which makes segments fewer. Counted: sinks, window buffer, pages, records, segments, tables.
        """
        window, t = self.format.window, self.format.t
        buffered = window.sinks + window.recent + t
        pages = window.pages(n, t)
        segments = self.segments(pages, window.pages(min(prompt, n), t))
        exact = buffered * self.shape.h_kv * self.shape.d * full_bytes
        return exact + pages * (self.page_bytes + self.table_bytes) + segments * self.shape.h_kv * self.segment_bytes


Pair = tuple[PageGeometry, PageGeometry]


@dataclass(frozen=True)
class CacheGeometry:
    """Geometry of a whole model of h_kv kv heads of d channels.

    layers   pairs (key, value), None for layers in full precision
    sliding  as in `ModelFingerprint`
    """

    layers: tuple[Pair | None, ...]
    h_kv: int
    d: int
    sliding: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, formats: Iterable[LayerFormat | None], h_kv: int, d: int, sliding: tuple[int, ...] = ()
    ) -> "CacheGeometry":
        """Geometry for the formats of all layers, None for those in full precision."""

        def pair(f: LayerFormat) -> Pair:
            return PageGeometry.of(f.key, h_kv, d, "key"), PageGeometry.of(f.value, h_kv, d, "value")

        return cls(tuple(pair(f) if f else None for f in formats), h_kv, d, sliding)

    @property
    def pairs(self) -> list[Pair]:
        """Those of the layers that have a format."""
        return [pair for pair in self.layers if pair]

    @property
    def sides(self) -> list[PageGeometry]:
        """Keys and values of the layers that have a format."""
        return [side for pair in self.pairs for side in pair]

    def held(self, layer: int, n: int) -> int:
        """Tokens that a cache in full precision keeps of n: those that the next one may still see."""
        window = self.sliding[layer] if self.sliding else 0
        return min(n, window) if window else n

    def exact_bytes(self, n: int, full_bytes: int = 2) -> int:
        """Bytes of the layers in full precision at n tokens of one sequence."""
        tokens = sum(self.held(layer, n) for layer, pair in enumerate(self.layers) if pair is None)
        return 2 * tokens * self.h_kv * self.d * full_bytes

    def cache_bytes(self, n: int, full_bytes: int = 2, prompt: int = 0) -> int:
        """Bytes that a cache with room for n tokens of one sequence, `prompt` of them its prompt, allocates."""
        paged = sum(side.cache_bytes(n, full_bytes, prompt) for side in self.sides)
        return paged + self.exact_bytes(n, full_bytes)

    def numbers(self, n: int) -> int:
        """Numbers that a cache in full precision holds at n tokens of one sequence."""
        return 2 * self.h_kv * self.d * sum(self.held(layer, n) for layer in range(len(self.layers)))

    @property
    def bundle_bytes(self) -> int:
        """Bytes of the bundle's tensors that decoding reads."""
        return sum(side.bundle_bytes for side in self.sides)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the bundle's tensors take on a GPU, however many sequences there are."""
        return sum(side.resident_bytes for side in self.sides)

    def bits(self, n: int, full_bytes: int = 2, prompt: int = 0) -> float:
        """Bits per cached number at n tokens with everything counted: `cache_bytes` and the bundle's tensors over
        `numbers`. Layers that slide are held against a cache that drops what nobody sees any more."""
        return 8 * (self.cache_bytes(n, full_bytes, prompt) + self.bundle_bytes) / self.numbers(n)
