"""Numbers that no calibration finds."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts import (
    Banded,
    BundleInvalidError,
    Dense,
    Format,
    FormatError,
    LayerFormat,
    PageShape,
    Rotate,
    Sketch,
    Sparse,
    verify,
)
from artifacts.checks import findings
from tests.artifacts.samples import fingerprint, sample_bundle

D, ROWS = 64, 96


def orthogonal(rows, rng):
    q, _ = np.linalg.qr(rng.standard_normal((D, D)))
    return q[:rows]


def hadamard(rng):
    matrix = np.ones((1, 1))
    while len(matrix) < D:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * rng.choice([-1.0, 1.0], (D, 1)) / np.sqrt(D)


def everything(rows="orthogonal", kind="haar", **changes):
    """A bundle of one layer with a rotation, a sketch, a mask and a codebook with edges; `changes` to its tensors."""
    rng = np.random.default_rng(0)
    key = Format(
        64, Dense(2, "head", 0, "nuq", "online", "norm"), rotate=Rotate(kind), sketch=Sketch(ROWS, rows, 4, 32)
    )
    value = Format(64, Dense(3, "channel", codebook="nuq-qnorm", scales="bundle"), Sparse(0.01, "channel", "bundle"))
    layers, model = (LayerFormat(key, value),), fingerprint(1)
    square = orthogonal(D, rng) if kind == "haar" else hadamard(rng)
    s = np.sqrt(D)
    sketch = np.concatenate([orthogonal(D, rng), orthogonal(ROWS - D, rng)]) * s
    mask = np.zeros((model.h_kv, D), np.uint8)
    mask[0, :4] = mask[1, 7] = 1
    tensors = {
        "rope.inv_freq": np.linspace(1, 0, 16),
        "layers.0.key.rotation": square,
        "layers.0.key.signposts": np.linspace(-1, 1, 4),
        "layers.0.key.sketch": sketch if rows == "orthogonal" else rng.standard_normal((ROWS, D)),
        "layers.0.key.outlier_sketch": orthogonal(32, rng) * s,
        "layers.0.key.outlier_mask": mask,
        "layers.0.value.scale": np.ones((2, D)),
        "layers.0.value.zero": np.zeros((2, D)),
        "layers.0.value.signposts": np.linspace(-1.2, 1.3, 8),
        "layers.0.value.edges": np.linspace(-0.9, 0.9, 7),
        "layers.0.value.lower": -np.ones((2, D)),
        "layers.0.value.upper": np.ones((2, D)),
    }
    names = {n: spec.dtype for n, spec in sample_specs(layers, model).items()}
    tensors = {name: tensor.astype(names[name]) for name, tensor in (tensors | changes).items()}
    return sample_bundle(layers=layers, tensors=tensors)


def sample_specs(layers, model):
    specs = {"rope.inv_freq": type("Spec", (), {"dtype": "float32"})}
    for side in ("key", "value"):
        fmt = getattr(layers[0], side)
        shape = PageShape(fmt.t, model.h_kv, model.d, side)
        specs |= {f"layers.0.{side}.{name}": spec for name, spec in fmt.bundle_tensors(shape).items()}
    return specs


def changed(name, change):
    tensor = everything().tensors[name].astype(np.float64)
    return {name: change(tensor)}


def entry(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("rows", ["orthogonal", "gaussian"])
def test_sound(tmp_path, rows, kind):
    bundle = everything(rows, kind)
    assert list(findings(bundle)) == []
    assert verify(bundle.save(tmp_path / "b")).model == bundle.model


KEY, VALUE = "layers.0.key", "layers.0.value"
UNSOUND = {
    "frequency": ("rope.inv_freq", entry(3, -0.1), "holds a negative frequency"),
    "rotation": (f"{KEY}.rotation", lambda t: t * (1 + 2**-6), r"rows 0 to 63 are not orthogonal: .* off by 0\.03"),
    "rotation, one entry": (f"{KEY}.rotation", entry((5, 6), 0.4), "rows 0 to 63 are not orthogonal"),
    "sketch": (f"{KEY}.sketch", entry((70, 1), 5.0), "rows 64 to 95 are not orthogonal"),
    "outlier sketch": (f"{KEY}.outlier_sketch", lambda t: t / 8, "rows 0 to 31 are not orthogonal"),
    "mask": (f"{KEY}.outlier_mask", entry((0, 0), 2), r"holds 2: a channel is in the mask \(1\) or not \(0\)"),
    "full mask": (f"{KEY}.outlier_mask", entry(1, 1), "marks 64 channels of a head, the format allows 4"),
    "signposts": (f"{KEY}.signposts", lambda t: t * 1.01, r"lie outside \[-1, 1\]"),
    "edges": (f"{VALUE}.edges", lambda t: t * 1.2, r"lie outside \[-1, 1\]"),
    "thresholds": (f"{VALUE}.lower", entry((1, 63), 1.5), "is above upper"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound(tmp_path, name):
    tensor, change, problem = UNSOUND[name]
    bundle = everything(**changed(tensor, change))
    assert [finding.name for finding in findings(bundle)] == [tensor]
    with pytest.raises(BundleInvalidError, match=rf"b: {tensor} {problem}.*\. Calibrate again"):
        verify(bundle.save(tmp_path / "b"))


def test_a_rotation_that_is_no_hadamard_matrix(tmp_path):
    rng = np.random.default_rng(1)
    bundle = everything("orthogonal", "hadamard", **{f"{KEY}.rotation": orthogonal(D, rng)})
    with pytest.raises(BundleInvalidError, match="rotation is no Hadamard matrix"):
        verify(bundle.save(tmp_path / "b"))


def test_gaussian_rows_need_not_be_orthogonal_but_a_row_of_orthogonal_ones_does():
    gaussian = {f"{KEY}.sketch": np.random.default_rng(2).standard_normal((ROWS, D))}
    assert list(findings(everything("gaussian", **gaussian))) == []
    assert [finding.name for finding in findings(everything("orthogonal", **gaussian))] == [f"{KEY}.sketch"]


def test_number_of_further_findings(tmp_path):
    bundle = everything(**{"rope.inv_freq": -np.ones(16), f"{VALUE}.upper": -2 * np.ones((2, D))})
    with pytest.raises(BundleInvalidError, match=r"rope\.inv_freq holds a negative frequency \(and 1 more\)"):
        verify(replace(bundle, evaluation=None).save(tmp_path / "b"))


def evenly_spaced(spacing):
    """A bundle of one layer whose 3-bit values say where they are evenly spaced."""
    layer = LayerFormat(Format(64, Dense(2, "token")), Format(64, Dense(3, "token", codebook="uniform-fit")))
    bundle = sample_bundle(0, (layer,))
    return replace(bundle, tensors={**bundle.tensors, "layers.0.value.spacing": np.array(spacing, np.int16)})


@pytest.mark.parametrize("spacing", [(-2047, 584), (0, 292), (-2047, 1)])
def test_evenly_spaced_values_within_the_range(spacing):
    assert not list(findings(evenly_spaced(spacing)))


@pytest.mark.parametrize("spacing", [(-2048, 1), (0, 293), (-2046, 585)])
def test_evenly_spaced_values_beyond_the_range(spacing):
    (finding,) = findings(evenly_spaced(spacing))
    assert finding.name == "layers.0.value.spacing"
    assert "outside [-1, 1]" in finding.problem


@pytest.mark.parametrize("step", [0, -3])
def test_values_that_are_not_apart(step):
    with pytest.raises(FormatError, match=f"layers.0.value.spacing says that values are {step} apart"):
        evenly_spaced((5, step))


def banded(**changes):
    """A bundle of one layer with bands, and learned rotations of values; `changes` to its tensors."""
    layer = LayerFormat(
        Format(64, banded=Banded(2.0), domain="pre_rope"), Format(64, banded=Banded(1.5), rotate=Rotate("learned"))
    )
    bundle = sample_bundle(0, (layer,))
    return replace(bundle, tensors={**bundle.tensors, **changes})


def test_bands_and_learned_rotations_are_sound():
    assert not list(findings(banded()))


@pytest.mark.parametrize(
    "name, change, problem",
    [
        ("layers.0.value.rotation", lambda x: x * (np.arange(x.shape[0])[:, None, None] != 1), "of head 1 is singular"),
    ],
)
def test_unsound_bands(name, change, problem):
    tensor = banded().tensors[name]
    (finding,) = findings(banded(**{name: change(tensor).astype(tensor.dtype)}))
    assert (finding.name, finding.problem) == (name, problem)
