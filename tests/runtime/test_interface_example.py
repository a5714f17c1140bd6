"""The example of docs/inference.md for engines of others, with torch in the kernels' place."""

import re
from pathlib import Path

import pytest
import torch

import runtime.attention
import runtime.pack
from artifacts import PageGeometry
from runtime import KVCache, PagePool
from tests import standins
from tests.formats import CASES, cache_numbers, kivi, kvquant, random_bundle

TEXT = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
(CODE,) = re.findall(r"<!-- tests/runtime/test_interface_example.py runs this -->\n```python\n(.*?)```", TEXT, re.S)
H_Q, H_KV, D = 4, 2, 64


@pytest.mark.parametrize("formats", [kvquant(3), kivi(2), kivi(4, recent=0, sinks=2)], ids=["kvquant", "kivi", "sinks"])
@pytest.mark.parametrize("n", [300, 255])
def test_the_example_attends_over_what_it_packed(formats, n, monkeypatch):
    """What a cache of ours would say; a page that the new token fills is packed to the same numbers."""
    monkeypatch.setattr(runtime.attention, "PagedAttention", standins.PagedAttention)
    monkeypatch.setattr(runtime.pack, "Packer", standins.Packer)
    x = torch.from_numpy(cache_numbers((2, 2, n + 1, H_KV, D), 0))
    q = torch.randn(2, H_Q, 1, D, generator=torch.Generator().manual_seed(0))
    given = {
        "bundle": random_bundle([formats], H_Q, H_KV, D), "keys": x[0, :, :n], "values": x[1, :, :n],
        "key": x[0, :, n, :, None], "value": x[1, :, n, :, None], "query": q,
    }  # fmt: skip
    code = CODE.replace('"cuda", torch.float16, 2, 300', f'"cpu", torch.float32, 2, {n}')
    assert code != CODE
    exec(compile(code, "docs/inference.md", "exec"), given)
    layer = KVCache(given["bundle"], 2).layers[0]
    keys, values = (side.transpose(1, 2) for side in x)
    prompt = torch.randn(2, H_Q, n, D)
    layer.attend(prompt, keys[:, :, :n], values[:, :, :n], torch.arange(n)[None], None, D**-0.5)
    expected = layer.attend(q, keys[:, :, n:], values[:, :, n:], torch.tensor([[n]]), None, D**-0.5)
    # float32 against float64, 301 terms below the largest.
    assert (given["out"].transpose(1, 2) - expected).abs().max() <= 1e-4 * expected.abs().max()
    for i, side in enumerate((layer.key, layer.value)):
        ids = given["sides"][i].table[:, : side.used[0]].long()
        for sequence in range(2):
            decoded = given["packers"][i].codec.decode(given["pools"][i].read(ids[sequence])).flatten(0, 1)
            assert torch.equal(decoded, side.dense(sequence))


def test_pools_in_memory_of_others():
    """Pages and segments stand side by side in it; bytes are what they are in a pool of its own."""
    case = next(case for case in CASES if case.key.lowrank and case.key.sparse)
    geometry = PageGeometry.of(case.key, case.h_kv, case.d, "key")
    entry = case.h_kv * geometry.segment_bytes
    memory = torch.arange(5 * geometry.page_bytes + 3 * entry + 17).to(torch.uint8)
    pool = PagePool.over(geometry, memory, 3)
    assert (pool.capacity, pool.segments.shape[0]) == (5, 3)
    assert pool.nbytes == 5 * geometry.page_bytes + 3 * entry
    stores = torch.cat([store.flatten() for store in (pool.heads, pool.records, pool.segments)])
    assert torch.equal(stores, memory[: pool.nbytes])
    pool.heads[4, 0, 0] = 77
    assert memory[4 * case.h_kv * geometry.head_bytes] == 77
    own = PagePool(geometry, 5, segments=3)
    for name in ("heads", "records", "segments"):
        getattr(own, name).copy_(getattr(pool, name))
    for name in geometry.fields:
        assert torch.equal(own.field(name).view(torch.uint8), pool.field(name).view(torch.uint8))


@pytest.mark.parametrize("memory, message", [
    (torch.zeros(1000, dtype=torch.int8), "contiguous uint8"),
    (torch.zeros(10, 1000, dtype=torch.uint8), r"not torch.uint8 \[10, 1000\]"),
    (torch.zeros(1000, dtype=torch.uint8)[::2], r"strides \(2,\)"),
    (torch.zeros(100000, dtype=torch.uint8)[1:], "at a multiple of 16"),
    (torch.zeros(1000, dtype=torch.uint8), r"1000 bytes hold no page: one takes \d+, and 0 segments 0"),
])  # fmt: skip
def test_memory_that_cannot_hold_pages(memory, message):
    geometry = PageGeometry.of(kvquant(3).key, 2, 128, "key")
    with pytest.raises(ValueError, match=message):
        PagePool.over(geometry, memory)
