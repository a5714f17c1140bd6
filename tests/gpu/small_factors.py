"""Pages of a few formats with low-rank factors: small enough for compute-sanitizer.

compute-sanitizer --tool racecheck python -m tests.gpu.small_factors
"""

from unittest.mock import patch

import torch

from artifacts import PageGeometry
from artifacts.model import Rope
from runtime import pack_factors
from tests.gpu.test_pack import FACTORS, Bench, segments_like
from tests.packing import poisoned


def pack(geometry: PageGeometry, rope: Rope, parts: int, pages: int = 3) -> None:
    """A prompt's pages, whose products are summed up in so many parts."""
    bench = Bench(geometry, rope, torch.float16)
    x = bench.numbers("grid", 1, geometry.format.window.sinks + pages * geometry.shape.t)
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    pool = poisoned(geometry, pages, "cuda", 1)
    with patch.object(pack_factors, "splits", return_value=parts):
        bench.packer.prompt(pool, table, x, 0, pages, segments=segments_like(table, 0, pages))
    bench.packer.check()
    for name in ("left", "right"):
        assert torch.isfinite(pool.field(name)).all()


def main() -> None:
    """Of each head dimension the smallest and the largest rank; sums at once, and in parts."""
    for d in (64, 128, 256):
        some = sorted((side for side in FACTORS if side[1].shape.d == d), key=lambda side: side[1].format.lowrank.rank)
        for _, geometry, rope in (some[0], some[-1]):
            for parts in (1, 3):
                pack(geometry, rope, parts)


if __name__ == "__main__":
    main()
