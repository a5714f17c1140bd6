"""Pages of a few formats, with outliers and behind matrices: small enough for compute-sanitizer.

compute-sanitizer --report-api-errors no --tool memcheck python -m tests.gpu.small_pack
compute-sanitizer --report-api-errors no --tool racecheck python -m tests.gpu.small_pack 0 1 2

With numbers: those scenes only; racecheck takes long.
"""

import sys
from itertools import product

import torch

from artifacts import Banded, Dense, Format, PageGeometry, Rope, Rotate, Sketch, Sparse, Window
from tests.gpu.test_pack import Bench
from tests.packing import poisoned

KEYS = Format(
    64,
    Dense(4, "channel", scales="bundle"),
    Sparse(0.01, "channel", "bundle"),
    window=Window(sinks=1),
    domain="pre_rope",
)
VALUES = Format(64, Dense(3, "token"), Sparse(0.01, "token", "online"), window=Window(sinks=1))
LIMITED = Format(32, Dense(2, "token"), Sparse(0.02, "matrix", "bundle", capacity=1))
SHAPES = ((8, 128), (32, 128), (4, 256), (4, 64))  # kv heads, channels
NORMS = Dense(3, "head", codebook="lloyd", normalize="norm")
# Through registers: `cuda/pack_direct.cuh`.
DIRECT = (
    (Format(64, NORMS, rotate=Rotate("haar")), "key"),
    (Format(64, banded=Banded(3.0), rotate=Rotate("learned")), "value"),
    (Format(64, sketch=Sketch(256, "orthogonal", 8, 64)), "key"),
)
SCENES = [
    *(
        (shape, *side, kind)
        for shape in SHAPES
        for side in ((KEYS, "key"), (VALUES, "value"), (LIMITED, "key"))
        for kind in ("smooth", "huge")
    ),
    *((shape, *side, "smooth") for shape, side in product(SHAPES, DIRECT)),
]


def pack(geometry: PageGeometry, rope: Rope, kind: str, pages: int = 2) -> None:
    """A prompt's pages."""
    bench = Bench(geometry, rope, torch.float16)
    x = bench.numbers(kind, 1, geometry.format.window.sinks + pages * geometry.shape.t)
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    pool = poisoned(geometry, pages, "cuda")
    bench.packer.prompt(pool, table, x, 0, pages)
    bench.packer.check()
    if geometry.format.sparse:
        assert (pool.field("start").view(torch.int32) >= 0).all()  # all are written


def main() -> None:
    """Keys and values; whole tiles and halves; numbers like a cache's, and more outliers than there is room for."""
    chosen = [int(n) for n in sys.argv[1:]] or range(len(SCENES))
    for (h_kv, d), fmt, side, kind in (SCENES[n] for n in chosen):
        pack(PageGeometry.of(fmt, h_kv, d, side), Rope(d, "half", 1.0, "default"), kind)


if __name__ == "__main__":
    main()
