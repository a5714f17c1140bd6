"""What the tap sees, keys before RoPE, values and gradients, against the models' own rotation and differences."""

import numpy as np
import pytest
import torch

from calib import forward, tap
from calib.forward import ActivationError, Head, blocks, hidden_states
from calib.tap import Tap
from runtime.hf import UnsupportedModelError
from runtime.hf_decoder import decoder_layers
from tests.calib.taken import taken
from tests.oracles.fisher import attention_modules, key_derivative, keys_before_rope, summed_loss, value_derivative

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "yarn")
N = 24
# A float32 rotation rounds each of two products and their sum, cos and sin included: at most 6 units of 2^-24 of the
# pair's norm, twice (there and back).
ROTATION = 12 * 2.0**-24


def tokens(seed=0, n=N):
    return torch.randint(0, 260, (n,), generator=torch.Generator().manual_seed(seed))


def difference(a, b):
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_those_of_the_model(tiny_model, family):
    model, ids = tiny_model(family), tokens()
    keys, rotated, values = [], [], []
    hooks = [
        m.v_proj.register_forward_hook(lambda module, args, output: values.append(output))
        for m in attention_modules(model)
    ]
    with torch.no_grad(), keys_before_rope(model, lambda layer, k: keys.append(k) or k):
        cache = model(ids[None], use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    rotated = [layer.keys for layer in cache.layers]
    seen = taken(Tap(model), ids, gradients=False)
    assert [a.layer for a in seen] == [0, 1]
    for a, k, r, v in zip(seen, keys, rotated, values, strict=True):
        for x in (a.key, a.rotated_key, a.value):
            assert x.dtype == torch.float32
            assert x.shape == (N, 2, 32)
        assert difference(a.key, k[0].transpose(0, 1)) <= ROTATION * k.abs().max().item() * 2**0.5
        assert torch.equal(a.rotated_key, r[0].transpose(0, 1).float())
        assert torch.equal(a.value, v[0].unflatten(-1, (2, 32)).float())
        assert (a.key_gradient, a.rotated_key_gradient, a.value_gradient) == (None, None, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_differences_of_the_summed_loss(tiny_model, family):
    model, ids = tiny_model(family), tokens()
    entries = np.random.default_rng(1).integers(0, (N - 1, 2, 32), (6, 3)).tolist()
    for a in taken(Tap(model), ids, gradients=True):
        for found, derivative in ((a.key_gradient, key_derivative), (a.value_gradient, value_derivative)):
            scale = found.abs().max().item()
            for entry in entries:
                expected = derivative(model, ids, a.layer, tuple(entry))
                # The float32 result is good to 1e-6 of the largest; a step of 1e-4 adds 1e-8 of the third derivative.
                assert found[tuple(entry)].item() == pytest.approx(expected, rel=1e-6, abs=2e-6 * scale), (
                    entry,
                    a.layer,
                )


def test_yarn_gradients_take_the_transposed_rotation(tiny_model):
    model, ids = tiny_model("yarn"), tokens()
    t = Tap(model)
    assert t.rotations[0].rope.scaling > 1.1  # else transpose and inverse could not be told apart
    positions = torch.arange(N)
    for a in taken(t, ids, gradients=True):
        after = a.rotated_key_gradient.transpose(0, 1)
        inverse = t.rotations[a.layer].unrotate(after, positions).transpose(0, 1)
        assert torch.equal(a.key_gradient, t.rotations[a.layer].pull_back(after, positions).transpose(0, 1))
        assert torch.allclose(a.key_gradient, inverse * t.rotations[0].rope.scaling ** 2, rtol=1e-5, atol=1e-7)


def test_samples_do_not_touch_each_other(tiny_model):
    model, first, second = tiny_model("llama"), tokens(0), tokens(1)
    kept = []
    model.get_input_embeddings().requires_grad_(True)
    with keys_before_rope(model, lambda layer, k: kept.append(k) or k):
        loss = summed_loss(model, torch.stack([first, second]))
    expected = torch.autograd.grad(loss, kept)
    t = Tap(model)
    for row, ids in ((1, second), (0, first), (1, second)):
        for a in taken(t, ids, gradients=True):
            own = expected[a.layer][row].transpose(0, 1)
            assert difference(a.key_gradient, own) <= ROTATION * 2**0.5 * own.abs().max()


@pytest.mark.parametrize("trainable", [False, True])
def test_no_weight_gets_a_gradient(tiny_model, trainable):
    model = tiny_model("llama").requires_grad_(trainable)
    for a in taken(Tap(model), tokens(), gradients=True):
        assert not a.key_gradient.requires_grad
        assert not a.key.requires_grad
    assert all(p.grad is None and p.requires_grad == trainable for p in model.parameters())


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_callers_grad_mode_and_hooks_are_restored(tiny_model, enabled, gradients):
    model = tiny_model("llama")
    hooked = (model.get_input_embeddings(), model.base_model)
    before = [len(m._forward_hooks) for m in hooked]
    with torch.set_grad_enabled(enabled):
        taken(Tap(model), tokens(), gradients)
        assert torch.is_grad_enabled() == enabled
        assert model.get_input_embeddings()(tokens()).requires_grad is False
    assert [len(m._forward_hooks) for m in hooked] == before


def weight(model, name):
    return dict(model.named_parameters())[name]


@pytest.mark.parametrize(
    ("name", "number", "gradients", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", float("nan"), False, "layer 1: keys hold NaN"),
        ("model.layers.1.self_attn.v_proj.weight", float("inf"), False, "layer 1: values hold NaN"),
        ("model.layers.0.mlp.up_proj.weight", float("nan"), True, "layer 1: keys hold NaN"),
        ("lm_head.weight", float("inf"), True, "behind the last layer: logits hold NaN"),
    ],
)
def test_numbers_that_are_not_finite_are_named(tiny_model, name, number, gradients, message):
    model = tiny_model("llama")
    t = Tap(model)
    weight(model, name)[3, 5] = number
    with pytest.raises(ActivationError, match=message):
        taken(t, tokens(), gradients)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("which", "name"), [(2, "keys"), (3, "values")])
def test_gradients_that_are_not_finite_are_named(tiny_model, monkeypatch, which, name):
    real = tap._Calls.gradients

    def broken(calls, layer, of_output):
        found = real(calls, layer, of_output)
        if layer == 1:
            found[which][0, 1, 2, 3] = torch.inf
        return found

    monkeypatch.setattr(tap._Calls, "gradients", broken)
    with pytest.raises(ActivationError, match=f"layer 1: gradients of {name} hold NaN or infinity"):
        taken(Tap(tiny_model("llama")), tokens(), gradients=True)


@pytest.mark.parametrize("rows", [1, 7, N - 1, N])
def test_gradients_do_not_depend_on_the_blocks_of_the_head(tiny_model, monkeypatch, rows):
    model, ids = tiny_model("llama"), tokens()
    whole = taken(Tap(model), ids, gradients=True)
    monkeypatch.setattr(forward, "ROWS", rows)
    for a, b in zip(taken(Tap(model), ids, gradients=True), whole, strict=True):
        assert difference(a.key_gradient, b.key_gradient) <= 1e-6 * b.key_gradient.abs().max()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("granite", {"logits_scaling": 7.0}), ("cohere", {"logit_scale": 0.3})],
)
def test_head_keeps_what_the_model_does_to_its_logits(tiny_model, family, changes):
    model, ids = tiny_model(family, **changes), tokens()[None]
    with torch.no_grad():
        hidden, head = hidden_states(model, ids), Head(model)
        found = torch.cat([head(hidden[:, rows]) for rows in (slice(0, 5), slice(5, N))], 1)
        assert difference(found, model(ids).logits) <= 1e-12 * found.abs().max()


def test_what_is_below_the_head_runs_once_and_stays_the_models_own(tiny_model):
    model, runs = tiny_model("llama"), []
    with torch.no_grad():
        hidden = hidden_states(model, tokens()[None])
        hook = model.base_model.layers[0].register_forward_hook(lambda *args: runs.append(1))
        head = Head(model)
        first, again = head(hidden), head(hidden)
        hook.remove()
        assert len(runs) == 1
        assert torch.equal(first, again)
        assert "forward" not in model.base_model.__dict__
        assert torch.equal(model(tokens()[None]).logits, first)


def test_blocks_cover_all_rows(monkeypatch):
    monkeypatch.setattr(forward, "ROWS", 4)
    assert list(blocks(9)) == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert list(blocks(8)) == [slice(0, 4), slice(4, 8)]
    assert list(blocks(0)) == []


def test_layers_that_are_in_no_list(tiny_model):
    """They cannot be run again one by one."""
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM keeps its 7 layers in no list: they cannot be"):
        decoder_layers(model, 7)
