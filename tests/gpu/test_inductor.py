"""Times of kernels that inductor's search goes by."""

import pytest
import torch

from runtime.inductor import SAMPLES, kernel_ms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_kernel_is_launched_once_before_it_is_timed() -> None:
    numbers = torch.zeros(1 << 20, device="cuda")
    launches = []

    def launch() -> None:
        launches.append(numbers.add_(1))

    assert kernel_ms(launch, rep=40, is_vetted_benchmarking=True) > 0  # what inductor asks for
    assert len(launches) == SAMPLES + 1
    assert numbers[0] == SAMPLES + 1
