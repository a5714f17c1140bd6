"""The cache: what it holds, what it costs, and that its tables can be edited under way."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import LayerFormat
from runtime import CacheFullError, KVCache
from runtime.side import write_ring
from tests.attending import expected, pool_bytes
from tests.attending import filled as filled_case
from tests.attending import step as case_step
from tests.formats import CASES, cache_numbers, kivi, kvquant, random_bundle

H_Q, H_KV, D = 4, 2, 32
SMALL = [kvquant(3, t=32, sinks=4), kivi(2, t=32, recent=5, sinks=4)]  # one layer of each
BUNDLE = random_bundle(SMALL, H_Q, H_KV, D)
all_cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def tokens(m, seed=0, b=1):
    """Queries, keys and values of m tokens."""
    q = torch.randn(b, H_Q, m, D, generator=torch.Generator().manual_seed(seed))
    k, v = (torch.from_numpy(cache_numbers((b, m, H_KV, D), seed + i)).transpose(1, 2) for i in (1, 2))
    return q, k, v


def attend(kv, q, k, v, positions=None, valid=None):
    """All layers on the same tokens, by default at the positions that come next: outputs [layers, b, m, h_q, d]."""
    if positions is None:
        positions = torch.tensor(kv.lengths)[:, None] + torch.arange(q.shape[2])
    return torch.stack([layer.attend(q, k, v, positions, valid, D**-0.5) for layer in kv])


def filled(lengths, seed=0, max_tokens=None, bundle=BUNDLE):
    """A cache with sequences of these lengths; each has its own tokens, whatever stands beside it."""
    kv, longest = KVCache(bundle, len(lengths), max_tokens), max(lengths)
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    parts = [tokens(n, seed + 10 * i) for i, n in enumerate(lengths)]
    padded = [
        torch.cat([torch.nn.functional.pad(x, (0, 0, longest - x.shape[2], 0)) for x in xs])
        for xs in zip(*parts, strict=True)
    ]
    attend(kv, *padded, valid.long().cumsum(-1) - 1, valid)
    return kv


def content(kv):
    """All that is held: per layer, side and sequence the sinks, the decoded pages and the newest tokens."""
    sides = [(layer, side) for layer in kv for side in (layer.key, layer.value)]
    return [
        (*side.exact(i, layer.lengths[i]), side.dense(i)) for layer, side in sides for i in range(len(layer.lengths))
    ]


def assert_same_content(one, other):
    for mine, theirs in zip(content(one), content(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@all_cases
@pytest.mark.parametrize("b", [1, 3])
def test_bytes_of_reserved_caches(case, b):
    bundle = case.bundle()
    for n, dtype in ((1, torch.float32), (case.key.t, torch.bfloat16), (3 * case.key.t + 70, torch.float16)):
        kv = KVCache(bundle, b, n, dtype)
        assert kv.nbytes == b * bundle.geometry.cache_bytes(n, dtype.itemsize)


def test_a_reserve_is_enough_and_is_all():
    kv = KVCache(BUNDLE, 2, max_tokens=150)
    before = kv.nbytes
    for m in (1, 40, 3, 100, 6):
        attend(kv, *tokens(m, b=2))
    assert (kv.lengths, kv.nbytes) == ([150, 150], before)
    assert kv.nbytes == 2 * BUNDLE.geometry.cache_bytes(150, 4)


def test_a_full_cache_stays_as_it_was():
    """Also where only one sequence is full, and where layers fill their pages at different lengths."""
    kv = filled([100, 61], max_tokens=103)
    before = copy.deepcopy(kv)
    valid = torch.tensor([[True] * 4, [False, False, True, True]])
    positions = torch.tensor([[100, 101, 102, 103], [0, 0, 61, 62]])
    message = r"sequence 0 holds 100 tokens and would get 4 more, but 103 were reserved: reserve more \(max_tokens=\)"
    with pytest.raises(CacheFullError, match=message):
        attend(kv, *tokens(4, b=2), positions, valid)
    assert kv.lengths == [100, 61]
    assert_same_content(kv, before)
    step = tokens(3, 5, b=2)
    assert torch.equal(attend(kv, *step), attend(before, *step))
    assert kv.lengths == [103, 64]


def test_growing_keeps_what_is_held():
    grown, reserved = KVCache(BUNDLE, 2), KVCache(BUNDLE, 2, max_tokens=800)
    for seed, m in enumerate((1, 30, 9, 300, 8, 1, 200)):
        step = tokens(m, seed, b=2)
        assert torch.equal(attend(grown, *step), attend(reserved, *step))
    assert_same_content(grown, reserved)
    assert grown.nbytes < 2 * reserved.nbytes


@settings(max_examples=25)
@given(st.lists(st.integers(1, 45), min_size=1, max_size=8))
def test_content_does_not_depend_on_the_steps(steps):
    """A number is quantized once, from what the model made: page by page or all at once is the same."""
    q, k, v = tokens(sum(steps))
    at_once, by_steps = KVCache(BUNDLE, 1), KVCache(BUNDLE, 1)
    attend(at_once, q, k, v)
    for part in zip(*(x.split(steps, 2) for x in (q, k, v)), strict=True):
        attend(by_steps, *part)
    assert_same_content(at_once, by_steps)
    for layer, formats in zip(at_once, SMALL, strict=True):
        for side, fmt in ((layer.key, formats.key), (layer.value, formats.value)):
            sinks, newest, packed = (x.shape[0] for x in (*side.exact(0, sum(steps)), side.dense(0)))
            assert sinks + packed + newest == sum(steps)
            assert sinks == min(4, sum(steps))
            assert newest < fmt.window.recent + fmt.t
            assert packed == 0 or newest >= fmt.window.recent


def test_packed_numbers_are_the_encoded_ones():
    """Pages hold what the codec makes of the tokens behind the sinks: keys before RoPE at their own positions."""
    kv, (_, k, v) = filled([100]), tokens(100)
    layer = kv.layers[0]
    pre_rope = kv.rotation.unrotate(k[0], torch.arange(100)).transpose(0, 1)
    for side, x in ((layer.key, pre_rope), (layer.value, v[0].transpose(0, 1))):
        assert torch.equal(side.dense(0), side.codec.encode(x[4:100].unflatten(0, (3, 32)))[1].flatten(0, 1))


@pytest.mark.parametrize("chosen", [[2, 0, 1], [1, 1, 1], [2], [0, 2, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("max_tokens", [None, 260])
def test_selected_sequences_go_on_as_fresh_ones(chosen, max_tokens):
    """Reordered, repeated and dropped: each continues as a cache of its own would, through new pages."""
    lengths = [100, 37, 71]
    kv = filled(lengths, max_tokens=max_tokens)
    kv.select(chosen)
    alone = [filled(lengths, max_tokens=max_tokens) for _ in chosen]
    for fresh, i in zip(alone, chosen, strict=True):
        fresh.select([i])
    assert kv.lengths == [lengths[i] for i in chosen]
    for seed, m in ((20, 1), (21, 80), (22, 8), (23, 70)):
        step = tokens(m, seed, b=len(chosen))
        out = attend(kv, *step)
        for row, fresh in enumerate(alone):
            assert torch.equal(out[:, row : row + 1], attend(fresh, *(x[row : row + 1] for x in step)))


@pytest.mark.parametrize("max_tokens", [None, 350])
def test_pages_that_nobody_owns_are_used_again(max_tokens):
    kv = filled([200, 200], max_tokens=max_tokens)
    sides = [side for layer in kv for side in (layer.key, layer.value)]
    before = [side.pool.capacity for side in sides]
    kv.select([1, 1])
    books = [side.tables.book for side in sides]
    # Shared pages count once.
    assert all(len(book.free) == book.capacity - side.used[0] for book, side in zip(books, sides, strict=True))
    kv.select([0])
    attend(kv, *tokens(150))
    assert [side.pool.capacity for side in sides] == before


def test_a_reserve_holds_for_a_larger_batch_too():
    kv = filled([100], max_tokens=200)
    kv.select([0, 0, 0])
    attend(kv, *tokens(100, b=3))
    assert kv.lengths == [200, 200, 200]
    assert kv.nbytes == 3 * BUNDLE.geometry.cache_bytes(200, 4)


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_a_copy_lives_its_own_life(max_tokens):
    """The cache and its copy go on as caches that were never copied; pages are added in place and by growing."""
    kv, alone, alone_too = (filled([100], max_tokens=max_tokens) for _ in range(3))
    for cache in (kv, alone, alone_too):
        attend(cache, *tokens(1, 30))
    twin = copy.deepcopy(kv)
    for seed, m in ((40, 90), (41, 1), (42, 40), (43, 1)):
        assert torch.equal(attend(twin, *tokens(m, seed)), attend(alone, *tokens(m, seed)))
        assert torch.equal(attend(kv, *tokens(m, seed + 10)), attend(alone_too, *tokens(m, seed + 10)))


def test_padding_is_neither_seen_nor_kept():
    """Whatever stands in padded places, NaN too; their rows of the output are zero."""
    kv, clean = KVCache(BUNDLE, 2), filled([50, 80])
    parts = [tokens(50), tokens(80, 10)]
    padded = [torch.full((2, x.shape[1], 80, D), torch.nan) for x in parts[0]]
    for i, part in enumerate(parts):
        for x, y in zip(padded, part, strict=True):
            x[i, :, 80 - y.shape[2] :] = y[0]
    valid = torch.arange(80) >= torch.tensor([[30], [0]])
    out = attend(kv, *padded, valid.long().cumsum(-1) - 1, valid)
    assert (out[:, 0, :30] == 0).all()
    assert out.isfinite().all()
    assert_same_content(kv, clean)


def test_positions_may_start_anywhere():
    """As they do for a left-padded prompt whose positions count the padding."""
    kv, q, k, v = KVCache(BUNDLE, 1), *tokens(80)
    attend(kv, q, k, v, torch.arange(7, 87)[None])
    attend(kv, *tokens(1), torch.tensor([[87]]))
    assert kv.lengths == [81]
    pre_rope = kv.rotation.unrotate(k[0], torch.arange(7, 87)).transpose(0, 1)
    key = kv.layers[0].key
    assert torch.equal(key.dense(0), key.codec.encode(pre_rope[4:68].unflatten(0, (2, 32)))[1].flatten(0, 1))


@pytest.mark.parametrize("positions", [[61], [59], [0], [60, 62], [60, 60]])
def test_positions_that_do_not_continue(positions):
    kv = filled([60, 60])
    before = copy.deepcopy(kv)
    good = [60 + i for i in range(len(positions))]
    message = rf"sequence 1: positions \[{positions[0]}.*\]... do not continue at 60: tokens of a sequence must follow"
    with pytest.raises(ValueError, match=message):
        attend(kv, *tokens(len(positions), b=2), torch.tensor([good, positions]))
    assert kv.lengths == [60, 60]
    assert_same_content(kv, before)


def test_positions_with_gaps_in_a_prompt():
    with pytest.raises(ValueError, match=r"sequence 0: positions \[0, 1, 3\]... do not continue at 0"):
        attend(KVCache(BUNDLE, 1), *tokens(3), torch.tensor([[0, 1, 3]]))


@pytest.mark.parametrize("bad", ["key", "value"])
def test_a_token_that_cannot_be_encoded_is_on_neither_side(bad):
    kv = filled([98])
    before = copy.deepcopy(kv)
    q, k, v = tokens(10, 5)
    (k if bad == "key" else v)[0, 1, 1, 3] = torch.inf
    with pytest.raises(ValueError, match="keys or values hold NaN or infinity"):
        kv.layers[0].attend(q, k, v, torch.arange(98, 108)[None], None, 1.0)
    assert_same_content(kv, before)
    assert torch.equal(attend(kv, *tokens(40)), attend(before, *tokens(40)))


def test_bits_count_everything():
    kv = KVCache(BUNDLE, 1, max_tokens=200, dtype=torch.bfloat16)
    assert math.isnan(kv.bits)
    attend(kv, *(x.bfloat16() for x in tokens(200)))
    assert kv.bits == BUNDLE.geometry.bits(200, 2)
    both = KVCache(BUNDLE, 2, max_tokens=200, dtype=torch.bfloat16)
    attend(both, *(x.bfloat16() for x in tokens(200, b=2)))
    assert kv.bits > both.bits > kv.bits / 2  # the bundle's tensors are shared


def test_keys_and_values_may_be_packed_up_to_different_tokens():
    layer = LayerFormat(kvquant(3, t=64).key, kivi(2, t=32, recent=40, sinks=1).value)
    kv = filled([150], bundle=random_bundle([layer], H_Q, H_KV, D))
    assert (kv.layers[0].key.used, kv.layers[0].value.used) == ([2], [3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_given_back(dtype):
    kv = KVCache(BUNDLE, 1, dtype=dtype)
    q, k, v = (x.to(dtype) for x in tokens(80))
    assert attend(kv, q, k, v).dtype == dtype
    assert attend(kv, *(x.to(dtype) for x in tokens(1))).dtype == dtype
    sinks, newest = kv.layers[1].value.exact(0, 81)
    assert torch.equal(sinks, v[0].transpose(0, 1)[:4])
    assert newest.dtype == dtype
    assert np.isfinite(kv.bits)


@pytest.mark.parametrize("b, max_tokens", [(0, None), (1, 0), (-1, 5), (1.5, None), (1, 1.5), (True, 5), (1, "64")])
def test_sizes_that_make_no_sense(b, max_tokens):
    with pytest.raises(ValueError, match=rf"b={b}, max_tokens={max_tokens}: both must be at least 1"):
        KVCache(BUNDLE, b, max_tokens)


@pytest.mark.parametrize("budget", ["1GB", 700_000.5])
def test_budgets_that_are_no_bytes(budget):
    with pytest.raises(ValueError, match=rf"budget={budget!r}: must be a whole number of bytes"):
        KVCache(BUNDLE, 1, 400, budget=budget)


@pytest.mark.parametrize("dtype", [torch.int8, "float16", None])
def test_types_that_no_model_has(dtype):
    with pytest.raises(ValueError, match=rf"dtype={dtype!r}: must be a model's, torch\.float16, torch\.bfloat16 or"):
        KVCache(BUNDLE, 1, dtype=dtype)


def room_for(tokens, b=3, most=400):
    """A cache with room for so many tokens of one sequence and no more, whatever the sequences are."""
    budget = pool_bytes(BUNDLE, tokens, b, most)
    kv = KVCache(BUNDLE, b, most, budget=budget)
    assert kv.nbytes <= budget < b * BUNDLE.geometry.cache_bytes(most, 4)
    return kv


def alone(seed, *sizes):
    """A cache of one sequence to which so many tokens came, one pass each."""
    kv = KVCache(BUNDLE, 1)
    for i, m in enumerate(sizes):
        attend(kv, *tokens(m, seed + i))
    return kv


def pass_of(kv, sequence, seed, m):
    """m tokens for one sequence of a larger cache, through all layers."""
    q, k, v = tokens(m, seed)
    positions = torch.tensor([kv.lengths[sequence]])[:, None] + torch.arange(m)
    return torch.stack([layer.attend(q, k, v, positions, None, D**-0.5, [sequence]) for layer in kv])


def assert_continues_as(kv, sequence, other):
    """The next tokens of a sequence see what those of another cache's only sequence see."""
    for seed, m in ((70, 1), (71, 40)):
        assert torch.equal(pass_of(kv, sequence, seed, m), attend(other, *tokens(m, seed)))


def test_sequences_share_a_pool_of_fixed_bytes():
    """One sequence may take nearly all of it; when it ends, others do; bytes never change."""
    kv = room_for(300)
    before, free = kv.nbytes, kv.free_tokens()
    assert 300 <= free < 400
    pass_of(kv, 1, 0, 280)
    message = r"more pages are needed, \d+ of \d+ are free: wait until sequences end, or give the cache a larger"
    with pytest.raises(CacheFullError, match=message):
        pass_of(kv, 0, 10, 200)
    assert kv.lengths == [0, 280, 0]
    assert_continues_as(kv, 1, alone(0, 280))
    kv.release(1)
    assert kv.free_tokens() == free
    for i in range(3):
        pass_of(kv, i, 20 + i, 90)
    assert_continues_as(kv, 1, alone(21, 90))
    assert kv.nbytes == before


def test_out_of_pages_leaves_every_sequence_and_layer_intact():
    """Also where the pages of one format would do and those of another do not."""
    kv = room_for(200)
    for i, m in enumerate((95, 60, 35)):
        pass_of(kv, i, 10 * i, m)
    before = copy.deepcopy(kv)
    positions = torch.tensor(kv.lengths)[:, None] + torch.arange(60)
    for layer in kv:
        with pytest.raises(CacheFullError):
            layer.attend(*tokens(60, 5, b=3), positions, None, D**-0.5)
    assert_same_content(kv, before)
    assert kv.free_tokens() == before.free_tokens()
    assert_continues_as(kv, 2, alone(20, 35))


def test_what_is_reserved_is_kept():
    kv = room_for(300)
    kv.reserve(0, 200)
    with pytest.raises(CacheFullError, match="more pages are needed"):
        kv.reserve(1, 200)
    with pytest.raises(CacheFullError, match="401 tokens, but a sequence of this cache holds at most 400"):
        kv.reserve(1, 401)
    free = kv.free_tokens()
    kv.reserve(1, free)
    with pytest.raises(CacheFullError):
        pass_of(kv, 2, 0, 60)
    for sequence, n in ((0, 200), (1, free)):
        pass_of(kv, sequence, 30, n)
    with pytest.raises(ValueError, match="sequence 0 holds 200 tokens already: release it first"):
        kv.reserve(0, 250)


def test_forks_share_pages_and_nothing_else():
    kv = room_for(300)
    pass_of(kv, 0, 0, 250)
    kv.fork(0, 2)  # would not fit twice
    assert kv.lengths == [250, 0, 250]
    assert_continues_as(kv, 2, alone(0, 250))
    assert_continues_as(kv, 0, alone(0, 250))
    kv.release(0)
    other = alone(0, 250, 1, 40)
    kv.release(2)
    pass_of(kv, 2, 0, 250)
    assert other.lengths == [291]
    assert_continues_as(kv, 2, alone(0, 250))


def test_a_fork_outlives_its_source():
    kv = room_for(300)
    pass_of(kv, 0, 0, 150)
    kv.fork(0, 1)
    kv.release(0)
    pass_of(kv, 0, 50, 90)
    assert_continues_as(kv, 1, alone(0, 150))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["pass", "release", "fork"]), st.integers(0, 2), st.integers(1, 70)), max_size=12
    )
)
def test_sequences_come_and_go(events):
    """Whatever happened to the others, a sequence holds what it would hold alone; pages come back."""
    kv, history = room_for(330), [[], [], []]
    free = kv.free_tokens()
    for number, (event, i, m) in enumerate(events):
        if event == "release" or (event == "fork" and not history[i - 1]):
            kv.release(i)
            history[i] = []
        elif event == "fork":
            kv.release(i)
            kv.fork((i - 1) % 3, i)
            history[i] = list(history[i - 1])
        else:
            try:
                pass_of(kv, i, number, m)
            except CacheFullError:
                continue
            history[i].append((number, m))
    for i, passes in enumerate(history):
        fresh = KVCache(BUNDLE, 1)
        for seed, m in passes:
            attend(fresh, *tokens(m, seed))
        for layer, other in zip(kv, fresh, strict=True):
            for mine, theirs in ((layer.key, other.key), (layer.value, other.value)):
                assert torch.equal(mine.dense(i), theirs.dense(0)) if mine.used[i] else not theirs.used[0]
                pairs = zip(mine.exact(i, layer.lengths[i]), theirs.exact(0, other.lengths[0]), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        kv.release(i)
    assert kv.free_tokens() == free


def test_budgets_that_make_no_sense():
    with pytest.raises(ValueError, match=r"budget=1000: say the most that a sequence may hold, too \(max_tokens=\)"):
        KVCache(BUNDLE, 1, budget=1000)
    with pytest.raises(CacheFullError, match=r"budget=1000: full precision and tables of 2 sequences take \d+ bytes"):
        KVCache(BUNDLE, 2, 400, budget=1000)


def test_a_reserve_for_a_fork_is_of_what_it_adds():
    """Shared pages are not promised again; the rest is, whatever others take meanwhile."""
    kv = room_for(300)
    most = kv.free_tokens()
    pass_of(kv, 0, 0, 200)
    with pytest.raises(CacheFullError):
        kv.reserve(1, most)
    kv.reserve(1, most, source=0)
    with pytest.raises(CacheFullError):
        pass_of(kv, 2, 10, 60)
    kv.release(2)
    kv.fork(0, 1)
    kv.release(0)
    pass_of(kv, 1, 1, most - 200)
    assert all(book.promised == [0, 0, 0] for book in (tables.book for tables in kv.room.tables.values()))
    kv.release(1)
    pass_of(kv, 0, 0, 100)
    with pytest.raises(ValueError, match="99 tokens, but sequence 0 holds 100: a fork of it has at least these"):
        kv.reserve(1, 99, source=0)


@all_cases
def test_attention_behind_a_sequence_keeps_nothing(case):
    """The last of some new tokens see the cached ones and these, few by page kernels and many by decoding."""
    kv = filled_case(case, [case.key.window.sinks + case.key.window.recent + 2 * case.key.t + 3])
    before = copy.deepcopy(kv)
    q, k, v, _ = case_step(case, kv.lengths, 20, 30)
    for m in (1, 5, 12, 20):
        rows = q[:, :, 20 - m :]
        out = kv.layers[0].attend_behind(0, rows, k, v, case.d**-0.5)
        wanted, bound = expected(case, kv, 0, rows[0], k[0], v[0])
        assert out.dtype == rows.dtype
        assert (np.abs(out[0].transpose(0, 1).double().numpy() - wanted) <= bound).all()
    assert kv.lengths == before.lengths
    assert_same_content(kv, before)


@given(st.integers(1, 9), st.integers(0, 40), st.data())
def test_rings_hold_each_number_at_its_place(capacity, first, data):
    count = data.draw(st.integers(0, capacity))
    ring, x = torch.full((capacity, 2), -1.0, dtype=torch.float16), torch.arange(2.0 * count).view(count, 2)
    write_ring(ring, first, x)
    wanted = torch.full((capacity, 2), -1.0, dtype=torch.float16)
    for i in range(count):
        wanted[(first + i) % capacity] = x[i].half()
    assert torch.equal(ring, wanted)


def test_what_is_no_bundle():
    with pytest.raises(TypeError, match=r"bundle='bundles/tiny': load it with runtime.load\(path\)"):
        KVCache("bundles/tiny", 1)
