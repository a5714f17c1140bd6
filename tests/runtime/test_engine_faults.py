"""What an engine does when something breaks in the middle of a pass, and with what it should not have been given."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import runtime.decoding
import runtime.engine
import runtime.intake
import runtime.prompts
from artifacts.errors import BundleMismatchError
from runtime import CacheFullError, Engine, RequestError, Sampling
from runtime.cache import KVCache, LayerCache
from runtime.hf_decoder import HFDecoder
from runtime.jit import KernelError
from runtime.pack import check_all
from runtime.side import Side
from runtime.step import LayerStep, SidePackers
from runtime.transfer import Arriving
from tests.attending import pool_bytes
from tests.formats import kivi, kvquant
from tests.runtime.test_engine import MODEL, engine_for, generated, prompt
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny
from tests.standins import stand_in

BUNDLES = {"kvquant": bundle_for(MODEL, kvquant(3, t=32)), "kivi": bundle_for(MODEL, kivi(2, t=32, recent=5))}
every_bundle = pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)
TAKEN = torch.OutOfMemoryError("somebody else took it")


class Fault:
    """Raises an error before or after one of the calls of some methods, once, counted from `set`."""

    def __init__(self, patch, *methods, error=TAKEN):
        self.left, self.error = None, error
        for cls, name in methods:
            patch.setattr(cls, name, self._around(getattr(cls, name)))

    def set(self, calls):
        self.left = calls

    def _around(self, method):
        def call(*given, **named):
            self._count()
            out = method(*given, **named)
            self._count()
            return out

        return call

    def _count(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise self.error


def held(kv):
    """All that a step changes, but for numbers that nobody sees."""
    books = [tables.book for tables in kv.room.tables.values()]
    counts = [
        (book.tables, sorted(book.free), book.users, book.promised, book.promised_segments, sorted(book.free_segments))
        for book in books
    ]
    layers = [(layer.lengths, layer.offsets, layer.key.used, layer.value.used) for layer in kv]
    exact = [
        [x.clone() for side in (layer.key, layer.value) for i, n in enumerate(layer.lengths) for x in side.exact(i, n)]
        for layer in kv
    ]
    return str((counts, layers)), exact


def assert_held(kv, before):
    assert held(kv)[0] == before[0]
    for layer, earlier in zip(held(kv)[1], before[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, earlier, strict=True))


def step_through_faults(engine, fault, places):
    """Steps until all have ended; each decode step breaks off at two places first. How often it did."""
    count = 0
    while not engine.idle:
        ahead = [request for flight in engine._flights for request in flight.requests]
        queues = any(len(r.tokens) + ahead.count(r) < r.max_new_tokens for r in engine.running.values())
        if queues and not (engine.waiting or engine.prompt):
            for more in (0, 17):
                before, tokens = held(engine.kv), [list(r.tokens) for r in engine.running.values()]
                fault.set((count + more) % places)
                with pytest.raises(type(fault.error)):
                    engine.step()
                assert_held(engine.kv, before)
                assert [list(r.tokens) for r in engine.running.values()] == tokens
                count += 1
        engine.step()
    return count


@every_bundle
def test_a_step_that_breaks_off_in_any_layer_can_be_repeated(bundle, monkeypatch):
    """Before and after every write and pack of every side, over the ends of pages; promises are kept, too."""
    fault = Fault(monkeypatch, (Side, "pack"), (Side, "append"))
    engine = engine_for(bundle, budget=pool_bytes(bundle, 450, 3, 200))
    free, wanted = engine.kv.free_tokens(), [(9, 70), (40, 66), (90, 60)]
    requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
    # 3 sequences, 2 layers, 2 sides, 2 methods, 2 ends of each; the shortest step has one sequence.
    assert step_through_faults(engine, fault, 16) > 100
    for request, (n, new) in zip(requests, wanted, strict=True):
        assert request.tokens == generated(bundle, prompt(n, n), new)
    assert engine.kv.free_tokens() == free


@pytest.mark.parametrize("methods, places", [
    ([(LayerStep, "run")], 4),
    ([(KVCache, "advance"), (Side, "advance")], 4),  # some layers have counted the token, others not
    ([(Arriving, "__init__")], 2),  # all of it is queued
], ids=["kernels", "counting", "tokens"])  # fmt: skip
@every_bundle
def test_a_device_step_that_breaks_off_can_be_repeated(bundle, methods, places, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(runtime.decoding.torch.cuda, "graph_pool_handle", lambda: None)
    fault = Fault(monkeypatch, *methods)
    wanted, found = [(9, 40, 0.0), (40, 36, 1.0)], []
    for broken in (False, True):
        engine = engine_for(bundle, capture=False)
        requests = [engine.submit(prompt(n, n), new, Sampling(heat, seed=n)) for n, new, heat in wanted]
        if broken:
            assert step_through_faults(engine, fault, places) > 60
        engine.run()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]


def test_memory_that_is_taken_while_tokens_are_drawn(monkeypatch):
    """The cache holds the step already, and draws have been made: both go back."""
    choose, bundle = runtime.engine.choose, BUNDLES["kvquant"]
    failing = [False]

    def drawing(*given):
        tokens = choose(*given)
        if failing[0]:
            raise TAKEN
        return tokens

    monkeypatch.setattr(runtime.engine, "choose", drawing)
    samplings, found = [Sampling(1.0, seed=3), Sampling(), Sampling(1.5, 0.9, 4)], []
    for broken in (False, True):
        engine = engine_for(bundle)
        requests = [engine.submit(prompt(n, n), 40, s) for n, s in zip((5, 30, 60), samplings, strict=True)]
        while not engine.idle:
            if broken and engine.running and not engine.waiting:
                before, failing[0] = held(engine.kv), True
                with pytest.raises(torch.OutOfMemoryError):
                    engine.step()
                assert_held(engine.kv, before)
                failing[0] = False
            engine.step()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]


def test_memory_that_is_taken_while_the_first_token_is_chosen(monkeypatch):
    engine = engine_for(BUNDLES["kvquant"])
    free, good = engine.kv.free_tokens(), engine.submit(prompt(9), 20)
    engine.step()
    bad = engine.submit(prompt(20), 5)

    def fail(*_):
        monkeypatch.undo()
        raise TAKEN

    monkeypatch.setattr(runtime.engine, "choose", fail)
    assert engine.step()[0] is bad
    assert (bad.reason, bad.error, bad.tokens) == ("failed", TAKEN, [])
    engine.run()
    assert good.tokens == generated(BUNDLES["kvquant"], prompt(9), 20)
    assert engine.kv.free_tokens() == free


@pytest.mark.parametrize("chunk, place", [(None, 0), (None, 3), (None, 7), (20, 0), (20, 7)])
@every_bundle
def test_memory_that_is_taken_in_the_middle_of_a_prompt(bundle, chunk, place, monkeypatch):
    """The request fails, its pages return, nobody notices; its error keeps no memory."""
    fault = Fault(monkeypatch, (Side, "append"))
    engine = engine_for(bundle, chunk=chunk, sequences=2, budget=pool_bytes(bundle, 230, 2, 200))
    free, good = engine.kv.free_tokens(), engine.submit(prompt(9), 60)
    engine.step()
    bad, after = engine.submit(prompt(90, 1), 30), engine.submit(prompt(80, 2), 40)
    for _ in range(4 if chunk else 0):
        engine.step()
    work = [weakref.ref(pair[1]) for pair in [engine.prompt] if pair]
    assert [prompt().done for prompt in work] == ([80] if chunk else [])
    fault.set(place)  # a step's writes are the prompt's first
    assert bad in engine.step()
    assert (bad.reason, bad.error, bad.tokens) == ("failed", TAKEN, [])
    assert "in advance" in bad.error.__notes__[-1]
    assert [prompt() for prompt in work] == [None] * len(work)
    engine.run()
    assert good.tokens == generated(bundle, prompt(9), 60)
    assert after.tokens == generated(bundle, prompt(80, 2), 40)
    assert engine.kv.free_tokens() == free


@pytest.mark.parametrize("chunk, place", [(None, 3), (20, 3)])
def test_a_prompt_that_is_interrupted_ends(chunk, place, monkeypatch):
    """Some of its layers hold tokens, so it cannot go on; the others can."""
    bundle = BUNDLES["kivi"]
    fault = Fault(monkeypatch, (Side, "append"), error=KeyboardInterrupt())
    engine = engine_for(bundle, chunk=chunk)
    free, good = engine.kv.free_tokens(), engine.submit(prompt(9), 60)
    engine.step()
    bad = engine.submit(prompt(90, 1), 30)
    for _ in range(4 if chunk else 0):
        engine.step()
    fault.set(place)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (bad.reason, bad.tokens) == ("failed", [])
    assert "was broken off: KeyboardInterrupt()" in str(bad.error)
    engine.run()
    assert good.tokens == generated(bundle, prompt(9), 60)
    assert engine.kv.free_tokens() == free


def test_no_memory_for_the_work_space_of_a_prompt(monkeypatch):
    engine = engine_for(BUNDLES["kvquant"], chunk=20)
    free, bad = engine.kv.free_tokens(), engine.submit(prompt(50), 5)

    def fail(*_, **__):
        raise TAKEN

    with monkeypatch.context() as patch:
        patch.setattr(runtime.prompts.torch, "empty", fail)
        assert engine.step() == [bad]
    assert (bad.reason, bad.error, engine.idle, engine.kv.free_tokens()) == ("failed", TAKEN, True, free)


def test_numbers_that_cannot_be_packed_end_one_request(monkeypatch):
    """In a decode step of several: the one whose page has them fails when that fills, the others get every token."""
    bundle, attend = BUNDLES["kvquant"], LayerCache.attend
    engine = engine_for(bundle)
    free = engine.kv.free_tokens()
    wanted = [(9, 50), (20, 50), (31, 50)]
    good, bad, other = (engine.submit(prompt(n, n), new) for n, new in wanted)

    def poisoned(self, q, k, v, positions, valid, scaling, sequences=None):
        if bad.sequence in (sequences or ()) and len(bad.tokens) >= 5:
            k = k.clone()
            k[sequences.index(bad.sequence)] = torch.nan
        return attend(self, q, k, v, positions, valid, scaling, sequences)

    monkeypatch.setattr(LayerCache, "attend", poisoned)
    engine.run()
    assert bad.reason == "failed"
    assert isinstance(bad.error, ValueError)
    assert 5 <= len(bad.tokens) < 50
    for request, (n, new) in ((good, wanted[0]), (other, wanted[2])):
        assert request.tokens == generated(bundle, prompt(n, n), new)
    assert engine.kv.free_tokens() == free


def test_device_steps_that_fail_are_raised(monkeypatch):
    """A device step cannot leave out a sequence that holds tokens, so nobody is tried alone."""
    stand_in(monkeypatch)
    monkeypatch.setattr(runtime.decoding.torch.cuda, "graph_pool_handle", lambda: None)
    fault = Fault(monkeypatch, (LayerStep, "run"), error=ValueError("broken"))
    engine = engine_for(BUNDLES["kvquant"], capture=False)
    engine.prepare()
    request = engine.submit(prompt(9), 10)
    engine.step()
    short = engine.submit(prompt(9), 1)
    fault.set(2)
    with pytest.raises(ValueError, match="broken"):
        engine.step()
    assert short.reason == "length"
    assert engine.step() == [short, request]  # told late, but told
    engine.run()
    assert (request.reason, len(request.tokens)) == ("length", 10)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("somebody else took it"), KernelError("no compiler")])
def test_device_steps_that_cannot_be_prepared(error, monkeypatch):
    """Requests have their first tokens and wait; when it can be done, they go on."""
    stand_in(monkeypatch)
    fault = Fault(monkeypatch, (runtime.engine, "steps_of"), error=error)
    engine = engine_for(BUNDLES["kvquant"], capture=False)
    requests = [engine.submit(prompt(n, n), 10) for n in (9, 70)]
    assert engine.step() == requests
    fault.set(0)
    with pytest.raises(type(error), match=str(error)):
        engine.step()
    assert [len(request.tokens) for request in requests] == [1, 1]
    engine.run()
    monkeypatch.undo()
    assert [r.tokens for r in requests] == [generated(BUNDLES["kvquant"], prompt(n, n), 10) for n in (9, 70)]


@every_bundle
def test_cancelled_between_chunks_the_next_gets_its_pages(bundle):
    engine = engine_for(bundle, sequences=2, chunk=16, budget=pool_bytes(bundle, 160, 2, 200))
    first, second = engine.submit(prompt(90), 30), engine.submit(prompt(90, 1), 40)
    engine.step()
    engine.step()
    assert engine.prompt[0] is first
    assert 0 < engine.prompt[1].done < 90
    work = weakref.ref(engine.prompt[1])
    engine.cancel(first)
    assert work() is None
    assert (first.reason, first.tokens) == ("cancelled", [])
    engine.run()
    assert second.tokens == generated(bundle, prompt(90, 1), 40)


@pytest.mark.parametrize("chunk", [None, 16])
def test_two_engines_on_one_decoder(chunk):
    """Step by step, in each other's prompts; one loses a request on the way."""
    decoder = HFDecoder(MODEL)
    engines = [Engine(decoder, bundle, 2, 200, chunk=chunk) for bundle in BUNDLES.values()]
    requests = [[engine.submit(prompt(n, n), 30) for n in (70, 33, 90)] for engine in engines]
    for number in range(200):
        for engine in engines:
            engine.step()
        if number == 9:
            engines[0].cancel(requests[0][1])
    assert all(engine.idle for engine in engines)
    for (bundle, made), lost in zip(zip(BUNDLES.values(), requests, strict=True), (True, False), strict=True):
        for request, n in zip(made, (70, 33, 90), strict=True):
            expected = generated(bundle, prompt(n, n), 30)
            assert request.tokens == (expected[: len(request.tokens)] if lost and n == 33 else expected)


def test_a_bundle_of_another_model():
    """Its shapes are the model's, so nothing else would notice."""
    other = tiny(CONFIGS["mistral"])
    bundle = bundle_for(other, kvquant(3, t=32))
    with pytest.raises(BundleMismatchError):
        Engine(HFDecoder(MODEL), bundle, 1, 100)


@pytest.mark.parametrize("token", [64, -1, 1.5, "a", None], ids=str)
def test_tokens_that_the_model_does_not_have(token):
    engine = engine_for(BUNDLES["kvquant"])
    with pytest.raises(RequestError, match=r"at place 2 of the prompt: must be an integer from 0 to 63"):
        engine.submit([1, 2, token], 5)
    assert engine.idle


def test_prompts_as_tensors():
    engine = engine_for(BUNDLES["kvquant"])
    request = engine.submit(torch.tensor(prompt(9)), 5)
    engine.run()
    assert request.tokens == generated(BUNDLES["kvquant"], prompt(9), 5)
    assert isinstance(request.prompt[0], int)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_that_are_no_numbers_end_their_request_alone(broken, temperature, ranks, monkeypatch):
    """On several ranks, too: all of them have chosen the same."""
    monkeypatch.setattr(HFDecoder, "ranks", ranks)
    bundle = BUNDLES["kivi"]
    engine = engine_for(bundle)
    bad = engine.submit(prompt(9), 20, Sampling(temperature))
    good = engine.submit(prompt(40), 20)
    while len(engine.running) < 2:
        engine.step()
    forward, had = engine.decoder.forward, len(bad.tokens)

    def breaking(*given):
        logits = forward(*given)
        logits[0, 3] = broken
        return logits

    engine.decoder.forward = breaking
    engine.step()
    engine.decoder.forward = forward
    engine.run()
    assert (bad.reason, len(bad.tokens)) == ("failed", had)
    assert isinstance(bad.error, RequestError)
    assert "a prompt of 9 tokens and 20 new ones: the model's logits hold NaN or infinity" in str(bad.error)
    assert good.tokens == generated(bundle, prompt(40), 20)
    assert engine.idle


def test_what_kernels_met_is_told_once():
    packers = [SimpleNamespace(status=torch.tensor([bits], dtype=torch.int32)) for bits in (0, 4, 2, 4)]
    with pytest.raises(KernelError, match=r"a scale or zero point does not fit float16.*; keys or values hold NaN"):
        check_all(packers)
    check_all(packers)


def test_errors_keep_no_frames():
    """Nor do those that led to them."""
    engine = engine_for(BUNDLES["kivi"], prefixes=1, budget=pool_bytes(BUNDLES["kivi"], 120, 4, 200))
    engine.prefix(prompt(100))
    request = engine.submit(prompt(90), 20)
    engine.run()
    assert isinstance(request.error, CacheFullError)
    error, seen = request.error, 0
    while error is not None:
        assert error.__traceback__ is None
        error, seen = error.__cause__ or error.__context__, seen + 1
    assert seen == 2


@pytest.mark.parametrize("error", [ValueError("no page holds it"), TAKEN, KeyboardInterrupt()], ids=repr)
def test_prompts_that_fail_together_are_processed_one_by_one(error, monkeypatch):
    """Whoever broke the pass off; nothing of it is left."""
    bundle = BUNDLES["kvquant"]
    fault = Fault(monkeypatch, (LayerCache, "append_prompts"), error=error)
    engine = engine_for(bundle)
    free, requests = engine.kv.free_tokens(), [engine.submit(prompt(n, n), 5) for n in (40, 33, 60)]
    fault.set(2)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        assert engine.step() == []
    assert engine.kv.free_tokens() == free
    assert not any(request.tokens or request.reason for request in requests)
    engine.step()
    assert [len(request.tokens) for request in requests] == [2, 0, 0]
    engine.run()
    for request, n in zip(requests, (40, 33, 60), strict=True):
        assert request.tokens == generated(bundle, prompt(n, n), 5)
    assert engine.kv.free_tokens() == free


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["layer-by-layer", "all-at-once"])
@pytest.mark.parametrize("lengths", [(70,), (40, 33, 60)], ids=["alone", "together"])
def test_prompts_that_a_device_does_not_pack(lengths, held, monkeypatch):
    """In the middle of a pass: memory is somebody else's. A lone one ends; of several each is tried again."""
    bundle = BUNDLES["kvquant"]
    with monkeypatch.context() as patch:
        stand_in(patch)
        patch.setattr(runtime.intake, "HELD", held)
        fault = Fault(patch, (SidePackers, "prompts"), error=torch.OutOfMemoryError("somebody else took it"))
        engine = engine_for(bundle, capture=False)
        free, requests = engine.kv.free_tokens(), [engine.submit(prompt(n, n), 5) for n in lengths]
        fault.set(2 if held == 0 else 1)  # behind the first layer's, or behind all of them
        engine.step()
        assert engine.kv.free_tokens() == free
        assert engine.kv.lengths == [0] * 3
        again = engine.submit(prompt(70, 70), 5)
        engine.run()
        assert engine.kv.free_tokens() == free
    if len(lengths) == 1:
        assert [(r.reason, str(r.error)) for r in requests] == [("failed", "somebody else took it")]
    else:
        assert [r.tokens for r in requests] == [generated(bundle, prompt(n, n), 5) for n in lengths]
    assert again.tokens == generated(bundle, prompt(70, 70), 5)


def test_one_of_prompts_together_that_no_page_holds_ends_alone(monkeypatch):
    """What is told of the pass is told of it alone, when each is processed for itself."""
    bundle, pack = BUNDLES["kvquant"], Side.pack

    def failing(self, sequence, x, *rest):
        if x.shape[0] == 70:
            raise ValueError("no page holds it")
        pack(self, sequence, x, *rest)

    monkeypatch.setattr(Side, "pack", failing)
    engine = engine_for(bundle)
    free = engine.kv.free_tokens()
    good, bad = (engine.submit(prompt(n, n), 5) for n in (66, 70))
    engine.run()
    assert (bad.reason, bad.tokens) == ("failed", [])
    assert str(bad.error) == "no page holds it"
    assert good.tokens == generated(bundle, prompt(66, 66), 5)
    assert engine.kv.free_tokens() == free


def test_on_several_ranks_prompts_that_fail_together_are_raised(monkeypatch):
    """The others wait in that pass."""
    monkeypatch.setattr(HFDecoder, "ranks", 2)
    fault = Fault(monkeypatch, (LayerCache, "append_prompts"), error=ValueError("no page holds it"))
    engine = engine_for(BUNDLES["kvquant"])
    for n in (40, 33):
        engine.submit(prompt(n, n), 5)
    fault.set(0)
    with pytest.raises(ValueError, match="no page holds it"):
        engine.step()
