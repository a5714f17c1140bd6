"""Passes over prompts that are captured: of fixed sizes, filled up, on the CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import runtime.engine
import runtime.prompts
from runtime import Engine, KVCache
from runtime.hf_decoder import HFDecoder
from runtime.prompts import PromptGraphs, Prompts, graph_sizes
from tests.formats import kivi, kvquant
from tests.runtime.test_engine import BUNDLES, MODEL, bundle_for, every_bundle, generated, prompt
from tests.standins import capture, stand_in


@given(st.integers(1, 5000), st.integers(1, 20))
def test_sizes_of_graphs(tokens, sequences):
    """Whatever prompt has as many tokens as a pass may have finds one, alone at less than twice its tokens or 128."""
    sizes = graph_sizes(tokens, sequences)
    assert len(set(sizes)) == len(sizes)
    assert all(b <= sequences and b * n <= tokens for b, n in sizes)
    assert [b * n for b, n in sizes] == sorted(b * n for b, n in sizes)
    for n in {1, 100, 129, tokens}:
        if n <= tokens:
            of_one = min(size for b, size in sizes if b == 1 and size >= n)
            assert of_one <= max(128, 2 * n - 1)


def test_sizes_by_default():
    assert graph_sizes(512, 8) == [
        (1, 128), (2, 64), (4, 32), (1, 192), (1, 256), (2, 128), (4, 64), (8, 32), (1, 384), (1, 512), (2, 256),
        (4, 128), (8, 64),
    ]  # fmt: skip


@every_bundle
@pytest.mark.parametrize("counts", [[150], [1], [40, 64], [5, 33, 20]], ids=str)
def test_prompts_that_fill_a_size_up(bundle, counts, monkeypatch):
    """Are what they are without: logits, and what the cache holds, of these sequences alone."""
    found = []
    decoder = HFDecoder(MODEL, bundle)
    capture(monkeypatch)
    prompts = [prompt(n, n) for n in counts]
    for captured in (False, True):
        kv = KVCache(bundle, 4, 200)
        graphs = PromptGraphs(decoder, kv, 200, 4, object()) if captured else None
        if graphs:  # what an earlier pass left behind is nothing of this one's
            Prompts(decoder, kv, [0, 2, 1], [prompt(50, 1)] * 3, graphs).advance()
            for i in range(3):
                kv.release(i)
        sequences = [3, 1, 0][: len(counts)]
        logits = Prompts(decoder, kv, sequences, prompts, graphs).advance()
        if graphs:
            assert sum(graph.graph.replays for graph in graphs.graphs.values()) == 2
        found.append((logits, kv))
    (logits, kv), (captured, other) = found
    assert captured.shape == (len(counts), 64)
    assert torch.allclose(captured, logits, atol=1e-4)
    assert other.lengths == kv.lengths
    for one, two in zip(kv, other, strict=True):
        for mine, theirs in ((one.key, two.key), (one.value, two.value)):
            assert mine.used == theirs.used
            for i, n in enumerate(kv.lengths):
                for a, b in zip(mine.exact(i, n), theirs.exact(i, n), strict=True):
                    assert torch.allclose(a, b, atol=1e-4)
                if mine.used[i]:  # products of other shapes sum in another order; few codes lie on an edge
                    assert (mine.dense(i) - theirs.dense(i)).norm() <= 0.05 * theirs.dense(i).norm()


@pytest.mark.parametrize("short", [0, 40, 128])
@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5)], ids=["kvquant", "kivi"])
def test_the_engine_captures_prompts(formats, short, monkeypatch):
    """Of at most so many tokens, when steps have been prepared; alone or as many as fit."""
    bundle = bundle_for(MODEL, formats)
    stand_in(monkeypatch)
    capture(monkeypatch)
    engine = Engine(HFDecoder(MODEL, bundle), bundle, 3, 200, short=short)
    engine.prepare()
    wanted = [(5, 40), (17, 30), (13, 3), (64, 50), (1, 60), (150, 12), (64, 5)]
    requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
    engine.run()
    used = [] if engine._graphs is None else [(size, g.graph.replays) for size, g in engine._graphs.graphs.items()]
    assert sum(replays for _, replays in used) == {0: 0, 40: 1, 128: 4}[short], used
    monkeypatch.undo()
    for request, (n, new) in zip(requests, wanted, strict=True):
        assert request.tokens == generated(bundle, prompt(n, n), new)


@pytest.mark.parametrize(
    "options, tokens",
    [({"capture": False}, None), ({"short": 0}, None), ({"chunk": 40}, 40), ({"max_tokens": 100}, 100)],
)
def test_which_prompts_are_captured(options, tokens, monkeypatch):
    """None without captures; none longer than a chunk or what a sequence holds."""
    stand_in(monkeypatch)
    capture(monkeypatch)
    engine = Engine(HFDecoder(MODEL, BUNDLES["kivi"]), BUNDLES["kivi"], **{"sequences": 3, "max_tokens": 200} | options)
    engine.prepare()
    assert (engine._graphs and engine._graphs.tokens) == tokens


def test_a_graphs_logits_are_the_callers(monkeypatch):
    """They stay when the graph runs again."""
    capture(monkeypatch)
    decoder, bundle = HFDecoder(MODEL, BUNDLES["kivi"]), BUNDLES["kivi"]
    kv = KVCache(bundle, 2, 200)
    graphs = PromptGraphs(decoder, kv, 128, 2, object())
    first = Prompts(decoder, kv, [0], [prompt(50, 1)], graphs).advance()
    before = first.clone()
    second = Prompts(decoder, kv, [1], [prompt(50, 2)], graphs).advance()
    assert torch.equal(first, before)
    assert not torch.equal(first, second)


def test_numbers_that_cannot_be_packed_behind_a_graph(monkeypatch):
    """Both prompts of the pass are tried again, each for itself; who comes later finds everything as it was."""
    stand_in(monkeypatch)
    capture(monkeypatch)
    bundle = BUNDLES["kvquant"]
    engine = Engine(HFDecoder(MODEL, bundle), bundle, 3, 200, short=256)
    engine.prepare()
    assert engine._graphs is not None
    free, bad, places = engine.kv.free_tokens(), engine._graphs.fitting(2, 100), []
    own = type(bad).run

    def poisoned(graph, prompts, intake):
        logits = own(graph, prompts, intake)
        places.append(len(prompts))
        if prompt(100, 1) in list(map(list, prompts)):
            graph.numbers[1][0].fill_(torch.nan)
        return logits

    monkeypatch.setattr(type(bad), "run", poisoned)
    requests = [engine.submit(prompt(100, seed), 5) for seed in (1, 2)]
    engine.run()
    assert [request.reason for request in requests] == ["failed", "length"]
    assert places == [2, 1, 1]
    assert engine.kv.free_tokens() == free
    later = engine.submit(prompt(70), 5)
    engine.run()
    monkeypatch.undo()
    assert requests[1].tokens == generated(bundle, prompt(100, 2), 5)
    assert later.tokens == generated(bundle, prompt(70), 5)


def test_many_tokens_are_worth_a_pass_without_a_graph(monkeypatch):
    """Few ones are divided into what graphs take."""
    bundle, passes = BUNDLES["kivi"], []
    stand_in(monkeypatch)
    capture(monkeypatch)
    own = Prompts.advance
    monkeypatch.setattr(Prompts, "advance", lambda self: passes.append(list(map(len, self.prompts))) or own(self))
    engine = Engine(HFDecoder(MODEL, bundle), bundle, 8, 200, short=128)
    engine.prepare()
    for counts, expected in (
        ([60] * 3, [[60, 60], [60]]),  # 180 tokens, two of 64 fit
        ([90] * 3, [[90] * 3]),  # 270: more than twice 128
        ([30] * 7, [[30] * 4, [30] * 3]),
        ([33] * 5, [[33] * 5]),  # two at a time would be 3 passes of 128
    ):
        passes.clear()
        for n in counts:
            engine.submit(prompt(n, n), 1)
        engine.run()
        assert passes == expected


def test_without_memory_for_graphs(monkeypatch):
    """It is told, and then the engine goes on with steps alone."""
    stand_in(monkeypatch)
    capture(monkeypatch)
    bundle = BUNDLES["kvquant"]

    def fail(*_):
        raise torch.OutOfMemoryError("somebody else took it")

    engine = Engine(HFDecoder(MODEL, bundle), bundle, 3, 200)
    monkeypatch.setattr(runtime.engine, "PromptGraphs", fail)
    with pytest.raises(torch.OutOfMemoryError, match="somebody else took it") as found:
        engine.prepare()
    assert "prompts of up to 200 tokens (short=200): this engine goes on without them; make it with short=0" in str(
        found.value.__notes__
    )
    request = engine.submit(prompt(50), 5)
    engine.run()
    assert (request.reason, engine._graphs) == ("length", None)


def test_a_negative_number_of_tokens():
    bundle = BUNDLES["kivi"]
    with pytest.raises(ValueError, match=r"short=-1: must be at least 1 token, or 0 for no graphs of prompts"):
        Engine(HFDecoder(MODEL, bundle), bundle, short=-1)
