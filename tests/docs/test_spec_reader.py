"""The specification is enough: a reader made from it alone reads what we write, and refuses what we refuse."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import Dense, load
from artifacts.bundle import MANIFEST_LIMIT
from artifacts.codes import BITS
from artifacts.matrices import eight_bits
from artifacts.model import MAX_LAYERS
from artifacts.tensor_file import HEADER_LIMIT
from runtime.parts.dense import codebook
from tests.artifacts.samples import layer_formats, sample_bundle
from tests.docs import spec_reader
from tests.fuzz.corpus import bundles
from tests.fuzz.mutations import damaged

SPECIFICATION = Path(__file__).resolve().parents[2] / "docs" / "bundle-format.md"


def same(folder):
    manifest, tensors, evaluation = spec_reader.read(folder)
    bundle = load(folder)
    assert (manifest["recipe"], manifest["model"]["d"]) == (bundle.recipe, bundle.model.d)
    assert evaluation == bundle.evaluation
    assert tensors.keys() == bundle.tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, bundle.tensors[name], strict=True)


@pytest.mark.parametrize("name", bundles())
def test_reads_every_recipe(tmp_path, name):
    same(bundles()[name].save(tmp_path / "b"))


@settings(max_examples=25)
@given(st.lists(layer_formats(), min_size=1, max_size=2), st.text(max_size=5), st.floats(allow_nan=False))
def test_reads_any_bundle(tmp_path_factory, layers, text, number):
    try:
        text.encode()
    except UnicodeEncodeError:
        text = "x"
    number = 0.0 if abs(number) == np.inf else number
    folder = sample_bundle(1, tuple(layers), calibration={text: [number, text, {}, []]})
    same(folder.save(tmp_path_factory.mktemp("b")))


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors", "evaluation.json"])
@given(rng=st.randoms(use_true_random=True))
@settings(max_examples=30)
def test_refuses_what_is_damaged(tmp_path_factory, name, rng):
    folder = sample_bundle().save(tmp_path_factory.mktemp("b"))
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), rng))
    try:
        load(folder)
    except ValueError:
        # The loader in the library is stricter about limits; what it refuses here is damage, which both find.
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            spec_reader.read(folder)
    else:
        same(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("bits", BITS)
def test_signposts_are_rounded_as_the_runtime_does(bits):
    signposts = np.sort(np.random.default_rng(0).uniform(-1.2, 1.2, 1 << bits)).astype(np.float32)
    tables, part = {"signposts": torch.from_numpy(signposts)}, Dense(bits, "token", 0, "nuq")
    decoded = codebook(part, 64, tables, torch.device("cpu"))
    np.testing.assert_array_equal(spec_reader.values(bits, signposts), decoded.numpy(), strict=True)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_evenly_spaced_values_are_the_runtimes(bits):
    spacing, part = np.array([-1600, 213], np.int16), Dense(bits, "token", 0, "uniform-fit")
    decoded = codebook(part, 64, {"spacing": torch.from_numpy(spacing)}, torch.device("cpu"))
    np.testing.assert_array_equal(spec_reader.evenly_spaced(bits, spacing), decoded.numpy(), strict=True)


def test_matrices_have_eight_bits():
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(64, 64)) * 2.0 ** rng.integers(-26, 4, (64, 64))).astype(np.float32)
    np.testing.assert_array_equal(spec_reader.coarse(matrix), eight_bits(matrix), strict=True)


def test_takes_about_a_hundred_lines():
    assert len([line for line in Path(spec_reader.__file__).read_text().splitlines() if line]) <= 105


def test_imports_numpy_and_the_standard_library():
    tree = ast.parse(Path(spec_reader.__file__).read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"hashlib", "json", "sys", "pathlib", "numpy"}


def test_limits_of_the_specification_are_those_of_the_code():
    text = SPECIFICATION.read_text()
    for limit in (MANIFEST_LIMIT, HEADER_LIMIT, MAX_LAYERS):
        assert str(limit) in text
