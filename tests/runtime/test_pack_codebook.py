"""Bins find the code that counting edges finds, whatever the edges: the device's arithmetic in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import codebooks
from runtime import pack_codebook
from runtime.parts.dense import signpost_steps

INF = np.float32(np.inf)


def codes(table: np.ndarray, edges: np.ndarray, x: np.ndarray) -> np.ndarray:
    """As `Bins` of cuda/pack_codebook.cuh; a sum in float64 stands for the fused product."""
    factor, offset = table[:8].view(np.float32).astype(np.float64)
    last, most = table[8:16].view(np.int32)
    with np.errstate(invalid="ignore"):
        share = np.clip(np.nan_to_num(x * factor + offset, nan=0.0, posinf=1.0, neginf=0.0), 0, 1).astype(np.float32)
    places = table[16:][np.rint(share.astype(np.float64) * last).astype(int)].astype(int)
    ends = np.append(edges, INF)
    for _ in range(most):
        places += 4 * (x > ends[places // 4])
    return places // 4


def check(edges: np.ndarray) -> int:
    """Numbers on and beside every edge and bin, and far from all; returns most edges of a bin."""
    edges = np.sort(edges).astype(np.float32)
    table = pack_codebook.table(torch.from_numpy(edges)).numpy()
    assert table.shape == (pack_codebook.BYTES,)
    spread = np.linspace(edges[0], edges[-1], 2047, dtype=np.float32)
    x = np.concatenate([edges, spread, [0, 1, -1, 1e30, -1e30, INF, -INF]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, INF), np.nextafter(x, -INF)])
    wanted = torch.bucketize(torch.from_numpy(x), torch.from_numpy(edges)).numpy()
    np.testing.assert_array_equal(codes(table, edges, x), wanted)
    assert codes(table, edges, np.array([np.nan], np.float32))[0] < len(edges) + 1
    return int(table[12:16].view(np.int32)[0])


@pytest.mark.parametrize("bits", pack_codebook.WIDTHS)
@pytest.mark.parametrize("name", ["uniform", "normal_float", "lloyd"])
def test_plain_codebooks(name, bits):
    values = codebooks.lloyd_max(bits, 128) if name == "lloyd" else getattr(codebooks, name)(bits)
    assert check(0.5 * (values[1:] + values[:-1])) == 1


@pytest.mark.parametrize("bits", pack_codebook.WIDTHS)
@given(data=st.data())
def test_different_signposts_have_an_edge_a_bin(bits, data):
    steps, n = signpost_steps(bits), 1 << bits
    whole = data.draw(st.lists(st.integers(-steps, steps), min_size=n, max_size=n, unique=True).map(sorted))
    values = np.array(whole, np.float32) / np.float32(steps)
    assert check(np.float32(0.5) * (values[1:] + values[:-1])) == 1


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=7, max_size=7))
def test_any_edges(edges):
    check(np.array(edges))


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_a_tree_finds_the_codes(bits):
    edges = torch.linspace(-1, 1, (1 << bits) - 1)
    nodes = pack_codebook.tree(edges)
    x = torch.cat([edges, torch.nextafter(edges, torch.tensor(INF)), torch.tensor([-2.0, 2.0])])
    at = torch.ones_like(x, dtype=torch.int64)
    for _ in range(bits):
        at = 2 * at + (x > nodes[at])
    torch.testing.assert_close(at - (1 << bits), torch.bucketize(x, edges))


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_codebook_as_shared_memory_has_it(bits):
    values = torch.linspace(-1, 1, 1 << bits)
    edges = 0.5 * (values[1:] + values[:-1])
    found = pack_codebook.codebook(values, edges)
    room = -(-4 * len(values) // 16) * 16
    assert len(found) == 2 * room + (pack_codebook.BYTES if bits in pack_codebook.WIDTHS else 0)
    nodes, numbers = (found[i * room :][: 4 * len(values)].view(torch.float32) for i in range(2))
    assert torch.equal(numbers, values)
    binned = bits in pack_codebook.WIDTHS
    assert torch.equal(nodes, torch.cat([edges, torch.tensor([INF])]) if binned else pack_codebook.tree(edges))
