"""Which models and calls are supported, what a bundle remembers of a model, and what is said to the rest."""

import inspect
import re
from dataclasses import replace

import pytest
import torch
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PersimmonConfig,
    Qwen2Config,
    SmolLM3Config,
)
from transformers.masking_utils import create_causal_mask

from artifacts import BundleMismatchError, Rope, SignpostError
from runtime.hf import SignpostCache, UnsupportedModelError, fingerprint
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import CACHE_KEYWORDS, rotary, rotary_by_layer, with_cache
from tests.formats import kivi, kvquant, random_bundle
from tests.runtime.tiny_models import CONFIGS, FALCON, LLAMA3, LOCAL, MLA, SIZE, YARN, bundle_for, tiny

IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny(CONFIGS["llama"])


@torch.no_grad()
def run(model, ids, cache, **options):
    return model(ids, past_key_values=cache, use_cache=True, **options).logits


def cache_for(model, formats=None):
    return SignpostCache(model, bundle_for(model, formats or kvquant(3, t=32)))


@torch.no_grad()
def test_a_cache_under_either_name(model):
    """transformers 5.24 calls it `cache`, and takes the old name too."""
    known = inspect.signature(type(model).forward).parameters
    names = [name for name in CACHE_KEYWORDS if name in known or "cache" in known]
    assert list(with_cache(model, None)) == names[:1]
    logits = [model(IDS, **{name: cache_for(model)}, use_cache=True).logits for name in names]
    assert all(torch.equal(other, logits[0]) for other in logits)


@pytest.mark.parametrize(
    "name, rope",
    [
        ("llama", Rope(32, "half", 1.0, "default")),
        ("llama-llama3", Rope(32, "half", 1.0, "llama3")),
        ("qwen3-norm", Rope(64, "half", 1.0, "default")),
        ("cohere-interleaved", Rope(32, "interleaved", 1.0, "default")),
        ("phi-partial", Rope(16, "half", 1.0, "default")),
        ("gpt-neox-partial", Rope(8, "half", 1.0, "default")),
    ],
)
def test_rotary_embedding(name, rope):
    model = tiny(CONFIGS[name])
    assert fingerprint(model).rope == rope
    frequencies = rotary(model)[1]
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, model.base_model.rotary_emb.inv_freq)


def test_rotary_embedding_of_the_layers_that_see_all_tokens():
    """Gemma 3's other layers have one of their own, which a bundle need not know while they are in full precision."""
    model = tiny(CONFIGS["gemma3-two-ropes"])
    (local, _), (rope, frequencies) = rotary_by_layer(model)
    assert (rope, local.kind) == (Rope(32, "half", 1.0, "linear"), "default")
    assert fingerprint(model).rope == rope
    assert torch.equal(rotary(model)[1], frequencies)
    assert torch.equal(frequencies, model.base_model.rotary_emb.full_attention_inv_freq)


@pytest.mark.parametrize(
    ("name", "sliding", "softcap"),
    [
        ("llama", (), None),
        ("mistral", (), None),
        ("mistral-sliding", (20, 20), None),
        ("gemma2-capped", (20, 0), 3.0),
        ("gemma3-two-ropes", (20, 0), None),
    ],
)
def test_windows_and_caps(name, sliding, softcap):
    found = fingerprint(tiny(CONFIGS[name]))
    assert (found.sliding, found.softcap) == (sliding, softcap)
    assert [found.window(layer) for layer in range(2)] == list(sliding or (0, 0))


def test_windows_that_are_switched_off():
    assert fingerprint(tiny(Qwen2Config(**SIZE, sliding_window=16, use_sliding_window=False))).sliding == ()
    some = Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert fingerprint(tiny(some)).sliding == (0, 16)


def test_keys_before_a_rotation_that_the_bundle_lacks():
    model = tiny(CONFIGS["gemma3-two-ropes"])
    found, frequencies = fingerprint(model), rotary(model)[1].numpy()

    def bundle(formats):
        return random_bundle(formats, found.h_q, found.h_kv, found.d, model=found, inv_freq=frequencies)

    message = (
        "layer 0 of Gemma3ForCausalLM has a rotary embedding of its own, and a bundle holds one: "
        r"keep it in full precision \(method.layers={0: null}\) or pack its keys with domain=post_rope"
    )
    for make in (lambda b: SignpostCache(model, b), lambda b: HFDecoder(model, b)):
        with pytest.raises(UnsupportedModelError, match=message):
            make(bundle([kvquant(3, t=32)] * 2))
    assert run(model, IDS, SignpostCache(model, bundle([kivi(2, t=32), kvquant(3, t=32)]))).isfinite().all()


def test_a_layer_that_does_otherwise_than_its_configuration_says(monkeypatch):
    model = tiny(CONFIGS["gemma2-capped"])
    cache = cache_for(model)
    monkeypatch.setattr(model.model.layers[1].self_attn, "attn_logit_softcapping", 7.0)
    message = (
        "attention of layer 1 with dropout=0.0, softcap=7.0, sliding_window=None, no sink logits is not supported: "
    )
    with pytest.raises(UnsupportedModelError, match=message + r".* softcap=3.0 and a window of all tokens"):
        run(model, IDS, cache)


def test_rotary_embedding_that_scales():
    rope, _ = rotary(tiny(CONFIGS["llama-yarn"]))
    assert (rope.dim, rope.layout, rope.kind) == (32, "half", "yarn")
    assert rope.scaling == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1, rel=1e-6)  # yarn, section 3.4


def test_rotary_embedding_of_half_a_head():
    model = tiny(GlmConfig(**SIZE))
    assert fingerprint(model).rope == Rope(16, "interleaved", 1.0, "default")
    assert run(model, IDS, cache_for(model)).isfinite().all()


def test_dimensions():
    seen = {name: fingerprint(tiny(config)) for name, config in CONFIGS.items()}
    for name, found in seen.items():
        h_kv = 4 if name in ("llama-mha", "gpt-neox-partial") else 2
        assert (found.l, found.h_q, found.h_kv, found.d) == (2, 4, h_kv, 64 if name == "qwen3-norm" else 32)
    assert seen["mistral"].architecture == "MistralForCausalLM"
    assert len({(x.architecture, x.config_hash, x.weights_hash, x.rope, x.sliding) for x in seen.values()}) == len(seen)


def test_names_are_hub_ids_or_folders_without_their_path(model, tmp_path, monkeypatch):
    (tmp_path / "models" / "my-llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, name in [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        (str(tmp_path / "models" / "my-llama"), "my-llama"),
        ("/gone/my-llama/", "my-llama"),
        ("models/my-llama", "my-llama"),
        ("models/../models/my-llama/", "my-llama"),
        ("", "LlamaForCausalLM"),
    ]:
        monkeypatch.setattr(model.config, "_name_or_path", given)
        assert fingerprint(model).name == name


def test_a_fingerprint_survives_saving_loading_and_other_dtypes(model, tmp_path):
    expected = replace(fingerprint(model), name="saved")
    model.save_pretrained(tmp_path / "saved")
    for dtype in (torch.float32, torch.bfloat16):
        assert fingerprint(type(model).from_pretrained(tmp_path / "saved", dtype=dtype)) == expected
    model.set_attn_implementation("eager")
    assert replace(fingerprint(model), name="saved") == expected
    model.set_attn_implementation("sdpa")


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GPT2 = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2)
LATENT = {name: getattr(MLA, name) for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")}
CHUNKS = Qwen2Config(**SIZE, layer_types=["full_attention", "chunked_attention"])
UNSUPPORTED = {
    "no rope": (GPT2, "GPT2LMHeadModel has no rotary embedding that applies to all layers alike"),
    "some without": (SmolLM3Config(**SIZE, no_rope_layers=[1, 0]), "SmolLM3ForCausalLM has layers without rotary"),
    "dynamic": (
        LlamaConfig(**SIZE, rope_parameters=DYNAMIC),
        "RoPE of type 'dynamic' changes its frequencies with the length; supported are default, linear, llama3, yarn",
    ),
    "chunks": (
        CHUNKS,
        "qwen2 has layers of kind chunked_attention: supported are full_attention and sliding_attention",
    ),
    "mla 2": (
        DeepseekV2Config(**SIZE, **LATENT),
        r"deepseek_v2 caches a latent vector \(MLA\), not keys and",
    ),
    "mla 3": (MLA, r"deepseek_v3 caches a latent vector \(MLA\), not keys and"),
    "no interface": (
        FALCON["falcon-grouped"],
        "FalconForCausalLM does not take an attention function from transformers' Attention",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models(kind):
    config, message = UNSUPPORTED[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        fingerprint(tiny(config))


def test_a_rotation_of_an_unknown_kind(model, monkeypatch):
    import transformers.models.llama.modeling_llama as module

    original = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: original(q, k, cos, -sin))
    with pytest.raises(
        UnsupportedModelError, match="rotates its keys in a way that is neither half nor interleaved RoPE"
    ):
        fingerprint(model)
    monkeypatch.delattr(module, "apply_rotary_pos_emb")
    with pytest.raises(UnsupportedModelError, match="neither half nor interleaved"):
        fingerprint(model)


OTHERS = {
    "architecture": MistralConfig(**SIZE, sliding_window=None),
    "l": LlamaConfig(**SIZE | {"num_hidden_layers": 3}),
    "h_q": LlamaConfig(**SIZE | {"num_attention_heads": 8}),
    "h_kv": LlamaConfig(**SIZE | {"num_key_value_heads": 1}),
    "d": LlamaConfig(**SIZE | {"head_dim": 64}),
    "rope": LlamaConfig(**SIZE, rope_parameters=YARN),
    "config_hash": LlamaConfig(**SIZE | {"rms_norm_eps": 1e-5}),
    "weights_hash": LlamaConfig(**SIZE | {"vocab_size": 65}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_bundle_of_another_model(model, field):
    """The message names each field that differs, with both values, and no other field."""
    mine, other = fingerprint(model), tiny(OTHERS[field])
    theirs = fingerprint(other)
    different = {name for name in OTHERS if getattr(mine, name) != getattr(theirs, name)}
    assert field in different
    with pytest.raises(BundleMismatchError) as error:
        SignpostCache(other, bundle_for(model, kvquant(3, t=32)))
    assert set(re.findall(r"(\w+): bundle has", str(error.value))) == different
    for name in different:
        assert f"{name}: bundle has" in str(error.value)
    assert "Calibrate this model, or load the model that the bundle names" in str(error.value)


def test_other_frequencies_under_the_same_kind(model):
    other = tiny(LlamaConfig(**SIZE, rope_parameters=LLAMA3 | {"factor": 4.0}))
    with pytest.raises(BundleMismatchError, match="config_hash"):
        SignpostCache(other, bundle_for(tiny(CONFIGS["llama-llama3"]), kvquant(3, t=32)))


def test_masks_of_four_dimensions(model):
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"an attention mask of 4 dimensions: only \[batch, tokens\] is supported"):
        run(model, IDS, cache_for(model), attention_mask=mask)


@pytest.mark.parametrize("shift", [-1, 1])
def test_masks_of_another_length(model, shift):
    cache = cache_for(model)
    run(model, IDS, cache)
    mask = torch.ones(2, 50 + shift)
    mask[0, 0] = 0
    message = f"an attention mask over {50 + shift} tokens, but 40 have passed and 10 are new: pass the mask of all"
    with pytest.raises(ValueError, match=message):
        run(model, IDS[:, :10], cache, attention_mask=mask)


def test_masks_that_hide_what_is_cached(model):
    cache = cache_for(model)
    run(model, IDS, cache)
    mask = torch.ones(2, 41)
    mask[1, 3:5] = 0
    with pytest.raises(
        ValueError, match=r"shows \[40, 38\] earlier tokens, but the cache holds \[40, 40\] \(by sequence\)"
    ):
        run(model, IDS[:, :1], cache, attention_mask=mask)
    assert run(model, IDS[:, :1], cache, attention_mask=torch.ones(2, 41)).isfinite().all()


def test_masks_that_are_not_causal(model, monkeypatch):
    """As models make them whose image tokens see each other."""
    import transformers.models.llama.modeling_llama as module

    def both_ways(**arguments):
        return create_causal_mask(**arguments, or_mask_function=lambda batch, head, q, k: q >= 0)

    monkeypatch.setattr(module, "create_causal_mask", both_ways)
    with pytest.raises(UnsupportedModelError, match="attention masks other than causal ones are not supported yet"):
        run(model, IDS, cache_for(model))


def test_windows_that_look_both_ways():
    config = Gemma3TextConfig(**SIZE, **LOCAL, use_bidirectional_attention=True)
    model = tiny(config)
    with pytest.raises(UnsupportedModelError, match="attention masks other than causal ones are not supported yet"):
        run(model, IDS, cache_for(model))


def test_gradients(model):
    trainable = tiny(CONFIGS["llama"]).requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"a compressed cache is for inference: call the model under torch.no_grad\(\)"
    ):
        trainable(IDS, past_key_values=cache_for(trainable), use_cache=True)


def test_dropout():
    model = tiny(LlamaConfig(**SIZE, attention_dropout=0.1)).train()
    with pytest.raises(
        UnsupportedModelError,
        match=r"attention of layer 0 with dropout=0.1, softcap=None, sliding_window=None, no sink",
    ):
        run(model, IDS, cache_for(model))


def test_attention_functions_without_positions():
    model = tiny(
        PersimmonConfig(
            **{k: v for k, v in SIZE.items() if k not in ("num_key_value_heads", "head_dim")} | {"hidden_size": 256}
        )
    )
    with pytest.raises(
        UnsupportedModelError, match="PersimmonAttention does not pass position_ids to its attention function"
    ):
        run(model, IDS, cache_for(model))


def test_cropping(model):
    cache = cache_for(model)
    run(model, IDS, cache)
    with pytest.raises(SignpostError, match="a compressed cache cannot be cropped: packed tokens are final"):
        cache.crop(-3)


def test_another_batch(model):
    cache = cache_for(model)
    run(model, IDS, cache)
    with pytest.raises(ValueError, match="a batch of 1 sequences, but this cache holds 2: use a new cache"):
        run(model, IDS[:1, :1], cache)


def test_heads_that_do_not_fit_packed_codes():
    model = tiny(LlamaConfig(**SIZE | {"head_dim": 48}))
    found = fingerprint(model)
    with pytest.raises(SignpostError, match="head dimension 48 is not a multiple of 32, which packed codes need"):
        random_bundle(
            [kivi(2, t=32)] * 2, found.h_q, found.h_kv, found.d, model=found, inv_freq=rotary(model)[1].numpy()
        )


def test_a_model_with_bias_and_one_kv_head():
    config = CohereConfig(**SIZE | {"num_key_value_heads": 1, "attention_bias": True})
    model = tiny(config)
    assert fingerprint(model).h_kv == 1
    assert run(model, IDS, cache_for(model)).isfinite().all()
