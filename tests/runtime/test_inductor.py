"""What layers are compiled with: settings and times that are there within the block alone."""

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker

from runtime.inductor import compiling, kernel_ms


@pytest.mark.parametrize("b", [1, 4])
def test_settings_and_times_end_with_the_block(b) -> None:
    before = benchmarker.benchmark_gpu

    def fails() -> None:
        with compiling(b):
            assert benchmarker.benchmark_gpu is kernel_ms
            assert torch._inductor.config.max_autotune_pointwise == (b == 1)
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fails()
    assert benchmarker.benchmark_gpu == before
    assert not torch._inductor.config.max_autotune_pointwise
