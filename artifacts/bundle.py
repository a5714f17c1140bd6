"""The bundle: a folder with `manifest.json`, `tensors.safetensors` and, once evaluated, `evaluation.json`.

Schema version 1. The manifest holds formats, model fingerprint, calibration provenance, the SHA-256 of every other file
and, under `sha256`, that of its own content but the date: two bundles with the same `sha256` are the same.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_tensors
from safetensors.numpy import save as dump_tensors

from artifacts.atomic import replace_folder
from artifacts.errors import BundleCorruptError, BundleError, BundleNotFoundError, BundleVersionError, FormatError
from artifacts.fields import PageShape, SideName, TensorSpec
from artifacts.format import LayerFormat, from_json, to_json
from artifacts.geometry import CacheGeometry
from artifacts.model import ModelFingerprint

SCHEMA_VERSION = 1
MANIFEST, TENSORS, EVALUATION = "manifest.json", "tensors.safetensors", "evaluation.json"
MANIFEST_LIMIT = 16 << 20  # bytes; a manifest of 1000 layers is below 1 MiB
SIDES: tuple[SideName, SideName] = ("key", "value")

Tensor = NDArray[np.generic]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Bundle:
    """What calibration learned about one model.

    recipe       name of the recipe that made it (for people; nothing depends on it)
    model        the model's fingerprint
    layers       formats, one entry per layer
    tensors      `layers.<l>.<key|value>.<name>` as the formats declare them, and `rope.inv_freq`
    calibration  provenance: data source and hash, samples, seed, package versions; plain JSON data
    evaluation   measured quality, or None; plain JSON data
    Raises FormatError when tensors and formats do not agree.
    """

    recipe: str
    model: ModelFingerprint
    layers: tuple[LayerFormat, ...]
    tensors: Mapping[str, Tensor]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.model.l:
            raise FormatError(f"formats for {len(self.layers)} layers, but the model has {self.model.l}")
        expected = self.tensor_specs()
        if missing := sorted(expected.keys() - self.tensors.keys()):
            raise FormatError(f"tensor {missing[0]} is missing ({len(missing)} in all)")
        if extra := sorted(self.tensors.keys() - expected.keys()):
            raise FormatError(f"tensor {extra[0]} is not declared by any format ({len(extra)} in all)")
        for name, spec in expected.items():
            _check_tensor(name, self.tensors[name], spec)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Names, dtypes and shapes that the formats ask for."""
        specs = {"rope.inv_freq": TensorSpec("float32", (self.model.rope.dim // 2,))}
        for layer, formats in enumerate(self.layers):
            for side in SIDES:
                fmt = getattr(formats, side)
                fmt.check(shape := PageShape(fmt.t, self.model.h_kv, self.model.d, side))
                specs |= {f"layers.{layer}.{side}.{name}": spec for name, spec in fmt.bundle_tensors(shape).items()}
        return specs

    def side_tensors(self, layer: int, side: str) -> dict[str, Tensor]:
        """Tensors of one layer's keys or values, by the names that the parts declare."""
        prefix = f"layers.{layer}.{side}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def geometry(self) -> CacheGeometry:
        """Page geometry of every layer."""
        return CacheGeometry.of(self.layers, self.model.h_kv, self.model.d)

    def with_evaluation(self, evaluation: Mapping[str, Any]) -> "Bundle":
        """The same bundle with measured quality attached."""
        return replace(self, evaluation=evaluation)

    def save(self, path: str | Path) -> Path:
        """Writes the bundle to folder `path`, atomically: it holds the old bundle or the new one, never a mixture.

        Raises BundleError where `path` is something else than a bundle, ValueError and TypeError where calibration or
        evaluation are not plain finite JSON data, OSError where the disk refuses. See `replace_folder`.
        """
        files = {
            TENSORS: dump_tensors({name: np.ascontiguousarray(self.tensors[name]) for name in sorted(self.tensors)})
        }
        if self.evaluation is not None:
            files[EVALUATION] = _dump_json(self.evaluation)
        files[MANIFEST] = _dump_json(self._manifest(files))
        if len(files[MANIFEST]) > MANIFEST_LIMIT:
            raise BundleError(
                f"{MANIFEST} would take {len(files[MANIFEST])} bytes, at most {MANIFEST_LIMIT} can be read back: "
                "keep less in `calibration`"
            )
        return replace_folder(Path(path), files, ours=(MANIFEST, TENSORS, EVALUATION))

    def _manifest(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        distinct = list(dict.fromkeys(self.layers))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": self.recipe,
            "model": asdict(self.model),
            "formats": [to_json(f) for f in distinct],
            "layers": [distinct.index(f) for f in self.layers],
            "calibration": self.calibration,
            "files": {name: asdict(_File.of(data)) for name, data in files.items()},
        }
        return manifest | {"sha256": _seal(manifest)}


@dataclass(frozen=True)
class _File:
    """What the manifest says of another file: size in bytes and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "_File":
        return cls(len(data), hashlib.sha256(data).hexdigest())


def load(path: str | Path) -> Bundle:
    """Reads and verifies the bundle in folder `path`.

    Raises BundleNotFoundError, BundleVersionError (written by a newer Signpost) or BundleCorruptError (anything that is
    not exactly what was written: truncated, altered or missing files, bad JSON, wrong shapes, numbers that are not
    finite). One that is replaced while it is being read may be refused: load it again.
    """
    folder = Path(path)
    try:
        manifest = _read_manifest(folder)
        records = {name: from_json(_File, f, f"files.{name}") for name, f in _entry(manifest, "files", dict).items()}
        files = {name: _read_file(folder, name, record) for name, record in records.items()}
        if TENSORS not in files:
            raise BundleCorruptError(f"{folder / MANIFEST}: does not list {TENSORS}. Fetch the bundle again")
        formats = [from_json(LayerFormat, f, f"formats[{i}]") for i, f in enumerate(_entry(manifest, "formats", list))]
        return Bundle(
            recipe=_entry(manifest, "recipe", str),
            model=from_json(ModelFingerprint, manifest.get("model"), "model"),
            layers=tuple(formats[_index(i, len(formats))] for i in _entry(manifest, "layers", list)),
            tensors=_parse_tensors(files[TENSORS], folder / TENSORS),
            calibration=_entry(manifest, "calibration", dict),
            evaluation=_parse_json(files[EVALUATION], folder / EVALUATION) if EVALUATION in files else None,
        )
    except (FormatError, RecursionError) as error:
        raise BundleCorruptError(f"{folder}: {error}. Calibrate again or fetch the bundle again") from error


def _dump_json(data: Mapping[str, Any]) -> bytes:
    """Indented JSON; NaN and infinity have no place in it (ValueError)."""
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def _seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything in the manifest but the date and the seal itself."""
    return hashlib.sha256(_dump_json({k: v for k, v in manifest.items() if k not in ("created", "sha256")})).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _finite(literal: str) -> float:
    if not isfinite(value := float(literal)):
        raise ValueError(f"{literal} is not a finite number")
    return value


def _parse_json(data: bytes, where: Path) -> dict[str, Any]:
    try:
        value = json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise BundleCorruptError(f"{where}: not valid JSON ({error}). Fetch the bundle again") from error
    if not isinstance(value, dict):
        raise BundleCorruptError(f"{where}: holds a {type(value).__name__}, not a table. Fetch the bundle again")
    return value


def _parse_tensors(data: bytes, where: Path) -> dict[str, Tensor]:
    try:
        return parse_tensors(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy does not have
        raise BundleCorruptError(f"{where}: not valid safetensors ({error}). Fetch the bundle again") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleNotFoundError(
            f"no bundle at {folder}: there is no {MANIFEST} in it. Make one with `python -m calib out={folder}`"
        )
    if path.stat().st_size > MANIFEST_LIMIT:
        raise BundleCorruptError(f"{path}: larger than {MANIFEST_LIMIT} bytes, not a manifest. Fetch the bundle again")
    manifest = _parse_json(path.read_bytes(), path)
    version = manifest.get("schema_version")
    if type(version) is not int or version < 1:
        raise BundleCorruptError(f"{path}: schema_version={version!r} is not a version. Fetch the bundle again")
    if version > SCHEMA_VERSION:
        raise BundleVersionError(
            f"{path}: schema version {version}, this Signpost reads up to {SCHEMA_VERSION}: pip install -U signpost-kv"
        )
    if manifest.get("sha256") != _seal(manifest):
        raise BundleCorruptError(f"{path}: altered since it was written (its SHA-256 differs). Fetch the bundle again")
    return manifest


def _read_file(folder: Path, name: str, record: _File) -> bytes:
    """The file's bytes, after size and hash have been checked."""
    if name not in (TENSORS, EVALUATION):
        raise BundleCorruptError(
            f"{folder / MANIFEST}: lists {name!r}; bundles hold only {TENSORS} and {EVALUATION}. Fetch the bundle again"
        )
    path = folder / name
    if not path.is_file():
        raise BundleCorruptError(f"{path} is missing. Fetch the bundle again")
    if (size := path.stat().st_size) != record.size:
        raise BundleCorruptError(f"{path}: {size} bytes, the manifest says {record.size}. Fetch the bundle again")
    if _File.of(data := path.read_bytes()) != record:
        raise BundleCorruptError(f"{path}: altered since it was written (its SHA-256 differs). Fetch the bundle again")
    return data


def _entry(manifest: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = manifest.get(key)
    if not isinstance(value, kind):
        raise FormatError(f"{MANIFEST}: {key} must be of type {kind.__name__}, not {value!r}")
    return value


def _index(value: Any, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise FormatError(f"{MANIFEST}: layers names format {value!r}, there are {count}")
    return value


def _check_tensor(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    if tensor.dtype != np.dtype(spec.dtype) or tensor.shape != spec.shape:
        raise FormatError(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, must be {spec.dtype} {list(spec.shape)}"
        )
    if not np.isfinite(tensor).all():
        raise FormatError(f"tensor {name} holds numbers that are not finite")
    if name.endswith((".signposts", ".edges")) and not (np.diff(tensor.astype(np.float64)) >= 0).all():
        raise FormatError(f"tensor {name} is not in ascending order")
    if name.endswith(".scale") and not (tensor.astype(np.float64) >= 0).all():
        raise FormatError(f"tensor {name} holds a negative scale")
