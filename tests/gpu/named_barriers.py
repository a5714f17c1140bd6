"""A kernel with two groups of warps that meet at barriers of their own, as `cuda/layout.cuh` has them, and then all.

compute-sanitizer --tool racecheck python -m tests.gpu.named_barriers

There is no race in it. What racecheck reports here, it may report of attention as well.
"""

import ctypes

import torch

from runtime import jit

SOURCE = """
struct Params { float* out; int turns; };
extern "C" __global__ void __launch_bounds__(256) groups(const __grid_constant__ Params params) {
    __shared__ float numbers[256];
    const int group = threadIdx.x / 128;
    for (int turn = 0; turn < params.turns + group; ++turn) {  // one group goes on after the other has left
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    }
    __syncthreads();
    numbers[threadIdx.x] = threadIdx.x;
    __syncthreads();
    params.out[threadIdx.x] = numbers[255 - threadIdx.x];
}
"""


class Params(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (("out", ctypes.c_void_p), ("turns", ctypes.c_int))


def main() -> None:
    """Launches it once for each number of turns."""
    device = torch.device("cuda", 0)
    kernel = jit.load(jit.Unit("groups", SOURCE, ("groups",)), device).kernel("groups")
    out = torch.zeros(256, device=device)
    for turns in range(4):
        kernel.launch((1, 1, 1), 256, 0, Params(out.data_ptr(), turns), jit.current_stream(0))
        assert out.tolist() == [255.0 - i for i in range(256)]


if __name__ == "__main__":
    main()
