"""Loading and launching on a GPU."""

import ctypes
import threading

import pytest
import torch

from runtime import jit
from runtime.jit import KernelError, Unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = Unit(
    "launches",
    """
struct Params { long long* out; const int* length; short a; double b; char tail; };
// out: i64 [blocks, 4], nullable: no. Every block writes what it was given; the block size last.
extern "C" __global__ void tell(const __grid_constant__ Params p) {
    long long* row = p.out + 4 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    if (threadIdx.x == 0) { row[0] = p.a; row[1] = p.b; row[2] = p.tail + p.length[0]; row[3] = blockDim.x; }
}
// Through as much dynamic shared memory as it gets.
extern "C" __global__ void turn(const __grid_constant__ Params p) {
    extern __shared__ int s[];
    for (int i = threadIdx.x; i < p.length[0]; i += blockDim.x) s[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) p.out[0] = s[p.length[0] - 1];
}
// Adds one after its predecessor is done, although it may start before.
extern "C" __global__ void add(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (threadIdx.x == 0 && blockIdx.x == 0) p.out[0] += 1;
}
""",
    ("tell", "turn", "add"),
)


class Params(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("a", ctypes.c_short),
        ("b", ctypes.c_double),
        ("tail", ctypes.c_char),
    )


class Call:
    """Tensors on a device, and the parameters that point to them."""

    def __init__(self, device: str = "cuda:0", rows: int = 24, length: int = 0) -> None:
        self.out = torch.full((rows, 4), -1, dtype=torch.int64, device=device)
        self.length = torch.full((1,), length, dtype=torch.int32, device=device)
        self.params = Params(self.out.data_ptr(), self.length.data_ptr(), -3, 2.0**40, b"\x05")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path))


def kernel(entry, device="cuda:0"):
    return jit.load(UNIT, device).kernel(entry)


def test_the_compiler_reports_each_time(tmp_path, monkeypatch):
    """Where there is a driver NVRTC can keep cubins of its own; those it finds there come without a report."""
    for folder in ("one", "two"):
        monkeypatch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path / folder))
        assert [used.spill_bytes for used in jit.report(UNIT, "sm_90a").values()] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["structure", "bytearray"])
def test_every_block_sees_the_struct(kind):
    call = Call(length=100)
    params = call.params if kind == "structure" else bytearray(bytes(call.params))
    kernel("tell").launch((2, 3, 4), 96, 0, params, jit.current_stream("cuda:0"))
    assert call.out.tolist() == [[-3, 2**40, 105, 96]] * 24


def test_the_struct_is_read_before_launch_returns():
    tell, calls = kernel("tell"), [Call(length=i) for i in range(8)]
    params = Params()
    torch.cuda._sleep(10_000_000)
    for i, call in enumerate(calls):
        params.out, params.length, params.a = call.out.data_ptr(), call.length.data_ptr(), i
        tell.launch((1, 1, 1), 32, 0, params, jit.current_stream(0))
    assert [call.out[0, 0].item() for call in calls] == list(range(8))


def test_streams_are_torchs():
    call = Call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes what the kernel reads
    assert jit.current_stream("cuda") == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side):
        assert jit.current_stream(0) == side.cuda_stream != 0
        kernel("tell").launch((1, 1, 1), 32, 0, call.params, jit.current_stream(0))
    side.synchronize()
    assert call.out[0, 0].item() == -3


def test_a_graph_replays_with_what_lies_on_the_device():
    call, tell, add = Call(length=1), kernel("tell"), kernel("add")
    other = Call(rows=1)
    other.out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tell.launch((24, 1, 1), 64, 0, call.params, jit.current_stream(0))
        for _ in range(3):
            add.launch((4, 1, 1), 32, 0, other.params, jit.current_stream(0), overlap=True)
    call.params.a = 99  # of no consequence: the graph has its own copy
    for length in (7, 50):
        call.length.fill_(length)
        graph.replay()
        assert call.out.tolist() == [[-3, 2**40, 5 + length, 64]] * 24
    assert other.out[0, 0].item() == 6


def test_overlapping_launches_keep_their_order():
    call, add = Call(rows=1), kernel("add")
    call.out.zero_()
    for _ in range(100):
        add.launch((200, 1, 1), 64, 0, call.params, jit.current_stream(0), overlap=True)
    assert call.out[0, 0].item() == 100


def test_all_shared_memory_can_be_asked_for():
    turn = kernel("turn")
    assert turn.max_shared >= 99 * 1024
    call = Call(length=turn.max_shared // 4)
    turn.launch((1, 1, 1), 128, turn.max_shared, call.params, jit.current_stream(0))
    assert call.out[0, 0].item() == turn.max_shared // 4 - 1
    with pytest.raises(
        KernelError, match=rf"kernel 'turn' does not launch: CUDA_ERROR_INVALID_VALUE.* of {turn.max_shared}"
    ):
        turn.launch((1, 1, 1), 128, turn.max_shared + 1, call.params, jit.current_stream(0))


def test_a_block_too_large_is_refused_and_the_next_launch_works():
    call, tell = Call(), kernel("tell")
    with pytest.raises(KernelError, match=r"does not launch: CUDA_ERROR_INVALID_VALUE.*2048 threads"):
        tell.launch((1, 1, 1), 2048, 0, call.params, jit.current_stream(0))
    tell.launch((1, 1, 1), 1024, 0, call.params, jit.current_stream(0))
    assert call.out[0, 3].item() == 1024


def test_a_struct_of_another_size_is_refused():
    with pytest.raises(KernelError, match=f"takes a struct of {ctypes.sizeof(Params)} bytes, not 8"):
        kernel("tell").launch((1, 1, 1), 32, 0, bytearray(8), 0)


@pytest.mark.parametrize("arguments", ["", "int a, int b"])
def test_a_kernel_takes_one_argument(arguments):
    unit = Unit("several", f'extern "C" __global__ void k({arguments}) {{}}', ("k",))
    with pytest.raises(KernelError, match="'k' of unit 'several': it must take one argument"):
        jit.load(unit, "cuda")


def test_what_is_no_cubin_is_refused(monkeypatch):
    monkeypatch.setattr(jit, "compile_unit", lambda unit, arch: b"\x7fELF" + bytes(1000))
    with pytest.raises(
        KernelError, match=r"unit 'bad' not loaded: cuModuleLoadData says CUDA_ERROR_.* if older, update"
    ):
        jit.load(Unit("bad", "", ()), "cuda")


def test_new_threads_load_and_launch():
    # A thread that has done nothing yet has no CUDA context.
    calls, modules = [Call(length=i) for i in range(8)], []
    torch.cuda.synchronize()
    unit = Unit("threads", UNIT.source, UNIT.entries)

    def work(call):
        module = jit.load(unit, 0)
        modules.append(module)
        for _ in range(50):
            module.kernel("tell").launch((24, 1, 1), 32, 0, call.params, 0)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(modules) == 8
    assert len(set(map(id, modules))) == 1
    assert [call.out[23, 2].item() for call in calls] == [5 + i for i in range(8)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_launch_on_a_device_that_is_not_current():
    calls = [Call(f"cuda:{i}", length=i) for i in range(2)]
    for current in range(2):
        with torch.cuda.device(current):
            for i, call in enumerate(calls):
                call.out.fill_(-1)
                kernel("tell", f"cuda:{i}").launch((24, 1, 1), 32, 0, call.params, jit.current_stream(i))
                assert torch.cuda.current_device() == current
                assert call.out.tolist() == [[-3, 2**40, 5 + i, 32]] * 24
