"""Reading a bundle that may come from anywhere: checked step by step, each before anything depends on it."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from artifacts import strict_json, tensor_file
from artifacts.bundle import (
    EVALUATION,
    MANIFEST,
    MANIFEST_LIMIT,
    SCHEMA_VERSION,
    TENSORS,
    Bundle,
    FileRecord,
    seal,
    tensor_specs,
)
from artifacts.errors import (
    BundleCorruptError,
    BundleError,
    BundleNotFoundError,
    BundleVersionError,
    FormatError,
    shown,
)
from artifacts.fields import TensorSpec
from artifacts.format import LayerFormat, from_json
from artifacts.model import ModelFingerprint
from artifacts.reader import Data, FolderReader

ATTEMPTS = 100  # to read a folder that is replaced all the time
NAMED, LOOKED_AT = 5, 1000  # bundles in a folder that is none, and what lies there
T = TypeVar("T")


def load(path: str | Path, mapped: bool = False) -> Bundle:
    """Reads and verifies the bundle in folder `path`.

    mapped: tensors are private, writable pages of the file instead of a copy, read from the disk as they are used.
    That saves memory where many processes of a machine load one bundle, and needs a file that nobody cuts short:
    `Bundle.save` never does, it makes new ones.

    Raises BundleNotFoundError, BundleVersionError (written by a newer Signpost) or BundleCorruptError (anything that is
    not exactly what was written: truncated, altered or missing files, links, bad JSON, wrong shapes, numbers that are
    not finite), and OSError where the disk or its permissions refuse. A bundle that is replaced while it is being read
    is read again.
    """
    for attempt in range(ATTEMPTS):
        with FolderReader(Path(path)) as folder:
            try:
                return _read(folder, mapped)
            except BundleError:
                if attempt == ATTEMPTS - 1 or not folder.replaced():
                    raise
    raise AssertionError("the last attempt returns or raises")


def read_manifest(folder: FolderReader) -> dict[str, Any]:
    """The manifest as JSON data, of a version that this Signpost reads, its own hash checked."""
    path = folder.path / MANIFEST
    if not folder.holds(MANIFEST):
        inside = folder.holding(MANIFEST, LOOKED_AT)
        raise BundleNotFoundError(
            f"no bundle at {folder.path}: there is no {MANIFEST} in it. "
            + (
                f"Bundles lie in {', '.join(str(folder.path / name) for name in inside[:NAMED])}"
                if inside
                else f"Make one with `python -m calib out={folder.path}`"
            )
        )
    manifest = _parse_json(folder.read(MANIFEST, MANIFEST_LIMIT), path)
    version = manifest.get("schema_version")
    if type(version) is not int or version < 1:
        raise BundleCorruptError(f"{path}: schema_version={shown(version)} is not a version. Fetch the bundle again")
    if version > SCHEMA_VERSION:
        raise BundleVersionError(
            f"{path}: schema version {version}, this Signpost reads up to {SCHEMA_VERSION}: install a newer one"
        )
    if manifest.get("sha256") != seal(manifest):
        raise BundleCorruptError(f"{path}: altered since it was written (its SHA-256 differs). Fetch the bundle again")
    return manifest


def listed_files(folder: FolderReader) -> dict[str, FileRecord]:
    """Names, sizes and hashes of the files beside the manifest. Raises as `load`."""
    try:
        return _records(read_manifest(folder), folder.path / MANIFEST)
    except (FormatError, RecursionError) as error:
        raise BundleCorruptError(f"{folder.path}: {error}. Calibrate again or fetch the bundle again") from error


def _read(folder: FolderReader, mapped: bool) -> Bundle:
    try:
        manifest = read_manifest(folder)
        records = _records(manifest, folder.path / MANIFEST)
        model, layers = _formats(manifest)
        specs = tensor_specs(model, layers)
        numbers = _read_file(folder, TENSORS, records[TENSORS], _size_limit(specs), mapped)
        evaluation = None
        if EVALUATION in records:
            text = _read_file(folder, EVALUATION, records[EVALUATION], MANIFEST_LIMIT)
            evaluation = _parse_json(text, folder.path / EVALUATION)
        try:
            tensors = tensor_file.parse(numbers)
        except FormatError as error:
            where = folder.path / TENSORS
            raise BundleCorruptError(f"{where}: not valid safetensors ({error}). Fetch the bundle again") from error
        return Bundle(
            recipe=_entry(manifest, "recipe", str),
            model=model,
            layers=layers,
            tensors=tensors,
            calibration=_entry(manifest, "calibration", dict),
            evaluation=evaluation,
        )
    except (FormatError, RecursionError) as error:
        raise BundleCorruptError(f"{folder.path}: {error}. Calibrate again or fetch the bundle again") from error


def _records(manifest: Mapping[str, Any], where: Path) -> dict[str, FileRecord]:
    """What the manifest says of the other files. Raises BundleCorruptError unless they are those that bundles hold."""
    listed = _entry(manifest, "files", dict)
    if foreign := [name for name in listed if name not in (TENSORS, EVALUATION)]:
        raise BundleCorruptError(
            f"{where}: lists {shown(foreign[0])}; bundles hold only {TENSORS} and {EVALUATION}. Fetch the bundle again"
        )
    if TENSORS not in listed:
        raise BundleCorruptError(f"{where}: does not list {TENSORS}. Fetch the bundle again")
    return {name: from_json(FileRecord, record, f"files.{name}") for name, record in listed.items()}


def _formats(manifest: Mapping[str, Any]) -> tuple[ModelFingerprint, tuple[LayerFormat | None, ...]]:
    model = from_json(ModelFingerprint, manifest.get("model"), "model")
    layers = _entry(manifest, "layers", list)
    if len(layers) != model.l:  # before anything is made for each of them
        raise FormatError(f"formats for {len(layers)} layers, but the model has {model.l}")
    formats = [from_json(LayerFormat, f, f"formats[{i}]") for i, f in enumerate(_entry(manifest, "formats", list))]
    return model, tuple(_named(formats, i) for i in layers)


def _named(formats: Sequence[LayerFormat], index: Any) -> LayerFormat | None:
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(formats):
        raise FormatError(f"{MANIFEST}: layers names format {shown(index)}, there are {len(formats)}")
    return formats[index]


def _size_limit(specs: Mapping[str, TensorSpec]) -> int:
    """Bytes that a file with these tensors takes at most."""
    return sum(spec.nbytes for spec in specs.values()) + tensor_file.HEADER_LIMIT + tensor_file.LENGTH_BYTES


def _read_file(folder: FolderReader, name: str, record: FileRecord, limit: int, mapped: bool = False) -> Data:
    """The file's bytes, after size and hash have been checked."""
    data = folder.read(name, limit, record.size, mapped)
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise BundleCorruptError(
            f"{folder.path / name}: altered since it was written (its SHA-256 differs). Fetch the bundle again"
        )
    return data


def _parse_json(data: Data, where: Path) -> dict[str, Any]:
    try:
        return strict_json.parse_object(bytes(data))
    except FormatError as error:
        raise BundleCorruptError(f"{where}: {error}. Fetch the bundle again") from error


def _entry(manifest: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = manifest.get(key)
    if not isinstance(value, kind):
        raise FormatError(f"{MANIFEST}: {key} must be of type {kind.__name__}, not {shown(value)}")
    return value
