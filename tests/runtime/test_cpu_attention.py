"""The CPU's page kernels: the same numbers as the torch codec bit for bit, and attention against float64."""

import copy

import numba
import numpy as np
import pytest
import torch

from artifacts import Dense, Format, PageGeometry
from artifacts.codes import BITS
from runtime import cache, cpu
from runtime.codec import Codec, PagePool
from runtime.cpu import PageReader
from runtime.rope import Rotation
from tests.attending import expected, filled, step
from tests.formats import CASES, DENSE_SIDES, Case, cache_numbers, kivi, kvquant, plain, random_tensors

all_cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def written_pool(codec, p=3):
    """A pool of poison with p random pages in it, what they decode to, and their ids."""
    shape = codec.geometry.shape
    fields, numbers = codec.encode(torch.from_numpy(cache_numbers((p, shape.t, shape.h_kv, shape.d), 1)))
    pool, ids = PagePool(codec.geometry, p + 2), torch.randperm(p + 2, generator=torch.Generator().manual_seed(0))[:p]
    pool.heads.fill_(0xFF)
    pool.records.fill_(0xFF)
    pool.write(ids, fields)
    for page in ids if codec.geometry.format.sparse else []:
        used = int(pool.field("start")[page, -1])
        pool.field("index")[page, used:] = 255
        pool.field("correction")[page, used:] = torch.nan
    return pool, numbers.flatten(0, 1).transpose(0, 1).contiguous(), ids.int()  # numbers [h_kv, p * t, d]


@pytest.mark.parametrize("name, fmt, h_kv, d, side", DENSE_SIDES, ids=[side[0] for side in DENSE_SIDES])
def test_kernels_see_the_codecs_numbers(name, fmt, h_kv, d, side):
    """Queries and weights of one 1 and zeros else pick single numbers, which no arithmetic rounds."""
    fmt = plain(fmt)
    codec = Codec(PageGeometry.of(fmt, h_kv, d, side), random_tensors(fmt, h_kv, d, 0))
    pool, numbers, ids = written_pool(codec)
    reader = PageReader.of(pool, codec.tables)
    units = torch.eye(d).expand(h_kv, d, d)
    assert torch.equal(reader.scores(units, ids, None, 0), numbers.transpose(1, 2))
    picked = torch.eye(3 * fmt.t)[:: fmt.t // 4].expand(h_kv, -1, -1)
    assert torch.equal(reader.weighted_sum(picked, ids), numbers[:, :: fmt.t // 4])


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", [32, 96])
def test_heads_whose_lanes_share_words(d, bits, side):
    test_kernels_see_the_codecs_numbers("", Format(48, Dense(bits, "channel", 16)), 2, d, side)
    test_kernels_see_the_codecs_numbers("", Format(48, Dense(bits, "token", 32)), 2, d, side)


PRE_ROPE = [case for case in CASES if case.key.domain == "pre_rope"]


@pytest.mark.parametrize("case", PRE_ROPE, ids=[case.name for case in PRE_ROPE])
def test_kernels_rotate_as_the_codec_path(case):
    fmt, position = plain(case.key), 3
    codec = Codec(PageGeometry.of(fmt, case.h_kv, case.d, "key"), random_tensors(fmt, case.h_kv, case.d, 0))
    pool, numbers, ids = written_pool(codec)
    rotation = Rotation(case.rope, case.bundle().tensors["rope.inv_freq"])
    units = torch.eye(case.d).expand(case.h_kv, -1, -1)
    expected = rotation.rotate(numbers, torch.arange(position, position + 3 * fmt.t))
    scores = PageReader.of(pool, codec.tables).scores(units, ids, rotation, position)
    assert torch.equal(scores, expected.transpose(1, 2))


@all_cases
def test_both_paths_against_float64(case, monkeypatch):
    """The page kernels and decoding to dense, over sequences of different lengths in one batch."""
    t, sinks = case.key.t, case.key.window.sinks
    lengths = [1, t - 1, t, t + 1, t + sinks, 3 * t + 7]
    kv = filled(case, lengths)
    for m in (1, cache.FUSED_QUERIES):
        q, k, v, positions = step(case, lengths, m, 20)
        outs = []
        for fused in (cache.FUSED_QUERIES, 0):
            monkeypatch.setattr(cache, "FUSED_QUERIES", fused)
            outs.append(copy.deepcopy(kv).layers[0].attend(q, k, v, positions, None, case.d**-0.5).double())
        monkeypatch.undo()
        for i in range(len(lengths)):
            exact, bound = expected(case, kv, i, q[i], k[i], v[i])
            for out in outs:
                error = np.abs(out[i].transpose(0, 1).numpy() - exact)
                assert (error <= bound).all(), f"length {lengths[i]}, m={m}: {(error / bound).max():.2f} of the bound"


def test_more_queries_than_the_kernels_take(monkeypatch):
    case = CASES[0]
    kv, m = filled(case, [70]), cache.FUSED_QUERIES + 1
    q, k, v, positions = step(case, [70], m, 20)
    exact, bound = expected(case, kv, 0, q[0], k[0], v[0])
    monkeypatch.setattr(cpu.PageReader, "scores", None)
    out = kv.layers[0].attend(q, k, v, positions, None, case.d**-0.5)[0].transpose(0, 1).double().numpy()
    assert (np.abs(out - exact) <= bound).all()


def of_recipe(layer, h_q=4, h_kv=2, d=64):
    return Case("recipe", layer.key, layer.value, h_q, h_kv, d, CASES[0].rope)


@pytest.mark.parametrize("layer", [kvquant(3, t=32), kivi(2, t=32)], ids=["kvquant", "kivi"])
def test_results_do_not_depend_on_the_number_of_threads(layer):
    """Nor does a long sequence (more pages than one task adds up) differ from float64 by more than the bound."""
    case = of_recipe(layer)
    n = 32 * (2 * cpu._SPLIT + 3) + 5
    kv, most = filled(case, [n]), numba.config.NUMBA_NUM_THREADS
    q, k, v, positions = step(case, [n], 1, 20)
    exact, bound = expected(case, kv, 0, q[0], k[0], v[0])
    outs = []
    try:
        for threads in range(1, most + 1):
            cpu.set_threads(threads)
            outs.append(copy.deepcopy(kv).layers[0].attend(q, k, v, positions, None, case.d**-0.5))
    finally:
        cpu.set_threads(1)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert (np.abs(outs[0][0].transpose(0, 1).double().numpy() - exact) <= bound).all()


def test_thread_counts_that_are_not_there():
    with pytest.raises(ValueError, match="number of threads must be between 1 and"):
        cpu.set_threads(0)


def test_kernels_are_compiled_once():
    """Every format comes with the same types and memory layouts, so that nobody waits for the compiler twice."""
    for case in (CASES[0], CASES[5], of_recipe(kvquant(3, t=32), 1, 1, 64), of_recipe(kivi(4, t=32, recent=0))):
        kv = filled(case, [case.key.t * 4])
        kv.layers[0].attend(*step(case, kv.lengths, 1, 20), None, 1.0)
    for kernel in (cpu._scores, cpu._weighted_sum, cpu._decode):
        assert len(kernel.signatures) <= 1
    assert len(cpu._scores.signatures) == len(cpu._weighted_sum.signatures) == 1
