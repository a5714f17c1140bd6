"""The unpack kernel on a GPU against the torch codec, and attention behind what it makes."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from runtime import KVCache  # noqa: E402
from runtime.joined import Bounds, attention_behind  # noqa: E402
from tests.formats import CASES, cache_numbers, kivi, kvquant  # noqa: E402
from tests.gpu.test_attention import with_formats  # noqa: E402
from tests.oracles.attention import attention  # noqa: E402
from tests.packing import check_unpacked  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FULL = [with_formats(kvquant(3), 32, 8), with_formats(kivi(2), 8, 8)]


@pytest.mark.parametrize("index", range(len(CASES) + len(FULL)))
def test_numbers_of_all_formats(index) -> None:
    """More pages than blocks take at once in the last ones; three sequences in turn, one all exact, one at a position
    whose angles are large."""
    case, dtype = (CASES + FULL)[index], DTYPES[index % 3]
    lengths = (40 * 64 + 13 if index < len(CASES) else 300 * 64 + 5, 3, 150)
    kv = KVCache(case.bundle(), 3, None, dtype, "cuda")
    (layer,) = kv.paged
    for i, n in enumerate(lengths):
        x = torch.from_numpy(cache_numbers((2, case.h_kv, n, case.d), i)).to("cuda", dtype)
        layer.append(i, x[0], x[1], 7 + 200_000 * i)
    for i, n in enumerate(lengths):
        got = torch.full((2, n + 5, case.h_kv, case.d), torch.nan, dtype=dtype, device="cuda")
        layer.unpack(kv.room.which(i, n, layer.offsets[i]), got[0], got[1])
        check_unpacked(layer, i, got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("h_q, h_kv, d", [(32, 8, 128), (4, 4, 64), (8, 1, 256)])
@pytest.mark.parametrize("b, m, count", [(1, 1, 1), (1, 40, 1000), (1, 161, 3), (3, 33, 777), (2, 500, 4096)])
def test_attention_behind_tokens_that_rows_share(b, m, count, h_q, h_kv, d, dtype) -> None:
    """Each row is what float64 says of the tokens before and its own; also captured, with another number of them."""
    torch.manual_seed(m)
    q = torch.randn(b, m, h_q, d, device="cuda", dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, b, m, h_kv, d, device="cuda", dtype=dtype).transpose(2, 3)
    keys, values = torch.randn(2, 5000, h_kv, d, device="cuda", dtype=dtype)
    there = torch.zeros(1, dtype=torch.int32, device="cuda")

    def attend() -> torch.Tensor:
        return attention_behind(q, k, v, keys, values, Bounds.of(there, b * m, h_q), d**-0.5)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    there.fill_(count)
    graph.replay()
    out = attend()
    assert torch.equal(out, captured)
    for row in range(b):
        both = [torch.cat([x[:count].transpose(0, 1), own[row]], 1) for x, own in ((keys, k), (values, v))]
        exact = attention(q[row].double().cpu().numpy(), *(x.double().cpu().numpy() for x in both), d**-0.5)
        plain = torch.nn.functional.scaled_dot_product_attention(
            q[row : row + 1], *(x[None] for x in both), scale=d**-0.5, enable_gqa=True,
            attn_mask=torch.ones(m, count + m, dtype=torch.bool, device="cuda").tril(count),
        )[0].transpose(0, 1)  # fmt: skip
        exact = torch.from_numpy(exact).to("cuda").transpose(0, 1)
        # As near as PyTorch's own in the mean, which rounds probabilities and results; twice what rounds results alone.
        assert (out[row] - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-6 * exact.norm()
