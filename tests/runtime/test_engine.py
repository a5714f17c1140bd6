"""The engine on the CPU: its tokens are `generate()`'s, whatever else is in the batch, and nothing leaks."""

import random
from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from artifacts.errors import BundleMismatchError
from runtime import CacheFullError, Engine, RequestError, Sampling
from runtime.hf import SignpostCache
from runtime.hf_decoder import HFDecoder
from runtime.prompts import Prompt
from runtime.sampling import SamplingError, choose
from tests.attending import pool_bytes
from tests.formats import kivi, kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

MODEL = tiny(CONFIGS["llama"])
BUNDLES = {"kvquant": bundle_for(MODEL, kvquant(3, t=32)), "kivi": bundle_for(MODEL, kivi(2, t=32, recent=5))}
every_bundle = pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)


def engine_for(bundle, **options):
    return Engine(HFDecoder(MODEL, bundle), bundle, **{"sequences": 3, "max_tokens": 200} | options)


def prompt(n, seed=0):
    return torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(bundle, tokens, new):
    """What transformers' generate() makes of it on a fresh cache."""
    ids = torch.tensor([tokens])
    cache = SignpostCache(MODEL, bundle)
    out = MODEL.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(tokens) :].tolist()


@every_bundle
@pytest.mark.parametrize("chunk", [None, 16])
def test_tokens_are_those_of_generate(bundle, chunk):
    """More requests than sequences, prompts shorter and longer than pages and chunks, ending at different times."""
    engine = engine_for(bundle, chunk=chunk)
    wanted = [(5, 40), (77, 30), (33, 3), (64, 50), (1, 60), (150, 12)]
    requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
    engine.run()
    for request, (n, new) in zip(requests, wanted, strict=True):
        assert request.reason == "length"
        assert request.tokens == generated(bundle, prompt(n, n), new)


@every_bundle
def test_chunks_make_no_other_pages(bundle):
    caches = []
    for chunk in (None, 16):
        engine = engine_for(bundle)
        work = Prompt(engine.decoder, engine.kv, 1, prompt(150), chunk)
        assert (work.nbytes > 0) == (chunk is not None)
        while work.advance() is None:
            assert engine.kv.lengths[1] == 0
        assert work.nbytes == 0
        caches.append(engine.kv)
    for one, other in zip(*caches, strict=True):
        for a, b in ((one.key, other.key), (one.value, other.value)):
            assert a.used[1] == b.used[1] > 0
            # Attention of later layers sums in another order; few codes lie on an edge.
            assert (a.dense(1) - b.dense(1)).norm() < 0.05 * b.dense(1).norm()


def test_others_go_on_between_the_chunks_of_a_prompt():
    engine = engine_for(BUNDLES["kvquant"], chunk=10)
    first = engine.submit(prompt(5), 50)
    engine.step()
    long = engine.submit(prompt(100, 1), 4)
    for done in range(9):
        engine.step()
        assert (len(first.tokens), long.tokens) == (3 + done, [])
    engine.step()
    assert len(long.tokens) == 2  # the prompt's and the step's


def test_tokens_come_one_by_one():
    engine = engine_for(BUNDLES["kvquant"])
    other = engine.submit(prompt(20, 1), 30)
    request = engine.submit(prompt(9), 12)
    stream = engine.stream(request)
    assert [next(stream)] == request.tokens[:1]
    rest = list(stream)
    assert (len(rest), request.reason) == (11, "length")
    assert 12 <= len(other.tokens) < 30


def test_stop_conditions():
    bundle = BUNDLES["kvquant"]
    tokens = generated(bundle, prompt(9), 30)
    place = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    engine = engine_for(bundle)
    by_token = engine.submit(prompt(9), 30, stop=[tokens[place]])
    by_token_alone = engine.submit(prompt(9), 30, stop=tokens[place])
    by_sequence = engine.submit(prompt(9), 30, stop=[(63, 63, 63), tuple(tokens[place - 1 : place + 1])])
    never = engine.submit(prompt(9), 30, stop=[(tokens[place], 64)])
    engine.run()
    assert by_token.tokens == by_token_alone.tokens == by_sequence.tokens == tokens[: place + 1]
    assert (by_token.reason, by_sequence.reason) == ("stop", "stop")
    assert (never.tokens, never.reason) == (tokens, "length")


def test_draws_depend_on_the_seed_alone():
    alone, crowded = (engine_for(BUNDLES["kvquant"]) for _ in range(2))
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    expected = alone.submit(prompt(9), 30, sampling)
    alone.run()
    others = [crowded.submit(prompt(n, n), 25, Sampling(2.0, seed=n)) for n in (3, 40)]
    request = crowded.submit(prompt(9), 30, sampling)
    other_seed = crowded.submit(prompt(9), 30, Sampling(1.0, 0.9, 6))
    crowded.run()
    assert request.tokens == expected.tokens != other_seed.tokens
    assert all(other.reason == "length" for other in others)


def test_drawn_tokens_follow_the_distribution():
    """Chi-squared over 4000 draws, top-p cuts exactly; fixed seeds."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0]])
    n, temperature = 4000, 0.7
    for top_p, kept in ((1.0, [0, 1, 2, 3, 4]), (0.9, [1, 2]), (0.5, [1])):
        generators = [torch.Generator().manual_seed(i) for i in range(n)]
        tokens = choose(logits.expand(n, -1), [Sampling(temperature, top_p)] * n, generators).tolist()
        chances = (logits[0].double() / temperature).softmax(-1)[kept]
        expected = n * chances / chances.sum()
        counts = torch.tensor([tokens.count(token) for token in kept], dtype=torch.float64)
        assert int(counts.sum()) == n
        assert float(((counts - expected) ** 2 / expected).sum()) < 25  # 4 degrees of freedom: 5e-5


def test_greedy_and_drawn_rows_in_one_batch():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    draws = [torch.Generator().manual_seed(0) for _ in range(3)]
    tokens = choose(logits, [Sampling(), Sampling(1e-6), Sampling(1.0, 1e-9)], draws)
    assert torch.equal(tokens, logits.argmax(-1))


def test_cancelled_wherever_they_are():
    engine = engine_for(BUNDLES["kivi"], sequences=2, chunk=10)
    free = engine.kv.free_tokens()
    running, in_prompt, waiting = (engine.submit(prompt(n, n), 20) for n in (8, 60, 30))
    engine.step()
    engine.step()
    assert running.tokens
    assert engine.prompt
    assert engine.prompt[0] is in_prompt
    for request in (waiting, in_prompt, running):
        engine.cancel(request)
        engine.cancel(request)
        assert request.reason == "cancelled"
    assert engine.idle
    assert (engine.kv.free_tokens(), engine.kv.lengths) == (free, [0, 0])
    again = engine.submit(prompt(40), 10)
    engine.run()
    assert again.tokens == generated(BUNDLES["kivi"], prompt(40), 10)


def test_a_small_pool_makes_requests_wait():
    """Each is served in the end, with the tokens that it would have alone; the pool is never overdrawn."""
    bundle = BUNDLES["kvquant"]
    budget = pool_bytes(bundle, 250, 3, 150)
    engine = engine_for(bundle, max_tokens=150, budget=budget)
    assert engine.kv.nbytes <= budget
    requests = [engine.submit(prompt(90, i), 20) for i in range(5)]
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
    assert 1 <= most < 3
    for i, request in enumerate(requests):
        assert request.tokens == generated(bundle, prompt(90, i), 20)


def test_many_requests_leak_nothing():
    """Random lengths and cancellations on a crowded pool: pages and bytes return, tokens are a fresh cache's."""
    bundle, rng = BUNDLES["kivi"], random.Random(0)
    engine = engine_for(bundle, budget=pool_bytes(bundle, 200, 3, 200), chunk=24)
    free, size, kept = engine.kv.free_tokens(), engine.kv.nbytes, []
    for number in range(60):
        n, new = rng.randint(1, 90), rng.randint(1, 40)
        request = engine.submit(prompt(n, number), new)
        kept.append(request)
        for _ in range(rng.randint(0, 12)):
            engine.step()
        if rng.random() < 0.4:
            engine.cancel(rng.choice(kept[-4:]))
    engine.run()
    assert (engine.kv.free_tokens(), engine.kv.nbytes) == (free, size)
    assert {request.reason for request in kept} == {"length", "cancelled"}
    for request in kept[::7]:
        expected = generated(bundle, list(request.prompt), request.max_new_tokens)
        assert request.tokens == expected[: len(request.tokens)]


def test_compiled_layers_choose_the_same_tokens(monkeypatch):
    """All of the layers share what was compiled for the first ones, and the model itself stays as it was."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = tiny(LlamaConfig(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": 12}))
    bundle = bundle_for(model, kvquant(3, t=32))
    found = []
    for compile in (False, True):
        engine = Engine(HFDecoder(model, bundle, compile), bundle, sequences=2, max_tokens=200)
        requests = [engine.submit(prompt(n), 6) for n in (90, 7)]
        engine.run()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 15
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_two_engines_on_one_model():
    one, two = (engine_for(bundle) for bundle in BUNDLES.values())
    first, second = one.submit(prompt(70), 30), two.submit(prompt(70), 30)
    while not (one.idle and two.idle):
        one.step()
        two.step()
    assert first.tokens == generated(BUNDLES["kvquant"], prompt(70), 30)
    assert second.tokens == generated(BUNDLES["kivi"], prompt(70), 30)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("taken"), ValueError("NaN")])
def test_a_request_that_fails_takes_nobody_along(monkeypatch, error):
    engine = engine_for(BUNDLES["kvquant"], chunk=20)
    free = engine.kv.free_tokens()
    good = engine.submit(prompt(9), 30)
    engine.step()
    bad = engine.submit(prompt(50), 5)
    engine.step()
    with monkeypatch.context() as patch:

        def fail(*_):
            raise error

        patch.setattr(Prompt, "advance", fail)
        assert bad in engine.step()
    assert (bad.reason, bad.error) == ("failed", error)
    with pytest.raises(type(error)):
        list(engine.stream(bad))
    engine.run()
    assert good.tokens == generated(BUNDLES["kvquant"], prompt(9), 30)
    assert engine.kv.free_tokens() == free


@pytest.mark.parametrize(
    "tokens, new, options, message",
    [
        ([], 5, {}, "the prompt is empty: give at least one token"),
        ([3], 0, {}, "max_new_tokens=0: must be at least 1"),
        ([3], 1.5, {}, "max_new_tokens=1.5: must be at least 1, a whole number"),
        ([3], True, {}, "max_new_tokens=True: must be at least 1, a whole number"),
        ([3] * 190, 12, {}, r"a prompt of 190 tokens and 12 new ones: a sequence of this engine holds 200"),
        ([3], 2, {"stop": [()]}, "an empty stop sequence: name at least one token in each"),
    ],
)
def test_requests_that_can_never_be_served(tokens, new, options, message):
    engine = engine_for(BUNDLES["kvquant"])
    with pytest.raises(RequestError, match=message):
        engine.submit(tokens, new, **options)
    assert engine.idle


def test_a_prompt_longer_than_model_or_pool():
    bundle = BUNDLES["kvquant"]
    with pytest.raises(RequestError, match=r"holds 512 .* the model has 512 positions"):
        engine_for(bundle, max_tokens=5000).submit([3] * 600, 1)
    assert engine_for(bundle, max_tokens=10**12).kv.room.max_tokens == 512  # no room for what nobody can fill
    small = engine_for(bundle, sequences=1, budget=pool_bytes(bundle, 150, 1, 200))
    with pytest.raises(RequestError, match=r"budget="):
        small.submit([3] * 199, 1)


@pytest.mark.parametrize("values, message", [
    ({"temperature": -1.0}, r"temperature=-1.0: must be 0 \(greedy\), or finite and 1e-06 or more"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": 1e-320}, "temperature=1e-320"),
    ({"top_p": 0.0}, "top_p=0.0: must lie above 0 and be at most 1"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"seed": -1}, "seed=-1: must be 0 or more"),
])  # fmt: skip
def test_sampling_out_of_range(values, message):
    with pytest.raises(SamplingError, match=message):
        Sampling(**values)


def test_engines_that_make_no_sense():
    bundle = BUNDLES["kvquant"]
    for chunk in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"chunk={chunk}: must be at least 1 token, or None for whole prompts"):
            engine_for(bundle, chunk=chunk)
    for name, value in (("max_tokens", 0), ("max_tokens", 99.0), ("short", -1), ("short", 0.5)):
        with pytest.raises(ValueError, match=f"{name}={value}: must be "):
            engine_for(bundle, **{name: value})
    with pytest.raises(CacheFullError, match="budget=5000: full precision and tables of 3 sequences take"):
        engine_for(bundle, budget=5000)
    with pytest.raises(BundleMismatchError):
        HFDecoder(tiny(CONFIGS["llama-mha"]), bundle)


@every_bundle
def test_short_prompts_are_processed_together(bundle):
    """As many at first as have sequences, others as these become free; each goes on as if it were alone."""
    engine = engine_for(bundle)
    wanted = [(40, 6), (33, 9), (1, 4), (65, 5), (70, 3)]
    requests = [engine.submit(prompt(n, n), new) for n, new in wanted]
    engine.step()
    assert [len(request.tokens) for request in requests] == [2, 2, 2, 0, 0]
    engine.run()
    for request, (n, new) in zip(requests, wanted, strict=True):
        assert request.tokens == generated(bundle, prompt(n, n), new)


def test_prompts_together_are_no_more_than_a_chunk():
    engine = engine_for(BUNDLES["kvquant"], chunk=64)
    requests = [engine.submit(prompt(30, seed), 3) for seed in range(3)]
    engine.step()
    assert [len(request.tokens) for request in requests] == [2, 2, 0]
    engine.run()
    assert [request.tokens for request in requests] == [
        generated(BUNDLES["kvquant"], prompt(30, seed), 3) for seed in range(3)
    ]


def test_short_prompts_do_not_fill_up_with_a_long_one():
    """The pass would be more than twice as long as its prompts."""
    engine = engine_for(BUNDLES["kvquant"])
    requests = [engine.submit(prompt(n, n), 3) for n in (2, 2, 90)]
    engine.step()
    assert [len(request.tokens) for request in requests] == [2, 2, 0]


def test_prompts_together_wait_for_room():
    """Two find room for all of their tokens, the third when one of them has ended."""
    bundle = BUNDLES["kivi"]
    engine = engine_for(bundle, budget=pool_bytes(bundle, 330, 3, 200))
    requests = [engine.submit(prompt(40, seed), 100) for seed in range(3)]
    engine.step()
    assert [len(request.tokens) for request in requests] == [2, 2, 0]
    engine.run()
    assert all(request.reason == "length" for request in requests)
    assert requests[2].tokens == generated(bundle, prompt(40, 2), 100)


def test_what_is_none_of_ours():
    bundle = BUNDLES["kivi"]
    with pytest.raises(TypeError, match=r"'bundles/mine' is a str, not a Bundle: load it with runtime\.load\(path\)"):
        HFDecoder(MODEL, "bundles/mine")
    with pytest.raises(TypeError, match=r"None is a NoneType, not a Bundle"):
        Engine(HFDecoder(MODEL), None)
    with pytest.raises(TypeError, match=r"a LlamaForCausalLM is no decoder: runtime\.hf_decoder\.HFDecoder\("):
        Engine(MODEL, bundle)
    engine = engine_for(bundle)
    with pytest.raises(RequestError, match=r"a prompt of shape \[1, 3\]: must be the tokens of one prompt, as"):
        engine.submit(torch.tensor([[1, 2, 3]]), 1)
    request = engine.submit(torch.tensor([1, 2, 3]), 1)
    engine.run()
    assert request.reason == "length"
