"""Every family of models through one tap, and from calibration to the cache."""

import numpy as np
import pytest
import torch

from artifacts import UnsupportedModelError, load
from calib.data import Tokens
from calib.evaluate import evaluate
from calib.pipeline import calibrate
from calib.tap import Tap
from runtime.hf_model import kv_heads, rotary_by_layer
from tests.calib.taken import taken
from tests.oracles.fisher import whole_model
from tests.runtime.tiny_models import CONFIGS, FALCON, MLA, tiny

N = 48  # more than the windows of those that slide
SLIDING = {"mistral-sliding": (20, 20), "gemma2-capped": (20, 0), "gemma3-two-ropes": (20, 0)} | {
    "gemma3-with-images": (20, 0)
}


def tokens(n, seed=0, rows=1):
    return torch.randint(2, 64, (rows, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", [*CONFIGS, *FALCON])
def test_keys_values_and_gradients_are_those_of_the_whole_model(family):
    """Layer by layer and un-rotated, against one backward pass and what enters the model's own rotation.

    In float64, but for transformers' norms and rotation angles, which are float32 in both: they differ by roundings
    of 2^-24, a few hundred of which add up in a layer's sums.
    """
    model, ids = tiny({**CONFIGS, **FALCON}[family], dtype=torch.float64), tokens(N)[0]
    oracle = whole_model(model, ids)
    h_kv = kv_heads(model.config.get_text_config())
    for a in taken(Tap(model), ids, gradients=True):
        keys, values, key_gradients, value_gradients = (x[a.layer][0].transpose(0, 1).detach() for x in oracle)
        turning, copies = keys.shape[-1], keys.shape[1] // h_kv
        assert a.key.shape == a.value.shape == (N, h_kv, values.shape[-1])
        near(a.key[..., :turning], keys[:, ::copies])
        near(a.value, values[:, ::copies])
        near(a.key_gradient[..., :turning], key_gradients.unflatten(1, (h_kv, copies)).sum(2))
        near(a.value_gradient, value_gradients.unflatten(1, (h_kv, copies)).sum(2))
        assert torch.equal(a.key[..., turning:], a.rotated_key[..., turning:])
        assert torch.equal(a.key_gradient[..., turning:], a.rotated_key_gradient[..., turning:])


def near(found, expected):
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert expected.abs().max() > 0


def test_layers_turn_by_rotations_of_their_own():
    model = tiny(CONFIGS["gemma3-two-ropes"])
    (local, fast), (all_tokens, slow) = rotary_by_layer(model)
    assert (local.kind, all_tokens.kind) == ("default", "linear")
    assert slow[1] < fast[1] / 8
    assert Tap(model).rotations[0] is not Tap(model).rotations[1]


@pytest.mark.parametrize("family", CONFIGS)
def test_calibrated_and_decoded(family, settings, tmp_path):
    """The bundle is written, read, and the real cache agrees with the simulation, token by token."""
    model = tiny(CONFIGS[family], dtype=torch.float64)
    s = settings("seqlen=100", "samples=2", "out=unused", "method.key.t=32", "method.value.t=32", "bits=3")
    bundle = load(calibrate(model, s, Tokens(tokens(100, 1, 2), "random")).save(tmp_path / "bundle"))
    sliding = SLIDING.get(family, ())
    assert bundle.model.sliding == sliding
    assert [formats is None for formats in bundle.layers] == [0 in sliding and w > 0 for w in sliding or (0, 0)]
    check = evaluate(model, bundle, Tokens(tokens(90, 2), "random"), cache_tokens=90)["cache_check"]
    assert check["loss_cache"] == pytest.approx(check["loss_simulated"], abs=1e-3)
    assert np.isfinite(check["loss_cache"])
    # Float64 but for what is packed: a code on the edge may fall to either side, and then logits move a little.
    assert check["largest_logit_difference"] < 1e-2


def test_windows_and_caps_matter():
    """Else nobody would notice if a mask or a cap got lost."""
    changed = {"mistral-sliding": {"sliding_window": 99}, "gemma2-capped": {"attn_logit_softcapping": 9.0}}
    for family, changes in changed.items():
        config = CONFIGS[family]
        other = type(config).from_dict(config.to_dict() | changes)
        with torch.no_grad():
            a, b = (tiny(c)(tokens(N)).logits for c in (config, other))
        assert (a - b).abs().max() > 0.5, family


def test_latent_attention_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"caches a latent vector \(MLA\), not keys and values"):
        Tap(tiny(MLA))
