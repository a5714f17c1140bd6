"""Formats, models and bundles that the tests of this floor are made of."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from artifacts import (
    Bundle,
    Center,
    Dense,
    Format,
    LayerFormat,
    ModelFingerprint,
    PageShape,
    Rope,
    Rotate,
    Sparse,
    Window,
)
from artifacts.parts.banded import BAND
from tests.formats import band_widths

SIZE = st.integers(0, 300)


@st.composite
def dense_parts(draw: Callable[..., Any]) -> Dense:
    axis, group, scales = draw(
        st.sampled_from([("channel", 0, "bundle")])
        | st.tuples(st.just("channel"), st.sampled_from([16, 32, 64]), st.just("online"))
        | st.tuples(st.just("token"), st.sampled_from([0, 32, 64]), st.just("online"))
    )
    bits = draw(st.sampled_from([1, 2, 3, 4, 8]))
    if draw(st.booleans()):
        return Dense(bits, "head", 0, draw(st.sampled_from(["lloyd", "nuq"])), "online", "norm")
    books = ["uniform", "nf", "nuq"] + (["uniform-fit"] if bits in (2, 3, 4) else [])
    return Dense(bits, axis, group, draw(st.sampled_from(books)), scales)


@st.composite
def sparse_parts(draw: Callable[..., Any]) -> Sparse:
    axis, thresholds = draw(
        st.sampled_from([("channel", "bundle"), ("channel", "online"), ("matrix", "bundle"), ("token", "online")])
    )
    return Sparse(draw(st.floats(1e-4, 0.25)), axis, thresholds, draw(st.floats(1, 8)))


@st.composite
def formats(draw: Callable[..., Any], sinks: int | None = None, domains: tuple[str, ...] = ("post_rope",)) -> Format:
    """Any format that fits pages of 64 or 128 tokens and heads of 64, 128 or 256 channels."""
    window = Window(draw(SIZE) if sinks is None else sinks, draw(SIZE))
    domain = draw(st.sampled_from(domains))
    return Format(
        t=draw(st.sampled_from([64, 128])),
        dense=draw(dense_parts()),
        sparse=draw(st.none() | sparse_parts()),
        window=window,
        domain=domain,
        center=draw(st.none() | st.just(Center())) if domain == "post_rope" else None,
        rotate=draw(st.none() | st.sampled_from([Rotate("haar"), Rotate("hadamard")]))
        if domain == "post_rope"
        else None,
    )


@st.composite
def layer_formats(draw: Callable[..., Any]) -> LayerFormat:
    sinks = draw(SIZE)
    return LayerFormat(draw(formats(sinks, ("pre_rope", "post_rope"))), draw(formats(sinks)))


def kvquant(bits: int, t: int = 64) -> LayerFormat:
    """The formats of conf/method/kvquant.yaml with 1% outliers and one sink."""
    window = Window(sinks=1)
    key = Dense(bits, "channel", codebook="nuq", scales="bundle")
    value = Dense(bits, "token", codebook="nuq")
    return LayerFormat(
        Format(t, key, Sparse(0.01, "channel", "bundle"), window, "pre_rope"),
        Format(t, value, Sparse(0.01, "token", "online"), window),
    )


ROPE = Rope(dim=32, layout="half", scaling=1.0, kind="default")


def fingerprint(l: int = 2) -> ModelFingerprint:
    return ModelFingerprint("tiny", "LlamaForCausalLM", l, 4, 2, 64, ROPE, "c0ffee", "decade")


def tensors_of(layers: tuple[LayerFormat | None, ...], model: ModelFingerprint, seed: int = 0) -> dict[str, Any]:
    """Random tensors as the formats declare them: signposts ascending, scales and widths positive."""
    rng = np.random.default_rng(seed)
    tensors = {"rope.inv_freq": rng.random(model.rope.dim // 2, np.float32)}
    for l, layer in enumerate(layers):
        for side, fmt in (("key", layer.key), ("value", layer.value)) if layer else ():
            for name, spec in fmt.bundle_tensors(PageShape(fmt.t, model.h_kv, model.d, side)).items():
                numbers = np.sort(rng.random(spec.shape, np.float32), axis=-1)
                tensors[f"layers.{l}.{side}.{name}"] = (-numbers if name == "lower" else numbers).astype(spec.dtype)
            if fmt.dense and fmt.dense.codebook == "uniform-fit":
                tensors[f"layers.{l}.{side}.spacing"] = np.array([-1600, 1 + seed % 213], np.int16)
            if fmt.banded:
                widths = band_widths(fmt.banded, model.h_kv, model.d // BAND, rng)
                tensors[f"layers.{l}.{side}.widths"] = widths
            if fmt.rotate and fmt.rotate.kind == "learned":
                tensors[f"layers.{l}.{side}.rotation"] = np.stack([127 * np.eye(model.d, dtype=np.int8)] * model.h_kv)
    return tensors


def sample_bundle(
    seed: int = 0, layers: tuple[LayerFormat | None, ...] = (kvquant(3), kvquant(4)), **changes: Any
) -> Bundle:
    """A small valid bundle; recipe and tensors tell seeds apart."""
    model = fingerprint(len(layers))
    given = {
        "recipe": f"sample-{seed}",
        "model": model,
        "layers": layers,
        "tensors": tensors_of(layers, model, seed),
        "calibration": {"data": {"source": "generated", "tokens": [16, 2048]}, "seed": seed, "mean": 0.1},
        "evaluation": {"loss_increase": 0.0125, "text": None},
    }
    return Bundle(**(given | changes))


def mixed_bundle(seed: int = 0) -> Bundle:
    """Layers 0, 1 and 3 slide and are in full precision, layer 2 has a format; logits are capped."""
    layers = (None, None, kvquant(3), None)
    return sample_bundle(seed, layers, model=replace(fingerprint(4), sliding=(512, 512, 0, 512), softcap=50.0))


def assert_same(one: Bundle, other: Bundle) -> None:
    """Bitwise equality of everything that a bundle holds."""
    for name in ("recipe", "model", "layers", "calibration", "evaluation"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        np.testing.assert_array_equal(tensor, other.tensors[name], err_msg=name)


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def write_sealed(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest whose own hash fits, as a hostile hand would."""
    content = {name: value for name, value in manifest.items() if name not in ("created", "sha256")}
    digest = hashlib.sha256((json.dumps(content, indent=2) + "\n").encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def write_tensors(folder: Path, data: bytes) -> None:
    """Puts other bytes in place of the tensors, and their hash in the manifest."""
    (folder / "tensors.safetensors").write_bytes(data)
    manifest = read_manifest(folder)
    manifest["files"]["tensors.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_sealed(folder, manifest)
