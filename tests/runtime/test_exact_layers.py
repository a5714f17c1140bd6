"""Layers in full precision, sliding windows and capped logits in the cache, against attention in float64."""

import copy

import numpy as np
import pytest
import torch

from artifacts import ModelFingerprint, Rope
from runtime import CacheFullError, Engine, KVCache, exact
from runtime.cpu import PageReader
from runtime.exact import causal_attention, visible
from runtime.hf_decoder import HFDecoder
from runtime.units import units
from tests.formats import cache_numbers, kivi, kvquant, random_bundle
from tests.oracles.attention import attention, float32_bound
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny
from tests.standins import run_on

H_Q, H_KV, D, WINDOW, SOFTCAP = 4, 2, 32, 20, 5.0
PASSES = [(7,), (50, 1, 1, 30), (5, 5, 5, 5, 5, 1), (20, 1), (19, 1, 1), (1,) * 45, (90, 12)]


def bundle(layers, sliding=(), softcap=None):
    rope = Rope(D, "half", 1.0, "default")
    model = ModelFingerprint("m", "M", len(layers), H_Q, H_KV, D, rope, "0", "0", sliding, softcap)
    return random_bundle(layers, H_Q, H_KV, D, model=model)


def tokens(m, seed=0):
    q = torch.randn(1, H_Q, m, D, generator=torch.Generator().manual_seed(seed))
    k, v = (torch.from_numpy(cache_numbers((1, m, H_KV, D), seed + i)).transpose(1, 2) for i in (1, 2))
    return q, k, v


def attend(kv, *qkv, sequences=None):
    first = [kv.lengths[i] for i in (sequences or range(kv.b))]
    positions = torch.tensor(first)[:, None] + torch.arange(qkv[0].shape[2])
    return torch.stack([layer.attend(*qkv, positions, None, D**-0.5, sequences) for layer in kv])


def outputs(kv, passes):
    """Of a sequence whose tokens come in passes of these sizes [layers, h_q, n, d], and the tokens."""
    q, k, v = tokens(sum(passes))
    outs, start = [], 0
    for m in passes:
        rows = slice(start, start := start + m)
        outs.append(attend(kv, q[:, :, rows], k[:, :, rows], v[:, :, rows])[:, 0].transpose(1, 2))
    return torch.cat(outs, 2), (q[0], k[0], v[0])


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("passes", PASSES, ids=str)
@pytest.mark.parametrize("reserve", [None, 102])
@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_attention_is_exact_in_whatever_passes(passes, window, softcap, reserve, device, monkeypatch):
    """A layer without a format, and one of which the pages never fill, on the page kernels' path; likewise where steps
    are a GPU's."""
    run_on(device, monkeypatch)
    given = bundle([None, kivi(2, 32, recent=400)], (window, window) if window else (), softcap)
    kv = KVCache(given, 1, reserve)
    found, (q, k, v) = outputs(kv, passes)
    q, k, v = (x.double().numpy() for x in (q, k, v))
    expected = attention(q, k, v, D**-0.5, window, softcap)
    bound = float32_bound(q, k, v, D**-0.5, np.zeros_like(k), np.zeros_like(v), window, softcap)
    for layer in found:
        assert (np.abs(layer.double().numpy() - expected) <= bound).all()


@pytest.mark.parametrize("passes", [(70, 1, 1, 1), (40, 30, 1), (70, 20)], ids=str)
@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5, sinks=2)], ids=["kvquant", "kivi"])
def test_pages_behind_the_window_are_not_seen(formats, passes):
    """What stands in a page may change places there (which leaves the page's scales alone) once nobody may see it."""
    given = bundle([formats], (WINDOW,), SOFTCAP)
    q, k, v = tokens(sum(passes))
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, 3:30] = x[:, :, 3:30].flip(2)
    outs = []
    for keys, values in ((k, v), changed):
        kv, start, found = KVCache(given, 1), 0, []
        for m in passes:
            rows = slice(start, start := start + m)
            found.append(attend(kv, q[:, :, rows], keys[:, :, rows], values[:, :, rows])[0, 0])
        assert kv.paged[0].key.used[0] >= 1
        outs.append(torch.cat(found)[30 + WINDOW :])
    whole = KVCache(bundle([formats]), 1)
    assert not torch.allclose(outs[0], outputs(whole, passes)[0][0].transpose(0, 1)[30 + WINDOW :], atol=1e-3)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("formats", [kvquant(3, t=32), kivi(2, t=32, recent=5, sinks=2)], ids=["kvquant", "kivi"])
def test_pages_wholly_behind_the_window_are_skipped(formats, monkeypatch):
    """And the others give what decoding all pages and masking gives."""
    kv = KVCache(bundle([formats], (WINDOW,), SOFTCAP), 1)
    outputs(kv, (170,))
    read = []
    for name in ("scores", "weighted_sum"):
        real = getattr(PageReader, name)

        def counted(reader, x, *args, real=real, name=name):
            read.append((name, (args[0] if name == "scores" else args[-1]).numel()))
            return real(reader, x, *args)

        monkeypatch.setattr(PageReader, name, counted)
    step = tokens(3, 9)
    whole = copy.deepcopy(kv).layers[0]
    dense = whole._attend_dense(0, *(x[0] for x in step), D**-0.5)
    found = attend(kv, *step)[0, 0].transpose(0, 1)
    sinks, packed = formats.sinks, kv.paged[0].key.used[0]
    assert packed == (170 - sinks - formats.key.window.recent) // 32
    assert read == [(name, packed - (170 - WINDOW + 1 - sinks) // 32) for name in ("scores", "weighted_sum")]
    assert (found - dense).abs().max() <= 1e-5 * dense.abs().max()


@pytest.mark.parametrize("reserve", [None, 10, 300])
def test_bytes_are_those_of_the_geometry(reserve):
    given = bundle([None, kvquant(3, t=32), None], (WINDOW, 0, 0))
    kv = KVCache(given, 2, reserve)
    if reserve:
        assert kv.nbytes == 2 * given.geometry.cache_bytes(reserve, 4)
    n = min(reserve or 100, 100)
    q, k, v = (x.expand(2, -1, -1, -1) for x in tokens(n))
    attend(kv, q, k, v)
    assert kv.layers[0].keys.shape[1] == min(n, WINDOW) if not reserve else min(reserve, WINDOW)
    if reserve:
        assert kv.nbytes == 2 * given.geometry.cache_bytes(reserve, 4)
    counted = 8 * (kv.nbytes + given.geometry.bundle_bytes) / (2 * given.geometry.numbers(n))
    assert kv.bits == pytest.approx(counted)


def test_more_than_was_reserved():
    kv = KVCache(bundle([None], (WINDOW,)), 1, 30)
    attend(kv, *tokens(25))
    with pytest.raises(CacheFullError, match="holds 25 tokens and would get 6 more, but 30 were reserved"):
        attend(kv, *tokens(6))
    assert kv.lengths == [25]
    assert kv.free_tokens() == 30


def test_budgets_pay_for_layers_in_full_precision():
    given = bundle([None, kvquant(3, t=32)])
    exact = 2 * 400 * 2 * H_KV * D * 4
    enough = 2 * given.geometry.cache_bytes(400, 4)
    assert KVCache(given, 2, 400, budget=enough).nbytes <= enough
    half = (exact + enough) // 2
    assert exact < KVCache(given, 2, 400, budget=half).nbytes <= half
    for layers in (given, bundle([None, None])):
        with pytest.raises(CacheFullError, match=rf"budget={exact - 1}: full precision and tables of 2 sequences take"):
            KVCache(layers, 2, 400, budget=exact - 1)


def test_sequences_come_go_and_fork():
    """Each goes on as it would alone."""
    given = bundle([None, kvquant(3, t=32), None], (WINDOW, 0, 0))
    alone = {}
    for seed, n in ((0, 33), (40, 5)):
        alone[seed] = KVCache(given, 1, 200)
        attend(alone[seed], *tokens(n, seed))
    kv = KVCache(given, 3, 200)
    attend(kv, *tokens(33, 0), sequences=[1])
    attend(kv, *tokens(60, 3), sequences=[0])
    kv.release(0)
    attend(kv, *tokens(5, 40), sequences=[0])
    kv.fork(1, 2)
    kv.select([2, 0, 1, 1])
    for i, seed in ((0, 0), (1, 40), (2, 0), (3, 0)):
        one = copy.deepcopy(alone[seed])
        for step, m in ((50, 1), (53, 30)):
            assert torch.equal(attend(kv, *tokens(m, step), sequences=[i]), attend(one, *tokens(m, step)))


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2-capped", "gemma3-two-ropes", "gemma3-with-images"])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("device", ["cpu", "stand-in", "graphs"])
def test_the_engine_serves_them(family, chunk, device, monkeypatch):
    """Its tokens are those of generate() on the model's own cache, nothing being packed."""
    run_on(device, monkeypatch)
    model = tiny(CONFIGS[family])
    given = bundle_for(model, kivi(2, 32, recent=400))
    engine = Engine(
        HFDecoder(model, given), given, sequences=2, max_tokens=120, chunk=chunk, capture=device == "graphs"
    )
    prompts = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 60, 33)]
    requests = [engine.submit(p.tolist(), 30) for p in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        with torch.no_grad():
            own = model.generate(prompt[None], max_new_tokens=30, do_sample=False, pad_token_id=0)
        assert request.tokens == own[0, prompt.numel() :].tolist()


def test_visible():
    assert visible(2, 5, 0, torch.device("cpu")).tolist() == [[True] * 4 + [False], [True] * 5]
    assert visible(2, 5, 2, torch.device("cpu")).tolist() == [
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caps_in_half_precision(dtype):
    """Computed in float32: off by the rounding of the result alone, 2^-8 or 2^-11 of it, and of float32's sums."""
    q, k, v = (x.to(dtype) for x in tokens(40))
    expected = attention(*(x[0].double().numpy() for x in (q, k, v)), D**-0.5, WINDOW, SOFTCAP)
    found = causal_attention(q, k, v, D**-0.5, WINDOW, SOFTCAP)
    assert found.dtype == dtype
    off = np.abs(found[0].double().numpy() - expected)
    assert (off <= torch.finfo(dtype).eps * np.abs(expected) + 1e-4 * np.abs(v.double().numpy()).max()).all()


@pytest.mark.parametrize("window", [0, WINDOW])
def test_as_many_scores_are_held_at_a_time_as_there_is_room_for(window, monkeypatch):
    q, k, v = (x.expand(3, -1, -1, -1) for x in tokens(90))
    whole = causal_attention(q, k, v, D**-0.5, window, SOFTCAP)
    held = []
    monkeypatch.setattr(exact, "SCORES", 3 * H_Q * 90 * 7)
    masks = exact.visible
    monkeypatch.setattr(exact, "visible", lambda m, n, *rest: held.append(m * n) or masks(m, n, *rest))
    assert torch.allclose(causal_attention(q, k, v, D**-0.5, window, SOFTCAP), whole, rtol=1e-5, atol=1e-6)
    assert len(held) > 1
    assert 3 * H_Q * max(held) <= exact.SCORES
    monkeypatch.setattr(exact, "SCORES", 1)  # less than a query's
    assert torch.allclose(causal_attention(q, k, v, D**-0.5, window, SOFTCAP), whole, rtol=1e-5, atol=1e-6)


def test_units_of_layers_that_differ():
    """One for each way to treat scores, and for layers in full precision, however many there are."""
    given = bundle([kvquant(3), None, None, kvquant(3), kvquant(3)], (0, WINDOW, WINDOW, WINDOW, 0), SOFTCAP)
    sources = [unit.source for unit in units(given, [torch.float16], [(1, 9999, 132)])]
    said = [tuple(name in source for name in ("SLIDING = true", "CAPPED = true", "EXACT = 1")) for source in sources]
    assert sorted(said) == [(False, True, False), (True, True, False), (True, True, True)]
    ways = [(1, 9999, 132), (1024, 300, 132)]  # warps alone where there is no window
    assert sum("ALONE = true" in unit.source for unit in units(given, [torch.float16], ways)) == 1
