"""Bundles on disk: what is loaded is what was saved, and anything else is refused with the reason."""

import copy
import hashlib
import json
import math
import re
import struct
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as dump_tensors

import artifacts.bundle
from artifacts import (
    BundleCorruptError,
    BundleError,
    BundleMismatchError,
    BundleNotFoundError,
    BundleVersionError,
    Dense,
    Format,
    FormatError,
    LayerFormat,
    load,
)
from tests.artifacts.samples import (
    assert_same,
    fingerprint,
    kvquant,
    layer_formats,
    read_manifest,
    sample_bundle,
    tensors_of,
    write_sealed,
    write_tensors,
)

BUNDLE = sample_bundle()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The files of a saved bundle."""
    folder = BUNDLE.save(tmp_path_factory.mktemp("pristine") / "bundle")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(autouse=True)
def restored(folder, pristine):
    """Every test starts from a whole bundle."""
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    for name, data in pristine.items():
        (folder / name).write_bytes(data)


# What is loaded is what was saved


@settings(max_examples=40)
@given(st.lists(layer_formats(), min_size=1, max_size=3), st.none() | st.just({"loss": 0.5, "by_length": [1, 2]}))
def test_round_trip(tmp_path_factory, layers, evaluation):
    bundle = sample_bundle(1, tuple(layers), evaluation=evaluation)
    assert_same(load(bundle.save(tmp_path_factory.mktemp("b"))), bundle)


def test_two_saves_differ_in_the_date_only(tmp_path, pristine, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2099, 1, 2, tzinfo=tz)

    monkeypatch.setattr(artifacts.bundle, "datetime", Later)
    again = {path.name: path.read_bytes() for path in sample_bundle().save(tmp_path / "b").iterdir()}
    date = re.compile(rb'"created": "[^"]*"')
    assert date.search(again["manifest.json"])[0] == b'"created": "2099-01-02T00:00:00+00:00"'
    assert date.search(pristine["manifest.json"])[0] != date.search(again["manifest.json"])[0]
    undated = [{name: date.sub(b"", data) for name, data in files.items()} for files in (pristine, again)]
    assert undated[0] == undated[1]


def test_equal_formats_are_stored_once(tmp_path):
    layers = (kvquant(3), kvquant(4), kvquant(3))
    manifest = read_manifest(sample_bundle(layers=layers).save(tmp_path / "b"))
    assert (len(manifest["formats"]), manifest["layers"]) == (2, [0, 1, 0])


def test_evaluation_is_attached_and_removed(tmp_path):
    bundle = load(BUNDLE.with_evaluation({"loss": 1.5}).save(tmp_path / "b"))
    assert bundle.evaluation == {"loss": 1.5}
    replace(bundle, evaluation=None).save(tmp_path / "b")
    assert load(tmp_path / "b").evaluation is None
    assert not (tmp_path / "b" / "evaluation.json").exists()


def test_side_tensors_have_the_names_of_their_parts():
    key = BUNDLE.side_tensors(1, "key")
    assert key.keys() == {"scale", "zero", "signposts", "lower", "upper"}
    assert key["zero"] is BUNDLE.tensors["layers.1.key.zero"]
    assert BUNDLE.side_tensors(1, "value").keys() == {"signposts"}


def test_side_tensors_of_layer_1_are_not_those_of_layer_10():
    assert sample_bundle(layers=(kvquant(3),) * 11).side_tensors(1, "value").keys() == {"signposts"}


def test_geometry_is_that_of_the_formats():
    assert [side.format.dense.bits for pair in BUNDLE.geometry.layers for side in pair] == [3, 3, 4, 4]


def test_tensors_need_not_be_contiguous(tmp_path):
    tensors = {name: np.repeat(tensor, 2, axis=-1)[..., ::2] for name, tensor in BUNDLE.tensors.items()}
    assert_same(load(replace(BUNDLE, tensors=tensors).save(tmp_path / "b")), BUNDLE)


def test_loaded_bundle_is_held_against_the_model(folder):
    with pytest.raises(BundleMismatchError, match="h_q: bundle has 4, model has 8; d: bundle has 64, model has 128"):
        load(folder).model.require(replace(fingerprint(), h_q=8, d=128))


# Bundles that cannot be made


def changed(name, change):
    """Tensors of the sample with one of them changed."""
    return dict(BUNDLE.tensors) | {name: change(BUNDLE.tensors[name])}


def with_number(value):
    return lambda tensor: np.where(np.arange(tensor.size).reshape(tensor.shape) == 3, np.float32(value), tensor)


BAD_TENSORS = {
    "NaN": (
        changed("layers.1.key.zero", with_number(np.nan)),
        r"tensor layers\.1\.key\.zero holds numbers that are not finite",
    ),
    "infinity": (
        changed("rope.inv_freq", with_number(np.inf)),
        r"tensor rope\.inv_freq holds numbers that are not finite",
    ),
    "dtype": (
        changed("rope.inv_freq", lambda tensor: tensor.astype(np.float16)),
        r"tensor rope\.inv_freq is float16 \[16\], must be float32 \[16\]",
    ),
    "shape": (
        changed("layers.0.key.scale", lambda tensor: tensor.T),
        r"tensor layers\.0\.key\.scale is float32 \[64, 2\], must be float32 \[2, 64\]",
    ),
    "unordered": (
        changed("layers.0.value.signposts", lambda tensor: tensor[::-1]),
        r"tensor layers\.0\.value\.signposts is not in ascending order",
    ),
    "negative scale": (
        changed("layers.0.key.scale", lambda tensor: -tensor),
        r"tensor layers\.0\.key\.scale holds a negative scale",
    ),
    "missing": (
        {name: tensor for name, tensor in BUNDLE.tensors.items() if "layers.1.value" not in name},
        r"tensor layers\.1\.value\.signposts is missing \(1 in all\)",
    ),
    "extra": (
        dict(BUNDLE.tensors) | {"layers.2.key.zero": BUNDLE.tensors["layers.1.key.zero"]},
        r"tensor layers\.2\.key\.zero is not declared by any format \(1 in all\)",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_the_formats(name, folder):
    tensors, message = BAD_TENSORS[name]
    with pytest.raises(FormatError, match=message):
        replace(BUNDLE, tensors=tensors)
    write_tensors(folder, dump_tensors({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))
    with pytest.raises(BundleCorruptError, match=rf"{message}\. Calibrate again or fetch the bundle again"):
        load(folder)


def test_layers_of_another_model():
    with pytest.raises(FormatError, match="formats for 1 layers, but the model has 2"):
        replace(BUNDLE, layers=BUNDLE.layers[:1])


def test_format_that_does_not_fit_the_heads():
    layer = LayerFormat(Format(64, Dense(4, "token", group=48)), Format(64, Dense(4, "token")))
    with pytest.raises(FormatError, match=r"dense\.group=48 does not divide the head dimension 64"):
        replace(BUNDLE, layers=(layer, layer))


@pytest.mark.parametrize("value, error", [(math.nan, ValueError), (math.inf, ValueError), (np.float32(1), TypeError)])
@pytest.mark.parametrize("name", ["evaluation", "calibration"])
def test_data_that_is_not_finite_json_is_refused_before_anything_is_written(tmp_path, name, value, error):
    with pytest.raises(error, match="JSON"):
        replace(BUNDLE, **{name: {"deep": [{"loss": value}]}}).save(tmp_path / "new" / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_manifest_that_could_not_be_read_back_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts.bundle, "MANIFEST_LIMIT", 1000)
    with pytest.raises(
        BundleError, match=r"manifest\.json would take \d+ bytes, at most 1000 .*: keep less in `calibr"
    ):
        BUNDLE.save(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


# Damage


@given(st.data())
@pytest.mark.parametrize("name", ["tensors.safetensors", "evaluation.json"])
def test_any_flipped_bit_of_a_listed_file_is_found(folder, pristine, name, data):
    position = data.draw(st.integers(0, 8 * len(pristine[name]) - 1))
    (folder / name).write_bytes(flipped(pristine[name], position))
    with pytest.raises(BundleCorruptError, match=rf"{name}: altered since it was written \(its SHA-256 differs\)"):
        load(folder)


def flipped(data, position):
    altered = bytearray(data)
    altered[position // 8] ^= 1 << position % 8
    return bytes(altered)


def test_a_flipped_bit_of_the_manifest_is_found_or_stands_in_the_date(folder, pristine):
    manifest = pristine["manifest.json"]
    date = re.search(rb'"created": "([^"]*)"', manifest)
    harmless = 0
    for byte in range(len(manifest)):  # one bit of every byte, another one each time
        (folder / "manifest.json").write_bytes(flipped(manifest, 8 * byte + byte % 8))
        try:
            assert_same(load(folder), BUNDLE)
        except BundleError:
            continue
        assert date.start(1) <= byte < date.end(1)
        harmless += 1
    assert harmless > 0


@pytest.mark.parametrize("name", ["tensors.safetensors", "evaluation.json"])
@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_file(folder, pristine, name, kept):
    data = pristine[name][:kept]
    (folder / name).write_bytes(data)
    size = len(pristine[name])
    if len(data) < size:
        with pytest.raises(BundleCorruptError, match=rf"{name}: {len(data)} bytes, the manifest says {size}\. Fetch"):
            load(folder)


def test_truncated_manifest(folder, pristine):
    manifest = pristine["manifest.json"].rstrip()
    for kept in range(0, len(manifest), 37):
        (folder / "manifest.json").write_bytes(manifest[:kept])
        with pytest.raises(BundleCorruptError, match=r"manifest\.json: not valid JSON \(.*\)\. Fetch the bundle again"):
            load(folder)


@pytest.mark.parametrize("name", ["tensors.safetensors", "evaluation.json"])
@pytest.mark.parametrize("replacement", [None, "folder"])
def test_missing_file(folder, name, replacement):
    (folder / name).unlink()
    if replacement:
        (folder / name).mkdir()
    problem = "is not a plain file" if replacement else "is missing"
    with pytest.raises(BundleCorruptError, match=rf"{name} {problem}\. Fetch the bundle again"):
        load(folder)


@pytest.mark.parametrize("where, problem", [
    ("nowhere", r"there is no such folder\. Make one with"),
    ("manifest.json", r"it is a file\. Name the bundle's folder"),
    ("", r"there is no manifest\.json in it\. Make one with"),
    ("..", r"there is no manifest\.json in it\. Bundles lie in .*bundle"),
])  # fmt: skip
def test_no_bundle(folder, where, problem):
    if not where:
        (folder / "manifest.json").unlink()
    with pytest.raises(BundleNotFoundError, match=rf"no bundle at .*: {problem}"):
        load(folder / where)


# Manifests that nobody wrote

DEEP = "[" * 50_000
NOT_JSON = {
    "empty": b"",
    "text": b"hello",
    "not UTF-8": b'{"recipe": "\xff"}',
    "UTF-16": '{"recipe": "r"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"schema_version": 1, "x": NaN}',
    "infinity": b'{"schema_version": 1, "x": -Infinity}',
    "beyond float64": b'{"schema_version": 1, "x": 1e999}',
    "5000 digits": b'{"schema_version": %s}' % (b"9" * 5000),
    "a key twice": b'{"schema_version": 1, "schema_version": 1}',
    "a deep key twice": b'{"schema_version": 1, "x": [{"y": 1, "y": 2}]}',
    "deep lists": DEEP.encode(),
    "deep tables": b'{"a":' * 50_000,
}


@pytest.mark.parametrize("name", NOT_JSON)
@pytest.mark.parametrize("file", ["manifest.json", "evaluation.json"])
def test_invalid_json(folder, file, name):
    (folder / file).write_bytes(NOT_JSON[name])
    if file == "evaluation.json":
        manifest = read_manifest(folder)
        digest = hashlib.sha256(NOT_JSON[name]).hexdigest()
        manifest["files"][file] = {"size": len(NOT_JSON[name]), "sha256": digest}
        write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match=rf"{file}: not valid JSON \(.*\)\. Fetch the bundle again"):
        load(folder)


@pytest.mark.parametrize("text, kind", [("[]", "list"), ("null", "NoneType"), ('"{}"', "str"), ("1", "int")])
def test_manifest_that_is_not_a_table(folder, text, kind):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleCorruptError, match=rf"manifest\.json: holds a {kind}, not a table\. Fetch"):
        load(folder)


@pytest.mark.parametrize("depth", [100, 900, 980, 2000, 10_000, 50_000])
def test_nesting_around_the_recursion_limits(folder, depth):
    """Python 3.11 gives up reading; later ones read deeper than they write, and so than they can hash."""
    nested = "[" * depth + "]" * depth
    manifest = read_manifest(folder) | {"formats": "HERE"}
    (folder / "manifest.json").write_text(json.dumps(manifest).replace('"HERE"', nested))
    with pytest.raises(BundleCorruptError):
        load(folder)


def test_huge_manifest(folder):
    with open(folder / "manifest.json", "r+b") as file:
        file.truncate((1 << 18) + 1)
    with pytest.raises(BundleCorruptError, match=r"manifest\.json: 262145 bytes, at most 262144 can be right\. Fetch"):
        load(folder)


@pytest.mark.parametrize("version", [True, False, 0, -1, 1.0, "1", None, [1]])
def test_schema_version_that_is_none(folder, version):
    write_sealed(folder, read_manifest(folder) | {"schema_version": version})
    with pytest.raises(
        BundleCorruptError, match=rf"schema_version={re.escape(repr(version))} is not a version\. Fetch"
    ):
        load(folder)


def test_newer_schema(folder):
    (folder / "manifest.json").write_text('{"schema_version": 2, "anything": "else"}')
    with pytest.raises(BundleVersionError, match=r"schema version 2, this Signpost reads up to 1: install a newer one"):
        load(folder)


def test_altered_manifest(folder, pristine):
    text = pristine["manifest.json"].decode()
    (folder / "manifest.json").write_text(text.replace('"sinks": 1', '"sinks": 0'))
    with pytest.raises(
        BundleCorruptError, match=r"manifest\.json: altered since it was written \(its SHA-256 differs\)"
    ):
        load(folder)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "../secret", "/etc/hostname", "sub/tensors.safetensors", "./tensors.safetensors", "", "x\0"],
)
def test_manifest_lists_a_file_that_no_bundle_has(folder, name):
    (folder.parent / "secret").write_text("secret")
    manifest = read_manifest(folder)
    manifest["files"][name] = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    write_sealed(folder, manifest)
    message = f"lists {name!r}; bundles hold only tensors.safetensors and evaluation.json. Fetch"
    with pytest.raises(BundleCorruptError, match=re.escape(message)):
        load(folder)


def test_manifest_without_tensors(folder):
    manifest = read_manifest(folder)
    del manifest["files"]["tensors.safetensors"]
    write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match=r"manifest\.json: does not list tensors\.safetensors\. Fetch"):
        load(folder)


@pytest.mark.parametrize(
    "name, kind", [("files", "dict"), ("recipe", "str"), ("formats", "list"), ("calibration", "dict")]
)
def test_entry_of_another_type(folder, name, kind):
    write_sealed(folder, read_manifest(folder) | {name: None})
    with pytest.raises(
        BundleCorruptError, match=rf"manifest\.json: {name} must be of type {kind}, not None\. Calibrate"
    ):
        load(folder)


@pytest.mark.parametrize("index", [2, -1, True, "0", 0.0, [0]])
def test_layer_of_no_format(folder, index):
    write_sealed(folder, read_manifest(folder) | {"layers": [0, index]})
    with pytest.raises(BundleCorruptError, match=rf"layers names format {re.escape(repr(index))}, there are 2"):
        load(folder)


@pytest.mark.parametrize("layers", [[], [0], [0, 1, 0]])
def test_layers_of_another_length(folder, layers):
    write_sealed(folder, read_manifest(folder) | {"layers": layers})
    with pytest.raises(BundleCorruptError, match=rf"formats for {len(layers)} layers, but the model has 2"):
        load(folder)


def safetensors(dtype, shape, size):
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff" * 64, struct.pack("<Q", 2) + b"{]", safetensors("F32", [3], 8), safetensors("F32", [-1], 4)),
        *(safetensors("BF16", [2], 4), safetensors("F8_E4M3", [4], 4), safetensors("F4", [8], 4)),
    ],
    ids=["empty", "ones", "JSON", "short", "negative", "bfloat16", "float8", "float4"],
)
def test_tensors_that_are_no_safetensors_for_numpy(folder, data):
    write_tensors(folder, data)
    with pytest.raises(
        BundleCorruptError, match=r"tensors\.safetensors: not valid safetensors \(.*\)\. Fetch the bundle"
    ):
        load(folder)


def entries(data, path=()):
    """Paths of all entries of nested tables and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from entries(value, (*path, name))


ODD = [None, True, 0, -1, 3, 1.5, 2**40, 10**400, "", "half", [], [1], {}, {"a": [1]}]


def test_any_entry_may_be_anything_or_missing(folder):
    """No crash: an odd value is refused, or makes a bundle that is whole."""
    manifest = read_manifest(folder)
    refused = []
    for path in entries(manifest):
        for value in [*ODD, ...]:
            odd = copy.deepcopy(manifest)
            table = odd
            for name in path[:-1]:
                table = table[name]
            if value is ...:
                del table[path[-1]]
            else:
                table[path[-1]] = value
            write_sealed(folder, odd)
            try:
                bundle = load(folder)
            except BundleError as error:
                refused.append(str(error))
            else:
                assert 0 < bundle.geometry.bits(4096) < 1e9
                assert bundle.geometry.cache_bytes(4096) > 0
    assert len(refused) > 500
    assert all("etch the bundle again" in message or "install a newer one" in message for message in refused)


def test_errors_of_a_hostile_size_are_still_bundle_errors(tmp_path):
    """Numbers whose product is too large for 64 bits, and those that are too large for floating point."""
    layer = LayerFormat(Format(64, Dense(4, "token")), Format(64, Dense(4, "token")))
    bundle = sample_bundle(layers=(layer,), tensors=tensors_of((layer,), fingerprint(1)))
    folder: Path = bundle.save(tmp_path / "b")
    manifest = read_manifest(folder)
    for size, problem in ((2**40, "more than 2147483647 numbers"), (10**400, "1000.* is not a 64-bit integer")):
        manifest["model"] |= {"h_q": size, "h_kv": size, "d": 32 * size}
        write_sealed(folder, manifest)
        with pytest.raises(BundleCorruptError, match=problem):
            load(folder)
