"""Times of kernels that inductor's search goes by."""

import pytest
import torch

from runtime.inductor import SAMPLES, kernel_ms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_kernel_is_timed_as_often_as_said_and_more_work_takes_longer() -> None:
    small, large = (torch.zeros(n, device="cuda") for n in (1 << 10, 1 << 28))
    launches = []

    def launch() -> None:
        launches.append(large.add_(1))

    long = kernel_ms(launch, rep=40, is_vetted_benchmarking=True)
    assert len(launches) == SAMPLES + 1
    assert large[0] == SAMPLES + 1
    assert kernel_ms(lambda: small.add_(1)) < long  # 4 KB and 1 GB
