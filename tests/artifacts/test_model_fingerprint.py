"""Fingerprints: what they refuse, and what they say of another model."""

from dataclasses import replace

import pytest

from artifacts import BundleMismatchError, FormatError
from tests.artifacts.samples import ROPE, fingerprint


@pytest.mark.parametrize("dim", [0, -2, 7])
def test_rope_dim(dim):
    with pytest.raises(FormatError, match=rf"rope\.dim={dim} must be even and at least 2"):
        replace(ROPE, dim=dim)


@pytest.mark.parametrize("scaling", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_scaling(scaling):
    with pytest.raises(FormatError, match=rf"rope\.scaling={scaling} must be a positive finite factor; 1\.0 for none"):
        replace(ROPE, scaling=scaling)


def test_rope_pairs():
    assert replace(ROPE, dim=6).pairs() == [(0, 3), (1, 4), (2, 5)]
    assert replace(ROPE, dim=6, layout="interleaved").pairs() == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("changes", [{"l": 0}, {"h_q": 0}, {"h_kv": 0}, {"d": 0}, {"h_q": 3}])
def test_dimensions(changes):
    with pytest.raises(FormatError, match=r"model dimensions l=\d, h_q=\d, h_kv=\d, d=\d+ do not fit together"):
        replace(fingerprint(), **changes)


def test_rope_beyond_the_head():
    with pytest.raises(FormatError, match=r"rope\.dim=66 is above the head dimension 64"):
        replace(fingerprint(), rope=replace(ROPE, dim=66))


def test_the_name_may_differ():
    fingerprint().require(replace(fingerprint(), name="elsewhere"))


CHANGES = {
    "architecture": "Qwen3ForCausalLM",
    "l": 3,
    "h_q": 8,
    "h_kv": 1,
    "d": 128,
    "rope": replace(ROPE, scaling=2.0),
    "config_hash": "beef",
    "weights_hash": "dead",
    "softcap": 50.0,
    "sliding": (512, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_mismatch_names_the_field(name):
    other = replace(fingerprint(), name="other", **{name: CHANGES[name]})
    with pytest.raises(
        BundleMismatchError, match=r"calibrated for 'tiny' and does not fit 'other': .*Calibrate"
    ) as info:
        fingerprint().require(other)
    assert f": {name}: bundle has " in str(info.value)
    assert str(info.value).count("bundle has") == 1


def test_mismatch_shows_the_first_digits_of_hashes():
    with pytest.raises(BundleMismatchError, match=r"weights_hash: bundle has \w{,12}, model has 012345678901\. "):
        fingerprint().require(replace(fingerprint(), weights_hash="0123456789" * 6 + "0123"))


def test_mismatch_names_every_field():
    with pytest.raises(BundleMismatchError) as info:
        fingerprint().require(replace(fingerprint(), **(CHANGES | {"sliding": (512, 0, 0)})))
    assert all(f"{name}: bundle has " in str(info.value) for name in CHANGES)
