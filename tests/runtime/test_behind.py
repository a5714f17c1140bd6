"""Prompts behind a sequence of the cache, as a GPU has them: several in a pass, and captured."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import runtime.behind
from artifacts import Dense, Format, Window
from runtime import Engine, KVCache
from runtime.behind import most_behind
from runtime.hf_decoder import HFDecoder
from runtime.intake import PromptRows
from runtime.joined import Bounds, attention_behind
from runtime.prompts import Prompt, PromptGraphs, Prompts
from tests.oracles.attention import attention
from tests.runtime.test_engine import MODEL, prompt
from tests.runtime.test_prefixes import ALL, engine_for, every_bundle, expected
from tests.standins import capture, stand_in


@st.composite
def places(draw):
    window = Window(draw(st.integers(0, 5)), draw(st.integers(0, 40)))
    sequences = draw(st.permutations(range(4)))[: draw(st.integers(1, 3))]
    counts = [draw(st.integers(1, 120)) for _ in sequences]
    source = draw(st.sampled_from([i for i in range(4) if i not in sequences]))
    return Format(16, Dense(4, "token"), window=window), sequences, counts, source, draw(st.integers(0, 120))


@given(places())
def test_every_token_has_one_place(drawn):
    """In a page that is shared or packed, or exact: copied from the prompt, or from the source's places."""
    fmt, sequences, counts, source, start = drawn
    window, b = fmt.window, 4
    capacity = window.recent + fmt.t
    rows = PromptRows.of(fmt, b, sequences, counts, torch.device("cpu"), source if start else None, start, 7)

    def place(i, token):
        if token < window.sinks:
            return i * window.sinks + token
        return b * window.sinks + i * capacity + (token - window.sinks) % capacity

    assert rows.first_page == window.pages(start, fmt.t)
    assert (rows.first_token, rows.offsets.tolist()) == (start, [7] * len(sequences))
    packed = {i: n for n, (_, of) in rows.packed.items() for i in of.tolist()}
    for row, (i, n) in enumerate(zip(sequences, counts, strict=True)):
        pages = rows.first_page + packed.get(i, 0)
        assert rows.used[i] == pages == window.pages(start + n, fmt.t)
        in_pages = range(window.sinks, window.sinks + pages * fmt.t)
        exact = [token for token in range(start + n) if token not in in_pages]
        own = [(token - start, place(i, token)) for token in exact if token >= start]
        copied = [(place(source, token), place(i, token)) for token in exact if token < start]
        assert sorted(own) == sorted((number, to) for r, number, to in rows.exact.tolist() if r == row)
        lies = range(b * window.sinks + i * capacity, b * window.sinks + (i + 1) * capacity)
        mine = [
            x for x in rows.shared.tolist() if x[2] in lies or x[2] in range(i * window.sinks, (i + 1) * window.sinks)
        ]
        assert sorted(copied) == sorted((number, to) for _, number, to in mine)


@pytest.mark.parametrize("count", [0, 1, 5, 90])
@pytest.mark.parametrize("b, m, g", [(1, 1, 1), (1, 7, 4), (3, 20, 2)])
def test_attention_behind_is_that_over_both(b, m, g, count, monkeypatch):
    """In one stretch or several, some of them empty."""
    capture(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, heads, m, 8) for heads in (2 * g, 2, 2))
    keys, values = torch.randn(2, 100, 2, 8)
    keys[count:] = values[count:] = torch.nan
    bounds = Bounds.of(torch.tensor([count], dtype=torch.int32), b * m, 2 * g)
    out = attention_behind(q, k, v, keys, values, bounds, 0.3)
    for row in range(b):
        both = [torch.cat([x[:count].transpose(0, 1), own[row]], 1) for x, own in ((keys, k), (values, v))]
        exact = attention(q[row].double().numpy(), *(x.double().numpy() for x in both), 0.3)
        assert (out[row].transpose(0, 1).double() - torch.from_numpy(exact)).abs().max() < 1e-5


@every_bundle
@pytest.mark.parametrize("captured", [False, True], ids=["passes", "graphs"])
@pytest.mark.parametrize("before", [3, 75])
def test_several_behind_one_sequence(name, before, captured, monkeypatch):
    """Are what they are each for itself on the CPU: logits, and what the cache holds, which goes on from there."""
    decoder, prompts, found = HFDecoder(MODEL, ALL[name]), [prompt(n, n) for n in (40, 1, 33)], []
    for stands_in in (False, True):
        with monkeypatch.context() as patch:
            if stands_in:
                stand_in(patch)
                capture(patch)
            kv = KVCache(ALL[name], 4, 200)
            Prompt(decoder, kv, 1, prompt(before), None).advance()
            graphs = PromptGraphs(decoder, kv, 160, 3, object()) if stands_in and captured else None
            if graphs:
                graphs.add_behind(100)
            sequences = [3, 0, 2]
            if stands_in:
                logits = Prompts(decoder, kv, sequences, prompts, graphs, source=1).advance()
                replays = sum(g.graph.replays for g in graphs.graphs.values() if g.behind) if graphs else 0
                assert replays == int(captured)
            else:
                each = zip(sequences, prompts, strict=True)
                logits = torch.stack([Prompt(decoder, kv, i, tokens, None, 1).advance() for i, tokens in each])
            found.append((kv, logits))
    (kv, logits), (other, of_other) = found
    assert torch.allclose(of_other, logits, atol=1e-4)
    assert other.lengths == kv.lengths
    for one, two in zip(kv, other, strict=True):
        for mine, theirs in ((one.key, two.key), (one.value, two.value)):
            assert mine.used == theirs.used
            for i, n in enumerate(kv.lengths):
                for a, b in zip(mine.exact(i, n), theirs.exact(i, n), strict=True):
                    assert torch.allclose(a, b, atol=1e-4)
                if mine.used[i]:  # sums of other shapes are taken in another order; few codes lie on an edge
                    assert (mine.dense(i) - theirs.dense(i)).norm() <= 0.05 * theirs.dense(i).norm()


@every_bundle
def test_the_engine_captures_prompts_behind_prefixes(name, monkeypatch):
    """Alone or several behind the same prefix, never behind two; without room for a prefix as well."""
    own, passes = Prompts.advance, []
    for room, used in ((runtime.behind.LAYER_BYTES, 5), (1 << 14, 0)):
        with monkeypatch.context() as patch:
            stand_in(patch)
            capture(patch)
            patch.setattr(runtime.behind, "LAYER_BYTES", room)
            note = lambda self: passes.append((self.source, [len(x) for x in self.prompts])) or own(self)  # noqa: E731
            patch.setattr(Prompts, "advance", note)
            engine = engine_for(name, prefixes=2, short=128)
            engine.prepare()
            first, second = engine.prefix(prompt(75)), engine.prefix(prompt(50, 2))
            engine.run()
            passes.clear()
            requests = [
                engine.submit(prompt(n, n), new, prefix=prefix)
                for n, new, prefix in (
                    (20, 4, first),
                    (33, 9, first),
                    (25, 3, second),
                    (5, 3, None),
                    (90, 3, first),
                    (60, 5, first),
                )
            ]
            engine.run()
            both = (first.sequence, [20, 33]), (second.sequence, [25]), (None, [5]), (first.sequence, [90])
            assert [*both, (first.sequence, [60])] == passes
            replays = [(graph.graph.replays, key) for key, graph in engine._graphs.graphs.items()]
            assert sum(count for count, (_, _, behind) in replays if behind) == used - bool(used)
        for request in requests:
            assert request.tokens == expected(name, request)


def test_on_the_cpu_several_share_a_pass_too(monkeypatch):
    own, passes = Prompts.advance, []
    monkeypatch.setattr(Prompts, "advance", lambda self: passes.append(len(self.prompts)) or own(self))
    engine = engine_for("kvquant")
    prefix = engine.prefix(prompt(75))
    requests = [engine.submit(prompt(n, n), 9, prefix=prefix) for n in (40, 22, 30)]
    engine.run()
    assert passes == [1, 3]
    for request in requests:
        assert request.tokens == expected("kvquant", request)


def test_room_for_a_prefix(monkeypatch):
    """Of one layer, at most so many bytes, and no more than a sequence holds."""
    kv = KVCache(ALL["kivi"], 2, 200)
    assert most_behind(kv) == 200
    of_token = 2 * 4 * kv.bundle.model.h_kv * kv.bundle.model.d
    monkeypatch.setattr(runtime.behind, "LAYER_BYTES", 50 * of_token + 3)
    assert most_behind(kv) == most_behind(KVCache(ALL["kivi"], 2)) == 50


def test_graphs_of_what_flash_attention_does_not_take():
    """Are none behind prefixes: on the CPU, and for float32."""
    engine = Engine(HFDecoder(MODEL, ALL["kivi"]), ALL["kivi"], 2, 200, prefixes=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.prompts, "captured", lambda work, pool: (None, work()))
        graphs = PromptGraphs(engine.decoder, engine.kv, 128, 2, object())
        graphs.add_behind(100)
    assert graphs.fitting(1, 20) is not None
    assert graphs.fitting(1, 20, 5) is None


def test_graphs_behind_what_grows(monkeypatch):
    """They hold addresses of pages."""
    capture(monkeypatch)
    decoder, kv = HFDecoder(MODEL, ALL["kivi"]), KVCache(ALL["kivi"], 2)
    with pytest.raises(ValueError, match=r"a cache that grows: say the most that it holds \(max_tokens=\)"):
        PromptGraphs(decoder, kv, 128, 2, object()).add_behind(100)


def test_without_memory_for_graphs_behind_prefixes(monkeypatch):
    """Those of other prompts are there all the same, and it is told which are not."""
    stand_in(monkeypatch)
    capture(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("somebody else took it")

    engine = engine_for("kvquant")
    monkeypatch.setattr(runtime.prompts, "Behind", fail)
    with pytest.raises(torch.OutOfMemoryError) as found:
        engine.prepare()
    assert "graphs of prompts behind prefixes of up to 200 tokens" in str(found.value.__notes__)
    assert engine._graphs.fitting(1, 50) is not None
    assert engine._graphs.fitting(1, 50, 20) is None
