"""Attached models compute what they always did, whatever happened in between, and keep their passes apart."""

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from runtime import CacheFullError
from runtime.hf import SignpostCache, attach
from tests.formats import exact_window, kivi, kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

FORMAT = kvquant(3, t=32)
IDS = torch.randint(2, 64, (2, 90), generator=torch.Generator().manual_seed(0))
ONE = IDS[:, :1]


@pytest.fixture(scope="module")
def model():
    return tiny(CONFIGS["llama"])


@pytest.fixture(scope="module")
def other():
    """Another model with layers, heads and weights of its own."""
    return tiny(CONFIGS["qwen3-norm"], seed=1)


def cache_for(model, max_tokens=None):
    return SignpostCache(model, bundle_for(model, FORMAT), max_tokens)


@torch.no_grad()
def logits(model, ids, cache=None, **options):
    return model(ids, past_key_values=cache, use_cache=cache is not None, **options).logits


@contextmanager
def inside_a_layer(model, action):
    """Runs `action` in every forward pass, before the model's second layer."""
    hook = model.base_model.layers[1].register_forward_pre_hook(lambda module, args: action())
    try:
        yield
    finally:
        hook.remove()


def test_plain_passes_are_what_they_were(model):
    fresh = copy.deepcopy(model)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        fresh.set_attn_implementation(implementation)
        cache = cache_for(model)
        logits(model, IDS, cache)
        assert model.config._attn_implementation == implementation
        assert torch.equal(logits(model, IDS), logits(fresh, IDS))
        logits(model, ONE, cache)
        plain = DynamicCache()
        assert torch.equal(logits(model, IDS, plain), logits(fresh, IDS, DynamicCache()))
        assert plain.get_seq_length() == 90
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_pass_that_is_broken_off_leaves_no_trace(model, error):
    """KeyboardInterrupt is what a notebook's stop button raises."""

    def fail():
        raise error

    before = logits(model, IDS)
    cache = cache_for(model)
    logits(model, IDS, cache)
    with inside_a_layer(model, fail), pytest.raises(error):
        logits(model, ONE, cache)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, IDS), before)
    expected = logits(model, IDS, cache_for(model))
    assert torch.equal(logits(model, IDS, cache_for(model)), expected)
    # The first layer has the broken step's token, the second has not: never continued in silence.
    with pytest.raises(
        ValueError, match="an earlier pass was broken off half-way, and some layers hold tokens that others"
    ):
        logits(model, ONE, cache)
    cache.reset()
    assert torch.equal(logits(model, IDS, cache), expected)


def test_two_caches_take_turns(model):
    alone = [cache_for(model) for _ in range(2)]
    turns = [cache_for(model) for _ in range(2)]
    texts = [IDS, IDS.flip(1)]
    expected = [
        [logits(model, x, cache) for x in (text, ONE, text[:, :5])] for text, cache in zip(texts, alone, strict=True)
    ]
    for step in range(3):
        for i, text in enumerate(texts):
            out = logits(model, (text, ONE, text[:, :5])[step], turns[i])
            assert torch.equal(out, expected[i][step])


def test_two_models_take_turns(model, other):
    expected = [[logits(m, IDS, cache := cache_for(m)), logits(m, ONE, cache)] for m in (model, other)]
    caches = [cache_for(model), cache_for(other)]
    for step, ids in enumerate((IDS, ONE)):
        for i, m in enumerate((model, other)):
            assert torch.equal(logits(m, ids, caches[i]), expected[i][step])


@pytest.mark.parametrize("inner", ["plain", "own cache", "other model", "plain cache"])
@pytest.mark.parametrize("outer", ["compressed", "plain"])
def test_a_pass_inside_of_a_pass(model, other, outer, inner):
    def run_outer():
        return logits(model, IDS, cache_for(model) if outer == "compressed" else None)

    def run_inner():
        m = other if inner == "other model" else model
        cache = {"plain": None, "plain cache": DynamicCache()}.get(
            inner, cache_for(m) if "plain" not in inner else None
        )
        return logits(m, IDS[:1, :50], cache)

    alone, inner_alone, results = run_outer(), run_inner(), []

    def once():
        if not results:
            results.append(None)  # the inner pass comes by here as well
            results[0] = run_inner()

    with inside_a_layer(model, once):
        nested = run_outer()
    assert torch.equal(nested, alone)
    assert torch.equal(results[0], inner_alone)
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"


def test_a_copied_model_has_caches_of_its_own(model):
    expected = logits(model, IDS, cache_for(model))
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, IDS, cache_for(twin)), expected)
    twin.lm_head.weight.zero_()
    assert torch.equal(logits(model, IDS, cache_for(model)), expected)
    assert (logits(twin, IDS, cache_for(twin)) == 0).all()


def test_a_copied_cache_lives_its_own_life(model):
    """As prompts are shared: the cache of the common beginning is copied for each continuation."""
    common = cache_for(model)
    logits(model, IDS, common)
    twin = copy.deepcopy(common)
    expected = logits(model, ONE, common)
    logits(model, IDS[:, :70], common)
    assert torch.equal(logits(model, ONE, twin), expected)
    assert (common.get_seq_length(), twin.get_seq_length()) == (161, 91)


def test_attaching_again_wraps_nothing_again(model):
    attach(model)
    wrapped = model.base_model.forward
    attach(model)
    assert model.base_model.forward is wrapped


def test_a_cache_belongs_to_one_model(model, other):
    cache = cache_for(model)
    cache_for(other)
    with pytest.raises(ValueError, match="this cache was made for another model: make one for each model"):
        logits(other, ONE, cache)
    stranger = tiny(CONFIGS["llama"], seed=3)  # never attached
    with pytest.raises(RuntimeError, match="this cache computes attention itself, and was passed around it"):
        logits(stranger, ONE, cache)
    assert cache.get_seq_length() == 0


def test_a_cache_passed_by_position_is_refused(model):
    cache = cache_for(model)
    with pytest.raises(RuntimeError, match="with the keyword cache= or past_key_values="), torch.no_grad():
        model.base_model(ONE, None, None, cache)


def test_attention_outside_of_a_cache(model, monkeypatch):
    attach(model)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "signpost")
    layer, angles = model.base_model.layers[0].self_attn, (torch.ones(1, 1, 32), torch.zeros(1, 1, 32))
    with pytest.raises(
        RuntimeError, match="signpost attention runs only inside a forward pass with cache= or past_key_values="
    ):
        layer(torch.zeros(1, 1, 64), position_embeddings=angles, attention_mask=None)


def test_a_full_cache_takes_what_still_fits(model):
    cache = cache_for(model, max_tokens=95)
    logits(model, IDS, cache)
    with pytest.raises(CacheFullError, match="sequence 0 holds 90 tokens and would get 6 more, but 95 were reserved"):
        logits(model, IDS[:, :6], cache)
    assert cache.get_seq_length() == 90
    roomy = cache_for(model)
    logits(model, IDS, roomy)
    assert torch.equal(logits(model, IDS[:, :5], cache), logits(model, IDS[:, :5], roomy))


def test_reset_and_selection(model):
    cache = cache_for(model)
    expected = logits(model, IDS, cache), logits(model, ONE, cache)
    assert cache.nbytes > 0
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert torch.equal(logits(model, IDS, cache), expected[0])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(logits(model, ONE, cache), expected[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_keys_are_the_keys_before_rope(name, monkeypatch):
    """Against what the model's own `apply_rotary_pos_emb` was given: 8-bit codes are off by half a step of the range.

    Equal tokens would not tell: any rotation that is undone before attention gives them.
    """
    model = tiny(CONFIGS[name])
    module, given = sys.modules[type(model).__module__], []
    original = module.apply_rotary_pos_emb

    def recording(q, k, *args, **kwargs):
        given.append((k.clone(), original(q, k, *args, **kwargs)[1]))
        return original(q, k, *args, **kwargs)

    formats = kivi(8, t=32, recent=0, sinks=1)
    formats = replace(formats, key=replace(formats.key, domain="pre_rope"))
    cache = SignpostCache(model, bundle_for(model, formats))
    monkeypatch.setattr(module, "apply_rotary_pos_emb", recording)
    logits(model, IDS, cache)
    assert len(given) == len(cache.kv.layers)
    paged = [(layer, *keys) for layer, keys in zip(cache.kv, given, strict=True) if layer in cache.kv.paged]
    assert len(paged) == sum(formats is not None for formats in cache.bundle.layers) > 0
    for layer, before, after in paged:
        for i in range(2):
            true, rotated = (x[i].transpose(0, 1)[1:65] for x in (before, after))
            packed = layer.key.dense(i)[..., : true.shape[-1]]  # Phi rotates a part of the channels, cut off before
            groups = true.unflatten(0, (-1, 32))
            half_step = ((groups.amax(1) - groups.amin(1)) / 255 / 2).repeat_interleave(32, 0)
            # float16 scale and zero point: 2^-11 of each; the rotation back and forth: 14 roundings of 2^-24 of a pair.
            slack = (
                2**-10 * groups.abs().amax(1).repeat_interleave(32, 0)
                + 14 * 2**-24 * true.abs().amax(-1, keepdim=True) * 2
            )
            assert ((packed - true).abs() <= half_step + slack).all()
            assert ((packed - rotated).abs() > half_step + slack).any()


def test_window_only_formats_pack_nothing(model):
    cache = SignpostCache(model, bundle_for(model, exact_window(100)))
    logits(model, IDS, cache)
    assert cache.kv.layers[0].key.used == [0, 0]
