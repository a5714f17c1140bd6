"""The CPU's page kernels: the same numbers as the torch codec bit for bit, and attention against float64."""

import copy

import numba
import numpy as np
import pytest
import torch

from artifacts import PageGeometry
from runtime import KVCache, cache, cpu
from runtime.codec import Codec, PagePool
from runtime.cpu import PageReader
from runtime.rope import Rotation
from tests.formats import CASES, SIDES, Case, bare, cache_numbers, kivi, kvquant, random_tensors
from tests.oracles.attention import U, attention, float32_bound
from tests.oracles.rope import rotate

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


@pytest.mark.parametrize("name, fmt, h_kv, d", SIDES, ids=[side[0] for side in SIDES])
def test_kernels_see_the_codecs_numbers(name, fmt, h_kv, d):
    """Queries and weights of one 1 and zeros else pick single numbers, which no arithmetic rounds."""
    fmt = bare(fmt)
    codec = Codec(PageGeometry.of(fmt, h_kv, d), random_tensors(fmt, h_kv, d, 0))
    pool, numbers, ids = written_pool(codec)
    reader = PageReader.of(pool, codec.tables)
    units = torch.eye(d).expand(h_kv, d, d)
    assert torch.equal(reader.scores(units, ids, None, 0), numbers.transpose(1, 2))
    picked = torch.eye(3 * fmt.t)[:: fmt.t // 4].expand(h_kv, -1, -1)
    assert torch.equal(reader.weighted_sum(picked, ids), numbers[:, :: fmt.t // 4])


PRE_ROPE = [case for case in CASES if case.key.domain == "pre_rope"]


@pytest.mark.parametrize("case", PRE_ROPE, ids=[case.name for case in PRE_ROPE])
def test_kernels_rotate_as_the_codec_path(case):
    fmt, position = case.key, 3
    codec = Codec(PageGeometry.of(fmt, case.h_kv, case.d), random_tensors(fmt, case.h_kv, case.d, 0))
    pool, numbers, ids = written_pool(codec)
    rotation = Rotation(case.rope, case.bundle().tensors["rope.inv_freq"])
    units = torch.eye(case.d).expand(case.h_kv, -1, -1)
    expected = rotation.rotate(numbers, torch.arange(position, position + 3 * fmt.t))
    scores = PageReader.of(pool, codec.tables).scores(units, ids, rotation, position)
    assert torch.equal(scores, expected.transpose(1, 2))


def step(case, lengths, m, seed):
    """Queries, keys and values of m tokens behind sequences of these lengths, as `LayerCache.attend` takes them."""
    b = len(lengths)
    q = torch.randn(b, case.h_q, m, case.d, generator=torch.Generator().manual_seed(seed)) * 2
    k, v = (torch.from_numpy(cache_numbers((b, m, case.h_kv, case.d), seed + i)).transpose(1, 2) for i in (1, 2))
    positions = start(b) + torch.tensor(lengths)[:, None] + torch.arange(m)
    return q, k, v, positions


def start(b):
    """Positions of the sequences' first tokens: not zero, as where padding was counted."""
    return 5 + 3 * torch.arange(b)[:, None]


def filled(case, lengths):
    """A cache whose sequences have these lengths, filled by one left-padded prompt."""
    kv, longest = KVCache(case.bundle(), len(lengths)), max(lengths)
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    q, k, v, _ = step(case, [0] * len(lengths), longest, 10)
    positions = start(len(lengths)) + valid.long().cumsum(-1) - 1
    kv.layers[0].attend(q, k, v, positions, valid, case.d**-0.5)
    assert kv.lengths == lengths
    return kv


def transform_error(side, numbers, n):
    """How far decoded numbers [tokens, h_kv, d] may be off because they are mean + y P^T, with y in pages.

    Once by (d + 2) U of the absolute terms where they are decoded, once more where the kernels transform the query or
    the output instead; and n U where n of them were added up before.
    """
    fmt, d = side.format, numbers.shape[-1]
    if fmt == bare(fmt):
        return np.zeros_like(numbers)
    mean, rotation = (
        side.codec.tables.get(name, default).double().numpy()
        for name, default in (("mean", torch.zeros(1)), ("rotation", torch.eye(d)))
    )
    terms = np.abs((numbers - mean) @ rotation) @ np.abs(rotation.T) + np.abs(mean)
    return (2 * (d + 2) + n) * U * terms


def expected(case, kv, i, q, k, v):
    """Attention in float64 over what sequence i holds and the new tokens, and how far float32 may be from it."""
    layer, n = kv.layers[0], kv.lengths[i]
    (sinks, newest), packed = layer.key.exact(i, n), layer.key.dense(i).double().numpy()
    uncertain = transform_error(layer.key, packed, 1)
    if case.key.domain == "pre_rope":
        first = int(start(i + 1)[i]) + case.key.window.sinks
        positions = np.arange(first, first + packed.shape[0])[:, None]
        for a, b in case.rope.pairs():  # test_rotation.py derives the 5
            pair = np.abs(packed[..., a]) + np.abs(packed[..., b])
            uncertain[..., a] = uncertain[..., b] = 5 * U * case.rope.scaling * pair
        inv_freq = kv.bundle.tensors["rope.inv_freq"]
        packed = rotate(packed, positions, inv_freq, case.rope.layout, case.rope.scaling)
    keys = np.concatenate([sinks, packed, newest, k.transpose(0, 1)]).transpose(1, 0, 2)
    key_error = np.concatenate([0 * sinks, uncertain, 0 * newest, 0 * k.transpose(0, 1)]).transpose(1, 0, 2)
    (sinks, newest), packed = layer.value.exact(i, n), layer.value.dense(i).double().numpy()
    uncertain = transform_error(layer.value, packed, n)
    values = np.concatenate([sinks, packed, newest, v.transpose(0, 1)]).transpose(1, 0, 2)
    value_error = np.concatenate([0 * sinks, uncertain, 0 * newest, 0 * v.transpose(0, 1)]).transpose(1, 0, 2)
    q = q.double().numpy()
    bound = float32_bound(q, keys, values, case.d**-0.5, key_error, value_error)
    return attention(q, keys, values, case.d**-0.5), bound


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
