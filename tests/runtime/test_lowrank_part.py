"""`lowrank`: factors near the optimum, segments of prompts and of decoded pages, and what a cache with them costs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import Dense, Format, LayerFormat, LowRank, PageGeometry, Sparse, Window
from artifacts.geometry import SEGMENT_PAGES
from runtime import KVCache
from runtime.codec import Codec, PagePool, join_fields
from runtime.parts.lowrank import factorize
from tests.formats import cache_numbers, random_bundle

H_Q, H_KV, D, T = 4, 2, 64, 32
WINDOW = Window(sinks=1, recent=5)
GEAR = LayerFormat(
    Format(T, Dense(2, "channel", 32), Sparse(0.02, "channel", "online"), WINDOW, lowrank=LowRank(4, 2)),
    Format(T, Dense(2, "token", 32), Sparse(0.02, "token", "online"), WINDOW, lowrank=LowRank(3, 1)),
)
BARE = LayerFormat(Format(T, Dense(2, "channel", 32), None, WINDOW), Format(T, Dense(2, "token", 32), None, WINDOW))
BUNDLE = random_bundle([GEAR, BARE], H_Q, H_KV, D)


def pages(count, seed=0):
    return torch.from_numpy(cache_numbers((count, T, H_KV, D), seed))


def codec(fmt=GEAR.key):
    return Codec(PageGeometry.of(fmt, H_KV, D, "key"), {})


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 200), st.sampled_from([16, 64, 128]), st.integers(1, 8), st.floats(0.0, 1.5), st.integers(0, 99))
def test_factors_lose_at_most_two_percent_more_than_the_svd(n, d, rank, decay, seed):
    """Matrices with spectra from flat (decay 0, the hardest) to steep; the oracle is numpy's SVD in float64."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(size, min(n, d))))[0] for size in (n, d))
    matrix = (u * np.arange(1.0, min(n, d) + 1) ** -decay) @ v.T
    left, right = factorize(torch.from_numpy(matrix), rank)
    error = np.linalg.norm(matrix - (left @ right.T).numpy())
    least = np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[rank:])
    assert error <= 1.02 * least + 1e-9 * np.linalg.norm(matrix)


def test_what_is_not_there_gives_zero_and_no_nan():
    left, right = factorize(torch.zeros(3, 20, 16), 4)
    assert not (left @ right.transpose(1, 2)).any()
    one = torch.randn(20, 1) @ torch.randn(1, 16)  # rank 1, asked for rank 3
    left, right = factorize(one, 3)
    assert torch.isfinite(left).all()
    assert torch.allclose(left @ right.T, one, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rank", [2, 4, 8])
@pytest.mark.parametrize("values", [[3, 2, 1], [1e4, 9e3] + [1] * 30, [0.1**k for k in range(30)]], ids=len)
def test_few_channels_that_are_all_there_is(values, rank, seed):
    """In float32 nothing is left of a dependent column but rounding, which lies in the same few channels."""
    rng, k = np.random.default_rng(seed), len(values)
    matrix = np.zeros((64, 64))
    matrix[:, rng.permutation(64)[:k]] = np.linalg.qr(rng.normal(size=(64, k)))[0] * values
    left, right = factorize(torch.from_numpy(matrix).float(), rank)
    error = np.linalg.norm(matrix - (left @ right.T).double().numpy())
    least = np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[rank:])
    assert error <= 1.02 * least + 2**-11 * np.linalg.norm(matrix)  # a product's rounding is that of squares: 2 ** -12


@pytest.mark.parametrize("fmt", [GEAR.key, GEAR.value], ids=["key", "value"])
@pytest.mark.parametrize("segment", [1, 2, 5, 8])
def test_decoding_gives_what_encoding_returned(fmt, segment):
    fields, approximation = codec(fmt).encode(pages(5), segment)
    assert fields["right"].shape[0] == -(-5 // segment)
    assert torch.equal(codec(fmt).decode(fields), approximation)


def test_factors_help_and_more_rank_helps_more():
    x = pages(6)
    bare = (x - codec(BARE.key).encode(x)[1]).square().sum()
    low, high = (
        (x - codec(Format(T, Dense(2, "channel", 32), lowrank=LowRank(r, r))).encode(x)[1]).square().sum()
        for r in (1, 6)
    )
    assert high < low < bare


def test_one_page_alone_has_the_block_rank():
    fields, _ = codec().encode(pages(3))
    assert not fields["right"][..., 2:].any()
    assert fields["right"][..., :2].any()
    assert codec().encode(pages(3), 3)[0]["right"][..., 2:].any()


def test_groups_join_to_the_same_numbers_as_the_pool_gives_back():
    """Every page finds the factors of its own segment, also through a pool whose segments lie elsewhere."""
    groups = [codec().encode(pages(count, seed), count) for seed, count in enumerate((3, 1, 2))]
    fields = join_fields([group[0] for group in groups])
    assert fields["segment"][:, 0].tolist() == [0, 0, 0, 1, 2, 2]
    pool = PagePool(codec().geometry, 9, segments=5)
    for store in (pool.heads, pool.records, pool.segments):
        store.fill_(0xFF)  # NaN wherever nothing is written
    ids = torch.tensor([8, 0, 5, 2, 7, 1])
    pool.write(ids, fields, torch.tensor([4, 0, 2]))
    expected = torch.cat([approximation for _, approximation in groups])
    assert torch.equal(codec().decode(pool.read(ids)), expected)


def attend(kv, n, seed):
    """n tokens through all layers."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, n, D, generator=g) for h in (H_Q, H_KV, H_KV))
    positions = torch.tensor(kv.lengths)[:, None] + torch.arange(n)
    return [layer.attend(q, k, v, positions, None, D**-0.5) for layer in kv], (q, k, v)


@pytest.mark.parametrize("prompt", [1, 37, 38, 69, 200])
def test_both_paths_agree_behind_a_prompt_and_behind_decoded_pages(prompt):
    kv = KVCache(BUNDLE, 1)
    attend(kv, prompt, 0)
    for step in range(2 * T + 3):
        layer = copy_inputs = kv.layers[0]
        g = torch.Generator().manual_seed(step)
        q, k, v = (torch.randn(h, 1, D, generator=g) for h in (H_Q, H_KV, H_KV))
        if step % 16 == 0 and layer.lengths[0]:
            dense = copy_inputs._attend_dense(0, q, k, v, D**-0.5)
            fused = copy_inputs._attend_one(0, q, k, v, D**-0.5)
            # Two float32 orders of at most n d terms below |x| = 20: far under 1e-4 of their size.
            assert torch.allclose(dense, fused, atol=1e-4 * float(dense.abs().max()))
        attend(kv, 1, 1000 + step)


@pytest.mark.parametrize("n, prompt", [(500, 0), (500, 300), (500, 500), (70 * T, 68 * T), (5, 0)])
def test_bytes_are_the_geometrys(n, prompt):
    """Reserved for a prompt and for decoded tokens, and filled that way, a cache never allocates anything more."""
    kv = KVCache(BUNDLE, 1, max_tokens=n, prompt=prompt)
    expected = BUNDLE.geometry.cache_bytes(n, 4, prompt)
    assert kv.nbytes == expected
    if prompt:
        attend(kv, prompt, 0)
    for _ in range(min(3 * T, n - prompt)):
        attend(kv, 1, 1)
    assert kv.nbytes == expected
    segments = kv.layers[0].key.geometry.segments(70, 68)
    assert segments == -(-68 // SEGMENT_PAGES) + 2


def test_dropped_sequences_give_their_segments_back():
    kv = KVCache(BUNDLE, 2)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 100, D, generator=g) for h in (H_Q, H_KV, H_KV))
    for layer in kv:
        layer.attend(q, k, v, torch.arange(100)[None], None, D**-0.5)
    side = kv.layers[0].key
    free = len(side.tables.book.free_segments)
    kv.select([1])
    assert len(kv.layers[0].key.tables.book.free_segments) == free + 1
    kept = kv.layers[0].key.dense(0)
    attend(kv, 64, 3)
    assert torch.equal(kv.layers[0].key.dense(0)[: kept.shape[0]], kept)
