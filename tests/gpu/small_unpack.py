"""Pages of a few formats as numbers, and attention behind them: small enough for compute-sanitizer.

compute-sanitizer --tool racecheck python -m tests.gpu.small_unpack
"""

import torch

from runtime import KVCache
from runtime.joined import Bounds, attention_behind
from tests.formats import CASES, Case, cache_numbers, kivi, kvquant
from tests.gpu.test_attention import with_formats


def chosen() -> list[Case]:
    """One for each part, each kind of matrix and each head dimension."""
    wanted = {
        "factors": lambda case: case.value.lowrank and case.d == 64,
        "sketches": lambda case: case.key.sketch and case.key.sketch.outliers and case.d == 128,
        "rotation": lambda case: case.key.rotate and case.value.rotate and case.d == 256,
        "bands": lambda case: case.key.banded and case.value.rotate and case.key.domain == "pre_rope",
    }
    return [next(filter(fits, CASES)) for fits in wanted.values()]


def main() -> None:
    """Sequences of a few pages, one after the other."""
    for case in [with_formats(kvquant(3), 8, 2), with_formats(kivi(2), 4, 4), *chosen()]:
        kv = KVCache(case.bundle(), 2, None, torch.float16, "cuda")
        (layer,) = kv.paged
        for i, n in enumerate((260, 3)):
            x = torch.from_numpy(cache_numbers((2, case.h_kv, n, case.d), i)).to("cuda", torch.float16)
            layer.append(i, x[0], x[1])
            out = torch.full((2, n, case.h_kv, case.d), torch.nan, dtype=torch.float16, device="cuda")
            layer.unpack(kv.room.which(i, n, 0), out[0], out[1])
            assert torch.isfinite(out).all()
            q = torch.randn(2, case.h_q, 3, case.d, device="cuda", dtype=torch.float16)
            bounds = Bounds.of(torch.tensor([n], dtype=torch.int32, device="cuda"), 6, case.h_q)
            k, v = x[:, None, :, :3].expand(-1, 2, -1, -1, -1)
            assert torch.isfinite(attention_behind(q, k, v, out[0], out[1], bounds, 0.1)).all()


if __name__ == "__main__":
    main()
