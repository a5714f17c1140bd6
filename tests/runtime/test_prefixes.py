"""Prefixes that requests of an engine share: tokens are those of forks made by hand, and pages count once."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from artifacts import LayerFormat, LowRank, Window
from runtime import CacheFullError, Engine, KVCache, RequestError
from runtime.decoding import HostSteps
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import rotary
from runtime.prompts import Prompt
from tests.attending import pool_bytes
from tests.formats import kivi, kvquant, random_bundle
from tests.runtime.test_engine import BUNDLES, MODEL, generated, prompt
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny
from tests.standins import run_on, stand_in

KIVI = kivi(2, t=32, recent=5)
FACTORS = LayerFormat(
    replace(KIVI.key, lowrank=LowRank(4, 2)), replace(KIVI.value, lowrank=LowRank(4, 2), window=Window(0, 40))
)


def mixed():
    """Factors, and pages of two sizes that fill at different tokens."""
    model = fingerprint(MODEL)
    layers = [FACTORS, LayerFormat(kvquant(3, t=64, sinks=0).key, KIVI.value)]
    inv_freq = rotary(MODEL)[1].numpy()
    return random_bundle(layers, model.h_q, model.h_kv, model.d, model=model, inv_freq=inv_freq)


ALL = BUNDLES | {"factors": bundle_for(MODEL, FACTORS), "mixed": mixed()}
every_bundle = pytest.mark.parametrize("name", ALL)
every_chunk = pytest.mark.parametrize("chunk", [None, 16])


def engine_for(name, **options):
    bundle = ALL[name]
    return Engine(HFDecoder(MODEL, bundle), bundle, **{"sequences": 3, "max_tokens": 200, "prefixes": 1} | options)


@cache
def by_hand(name, prefix, tokens, new):
    """Tokens of a sequence built of the cache's own parts: a prompt, a fork of it, what comes behind, steps."""
    bundle, found = ALL[name], []
    decoder, kv = HFDecoder(MODEL, bundle), KVCache(bundle, 2, 300)
    Prompt(decoder, kv, 1, prefix, None).advance()
    kv.fork(1, 0)

    def attend(layer, q, k, v, positions, scaling):
        return kv.layers[layer].attend(q, k, v, positions, None, scaling, [0])

    positions = torch.arange(len(prefix), len(prefix) + len(tokens))[None]
    logits = decoder.forward(torch.tensor([tokens]), positions, attend)
    steps = HostSteps(decoder, kv)
    while len(found) < new:
        found.append(int(logits.argmax()))
        logits = steps.run({0: found[-1]})
    return found


def expected(name, request):
    """What a request would be served alone."""
    if request.prefix is None:
        return generated(ALL[name], list(request.prompt), request.max_new_tokens)
    return by_hand(name, request.prefix.prompt, request.prompt, request.max_new_tokens)


def books(engine):
    return [tables.book for tables in engine.kv.room.tables.values()]


def state(engine):
    """What must be as at the start when everything has ended and prefixes are dropped."""
    promises = [(book.promised, book.promised_segments) for book in books(engine)]
    free = [(len(book.free), len(book.free_segments)) for book in books(engine)]
    return engine.kv.lengths, engine.kv.free_tokens(), engine.kv.nbytes, str(promises), free, engine.prefixes


def content(engine, sequence):
    """Sinks, newest tokens and decoded pages of a sequence."""
    sides = [(layer, side) for layer in engine.kv.paged for side in (layer.key, layer.value)]
    return [
        x.clone()
        for layer, side in sides
        for x in (*side.exact(sequence, layer.lengths[sequence]), side.dense(sequence))
    ]


@every_bundle
@every_chunk
def test_tokens_are_those_of_a_fork(name, chunk):
    """Behind a prefix of some pages, more requests than sequences; one beside them that begins by itself."""
    engine = engine_for(name, chunk=chunk)
    start = state(engine)
    prefix = engine.prefix(prompt(75))
    requests = [engine.submit(prompt(n, n), new, prefix=prefix) for n, new in ((1, 40), (40, 9), (7, 20))]
    requests.insert(1, engine.submit(prompt(33, 9), 12))
    engine.run()
    assert engine.kv.lengths == [0, 0, 0, 75]
    for request in requests:
        assert (request.reason, request.tokens) == ("length", expected(name, request))
    later = engine.submit(prompt(7, 7), 20, prefix=prefix)
    engine.run()
    assert later.tokens == requests[-1].tokens
    engine.drop(prefix)
    assert state(engine) == start == state(engine_for(name, chunk=chunk))


@every_bundle
@every_chunk
@pytest.mark.parametrize("shared", [1, 3, 31])
def test_a_prefix_without_a_page_changes_nothing(name, chunk, shared):
    """Nothing of it is compressed, so tokens are those of the whole prompt without sharing."""
    engine = engine_for(name, chunk=chunk)
    prefix = engine.prefix(prompt(shared, 5))
    requests = [engine.submit(prompt(n, n), 12, prefix=prefix) for n in (2, 50)]
    engine.run()
    for request in requests:
        assert request.tokens == generated(ALL[name], [*prefix.prompt, *request.prompt], 12)


@every_chunk
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2-capped"])
@pytest.mark.parametrize("device", ["cpu", "stand-in", "graphs"])
def test_layers_in_full_precision_and_sliding_ones(family, chunk, device, monkeypatch):
    """Where nothing is packed tokens are those of the model's own generate()."""
    run_on(device, monkeypatch)
    model = tiny(CONFIGS[family])
    bundle = bundle_for(model, kivi(2, 32, recent=400))
    engine = Engine(HFDecoder(model, bundle), bundle, 2, 120, chunk=chunk, prefixes=1, capture=device == "graphs")
    prefix = engine.prefix(prompt(45))
    requests = [engine.submit(prompt(n, n), 10, prefix=prefix) for n in (1, 40)]
    engine.run()
    for request in requests:
        ids = torch.tensor([[*prefix.prompt, *request.prompt]])
        own = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert request.tokens == own[0, ids.shape[1] :].tolist()


@every_bundle
@every_chunk
def test_device_steps_leave_prefixes_alone(name, chunk, monkeypatch):
    """Steps write into sequences that take no part; neither a prefix nor a prompt half way behind one is there."""
    stand_in(monkeypatch)
    engine = engine_for(name, chunk=chunk, capture=False, prefixes=2)
    assert sorted(engine.prepare().steps) == [(1, 200), (2, 200), (3, 200)]
    first, second = engine.prefix(prompt(75)), engine.prefix(prompt(20, 2))
    alone = engine.submit(prompt(5, 5), 45)
    for _ in range(20):
        engine.step()
    kept = [content(engine, prefix.sequence) for prefix in (first, second)]
    requests = [
        engine.submit(prompt(n, n), new, prefix=prefix)
        for n, new, prefix in ((3, 20, second), (40, 9, first), (70, 5, first), (1, 20, second), (9, 30, first))
    ]
    engine.run()
    for prefix, before in zip((first, second), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(content(engine, prefix.sequence), before, strict=True))
    monkeypatch.undo()
    for request in (alone, *requests):
        assert request.tokens == expected(name, request)


@every_bundle
def test_shared_pages_count_once(name):
    engine = engine_for(name)
    prefix = engine.prefix(prompt(100))
    requests = [engine.submit(prompt(30, i), 40, prefix=prefix) for i in range(3)]
    while len(engine.running) < 3:
        engine.step()
    for tables in engine.kv.room.tables.values():
        shared = tables.window.pages(100, tables.t)
        held = [tables.window.pages(n, tables.t) for n in engine.kv.lengths[:3]]
        whole = tables.window.pages(requests[0].total, tables.t)
        assert shared > 0
        assert tables.book.capacity - len(tables.book.free) == shared + sum(pages - shared for pages in held)
        assert tables.book.promised == [*(whole - pages for pages in held), 0]
        if tables.book.grouped:  # prefix, each prompt behind it, and what it got since: whatever was packed together
            behind = tables.window.pages(130, tables.t) > shared
            decoded = [pages - max(shared, tables.window.pages(130, tables.t)) for pages in held]
            assert tables.book.segments - len(tables.book.free_segments) == 1 + 3 * behind + sum(decoded)


@every_bundle
def test_a_pool_for_one_serves_three_that_share(name):
    """It would hold one of the requests unshared; promises are of the pages behind the prefix alone."""
    engine = engine_for(name, budget=pool_bytes(ALL[name], 300, 4, 200))
    prefix = engine.prefix(prompt(150))
    requests = [engine.submit(prompt(5, i), 20, prefix=prefix) for i in range(3)]
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
    assert most == 3
    for request in requests:
        assert request.tokens == expected(name, request)


def test_room_for_the_last_page_of_all_that_share():
    """Whoever is admitted gets all of its pages, whoever else was: nothing is promised twice or too little."""
    bundle = BUNDLES["kvquant"]
    engine = engine_for("kvquant", budget=pool_bytes(bundle, 260, 4, 200))
    prefix = engine.prefix(prompt(100))
    requests = [engine.submit(prompt(20, i), 79, prefix=prefix) for i in range(5)]
    waited = False
    while not engine.idle:
        engine.step()
        waited |= bool(engine.waiting) and 0 < len(engine.running) < 3
        assert all(book.room >= 0 for book in books(engine))
    assert waited
    assert {request.reason for request in requests} == {"length"}


def test_dropped_while_requests_run():
    """They keep its pages, its sequence is free at once, and pages come back with the last of them."""
    engine = engine_for("kvquant")
    start = state(engine)
    prefix = engine.prefix(prompt(100))
    requests = [engine.submit(prompt(5, i), 30, prefix=prefix) for i in range(2)]
    while len(engine.running) < 2:
        engine.step()
    engine.drop(prefix)
    engine.drop(prefix)
    assert (prefix.sequence, engine.kv.lengths[3]) == (None, 0)
    other = engine.prefix(prompt(100, 1))
    requests.append(engine.submit(prompt(9), 30, prefix=other))
    engine.run()
    engine.drop(other)
    assert state(engine) == start
    for request in requests:
        assert request.tokens == expected("kvquant", request)


@every_chunk
def test_dropped_while_requests_wait(chunk):
    """Those that were submitted with it still begin with it; then, or when they are cancelled, it goes."""
    engine = engine_for("kivi", sequences=1, chunk=chunk)
    start = state(engine)
    prefix = engine.prefix(prompt(70))
    served, cancelled = (engine.submit(prompt(40, i), 8, prefix=prefix) for i in range(2))
    engine.drop(prefix)
    with pytest.raises(RequestError, match=r"prefix 1 of 70 tokens was dropped: make it again \(Engine.prefix\)"):
        engine.submit([3], 1, prefix=prefix)
    list(engine.stream(served))
    assert served.tokens == expected("kivi", served)
    assert prefix.sequence is not None
    engine.cancel(cancelled)
    assert prefix.sequence is None
    assert engine.idle
    assert state(engine) == start


@pytest.mark.parametrize("steps", [0, 2, 9])
def test_dropped_before_anybody_wants_it(steps):
    """While it waits, while it is processed, when it is complete."""
    engine = engine_for("kvquant", chunk=10)
    start = state(engine)
    prefix = engine.prefix(prompt(50))
    for _ in range(steps):
        engine.step()
    engine.drop(prefix)
    assert engine.idle
    assert state(engine) == start


@every_chunk
def test_cancelled_wherever_they_are(chunk):
    engine = engine_for("kivi", sequences=2, chunk=chunk)
    start = state(engine)
    prefix = engine.prefix(prompt(70))
    engine.run()
    requests = [engine.submit(prompt(40, i), 20, prefix=prefix) for i in range(3)]
    for _ in range(5):
        engine.step()
    assert requests[0].tokens
    engine.drop(prefix)
    for request in requests:
        engine.cancel(request)
    assert engine.idle
    assert state(engine) == start


@pytest.mark.parametrize("name", ["kivi", "mixed"])
def test_many_requests_leak_nothing(name):
    """Prefixes come and go among random requests and cancellations on a crowded pool."""
    rng = random.Random(1)
    engine = engine_for(name, prefixes=2, chunk=24, budget=pool_bytes(ALL[name], 420, 5, 200))
    start, prefixes, kept = state(engine), [], []
    for number in range(50):
        if rng.random() < 0.3 and len(engine.prefixes) < 2:
            prefixes.append(engine.prefix(prompt(rng.randint(1, 90), number)))
        usable = [prefix for prefix in prefixes if prefix.sequence is not None and not prefix.dropped]
        prefix = rng.choice([None, *usable])
        kept.append(engine.submit(prompt(rng.randint(1, 60), number), rng.randint(1, 30), prefix=prefix))
        for _ in range(rng.randint(0, 12)):
            engine.step()
        if rng.random() < 0.3:
            engine.cancel(rng.choice(kept[-4:]))
        if usable and rng.random() < 0.3:
            engine.drop(rng.choice(usable))
    engine.run()
    for prefix in prefixes:
        engine.drop(prefix)
    assert state(engine) == start
    assert {request.reason for request in kept} == {"length", "cancelled"}
    assert sum(request.prefix is not None for request in kept) > 10
    for request in kept[::5]:
        assert request.tokens == expected(name, request)[: len(request.tokens)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("taken"), ValueError("NaN")])
def test_a_prefix_that_fails(monkeypatch, error):
    """With it those that were to begin with it, and nobody else; whoever comes later is told."""
    engine = engine_for("kvquant", chunk=20)
    start = state(engine)
    good = engine.submit(prompt(9), 30)
    engine.step()
    prefix = engine.prefix(prompt(50))
    bad = [engine.submit(prompt(5, i), 5, prefix=prefix) for i in range(2)]
    engine.step()
    with monkeypatch.context() as patch:

        def fail(*_):
            raise error

        patch.setattr(Prompt, "advance", fail)
        assert [*bad, good] == engine.step()
    message = f"prefix 1 of 50 tokens failed, and so does what begins with it: {error}"
    for request in bad:
        assert request.reason == "failed"
        with pytest.raises(RequestError, match=message) as raised:
            list(engine.stream(request))
        assert raised.value.__cause__ is prefix.error is error
    with pytest.raises(RequestError, match=message):
        engine.submit([3], 1, prefix=prefix)
    engine.drop(prefix)
    engine.run()
    assert good.tokens == generated(BUNDLES["kvquant"], prompt(9), 30)
    assert state(engine) == start


@every_chunk
@pytest.mark.parametrize("bad", [0, 1])
def test_a_prompt_that_fails_behind_a_prefix(monkeypatch, chunk, bad):
    """In whichever layer: the prefix stays, and serves others."""
    engine = engine_for("kvquant", chunk=chunk)
    prefix = engine.prefix(prompt(50))
    engine.run()
    kept, before = state(engine), content(engine, prefix.sequence)
    request = engine.submit(prompt(40), 5, prefix=prefix)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise ValueError("NaN")

        patch.setattr(engine.kv.layers[bad].value, "pack", fail)
        engine.run()
    assert (request.reason, str(request.error)) == ("failed", "NaN")
    assert state(engine) == kept
    assert all(torch.equal(a, b) for a, b in zip(content(engine, prefix.sequence), before, strict=True))
    again = engine.submit(prompt(40), 5, prefix=prefix)
    engine.run()
    assert again.tokens == expected("kvquant", again)


def test_no_room_beside_prefixes():
    """Nothing runs that could end: whoever finds no room is told, instead of waiting for ever."""
    engine = engine_for("kvquant", prefixes=3, budget=pool_bytes(BUNDLES["kvquant"], 230, 6, 200))
    first, second = engine.prefix(prompt(100)), engine.prefix(prompt(99, 1))
    engine.run()
    request, third = engine.submit(prompt(150), 2), engine.prefix(prompt(98))
    behind = engine.submit([3], 1, prefix=third)
    engine.run()
    message = (
        r"a prompt of 150 tokens and 2 new ones: nothing runs that could end, and the cache has no room for it beside "
        r"prefix 1 of 100 tokens, prefix 2 of 99 tokens, prefix 3 of 98 tokens: drop a prefix, or give the cache a "
        r"larger budget"
    )
    with pytest.raises(CacheFullError, match=message):
        list(engine.stream(request))
    with pytest.raises(CacheFullError, match=r"prefix 3 of 98 tokens: nothing runs .* 1 of 100 .*, prefix 2 of 99 tok"):
        raise third.error
    assert behind.error.__cause__ is third.error
    small = engine.submit([3], 9, prefix=second)
    engine.drop(first)
    again = engine.submit(prompt(100), 2)
    engine.run()
    assert small.tokens == expected("kvquant", small)
    assert again.tokens == expected("kvquant", again)


def test_the_longest_prefix_and_request_fit():
    """What is accepted alone is served: the limit is the same with and without a prefix."""
    for name in ("kvquant", "mixed"):
        engine = engine_for(name, budget=pool_bytes(ALL[name], 150, 4, 200))
        most = engine.max_tokens
        assert most < 200
        with pytest.raises(RequestError, match=rf"a prefix of {most} tokens and at least one behind it: a sequence of"):
            engine.prefix(prompt(most))
        prefix = engine.prefix(prompt(most - 21))
        with pytest.raises(RequestError, match=rf"a prompt of 2 tokens behind prefix 1 of {most - 21} tokens and 21 "):
            engine.submit([3, 4], 21, prefix=prefix)
        request = engine.submit([3, 4], 20, prefix=prefix)
        engine.run()
        assert (request.reason, len(request.tokens)) == ("length", 20)


def test_prefixes_that_make_no_sense():
    engine, without, other = engine_for("kvquant"), engine_for("kvquant", prefixes=0), engine_for("kvquant")
    with pytest.raises(RequestError, match="the prefix is empty: give at least one token"):
        engine.prefix([])
    with pytest.raises(RequestError, match="this engine has no sequences for prefixes: make it with prefixes=1 or mo"):
        without.prefix([3])
    prefix = engine.prefix([3, 4])
    with pytest.raises(
        RequestError,
        match=r"the sequences for prefixes \(prefixes=1\) are taken by prefix 1 of 2 tokens: drop one; it is free when",
    ):
        engine.prefix([3])
    with pytest.raises(RequestError, match="the prompt is empty: give at least one token behind the prefix"):
        engine.submit([], 1, prefix=prefix)
    message = r"prefix 1 of 2 tokens is another engine's: make it with this one \(Engine.prefix\)"
    for use in (lambda: other.submit([3], 1, prefix=prefix), lambda: other.drop(prefix)):
        with pytest.raises(RequestError, match=message):
            use()
    for sequences, prefixes in ((0, 2), (3, -1)):
        message = (
            rf"sequences={sequences}, prefixes={prefixes}, reuse=0: whole numbers, at least 1 sequence for requests"
        )
        with pytest.raises(ValueError, match=message):
            engine_for("kvquant", sequences=sequences, prefixes=prefixes)


def test_requests_leave_sequences_for_prefixes_free():
    engine = engine_for("kvquant", sequences=1, prefixes=2)
    for i in range(3):
        engine.submit(prompt(5, i), 10)
    while not engine.idle:
        engine.step()
        assert set(engine.running) <= {0}
        assert engine.kv.lengths[1:] == [0, 0]


def test_without_prefixes_the_cache_is_as_it_was():
    bundle = BUNDLES["kvquant"]
    assert engine_for("kvquant", prefixes=0).kv.nbytes == 3 * bundle.geometry.cache_bytes(200, 4)
    assert engine_for("kvquant", prefixes=2).kv.nbytes == 5 * bundle.geometry.cache_bytes(200, 4)


def test_what_is_no_prefix_is_not_dropped():
    with pytest.raises(RequestError, match=r"None is no prefix: give what `Engine\.prefix` returned"):
        engine_for("kvquant").drop(None)
