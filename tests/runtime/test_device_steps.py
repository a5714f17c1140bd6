"""What launches the GPU's kernels, with torch in their place: the cache of a GPU is the CPU's."""

import copy
import weakref

import pytest
import torch

import runtime.decoding
import runtime.intake
import runtime.prompts
import runtime.units
from artifacts import Rope
from runtime import Engine, KVCache
from runtime.hf import SignpostCache
from runtime.hf_decoder import HFDecoder
from runtime.intake import Intake
from tests.attending import start, step
from tests.formats import CASES, Case, kivi, kvquant
from tests.runtime.test_engine import MODEL, bundle_for, prompt
from tests.standins import PagedAttention, stand_in

all_cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
STEPS = 5


def lengths(case):
    """One sequence whose keys fill a page in a few steps, one whose values do, one of a single token."""
    key, value = (fmt.window.sinks + fmt.window.recent for fmt in (case.key, case.value))
    return [key + 2 * case.key.t - 2, value + case.value.t - 3, 1]


def filled(case, reserved):
    """Each sequence from a prompt of its own at positions of its own."""
    kv = KVCache(case.bundle(), 3, reserved)
    for i, n in enumerate(lengths(case)):
        q, k, v, _ = step(case, [0], n, 10 * i)
        positions = int(start(3)[i]) + torch.arange(n)[None]
        kv.layers[0].attend(q, k, v, positions, None, case.d**-0.5, [i])
    return kv


def assert_same(one, other):
    for mine, theirs in ((one.key, other.key), (one.value, other.value)):
        for i, n in enumerate(one.lengths):
            assert (one.lengths[i], one.offsets[i], mine.used[i]) == (n, other.offsets[i], theirs.used[i])
            for a, b in zip(mine.exact(i, n), theirs.exact(i, n), strict=True):
                assert torch.equal(a, b)
            if mine.used[i]:
                assert torch.equal(mine.dense(i), theirs.dense(i))


@all_cases
def test_steps_hold_and_see_what_the_cpus_do(case, monkeypatch):
    """Over the ends of pages of both sides; where memory grows, steps are planned anew."""
    caches, reserved = [], None if CASES.index(case) % 2 else 300
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
            kv = filled(case, reserved)
            outs = []
            for number in range(STEPS):
                q, k, v, positions = step(case, kv.lengths, 1, 100 + number)
                outs.append(kv.layers[0].attend(q, k, v, positions, None, case.d**-0.5))
            caches.append((kv, torch.cat(outs, 1)))
    (cpu, exact), (device, out) = caches
    assert_same(device.layers[0], cpu.layers[0])
    # float32 against float64: 2**-24 a term, some thousand terms as large as the largest number.
    assert (out - exact).abs().max() <= 1e-3 * exact.abs().max()
    assert device.lengths == [n + STEPS for n in lengths(case)]


@all_cases
def test_prompts_together_are_packed_as_each_for_itself(case, monkeypatch):
    """Into sequences in any order; of different numbers of pages, and none."""
    stand_in(monkeypatch)
    counts, sequences = [n + more for n, more in zip(lengths(case), (0, case.value.t, 0), strict=True)], [2, 0, 1]
    _, k, v, _ = step(case, [0] * 3, max(counts), 7)
    one, other = (KVCache(case.bundle(), 3, 600) for _ in range(2))
    for row, (i, n) in enumerate(zip(sequences, counts, strict=True)):
        one.layers[0].append(i, k[row, :, :n], v[row, :, :n])
    with other.checked_once():
        intake = Intake(other, sequences, counts)
        intake.give(0, k, v)
        intake.finish()
    assert_same(other.layers[0], one.layers[0])


def test_bytes_that_are_held(monkeypatch):
    """Are those of storages: keys and values that are cut out of one tensor with queries keep all of it."""
    stand_in(monkeypatch)
    formats = kvquant(3, t=32)
    case = Case("two", formats.key, formats.value, 4, 2, 64, Rope(64, "half", 1.0, "default"))
    whole = torch.randn(1, 40, 8, case.d)  # heads of queries, keys, values
    k, v = whole[:, :, 4:6].transpose(1, 2), whole[:, :, 6:].transpose(1, 2)
    for limit, left in ((2 * whole.nbytes + 1, 2), (2 * whole.nbytes, 0)):
        monkeypatch.setattr(runtime.intake, "HELD", limit)
        intake = Intake(KVCache(case.bundle(2), 1, 100), [0], [40])
        for layer in (0, 1):
            intake.give(layer, k, v)
        assert len(intake._held) == left
    intake = Intake(KVCache(case.bundle(2), 1, 100), [0], [40])
    for layer in (0, 1):
        intake.give(layer, k, v, stays=True)  # to pack it would free nothing
    assert len(intake._held) == 2


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["layer-by-layer", "all-at-once"])
@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5)], ids=["kvquant", "kivi"])
def test_prompts_that_are_held(formats, chunk, held, monkeypatch):
    """For several layers or none, in one pass or in chunks: pages and exact tokens are the CPU's."""
    bundle, caches = bundle_for(MODEL, formats), []
    decoder = HFDecoder(MODEL, bundle)
    monkeypatch.setattr(runtime.intake, "HELD", held)
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
            kv = KVCache(bundle, 3, 200)
            for i, n in ((2, 150), (0, 20)):
                work = runtime.prompts.Prompt(decoder, kv, i, prompt(n, n), chunk)
                while work.advance() is None:
                    pass
            caches.append(kv)
    for mine, theirs in zip(*caches, strict=True):
        assert_same(mine, theirs)


LOWRANK = [case for case in CASES if case.key.lowrank or case.value.lowrank]


@pytest.mark.parametrize("case", LOWRANK, ids=[case.name for case in LOWRANK])
def test_segments_of_decoded_pages(case, monkeypatch):
    """A page with factors that fills in a step has a segment of its own, and decodes to nearly the numbers."""
    stand_in(monkeypatch)
    kv = filled(case, None)
    for number in range(STEPS):
        q, k, v, positions = step(case, kv.lengths, 1, 100 + number)
        kv.layers[0].attend(q, k, v, positions, None, case.d**-0.5)
    for side in (kv.layers[0].key, kv.layers[0].value):
        if side.format.lowrank:
            book = side.tables.book
            for i, n in enumerate(lengths(case)):
                table = book.tables[i][: side.used[i]]
                prompt_pages = side.format.window.pages(n, side.format.t)
                expected = side.geometry.segments(len(table), prompt_pages)
                assert len(book.groups(table)) == expected
                stored = side.pool.field("segment")[torch.tensor(table, dtype=torch.int64)].flatten().tolist()
                assert stored == [book.segment_of[page] for page in table]


@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5)], ids=["kvquant", "kivi"])
def test_the_engines_device_steps(formats, monkeypatch):
    """In batches of all sizes, empty sequences among them, tokens are those of steps on the CPU."""
    bundle = bundle_for(MODEL, formats)
    wanted = [(5, 40), (77, 30), (33, 3), (64, 50), (1, 60), (150, 12)]
    found = []
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
            engine = Engine(HFDecoder(MODEL, bundle), bundle, 3, 200, capture=False)
            requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
            engine.run()
            assert isinstance(engine.prepare(), runtime.decoding.DeviceSteps) == stands_in
            found.append([request.tokens for request in requests])
    assert found[0] == found[1]


def test_steps_of_short_sequences_are_dealt_out_for_these(monkeypatch):
    """Where the cache would hold longer ones, too; with the longest, that step is taken; tokens stay the same."""
    bundle, wanted = bundle_for(MODEL, kivi(2, t=32, recent=5)), [(5, 20), (90, 30), (33, 3)]
    found = []
    for short in (2048, 100):
        with monkeypatch.context() as patch:
            stand_in(patch)
            patch.setattr(runtime.units, "SHORT", short)
            engine = Engine(HFDecoder(MODEL, bundle), bundle, 3, 200, capture=False)
            assert sorted(engine.prepare().steps) == [
                (b, n) for b in (1, 2, 3) for n in (100, 200) if n > 100 or n == short
            ]
            requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
            PagedAttention.planned.clear()
            engine.run()
            found.append([request.tokens for request in requests])
            planned = {(b, tokens) for b, tokens in PagedAttention.planned}
            assert planned == ({(3, 200), (2, 200)} if short == 2048 else {(3, 100), (2, 100), (2, 200)})
    assert found[0] == found[1]


def test_steps_keep_what_their_kernels_work_in(monkeypatch):
    """Of more sizes than a layer has plans: a captured graph holds addresses and nothing else."""
    stand_in(monkeypatch)
    bundle, made, plan = bundle_for(MODEL, kivi(2, t=32)), [], PagedAttention.plan

    def planned(*given):
        found = plan(*given)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(PagedAttention, "plan", planned)
    decoder, kv = HFDecoder(MODEL, bundle), KVCache(bundle, 20, 40)
    steps = runtime.decoding.DeviceSteps(decoder, kv, range(1, 21), capture=False)
    for each in steps.steps.values():
        each._pass()
    assert len(made) == 20 * 2  # layers
    assert all(found() is not None for found in made)


def test_generate_on_device_steps(monkeypatch):
    """Through transformers, with a padded batch and beams."""
    bundle = bundle_for(MODEL, kvquant(3, t=32))
    ids = torch.tensor([[0] * 30 + prompt(10), prompt(40)])
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    found = []
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
            for more in ({}, {"num_beams": 3}):
                found.append(MODEL.generate(ids, past_key_values=SignpostCache(MODEL, bundle), **options, **more))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5)], ids=["kvquant", "kivi"])
def test_sequences_that_fill_a_page(formats):
    """Those whose newest token does, of keys or of values."""
    kv = KVCache(bundle_for(MODEL, formats), 140, 200)
    kv.layers[0].lengths[:] = range(140)
    windows = [(side.format.window, side.format.t) for side in (kv.layers[0].key, kv.layers[0].value)]
    expected = [n for n in range(1, 140) if any(w.pages(n, t) > w.pages(n - 1, t) for w, t in windows)]
    assert kv.filling(range(140)) == expected != []
    assert kv.filling(range(0, 140, 2)) == [n for n in expected if n % 2 == 0]


def test_a_copy_plans_its_own_steps(monkeypatch):
    stand_in(monkeypatch)
    case = next(case for case in CASES if not (case.key.lowrank or case.value.lowrank))
    kv = filled(case, None)
    numbers = step(case, kv.lengths, 1, 5)
    kv.layers[0].attend(*numbers, None, case.d**-0.5)
    twin = copy.deepcopy(kv)
    for seed in range(6, 6 + STEPS):
        numbers = step(case, kv.lengths, 1, seed)
        assert torch.equal(*(cache.layers[0].attend(*numbers, None, case.d**-0.5) for cache in (kv, twin)))
    assert_same(kv.layers[0], twin.layers[0])


def test_plans_follow_memory_that_moves(monkeypatch):
    """Whatever of a side's memory is another, even at an address that was seen before, the step is planned anew."""
    stand_in(monkeypatch)
    case = next(case for case in CASES if not (case.key.lowrank or case.value.lowrank))
    kv = filled(case, None)
    layer, inputs = kv.layers[0], kv.step_inputs(3)
    kernels = layer.step(case.h_q)
    first = kernels.plan(inputs, 1.0, 300)
    assert kernels.plan(inputs, 1.0, 300) is first
    assert kernels.plan(inputs, 1.0, 200) is first  # dealt out alike
    assert kernels.plan(inputs, 0.5, 300) is not first
    assert kernels.plan(inputs, 1.0, 3000) is not first
    for name in ("heads", "records"):
        moved = getattr(layer.key.pool, name).clone()
        setattr(layer.key._pool, name, moved)
        assert kernels.plan(inputs, 1.0, 300) is not first
        first = kernels.plan(inputs, 1.0, 300)
    layer.key.tables.ids = torch.nn.functional.pad(layer.key.tables.ids, (0, 3))
    assert kernels.plan(inputs, 1.0, 300) is not first


def test_a_cache_that_cannot_be_captured():
    bundle = bundle_for(MODEL, kvquant(3, t=32))
    decoder = HFDecoder(MODEL, bundle)
    with pytest.raises(ValueError, match="a captured step cannot follow a cache that grows: say the most that it"):
        runtime.decoding.DeviceSteps(decoder, KVCache(bundle, 1), [1])


def test_memory_that_has_grown_is_held_no_more(monkeypatch):
    """Neither by the newest plan nor by older ones."""
    stand_in(monkeypatch)
    formats = kivi(2, t=32)
    case = Case("grows", formats.key, formats.value, 4, 2, 64, Rope(64, "half", 1.0, "default"))
    kv = filled(case, None)
    layer, seen = kv.layers[0], []
    for seed in range(5 * case.key.t):
        layer.attend(*step(case, kv.lengths, 1, seed), None, case.d**-0.5)
        heads = layer.key.pool.heads
        if not any(known() is heads for known in seen):
            seen.append(weakref.ref(heads))
    assert len(seen) > 1
    del heads
    assert [known() is not None for known in seen] == [False] * (len(seen) - 1) + [True]
