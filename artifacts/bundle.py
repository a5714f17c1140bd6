"""The bundle: a folder with `manifest.json`, `tensors.safetensors`, `README.md` and, once evaluated, `evaluation.json`.

Schema version 1. The manifest holds formats, model fingerprint, calibration provenance, the SHA-256 of the files with
numbers and, under `sha256`, that of its own content but the date: two bundles with the same `sha256` are the same. The
card `README.md` is for people: it is written at every save and never read back. docs/bundle-format.md specifies it all.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as dump_tensors

from artifacts import strict_json
from artifacts.atomic import replace_folder
from artifacts.card import CARD, MARK, bundle_card
from artifacts.errors import BundleError, BundleMismatchError, FormatError
from artifacts.fields import PageShape, SideName, TensorSpec
from artifacts.format import Format, LayerFormat, to_json
from artifacts.geometry import CacheGeometry
from artifacts.matrices import eight_bits
from artifacts.model import WHOLE, ModelFingerprint, Split

SCHEMA_VERSION = 1
MANIFEST, TENSORS, EVALUATION = "manifest.json", "tensors.safetensors", "evaluation.json"
MANIFEST_LIMIT = 1 << 18  # bytes, also of an evaluation; 126 layers with formats of their own take 140 KB
SIDES: tuple[SideName, SideName] = ("key", "value")

Tensor = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Bundle:
    """What calibration learned about one model.

    recipe       name of the recipe that made it (for people; nothing depends on it)
    model        the model's fingerprint
    layers       formats, one entry per layer; None: in full precision
    tensors      `layers.<l>.<key|value>.<name>` as the formats declare them, and `rope.inv_freq`; rotations and
                 sketches are taken in eight bits (`eight_bits`)
    calibration  provenance: data source and hash, samples, seed, package versions; plain JSON data
    evaluation   measured quality, or None; plain JSON data
    split        which share of the kv heads this is, if a slice (`shard`): in memory only, files hold whole bundles
    Raises FormatError when tensors and formats do not agree.
    """

    recipe: str
    model: ModelFingerprint
    layers: tuple[LayerFormat | None, ...]
    tensors: Mapping[str, Tensor]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    split: Split = WHOLE

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
        object.__setattr__(self, "tensors", _taken_coarse(self.tensors, expected))
        for layer, formats in enumerate(self.layers):
            for side in SIDES if formats else ():
                self._check_side(layer, side, getattr(formats, side))

    def _check_side(self, layer: int, side: SideName, fmt: Format) -> None:
        shape, prefix = PageShape(fmt.t, self.model.h_kv, self.model.d, side), f"layers.{layer}.{side}."
        try:
            fmt.check_tensors(shape, {name: self.tensors[prefix + name] for name in fmt.bundle_tensors(shape)})
        except FormatError as error:
            raise FormatError(f"tensor layers.{layer}.{side}.{error}") from error

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Names, dtypes and shapes that the formats ask for."""
        return tensor_specs(self.model, self.layers)

    def side_tensors(self, layer: int, side: str) -> dict[str, Tensor]:
        """Tensors of one layer's keys or values, by the names that the parts declare."""
        prefix = f"layers.{layer}.{side}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def geometry(self) -> CacheGeometry:
        """Page geometry of every layer."""
        return CacheGeometry.of(self.layers, self.model.h_kv, self.model.d, self.model.sliding)

    def with_evaluation(self, evaluation: Mapping[str, Any]) -> "Bundle":
        """The same bundle with measured quality attached."""
        return replace(self, evaluation=evaluation)

    def shard(self, rank: int, world: int) -> "Bundle":
        """The slice for one of `world` ranks, each with h_kv / world kv heads and the query heads that belong to them.

        Tensors are cut along their kv heads; those without are the same in all slices. Formats stay: whatever a page
        has by its heads (outliers and slots, scales of all heads of a token) is then of the rank's heads.
        A slice gives itself, if it is the one that is asked for.
        Raises FormatError for ranks that there are not, or that cannot share the heads evenly, and BundleMismatchError
        where this is another slice.
        """
        split = Split(rank, world)
        if split == self.split:
            return self
        if self.split != WHOLE:
            raise BundleMismatchError(
                f"this bundle is the slice for {self.split}, and the slice for {split} is wanted: "
                "pass the whole bundle, every rank takes its own slice"
            )
        model, tensors = self.model.share(world), {}
        for name, spec in tensor_specs(model, self.layers).items():
            whole, size = self.tensors[name], spec.shape[0]
            # A copy, so that nobody keeps the whole bundle for its slice.
            tensors[name] = whole if whole.shape == spec.shape else whole[rank * size : (rank + 1) * size].copy()
        return replace(self, model=model, tensors=tensors, split=split)

    def save(self, path: str | Path) -> Path:
        """Writes the bundle to folder `path`, atomically: it holds the old bundle or the new one, never a mixture.

        Raises BundleError for a slice and where `path` is something else than a bundle, ValueError and TypeError where
        calibration or evaluation are not plain finite JSON data, OSError where the disk refuses. See `replace_folder`.
        """
        if self.split != WHOLE:
            raise BundleError(
                f"this bundle is the slice for {self.split}: save the whole one, slices are cut on loading"
            )
        files = {
            TENSORS: dump_tensors({name: np.ascontiguousarray(self.tensors[name]) for name in sorted(self.tensors)})
        }
        if self.evaluation is not None:
            files[EVALUATION] = strict_json.dump(self.evaluation)
        files[MANIFEST] = strict_json.dump(self._manifest(files))
        for name, entry in ((MANIFEST, "calibration"), (EVALUATION, "evaluation")):
            if len(files.get(name, b"")) > MANIFEST_LIMIT:
                raise BundleError(
                    f"{name} would take {len(files[name])} bytes, at most {MANIFEST_LIMIT} can be read back: "
                    f"keep less in `{entry}`"
                )
        files[CARD] = bundle_card(self).encode()
        return replace_folder(Path(path), files, ours=owned_files)

    def _manifest(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        distinct = list(dict.fromkeys(formats for formats in self.layers if formats))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": self.recipe,
            "model": self.model.to_json(),
            "formats": [to_json(f) for f in distinct],
            "layers": [distinct.index(f) if f else None for f in self.layers],
            "calibration": self.calibration,
            "files": {name: asdict(FileRecord.of(data)) for name, data in files.items()},
        }
        return manifest | {"sha256": seal(manifest)}


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of another file: size in bytes and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """That of a file with these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


def owned_files(folder: Path) -> set[str]:
    """Names of files in `folder` that a bundle saved there may replace: a README.md only if it is a bundle's card."""
    names, card = {MANIFEST, TENSORS, EVALUATION}, folder / CARD
    if card.is_file() and not card.is_symlink():
        with open(card, "rb") as file:
            names |= {CARD} if MARK.encode() in file.read(1 << 16) else set()
    return names


def tensor_specs(model: ModelFingerprint, layers: Sequence[LayerFormat | None]) -> dict[str, TensorSpec]:
    """Tensors that formats ask for, by name. Raises FormatError where the formats do not fit the model."""
    specs = {"rope.inv_freq": TensorSpec("float32", (model.rope.dim // 2,))}
    for layer, formats in enumerate(layers):
        for side in SIDES if formats else ():
            fmt = getattr(formats, side)
            fmt.check(shape := PageShape(fmt.t, model.h_kv, model.d, side))
            specs |= {f"layers.{layer}.{side}.{name}": spec for name, spec in fmt.bundle_tensors(shape).items()}
    return specs


def seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything in the manifest but the date and the seal itself."""
    content = {name: value for name, value in manifest.items() if name not in ("created", "sha256")}
    digest = hashlib.sha256()
    for chunk in strict_json.chunks(content):
        digest.update(chunk.encode())
    return digest.hexdigest()


def _taken_coarse(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> Mapping[str, Tensor]:
    """The same tensors if matrices have eight bits, as calibration makes them; others are rounded."""
    changed = {}
    for name in (name for name, spec in specs.items() if spec.coarse):
        try:
            rounded = eight_bits(tensors[name])
        except FormatError as error:
            raise FormatError(f"tensor {name}: {error}") from error
        if not np.array_equal(rounded, tensors[name]):
            changed[name] = rounded
    return {**tensors, **changed} if changed else tensors


def _check_tensor(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    if tensor.dtype != np.dtype(spec.dtype) or tensor.shape != spec.shape:
        raise FormatError(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, must be {spec.dtype} {list(spec.shape)}"
        )
    if not np.isfinite(tensor).all():
        raise FormatError(f"tensor {name} holds numbers that are not finite")
    if name.endswith((".signposts", ".edges")) and not (np.diff(tensor.astype(np.float64)) >= 0).all():
        raise FormatError(f"tensor {name} is not in ascending order")
    if name.endswith(".spacing") and not tensor[1] > 0:
        raise FormatError(f"tensor {name} says that values are {tensor[1]} apart, must be at least 1")
    if name.endswith(".scale") and not (tensor.astype(np.float64) >= 0).all():
        raise FormatError(f"tensor {name} holds a negative scale")
