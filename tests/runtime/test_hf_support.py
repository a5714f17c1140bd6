"""Which models and calls are supported, what a bundle remembers of a model, and what is said to the rest."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
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
from runtime.hf import SignpostCache, UnsupportedModelError, fingerprint, rotary
from tests.formats import kivi, kvquant, random_bundle
from tests.runtime.tiny_models import CONFIGS, LLAMA3, SIZE, YARN, bundle_for, tiny

MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny(CONFIGS["llama"])


@torch.no_grad()
def run(model, ids, cache, **options):
    return model(ids, past_key_values=cache, use_cache=True, **options).logits


def cache_for(model, formats=None):
    return SignpostCache(model, bundle_for(model, formats or kvquant(3, t=32)))


@pytest.mark.parametrize(
    "name, rope",
    [
        ("llama", Rope(32, "half", 1.0, "default")),
        ("llama-llama3", Rope(32, "half", 1.0, "llama3")),
        ("qwen3-norm", Rope(64, "half", 1.0, "default")),
        ("cohere-interleaved", Rope(32, "interleaved", 1.0, "default")),
    ],
)
def test_rotary_embedding(name, rope):
    model = tiny(CONFIGS[name])
    assert fingerprint(model).rope == rope
    frequencies = rotary(model)[1]
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, model.base_model.rotary_emb.inv_freq)


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
        h_kv = 4 if name == "llama-mha" else 2
        assert (found.l, found.h_q, found.h_kv, found.d) == (2, 4, h_kv, 64 if name == "qwen3-norm" else 32)
    assert seen["mistral"].architecture == "MistralForCausalLM"
    assert len({(x.architecture, x.config_hash, x.weights_hash, x.rope) for x in seen.values()}) == len(seen)


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
FALCON = FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
SOME_SLIDE = Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=16, max_window_layers=1)
UNSUPPORTED = {
    "no rope": (GPT2, "GPT2LMHeadModel has no rotary embedding that applies to all layers alike"),
    "some without": (SmolLM3Config(**SIZE, no_rope_layers=[1, 0]), "SmolLM3ForCausalLM has layers without rotary"),
    "dynamic": (
        LlamaConfig(**SIZE, rope_parameters=DYNAMIC),
        "RoPE of type 'dynamic' changes its frequencies with the length; supported are default, linear, llama3, yarn",
    ),
    "window": (MistralConfig(**SIZE, sliding_window=16), "of kind full_attention and sliding_window=16: only full"),
    "window here and there": (SOME_SLIDE, "of kind full_attention, sliding_attention and sliding_window=16: only full"),
    "gemma 2": (Gemma2Config(**SIZE), "of kind full_attention, sliding_attention and sliding_window=4096"),
    "gemma 3": (Gemma3TextConfig(**SIZE), "of kind sliding_attention and sliding_window=4096"),
    "mla 2": (DeepseekV2Config(**SIZE | MLA), r"DeepseekV2ForCausalLM caches a latent vector \(MLA\), not keys and"),
    "mla 3": (DeepseekV3Config(**SIZE | MLA), r"DeepseekV3ForCausalLM caches a latent vector \(MLA\), not keys and"),
    "no interface": (FALCON, "FalconForCausalLM does not take an attention function from transformers' Attention"),
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


def test_gradients(model):
    trainable = tiny(CONFIGS["llama"]).requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"a compressed cache is for inference: call the model under torch.no_grad\(\)"
    ):
        trainable(IDS, past_key_values=cache_for(trainable), use_cache=True)


def test_dropout():
    model = tiny(LlamaConfig(**SIZE, attention_dropout=0.1)).train()
    with pytest.raises(
        UnsupportedModelError, match=r"attention with dropout=0.1, softcap=None, sliding_window=None, no sink"
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
