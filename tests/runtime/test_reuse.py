"""Texts that an engine keeps and prompts that begin alike: tokens are those behind a prefix, and nothing leaks."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Window
from runtime import Engine, KVCache, reuse
from runtime.cache import LayerCache
from runtime.decoding import HostSteps
from runtime.exact_layer import ExactLayer
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import fingerprint, rotary
from runtime.prompts import Prompt
from runtime.room import Room
from tests.attending import pool_bytes
from tests.formats import kivi, kvquant, random_bundle
from tests.runtime.test_engine import MODEL, generated, prompt
from tests.runtime.test_prefixes import ALL, books, by_hand, content, engine_for, every_bundle, every_chunk, state
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny
from tests.standins import stand_in

CUT = "kvquant"  # one sink, pages of 32, no newest tokens beside them
WHOLE = "kivi"  # always some


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(reuse, "LEAST", 20)


def reusing(name, **options):
    return engine_for(name, **{"prefixes": 0, "reuse": 2} | options)


def chat(name, turns):
    """New tokens of each (tokens of the user, how many new ones) behind all before, in one sequence by hand."""
    bundle, said, known = ALL[name], [], []
    decoder, kv = HFDecoder(MODEL, bundle), KVCache(bundle, 1, 400)
    steps = HostSteps(decoder, kv)
    for tokens, new in turns:
        fresh, found = [*known[kv.lengths[0] :], *tokens], []

        def attend(layer, q, k, v, positions, scaling):
            return kv.layers[layer].attend(q, k, v, positions, None, scaling, [0])

        if not known:
            logits = Prompt(decoder, kv, 0, fresh, None).advance()
        else:
            positions = kv.lengths[0] + torch.arange(len(fresh))[None]
            logits = decoder.forward(torch.tensor([fresh]), positions, attend)
        while len(found) < new:
            found.append(int(logits.argmax()))
            if len(found) < new:
                logits = steps.run({0: found[-1]})
        known += [*tokens, *found]
        said.append(found)
    return said


@every_bundle
@every_chunk
def test_a_chat_goes_on_behind_what_was_said(name, chunk):
    turns = [(prompt(70, 1), 25), (prompt(3, 2), 40), (prompt(40, 3), 10)]
    engine = reusing(name, chunk=chunk, max_tokens=400)
    text, other = [], engine.submit(prompt(33, 9), 90)
    for (tokens, new), said in zip(turns, chat(name, turns), strict=True):
        text += tokens
        request = engine.submit(text, new)
        for _ in engine.stream(request):
            pass
        assert request.tokens == said
        assert request.reused == max(0, len(text) - len(tokens) - 1)  # the last token was never fed back
        assert [kept.total for kept in engine.reuse.texts] == [len(text) + new - 1]  # in the place of the last one
        text += said
    engine.run()
    assert other.tokens == generated(ALL[name], prompt(33, 9), 90)


@every_chunk
@pytest.mark.parametrize("while_it_runs", [True, False])
def test_what_prompts_begin_with_is_shared_by_pages(chunk, while_it_runs):
    engine = reusing(CUT, chunk=chunk)
    system = prompt(100)
    first = engine.submit([*system, *prompt(30, 1)], 60)
    while not first.tokens:
        engine.step()
    if not while_it_runs:
        engine.run()
    rest = [prompt(n, n) for n in (20, 4)]
    requests = [engine.submit([*system, *tokens], 8) for tokens in rest]
    engine.step()
    assert [request.reused for request in requests] == [97, 97]  # a sink and three pages
    assert sorted(books(engine)[0].users)[-3:] >= [2, 2, 2]
    engine.run()
    for request, tokens in zip(requests, rest, strict=True):
        assert request.tokens == by_hand(CUT, tuple(system[:97]), (*system[97:], *tokens), 8)
    assert first.tokens == generated(ALL[CUT], list(first.prompt), 60)


def test_newest_tokens_in_full_precision_are_in_no_page():
    """So a prompt comes behind a whole text or by itself."""
    engine = reusing(WHOLE)
    first = engine.submit(prompt(100), 5)
    engine.run()
    other = engine.submit([*prompt(80), *prompt(20, 1)], 5)
    engine.run()
    again = engine.submit([*first.prompt, *first.tokens[:-1], 7], 5)
    engine.run()
    assert (other.reused, again.reused) == (0, 104)
    assert other.tokens == generated(ALL[WHOLE], list(other.prompt), 5)


def test_the_same_prompt_again():
    engine = reusing(CUT)
    tokens = []
    for _ in range(2):
        request = engine.submit(prompt(97), 5)
        engine.run()
        tokens.append((request.reused, request.tokens))
    assert tokens[0] == (0, generated(ALL[CUT], prompt(97), 5))
    # All but one page: a prompt has a token of its own at least.
    assert tokens[1] == (65, by_hand(CUT, tuple(prompt(97)[:65]), tuple(prompt(97)[65:]), 5))


@every_bundle
def test_behind_a_prefix(name):
    """A request's prefix is part of its text, and less than what is kept of it."""
    engine = engine_for(name, reuse=2)
    prefix = engine.prefix(prompt(40))
    first = engine.submit(prompt(30, 1), 20, prefix=prefix)
    engine.run()
    request = engine.submit([*first.prompt, *first.tokens, 5], 4, prefix=prefix)
    engine.run()
    assert request.reused == 30 + 19
    engine.drop(prefix)
    engine.reuse.clear()
    assert state(engine) == state(engine_for(name, reuse=2))


def test_a_longer_prefix_is_not_given_up():
    engine = engine_for(CUT, reuse=2)
    engine.submit(prompt(70), 4)
    engine.run()
    prefix = engine.prefix(prompt(80))
    request = engine.submit([5, 6, 7], 4, prefix=prefix)
    engine.run()
    assert (request.reused, request.kept) == (0, None)
    assert request.tokens == by_hand(CUT, prefix.prompt, request.prompt, 4)


def test_several_that_wait_share_a_pass(monkeypatch):
    passes = []
    forward = HFDecoder.forward

    def counted(self, tokens, *rest):
        passes.append(tokens.shape)
        return forward(self, tokens, *rest)

    monkeypatch.setattr(HFDecoder, "forward", counted)
    engine = reusing(CUT)
    engine.submit(prompt(97), 3)
    engine.run()
    passes.clear()
    requests = [engine.submit([*prompt(97), *prompt(n, n)], 3) for n in (9, 12, 10)]
    engine.step()
    assert passes[0] == (3, 12)
    engine.run()
    assert [request.reused for request in requests] == [97, 97, 97]


def test_the_least_recently_used_text_goes():
    engine = reusing(CUT, reuse=2)
    texts = {seed: prompt(65, seed) for seed in (1, 2, 3)}

    def send(seed, *more):
        request = engine.submit([*texts[seed], *more], 2)
        engine.run()
        return request.reused

    assert [send(1), send(2), send(1, 5), send(3)] == [0, 0, 65, 0]
    assert [kept.prompt[:65] for kept in engine.reuse.texts] == [tuple(texts[1]), tuple(texts[3])]
    assert [send(2, 5), send(3, 5)] == [0, 65]


def test_texts_have_the_pages_that_requests_leave():
    """A pool for little more than one request: kept texts go when their pages are needed, and all end as they would."""
    bundle = ALL[CUT]
    budget = pool_bytes(bundle, 330, 6, 200)
    alone = {n: generated(bundle, prompt(150, n), 8) for n in range(4)}
    engine = reusing(CUT, budget=budget, reuse=3)
    requests = [engine.submit(prompt(150, n), 8) for n in range(4)]
    engine.run()
    assert [request.tokens for request in requests] == list(alone.values())
    assert engine.reuse.texts
    engine.reuse.clear()
    assert state(engine) == state(reusing(CUT, budget=budget, reuse=3))


def test_a_text_that_others_wait_for_goes_where_nothing_else_can():
    """Two that wait are to come behind different texts, whose pages leave room for neither."""
    bundle = ALL[CUT]
    engine = reusing(CUT, budget=pool_bytes(bundle, 225, 5, 200), reuse=2)
    texts = [prompt(97, n) for n in (1, 2)]
    for text in texts:
        engine.submit(text, 2)
        engine.run()
    assert len(engine.reuse.texts) == 2
    requests = [engine.submit([*text, *prompt(40, 3)], 60) for text in texts]
    engine.run()
    assert [request.reason for request in requests] == ["length", "length"]
    engine.reuse.clear()
    assert all(len(book.free) == book.capacity and not any(book.promised) for book in books(engine))


def test_requests_that_fail_or_are_cancelled_are_not_kept():
    engine = reusing(CUT)
    request = engine.submit(prompt(70), 50)
    engine.step()
    engine.cancel(request)
    assert not engine.reuse.texts
    waiting = [engine.submit(prompt(70), 5), engine.submit([*prompt(70), 3], 5)]
    engine.cancel(waiting[0])
    engine.run()
    again = engine.submit([*prompt(70), 3, 4], 5)
    engine.step()
    engine.cancel(again)
    assert [text.wanted for text in engine.reuse.texts] == [{}] * len(engine.reuse.texts)


@pytest.mark.parametrize("name", [CUT, WHOLE, "mixed"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_random_requests_leave_nothing_behind(name, chunk):
    """Prompts that begin alike, some cancelled, on a crowded pool; prefixes beside them."""
    draw = random.Random(5)
    budget = None if name == "mixed" else pool_bytes(ALL[name], 500, 7, 200)
    engine = engine_for(name, budget=budget, reuse=3, chunk=chunk)
    start = state(engine)
    made, texts = [], [prompt(150, seed) for seed in (1, 2, 3)]
    for _ in range(60):
        if draw.random() < 0.5:
            text = draw.choice([*texts, *[[*r.prompt, *r.tokens] for r in made[-5:]]])
            tokens = [*text[: draw.randint(1, 150)], *prompt(draw.randint(1, 9), draw.randint(0, 99))]
            made.append(engine.submit(tokens[:160], draw.randint(1, 30)))
        if made and draw.random() < 0.2:
            engine.cancel(draw.choice(made))
        for _ in range(draw.randint(0, 6)):
            engine.step()
        held = [text.sequence for text in engine.reuse.texts]
        assert len(set(held)) == len(held) <= 3
    engine.run()
    assert {request.reason for request in made} <= {"length", "cancelled"}
    assert any(request.reused for request in made)
    assert not any(text.wanted for text in engine.reuse.texts)
    engine.reuse.clear()
    assert state(engine) == start


def test_who_begins_alone_is_in_no_pass_with_those_behind_a_text():
    """The first of two that come behind one text finds no room until others that wait let a second one go."""
    for tokens in range(300, 364, 16):
        engine = reusing(CUT, max_tokens=400, budget=pool_bytes(ALL[CUT], tokens, 5, 400))
        texts = prompt(97, 1), prompt(193, 2)
        for text in texts:
            engine.submit(text, 1)
            engine.run()
        wanted = ((texts[0], 20, 80), (texts[0], 19, 20), (texts[1], 5, 20))
        requests = [engine.submit([*text, *prompt(n, n)], new) for text, n, new in wanted]
        engine.run()
        for request in requests:
            assert request.reason == "length", request.error
            known = request.prompt[: request.reused], request.prompt[request.reused :]
            expected = by_hand(CUT, *known, request.max_new_tokens) if request.reused else None
            assert request.tokens == (expected or generated(ALL[CUT], list(request.prompt), request.max_new_tokens))
        engine.reuse.clear()
        assert not any(engine.kv.lengths)
        assert all(len(book.free) == book.capacity for book in books(engine))


def test_who_has_no_room_behind_a_text_begins_without():
    """Behind its prefix alone, whose pages are others than the text's."""
    for tokens in range(220, 300, 16):
        found = []
        for texts in (0, 2):
            budget = pool_bytes(ALL[CUT], tokens, 4 + texts, 200)
            engine = reusing(CUT, prefixes=1, reuse=texts, budget=budget)
            system = prompt(100, 1)
            engine.submit([*system, *prompt(30, 2)], 1)
            engine.run()
            prefix = engine.prefix(system)
            engine.run()
            request = engine.submit([*prompt(30, 2), *prompt(20, 3)], 30, prefix=prefix)
            engine.run()
            found.append(request.reason)
        assert found[0] == found[1] == "length"


@given(
    st.integers(0, 300),
    st.sampled_from([0, 0, 0, 1, 40]),
    st.sampled_from([(16,), (16, 16), (16, 32), (32, 48)]),
    st.sampled_from([0, 0, 1, 16]),
    st.integers(0, 5),
)
def test_whole_pages_are_what_windows_say(n, recent, pages, more, sinks):
    """By trying all numbers of tokens; 0 where newest ones are always in a window. more: sinks of the second side."""
    tables = {i: SimpleNamespace(t=t, window=Window(sinks + i * more, recent)) for i, t in enumerate(pages)}
    room = SimpleNamespace(tables=tables)
    held = [
        m
        for m in range(1, n + 1)
        if all(x.window.sinks + x.window.pages(m, x.t) * x.t == m for x in tables.values()) and n - m < math.lcm(*pages)
    ]
    assert Room.whole_pages(room, n) == (0 if recent else max(held, default=0))


@pytest.mark.parametrize("options", [{"reuse": -1}, {"reuse": 1.5}, {"prefixes": "2"}, {"reuse": None}])
def test_numbers_of_texts_that_are_none(options):
    with pytest.raises(ValueError, match=r"reuse=.*0 or more beside them for prefixes and for texts"):
        reusing(CUT, **options)


def test_who_waits_for_room_looks_once(monkeypatch):
    """And again when there is something new."""
    looked, alike = [], reuse.begins_alike
    monkeypatch.setattr(reuse, "begins_alike", lambda a, b: looked.append(b) or alike(a, b))
    engine = reusing(CUT, budget=pool_bytes(ALL[CUT], 200, 5, 200))
    first = engine.submit(prompt(100), 60)
    while not first.tokens:
        engine.step()
    other = engine.submit(prompt(90, 1), 60)
    engine.step()
    assert len(looked) == 1
    for _ in range(5):
        engine.step()
    assert (len(looked), other.tokens, len(engine.running)) == (1, [], 1)  # it waits for pages
    engine.run()
    assert len(looked) == 2  # the first request's text
    assert other.tokens == generated(ALL[CUT], prompt(90, 1), 60)


def test_without_texts_nothing_is_kept():
    engine = engine_for(CUT)
    for _ in range(2):
        request = engine.submit(prompt(97), 5)
        engine.run()
    assert request.reused == 0
    with pytest.raises(
        ValueError, match="reuse=-1: whole numbers, at least 1 sequence for requests, and 0 or more beside them"
    ):
        reusing(CUT, reuse=-1)


# ---- forks of a beginning ----


@every_bundle
def test_forks_are_cut_where_pages_end(name):
    kv = KVCache(ALL[name], 2, 200)
    Prompt(HFDecoder(MODEL, ALL[name]), kv, 0, prompt(150), None).advance()
    cuts = {kv.cut(n) for n in range(151)}
    assert max(cuts) == (129 if name == CUT else max(cuts & {0, 1, 2, 3, 4, 5}))
    if name == CUT:
        assert cuts >= {33, 65, 97, 129}
    for n in (-1, 130, 151):
        with pytest.raises(
            ValueError, match=rf"tokens={n}: of the 150 tokens of sequence 0 a fork has all, or as many"
        ):
            kv.fork(0, 1, n)
    assert kv.lengths == [150, 0]


def test_a_cut_fork_goes_on_as_its_own_prompt_would():
    engine = engine_for(CUT, prefixes=1)
    prefix = engine.prefix(prompt(97))
    engine.run()
    assert prefix.sequence is not None
    kv = engine.kv
    Prompt(engine.decoder, kv, 0, prompt(150), None).advance()
    kv.fork(0, 1, 97)
    assert kv.lengths[:2] == [150, 97]
    for one, other in zip(content(engine, 1), content(engine, prefix.sequence), strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 0.05 * other.norm()  # few codes lie on an edge
    steps, tokens = HostSteps(engine.decoder, kv), {}
    for i in (1, prefix.sequence):
        tokens[i] = [int(steps.run({i: token}).argmax()) for token in prompt(20, 4)]
    assert tokens[1] == tokens[prefix.sequence]


@pytest.mark.parametrize(("family", "most"), [("mistral-sliding", 65), ("gemma2-capped", 0)])
def test_windows_that_slide(family, most):
    """Pages behind a window are kept, but layers in full precision keep their window alone."""
    kv = KVCache(bundle_for(tiny(CONFIGS[family]), kvquant(3, t=32)), 1, 100)
    assert all(isinstance(layer, LayerCache) for layer in kv) == (most > 0)
    assert kv.cut(80) == most


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 600))
def test_begins_alike(a, b, common):
    shared = [3] * common
    one, other = np.array([*shared, *a], dtype=np.int64), np.array([*shared, *b], dtype=np.int64)
    alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert reuse.begins_alike(one, other) == common + alike


@pytest.mark.parametrize("formats", [kvquant(3, 32), kivi(2, 32, recent=50), None], ids=["kvquant", "kivi", "exact"])
def test_a_text_is_kept_as_it_is_while_others_go_on(formats, monkeypatch):
    """On device steps: a request's last token is on its way when a step of the others is queued, which covers the
    request's sequence, too."""
    stand_in(monkeypatch)
    found, info = [], fingerprint(MODEL)
    inv_freq = rotary(MODEL)[1].numpy()
    bundle = random_bundle([formats] * info.l, info.h_q, info.h_kv, info.d, model=info, inv_freq=inv_freq)
    for others in (0, 2):
        engine = Engine(HFDecoder(MODEL, bundle), bundle, sequences=3, max_tokens=200, reuse=1, capture=False)
        request = engine.submit(prompt(30), 15)
        running = [engine.submit(prompt(20 + i, i), 90) for i in range(others)]
        while request.reason is None:
            engine.step()
        (text,) = engine.reuse._texts
        kept = [layer.newest(text.sequence) for layer in engine.kv.layers if isinstance(layer, ExactLayer)]
        found.append([*content(engine, text.sequence), *(x for pair in kept for x in pair)])
        engine.run()
        assert [len(other.tokens) for other in running] == [90] * others
    for alone, among_others in zip(*found, strict=True):
        assert torch.allclose(alone, among_others, atol=1e-3)
