"""The engine on a GPU: steps queued ahead and captured, prompts in chunks and behind prefixes, on a crowded pool."""

import copy

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from transformers import LlamaConfig  # noqa: E402

from benchmarks.soak import Load, soak  # noqa: E402
from runtime import Engine, KVCache, reuse  # noqa: E402
from runtime.decoding import DeviceSteps  # noqa: E402
from runtime.hf_decoder import HFDecoder  # noqa: E402
from runtime.prompts import Prompt, PromptGraphs, Prompts  # noqa: E402
from tests.formats import kivi, kvquant  # noqa: E402
from tests.runtime.test_engine import prompt  # noqa: E402
from tests.runtime.tiny_models import SIZE, bundle_for, tiny  # noqa: E402

MODEL = tiny(LlamaConfig(**SIZE | {"hidden_size": 256, "head_dim": 64}))
BUNDLES = {"kvquant": bundle_for(MODEL, kvquant(3, t=64)), "kivi": bundle_for(MODEL, kivi(2, t=64, recent=5))}
every_bundle = pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)


@every_bundle
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_nothing_is_left_behind_and_no_token_is_wrong(bundle, dtype) -> None:
    """Requests of random lengths, greedy and drawn, that stop and are cancelled, against each alone."""
    load = Load(120, 6, sequences=8, longest_prompt=150, most_new=60, chunk=40, pool=900, cancelled=0.3)
    found = soak(copy.deepcopy(MODEL).to("cuda", dtype), bundle, load, False, lambda task, n: None)
    assert (found["leaks"], found["wrong"]) == ({}, [])
    assert found["same"] + found["near"] == 6
    assert sum(found["ended"].values()) == 120


@every_bundle
def test_behind_a_prefix(bundle) -> None:
    """Pages are shared, forked and gone on from; first tokens are those of the CPU."""
    firsts = []
    for device in ("cuda", "cpu"):
        decoder = HFDecoder(copy.deepcopy(MODEL).to(device), bundle)
        engine = Engine(decoder, bundle, sequences=3, max_tokens=300, prefixes=1)
        prefix = engine.prefix(prompt(200, 1))
        requests = [engine.submit(prompt(n, n), 20, prefix=prefix) for n in (3, 70, 20)]
        engine.run()
        engine.drop(prefix)
        assert [len(request.tokens) for request in requests] == [20] * 3
        assert engine.kv.lengths == [0] * 4
        firsts.append([request.tokens[0] for request in requests])
    assert firsts[0] == firsts[1]


@every_bundle
@pytest.mark.parametrize("short", [0, 256])
def test_behind_texts_that_are_kept(bundle, short) -> None:
    """Whole ones, and where formats allow it their beginnings, beside one that runs; first tokens are the CPU's."""
    found = []
    for device in ("cuda", "cpu"):
        decoder = HFDecoder(copy.deepcopy(MODEL).to(device), bundle)
        engine = Engine(decoder, bundle, sequences=3, max_tokens=900, reuse=2, short=short)
        other = engine.submit(prompt(400, 5), 90)
        firsts = []
        for text in (
            prompt(300, 1),
            [*prompt(300, 1), *prompt(80, 2)],
            [*prompt(290, 1), *prompt(9, 3)],
            prompt(390, 5),
        ):
            request = engine.submit(text, 1)
            for _ in engine.stream(request):
                pass
            firsts.append((request.reused, request.tokens))
        engine.run()
        engine.reuse.clear()
        assert (len(other.tokens), engine.kv.lengths) == (90, [0] * 5)
        found.append(firsts)
    assert found[0] == found[1]
    assert found[0][1][0] == 300


@pytest.mark.parametrize("short", [0, 256])
def test_a_chat_in_full_precision_is_as_if_nothing_were_kept(short, monkeypatch) -> None:
    """No page is packed: what steps queued ahead leave of a request that a stop token ends, among others,
    is what its text says."""
    monkeypatch.setattr(reuse, "LEAST", 64)
    bundle = bundle_for(MODEL, kivi(2, t=64, recent=600))
    decoder = HFDecoder(copy.deepcopy(MODEL).to("cuda"), bundle)
    found = []
    for kept in (0, 3):
        engine = Engine(decoder, bundle, sequences=3, max_tokens=500, reuse=kept, short=short)
        others, text, said, cached = [], prompt(150, 1), [], 0
        for turn in range(4):
            stop: list[int] = []
            for _ in range(2):  # the whole answer, then until one of its tokens comes
                request = engine.submit(text, 25, stop=stop)
                # Behind the chat's sequence, so that their steps cover it when its request has ended.
                others = others or [engine.submit(prompt(20 + i, i), 300) for i in range(2)]
                for _ in engine.stream(request):
                    pass
                said.append(request.tokens)
                cached += request.reused
                stop = request.tokens[11:12]
            assert request.reason == "stop"
            text = [*text, *request.tokens, *prompt(7, turn)]
        engine.run()
        found.append([*said, *(other.tokens for other in others)])
        assert (cached > 450) == bool(kept)
    assert found[0] == found[1]


@pytest.mark.parametrize("formats", [kvquant(3, t=64), kivi(2, t=64, recent=5), kvquant(4, t=32)], ids=str)
def test_steps_captured_beside_what_the_cache_holds(formats) -> None:
    """A graph runs once before it is captured; as bytes, that changes nothing of any sequence."""
    bundle = bundle_for(MODEL, formats)
    decoder = HFDecoder(copy.deepcopy(MODEL).to("cuda", torch.float16))
    found = []
    for late in (False, True):
        kv = KVCache(bundle, 3, 300, torch.float16, "cuda")
        steps = None if late else DeviceSteps(decoder, kv, [1, 2, 3])
        for i, n in enumerate((1, 190, 66)):
            Prompt(decoder, kv, i, prompt(n, n), None).advance()
        steps = steps or DeviceSteps(decoder, kv, [1, 2, 3])
        found.append(torch.stack([steps.run(dict.fromkeys(range(3), 7 + token % 50)).clone() for token in range(70)]))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("b", [1, 3])
def test_compiled_layers_are_those_of_the_model(b) -> None:
    """Steps of compiled layers, whose kernels begin before those before them have ended, captured and repeated."""
    model = copy.deepcopy(MODEL).to("cuda", torch.float16)
    bundle, logits = BUNDLES["kivi"], []
    for compile in (False, True):
        decoder = HFDecoder(model, bundle, compile=compile)
        kv = KVCache(bundle, b, 300, torch.float16, "cuda")
        steps = DeviceSteps(decoder, kv, [b])
        for i in range(b):
            Prompt(decoder, kv, i, prompt(100 + i, i), None).advance()
        given = [steps.run(dict.fromkeys(range(b), 7 + token)).clone() for token in range(30)]
        logits.append(torch.stack(given))
    # Rounding to halves, in another order, through pages that are packed from it.
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].std()


@every_bundle
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_prompts_from_graphs(bundle, dtype) -> None:
    """Prompts of all sizes, alone and several in a pass, are what they are without graphs: logits and pages."""
    decoder = HFDecoder(copy.deepcopy(MODEL).to("cuda", dtype), bundle)
    pool, found = torch.cuda.graph_pool_handle(), []
    for captured in (False, True):
        kv = KVCache(bundle, 4, 600, dtype, "cuda")
        graphs = PromptGraphs(decoder, kv, 512, 4, pool) if captured else None
        logits = []
        for counts in ([1], [129], [512], [64, 64, 3], [256, 200], [30, 20, 10, 30]):
            assert graphs is None or graphs.fitting(len(counts), max(counts))
            logits.append(Prompts(decoder, kv, range(len(counts)), [prompt(n, n) for n in counts], graphs).advance())
            logits[-1] = logits[-1].clone()
            for layer in kv.paged:
                logits += [side.dense(i) for side in (layer.key, layer.value) for i in range(4) if side.used[i]]
            for i in range(4):
                kv.release(i)
        found.append(logits)
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        # Matrices of other shapes are multiplied in another order; few codes lie on an edge.
        assert (one.float() - other.float()).norm() <= 0.05 * one.float().norm()


def content(kv: KVCache, i: int) -> list[torch.Tensor]:
    """Exact tokens and decoded pages of a sequence."""
    sides = [(side, layer.lengths[i]) for layer in kv.paged for side in (layer.key, layer.value)]
    exact = [x.clone() for side, n in sides for x in side.exact(i, n)]
    return exact + [side.dense(i) for side, _ in sides if side.used[i]]


@every_bundle
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("before", [3, 64, 333])
def test_prompts_behind_a_sequence(bundle, dtype, before) -> None:
    """From graphs, where flash attention takes the numbers, without, and in chunks: logits, and what the cache holds.

    The sequence stays as it is, and who comes behind it decodes."""
    decoder = HFDecoder(copy.deepcopy(MODEL).to("cuda", dtype), bundle)
    pool, found = torch.cuda.graph_pool_handle(), []
    for way in ("graphs", "pass", "chunks"):
        kv = KVCache(bundle, 5, 900, dtype, "cuda")
        graphs = PromptGraphs(decoder, kv, 512, 4, pool) if way == "graphs" else None
        if graphs:
            graphs.add_behind(600)
            assert bool(graphs.fitting(1, 10, before)) == (dtype != torch.float32)
            assert graphs.fitting(1, 10, 601) is None
        Prompt(decoder, kv, 4, prompt(before, 1), None).advance()
        source = content(kv, 4)
        kept = []
        for counts in ([1], [129], [512], [64, 64, 3], [256, 200], [30, 20, 10, 30]):
            prompts = [prompt(n, n) for n in counts]
            if way == "chunks":
                logits = []
                for i, tokens in enumerate(prompts):
                    work = Prompt(decoder, kv, i, tokens, max(1, len(tokens) // 2), 4)
                    while (done := work.advance()) is None:
                        pass
                    logits.append(done)
                kept.append(torch.stack(logits))
            else:
                kept.append(Prompts(decoder, kv, range(len(counts)), prompts, graphs, 4).advance().clone())
            assert kv.lengths == [before + n for n in counts] + [0] * (4 - len(counts)) + [before]
            kept += [x for i in range(len(counts)) for x in content(kv, i)]
            steps = DeviceSteps(decoder, kv, [4], capture=False)
            kept.append(steps.run(dict.fromkeys(range(len(counts)), 7)).clone())
            for i in range(4):
                kv.release(i)
        assert all(torch.equal(a, b) for a, b in zip(source, content(kv, 4), strict=True))
        found.append(kept)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            # Matrices of other shapes are multiplied in another order; few codes lie on an edge, more of halves.
            near = {torch.float32: 0.05, torch.float16: 0.1, torch.bfloat16: 0.3}[dtype]
            assert (one.float() - other.float()).norm() <= near * one.float().norm()


@every_bundle
def test_the_engine_goes_on_from_prompts_of_graphs(bundle) -> None:
    """While others decode: tokens are those of an engine without graphs."""
    found = []
    for short in (0, 256):
        decoder = HFDecoder(copy.deepcopy(MODEL).to("cuda"), bundle)
        engine = Engine(decoder, bundle, sequences=3, max_tokens=400, short=short)
        engine.prepare()
        requests = [engine.submit(prompt(n, n), 40) for n in (5, 161, 250, 64, 64, 64, 300, 30)]
        engine.run()
        found.append([request.tokens for request in requests])
    # A code on the edge may change what comes later, in few.
    assert [tokens[0] for tokens in found[0]] == [tokens[0] for tokens in found[1]]
    assert sum(one == other for one, other in zip(*found, strict=True)) >= 6
