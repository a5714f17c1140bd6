"""Pages of a few formats with outliers: small enough for compute-sanitizer.

compute-sanitizer --report-api-errors no --tool memcheck python -m tests.gpu.small_pack
"""

import torch

from artifacts import Dense, Format, PageGeometry, Rope, Sparse, Window
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


def pack(geometry: PageGeometry, rope: Rope, kind: str, pages: int = 2) -> None:
    """A prompt's pages."""
    bench = Bench(geometry, rope, torch.float16)
    x = bench.numbers(kind, 1, geometry.format.window.sinks + pages * geometry.shape.t)
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    pool = poisoned(geometry, pages, "cuda")
    bench.packer.prompt(pool, table, x, 0, pages)
    bench.packer.check()
    assert (pool.field("start").view(torch.int32) >= 0).all()  # all are written


def main() -> None:
    """Keys and values; whole tiles and halves; numbers like a cache's, and more outliers than there is room for."""
    for h_kv, d in SHAPES:
        rope = Rope(d, "half", 1.0, "default")
        for fmt, side in ((KEYS, "key"), (VALUES, "value"), (LIMITED, "key")):
            geometry = PageGeometry.of(fmt, h_kv, d, side)
            for kind in ("smooth", "huge"):
                pack(geometry, rope, kind)


if __name__ == "__main__":
    main()
