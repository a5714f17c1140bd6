"""The bundle: a folder with `manifest.json`, `tensors.safetensors` and, once evaluated, `evaluation.json`.

Schema version 1. The manifest holds formats, model fingerprint, calibration provenance and the SHA-256 of every other file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_tensors
from safetensors.numpy import save as dump_tensors

from artifacts.atomic import replace_folder
from artifacts.errors import BundleCorruptError, BundleNotFoundError, BundleVersionError, FormatError
from artifacts.fields import PageShape, TensorSpec
from artifacts.format import LayerFormat, from_json, to_json
from artifacts.geometry import CacheGeometry
from artifacts.model import ModelFingerprint

SCHEMA_VERSION = 1
MANIFEST, TENSORS, EVALUATION = "manifest.json", "tensors.safetensors", "evaluation.json"
MANIFEST_LIMIT = 16 << 20  # bytes; a manifest of 1000 layers is below 1 MiB
SIDES = ("key", "value")

Tensor = NDArray[np.generic]


@dataclass(frozen=True)
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
                fmt.check(shape := PageShape(fmt.t, self.model.h_kv, self.model.d))
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
        """Writes the bundle to folder `path`, atomically: the folder holds the old bundle or the new one, never a mixture.

        Raises BundleError where `path` is something else than a bundle, OSError where the disk refuses (the old bundle is
        then untouched).
        """
        files = {TENSORS: dump_tensors({name: np.ascontiguousarray(self.tensors[name]) for name in sorted(self.tensors)})}
        if self.evaluation is not None:
            files[EVALUATION] = _dump_json(self.evaluation)
        files[MANIFEST] = _dump_json(self._manifest(files))
        return replace_folder(Path(path), files, marker=MANIFEST)

    def _manifest(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        distinct = list(dict.fromkeys(self.layers))
        return {
            "schema_version": SCHEMA_VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": self.recipe,
            "model": asdict(self.model),
            "formats": [{side: _format_json(getattr(f, side)) for side in SIDES} for f in distinct],
            "layers": [distinct.index(f) for f in self.layers],
            "calibration": self.calibration,
            "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()},
        }


def load(path: str | Path) -> Bundle:
    """Reads and verifies the bundle in folder `path`.

    Raises BundleNotFoundError, BundleVersionError (written by a newer Signpost) or BundleCorruptError (anything that is not
    exactly what was written: truncated, altered or missing files, bad JSON, wrong shapes, numbers that are not finite).
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    try:
        files = {name: _read_file(folder, name, entry) for name, entry in _table(manifest, "files").items()}
        if TENSORS not in files:
            raise BundleCorruptError(f"{folder / MANIFEST}: does not list {TENSORS}")
        formats = [from_json(LayerFormat, f, f"formats[{i}]") for i, f in enumerate(_list(manifest, "formats"))]
        return Bundle(
            recipe=str(manifest.get("recipe")),
            model=from_json(ModelFingerprint, manifest.get("model"), "model"),
            layers=tuple(formats[_index(i, len(formats))] for i in _list(manifest, "layers")),
            tensors=parse_tensors(files[TENSORS]),
            calibration=_table(manifest, "calibration"),
            evaluation=_parse_json(files[EVALUATION], folder / EVALUATION) if EVALUATION in files else None,
        )
    except (FormatError, SafetensorError) as error:
        raise BundleCorruptError(f"{folder}: {error}. Calibrate again or fetch the bundle again") from error


def _format_json(fmt: Any) -> dict[str, Any]:
    data = to_json(fmt)
    return {k: to_json(getattr(fmt, k)) if isinstance(v, dict) else v for k, v in data.items()}


def _dump_json(data: Mapping[str, Any]) -> bytes:
    """Indented JSON; NaN and infinity have no place in it (ValueError)."""
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _parse_json(data: bytes, where: Path) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BundleCorruptError(f"{where}: not valid JSON ({error}). Fetch the bundle again") from error
    if not isinstance(value, dict):
        raise BundleCorruptError(f"{where}: holds a {type(value).__name__}, not a table. Fetch the bundle again")
    return value


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
    return manifest


def _read_file(folder: Path, name: str, entry: Any) -> bytes:
    """The file's bytes, after size and hash have been checked."""
    if name not in (TENSORS, EVALUATION):
        raise BundleCorruptError(f"{folder / MANIFEST}: lists {name!r}; a bundle holds {TENSORS} and {EVALUATION} only")
    path = folder / name
    size = entry.get("bytes") if isinstance(entry, dict) else None
    if not path.is_file():
        raise BundleCorruptError(f"{path} is missing. Fetch the bundle again")
    if path.stat().st_size != size:
        raise BundleCorruptError(f"{path}: {path.stat().st_size} bytes, the manifest says {size}. Fetch the bundle again")
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.get("sha256"):
        raise BundleCorruptError(f"{path}: SHA-256 is {digest}, the manifest says {entry.get('sha256')}. Fetch the bundle again")
    return data


def _table(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    value = manifest.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{MANIFEST}: {key} must be a table, not {value!r}")
    return value


def _list(manifest: dict[str, Any], key: str) -> list[Any]:
    value = manifest.get(key)
    if not isinstance(value, list):
        raise FormatError(f"{MANIFEST}: {key} must be a list, not {value!r}")
    return value


def _index(value: Any, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise FormatError(f"{MANIFEST}: layers names format {value!r}, there are {count}")
    return value


def _check_tensor(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    if tensor.dtype != np.dtype(spec.dtype) or tensor.shape != spec.shape:
        raise FormatError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, must be {spec.dtype} {list(spec.shape)}")
    if not np.isfinite(tensor).all():
        raise FormatError(f"tensor {name} holds numbers that are not finite")
    if name.endswith(".signposts") and not (np.diff(tensor.astype(np.float64)) >= 0).all():
        raise FormatError(f"tensor {name} is not in ascending order")
    if name.endswith(".scale") and not (tensor.astype(np.float64) >= 0).all():
        raise FormatError(f"tensor {name} holds a negative scale")
