"""Decode steps on a GPU are queued before the tokens of the one before are known; torch stands in for its kernels."""

import pytest
import torch

import runtime.decoding
import runtime.engine
from runtime import Engine, KVCache, RequestError, Sampling
from runtime.decoding import HostSteps, greedy, steps_of
from runtime.hf_decoder import HFDecoder
from runtime.prompts import Prompt
from runtime.transfer import Arriving, to_device
from tests.formats import kivi, kvquant
from tests.runtime.test_engine import MODEL, generated, prompt
from tests.runtime.tiny_models import bundle_for
from tests.standins import stand_in

BUNDLES = {"kvquant": bundle_for(MODEL, kvquant(3, t=32)), "kivi": bundle_for(MODEL, kivi(2, t=32, recent=5))}
every_bundle = pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)


def engine_for(bundle, **options):
    return Engine(HFDecoder(MODEL, bundle), bundle, **{"sequences": 3, "max_tokens": 200, "capture": False} | options)


def left(engine):
    """What is held for requests."""
    books = [tables.book for tables in engine.kv.room.tables.values()]
    return engine.kv.lengths, engine.kv.free_tokens(), [(book.promised, len(book.free)) for book in books]


@every_bundle
def test_a_step_is_queued_before_the_tokens_of_the_one_before_are_taken(bundle, monkeypatch):
    stand_in(monkeypatch)
    engine = engine_for(bundle)
    engine.prepare()
    request = engine.submit(prompt(9), 4)
    said = [(engine.step(), list(request.tokens), engine.kv.lengths[0]) for _ in range(4)]
    assert [len(tokens) for _, tokens, _ in said] == [1, 2, 3, 4]  # the prompt's; then each step lands one
    assert [n for *_, n in said] == [10, 11, 12, 0]  # one more than the tokens that are known
    assert all(served == [request] for served, *_ in said)
    assert engine.idle
    monkeypatch.undo()
    assert request.tokens == generated(bundle, prompt(9), 4)


def test_the_first_token_does_not_wait_for_steps(monkeypatch):
    """Who runs already does not wait for others' prompts."""
    stand_in(monkeypatch)
    made, engine = [], engine_for(BUNDLES["kivi"])
    monkeypatch.setattr(runtime.engine, "steps_of", lambda *given: made.append(given) or steps_of(*given))
    first = engine.submit(prompt(9), 4)
    assert (engine.step(), made) == ([first], [])
    second = engine.submit(prompt(90, 1), 4)
    assert engine.step() == [second]  # and a step of both is queued
    assert len(made) == 1
    engine.run()
    assert engine.prepare() is engine.prepare()
    assert len(made) == 1
    monkeypatch.undo()
    assert first.tokens == generated(BUNDLES["kivi"], prompt(9), 4)
    assert second.tokens == generated(BUNDLES["kivi"], prompt(90, 1), 4)


@every_bundle
def test_requests_that_end_while_a_step_is_queued_for_them(bundle, monkeypatch):
    """Stop tokens, drawn tokens, cancelled ones, and others that take over their sequences: as on the CPU."""
    plain = generated(bundle, prompt(9), 30)
    place = next(i for i in range(3, 30) if plain[i] not in plain[:i])
    found = []
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
            engine = engine_for(bundle)
            before = left(engine)
            stopped = [engine.submit(prompt(9), 30, stop=[plain[place]]) for _ in range(2)]
            drawn = engine.submit(prompt(40), 25, Sampling(1.0, 0.9, 7), stop=[3, 4, 5])
            cancelled = engine.submit(prompt(20), 50)
            later = [engine.submit(prompt(n, n), 20, Sampling(1.0, seed=n)) for n in (64, 3, 33)]
            while len(cancelled.tokens) < 5:
                engine.step()
            engine.cancel(cancelled)
            engine.run()
            assert left(engine) == before
            assert not engine._flights
            assert [r.tokens for r in stopped] == [plain[: place + 1]] * 2
            assert len(cancelled.tokens) == 5
            found.append([(r.tokens, r.reason) for r in (*stopped, drawn, cancelled, *later)])
    assert found[0] == found[1]


def test_nobody_left_nothing_queued(monkeypatch):
    """The only request is cancelled: the step that is queued for it is forgotten."""
    stand_in(monkeypatch)
    engine = engine_for(BUNDLES["kivi"])
    request = engine.submit(prompt(9), 30)
    engine.step()
    engine.cancel(request)
    assert engine.idle
    assert not engine._flights
    again = engine.submit(prompt(9), 10)
    engine.run()
    monkeypatch.undo()
    assert again.tokens == generated(BUNDLES["kivi"], prompt(9), 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_waiting_that_is_interrupted_loses_no_token(temperature, monkeypatch):
    stand_in(monkeypatch)
    wait, found = Arriving.wait, []
    for broken in (False, True):
        engine = engine_for(BUNDLES["kvquant"])
        requests = [engine.submit(prompt(n, n), 40, Sampling(temperature, seed=n)) for n in (5, 30)]
        while not engine.idle:
            if broken and engine._flights:
                monkeypatch.setattr(Arriving, "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
                monkeypatch.setattr(Arriving, "wait", wait)
            engine.step()
            assert len(engine._flights) <= 1
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [40, 40]


def test_logits_that_are_no_numbers_while_a_step_is_queued(monkeypatch):
    """What comes behind a token that is none is no token of the model: nothing of it is looked up."""
    stand_in(monkeypatch)
    bundle = BUNDLES["kivi"]
    engine = engine_for(bundle)
    bad, good = engine.submit(prompt(9), 20), engine.submit(prompt(40), 20)
    while len(engine.running) < 2:
        engine.step()
    forward, had = engine.decoder.forward, len(bad.tokens)

    def breaking(tokens, *given):
        assert (tokens >= 0).all()
        logits = forward(tokens, *given)
        logits[bad.sequence, 3] = torch.nan
        return logits

    engine.decoder.forward = breaking
    while bad.reason is None:
        engine.step()
    engine.decoder.forward = forward
    engine.run()
    assert bad.reason == "failed"
    assert isinstance(bad.error, RequestError)
    assert had <= len(bad.tokens) <= had + 1
    monkeypatch.undo()
    assert good.tokens == generated(bundle, prompt(40), 20)


@pytest.mark.parametrize("stands_in", [False, True], ids=["host", "device"])
def test_greedy_steps_without_an_engine(stands_in, monkeypatch):
    bundle, counts = BUNDLES["kvquant"], (9, 40)
    expected = [generated(bundle, prompt(n, n), 12) for n in counts]
    if stands_in:
        stand_in(monkeypatch)
        monkeypatch.setattr(runtime.decoding.torch.cuda, "graph_pool_handle", lambda: None)
    decoder, kv = HFDecoder(MODEL, bundle), KVCache(bundle, 2, 100)
    steps = steps_of(decoder, kv, capture=False)
    assert isinstance(steps, HostSteps) != stands_in
    first = {i: int(Prompt(decoder, kv, i, prompt(n, n), None).advance().argmax()) for i, n in enumerate(counts)}
    found = greedy(decoder, steps, first)
    rows = [list(first.values()), *(next(found) for _ in range(11))]
    assert [list(tokens) for tokens in zip(*rows, strict=True)] == expected
    assert kv.lengths == [n + 11 + steps.ahead for n in counts]


def test_numbers_go_to_a_device_and_back():
    there = to_device([(1, 2), (3, 4)], torch.int64, torch.device("cpu"))
    assert Arriving(there).wait() == [[1, 2], [3, 4]]
    assert Arriving(there[0, :0]).wait() == []
