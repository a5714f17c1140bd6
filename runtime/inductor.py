"""How torch.compile makes the kernels of a model's layers: its settings, and times that its search can go by."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._inductor.runtime.benchmarking import benchmarker

AHEAD, SAMPLES = 40, 25  # passes over the cache that are queued first; kernels timed


@contextmanager
def compiling(b: int) -> Iterator[None]:
    """Within it layers are compiled, and run for the first time, for b sequences of one token."""
    # All layers run the same code: their numbers in the stack must not be constants of it. A sequence alone multiplies
    # matrices with vectors: inductor makes kernels of its own for these if it may tune them, which it does when they
    # first run. Tuned so as an option of torch.compile they are slower. From one beginning alone the search ends at
    # kernels that are up to 1.7 times as slow as from another. Several sequences use cuBLAS, and for the rest of many
    # the search found nothing better than inductor's own choice, but at times kernels that were five times as slow.
    # With PDL a kernel begins while the one before it ends (from compute capability 9.0 on).
    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
        torch._inductor.config.patch(
            {"coordinate_descent_tuning": b == 1, "max_autotune_pointwise": b == 1, "triton.enable_pdl": True}
        ),
    ):
        own: dict[str, object] = vars(benchmarker)
        own["benchmark_gpu"] = kernel_ms
        try:
            yield
        finally:
            own.pop("benchmark_gpu", None)


def kernel_ms(launch: Callable[[], object], **asked: object) -> float:
    """Median time on the GPU of what `launch` queues, in milliseconds, as in a step: behind what reads other memory.

    Inductor's own is the least of some times, each behind zeros written to as many bytes as the L2 cache has. What of
    these waits to be written back, and which of the operands are still in the cache, decides which time is least.
    That steps are shorter for it has not been shown.
    """
    launch()
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    others = torch.empty(2 * cache // 4, dtype=torch.int32, device="cuda")
    most = torch.empty((), dtype=torch.int32, device="cuda")
    for _ in range(AHEAD):  # so that the host never makes the GPU wait
        torch.amax(others, 0, out=most)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(SAMPLES)]
    for begin, end in marks:
        torch.amax(others, 0, out=most)
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)
