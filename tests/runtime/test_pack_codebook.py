"""Bins find the code that counting edges finds, whatever the edges: the device's arithmetic in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import codebooks
from runtime import pack_codebook
from runtime.parts.dense import signpost_steps
from tests.oracles.bins import check_bins

INF = np.float32(np.inf)


def check(edges: np.ndarray) -> int:
    """Numbers on and beside every edge and bin, and far from all; returns most edges of a bin."""
    edges = np.sort(edges).astype(np.float32)
    table = pack_codebook.table(torch.from_numpy(edges)).numpy()
    assert table.shape == (pack_codebook.BYTES,)
    return check_bins(table, edges)


@pytest.mark.parametrize("bits", pack_codebook.WIDTHS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["uniform", "normal_float", "lloyd"])
def test_plain_codebooks(name, d, bits):
    """Kernels are compiled for one edge a bin (`pack_units.edges_in_bins`)."""
    values = codebooks.lloyd_max(bits, d) if name == "lloyd" else getattr(codebooks, name)(bits)
    assert check(0.5 * (values[1:] + values[:-1])) == 1


@pytest.mark.parametrize("bits", pack_codebook.WIDTHS)
@given(data=st.data())
def test_evenly_spaced_codebooks(bits, data):
    """Likewise."""
    count = 1 << bits
    step = data.draw(st.integers(1, 4094 // (count - 1)))
    start = data.draw(st.integers(-2047, 2047 - step * (count - 1)))
    values = (np.float32(start) + np.arange(count, dtype=np.float32) * np.float32(step)) / np.float32(2047)
    assert check(np.float32(0.5) * (values[1:] + values[:-1])) == 1


EDGES = st.lists(st.floats(-1, 1, width=32), min_size=7, max_size=7)


@given(st.lists(EDGES, min_size=1, max_size=3), st.sampled_from([128, 256]))
def test_bins_of_many_codebooks_at_once(many, room):
    edges = np.sort(np.array(many, np.float32), axis=1)
    found = pack_codebook.binned(torch.from_numpy(edges), room).numpy()
    assert found.shape == (len(many), 16 + room)
    for table, each in zip(found, edges, strict=True):
        check_bins(table, each)


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
