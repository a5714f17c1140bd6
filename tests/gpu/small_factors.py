"""Pages of a few formats with low-rank factors: small enough for compute-sanitizer.

compute-sanitizer --tool racecheck python -m tests.gpu.small_factors
"""

from unittest.mock import patch

import torch

from runtime import pack_factors
from tests.gpu.test_pack import FACTORS, check_prompt
from tests.packing import check_factors


def main() -> None:
    """Of each head dimension the smallest and the largest rank: prompts whose products are summed up at once, and in
    parts."""
    for d in (64, 128, 256):
        some = sorted((side for side in FACTORS if side[1].shape.d == d), key=lambda side: side[1].format.lowrank.rank)
        for _, geometry, rope in (some[0], some[-1]):
            for parts in (1, 3):
                with patch.object(pack_factors, "splits", lambda matrices, tokens, parts=parts: parts):
                    bench, got, wanted, ids, groups = check_prompt(geometry, rope, torch.float16, "grid")
                for i, group in enumerate(groups):
                    check_factors(bench.codec, got, wanted, ids[i].long(), group)


if __name__ == "__main__":
    main()
