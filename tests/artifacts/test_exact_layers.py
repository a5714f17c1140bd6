"""Layers without a format, sliding windows and capped logits in bundles: written, read, counted and shown."""

from dataclasses import replace

import pytest

from artifacts import Bundle, BundleCorruptError, CacheGeometry, FormatError, load, verify
from artifacts.card import bundle_card
from artifacts.diff import FieldChange, field_changes
from artifacts.format import to_json
from artifacts.summary import summarize
from tests.artifacts.samples import (
    assert_same,
    fingerprint,
    kvquant,
    mixed_bundle,
    read_manifest,
    sample_bundle,
    write_sealed,
)


def test_round_trip(tmp_path):
    bundle = mixed_bundle()
    assert_same(load(bundle.save(tmp_path / "b")), bundle)
    manifest = read_manifest(tmp_path / "b")
    assert manifest["layers"] == [None, None, 0, None]
    assert manifest["model"]["sliding"] == [512, 512, 0, 512]
    assert manifest["model"]["softcap"] == 50.0
    assert len(manifest["formats"]) == 1
    assert {name.split(".")[1] for name in bundle.tensors if name.startswith("layers.")} == {"2"}


def test_models_without_windows_and_caps_say_nothing_of_them(tmp_path):
    """So that bundles written before these entries came read, and have the seal, that they always had."""
    sample_bundle().save(tmp_path / "b")
    assert not read_manifest(tmp_path / "b")["model"].keys() & {"sliding", "softcap"}


def test_no_layer_with_a_format(tmp_path):
    bundle = sample_bundle(0, (None, None))
    assert_same(load(bundle.save(tmp_path / "b")), bundle)
    assert bundle.geometry.bits(1000) == 16


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "sliding",
            [512, 0],
            r"sliding has 2 windows, the least 0: one for each of the 4 layers, 0 where a layer sees",
        ),
        ("sliding", [512, 0, 0, -1], r"sliding has 4 windows, the least -1"),
        ("sliding", 512, r"model.sliding=512 must be a list"),
        ("sliding", [512, 0, 0, True], r"model.sliding\[3\]=True must be of type int"),
        ("softcap", 0.0, r"softcap=0.0 must be positive and finite; leave it out for none"),
        ("softcap", "x", r"model.softcap='x' must be a finite number"),
    ],
)
def test_entries_that_cannot_be(tmp_path, name, value, message):
    folder = mixed_bundle().save(tmp_path / "b")
    manifest = read_manifest(folder)
    manifest["model"][name] = value
    write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match=message):
        load(folder)


def test_a_cap_that_is_not_finite():
    with pytest.raises(FormatError, match="softcap=inf must be positive and finite"):
        replace(fingerprint(), softcap=float("inf"))


def test_bytes_of_layers_in_full_precision():
    """Two sides of two heads of 64 channels, two bytes each: of at most 512 tokens where a layer slides."""
    token, one = 2 * 2 * 64 * 2, CacheGeometry.of([kvquant(3)], 2, 64)
    mixed = mixed_bundle().geometry
    for n in (0, 1, 511, 512, 513, 100_000):
        assert mixed.exact_bytes(n) == 3 * min(n, 512) * token
        assert mixed.exact_bytes(n, 4) == 2 * mixed.exact_bytes(n)
        assert mixed.cache_bytes(n) == mixed.exact_bytes(n) + one.cache_bytes(n)
        assert mixed.numbers(n) == (3 * min(n, 512) + n) * 2 * 2 * 64
    everywhere = CacheGeometry.of([kvquant(3), None], 2, 64)
    assert everywhere.cache_bytes(1000) == one.cache_bytes(1000) + 1000 * token


def test_bits_are_of_what_a_plain_cache_would_hold():
    """A layer that slides is no excuse: against 16 bits for 512 tokens, full precision counts as 16."""
    mixed, one = mixed_bundle().geometry, CacheGeometry.of([kvquant(3)], 2, 64)
    n = 4096
    expected = (16 * 3 * 512 + one.bits(n) * n) / (3 * 512 + n)
    assert mixed.bits(n) == pytest.approx(expected, rel=1e-12)
    sliding = CacheGeometry.of([kvquant(3)], 2, 64, (512,))  # pages behind the window stay, and count
    assert sliding.bits(n) == pytest.approx(one.bits(n) * n / 512)


def test_what_is_shown():
    bundle = mixed_bundle()
    groups = summarize(bundle)["formats"]
    assert [(g["first"], g["last"], g["key"]["words"]) for g in groups] == [
        (0, 1, "full precision, the newest 512 tokens"),
        (2, 2, groups[1]["key"]["words"]),
        (3, 3, "full precision, the newest 512 tokens"),
    ]
    assert groups[0]["value"] == {"format": None, "page_bits": 16.0, "bytes_per_token": 0.0} | {
        "words": "full precision, the newest 512 tokens"
    }
    assert groups[1]["key"]["format"] == to_json(kvquant(3).key)
    assert summarize(sample_bundle(0, (None,)))["bytes_per_token"] == 2 * 2 * 64 * 2
    sliding = sample_bundle(0, (kvquant(3),), model=replace(fingerprint(1), sliding=(512,)))
    assert summarize(sliding)["formats"][0]["key"]["words"].endswith(", sees 512 tokens")
    assert "| 0-1 | key | 16.000 | full precision, the newest 512 tokens |" in bundle_card(bundle)


def test_verified(tmp_path):
    assert_same(verify(mixed_bundle().save(tmp_path / "b")), mixed_bundle())


def test_differences():
    mixed = mixed_bundle()
    layers = (None, None, None, None)
    tensors = {"rope.inv_freq": mixed.tensors["rope.inv_freq"]}
    less = Bundle(mixed.recipe, replace(mixed.model, softcap=None), layers, tensors,
                  mixed.calibration, mixed.evaluation)  # fmt: skip
    assert field_changes(mixed, less) == [
        FieldChange("model.softcap", 50.0, "absent"),
        FieldChange("layers.2", to_json(mixed.layers[2]), "full precision"),
    ]
