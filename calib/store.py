"""Stages on disk, so that a killed run continues and several recipes fit from statistics that were collected once.

A stage is a folder named by the SHA-256 of its key: everything that its numbers depend on. It holds one file per layer,
so no file grows with the model's depth. Folders are written aside, synced and renamed: after any interruption a
stage is there as a whole or not at all.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from artifacts.errors import SignpostError

VERSION = 1  # of what stages hold; one more whenever the same key would mean other numbers
RECORD = "stage.json"
Layers = Sequence[Mapping[str, Tensor]]


class StageError(SignpostError, ValueError):
    """A stage on disk is not what its name says."""


class Store:
    """Stages in one folder. Several processes may share it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.used: set[str] = set()  # digests of the stages that were asked for

    def get(self, key: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
        """Tensors of all layers, on the CPU; None if the stage is not there. Raises StageError if it is damaged."""
        return _read(self.folder / self._digest(key), key)

    def put(self, key: Mapping[str, Any], layers: Layers) -> None:
        """Saves a finished stage. Raises OSError where the disk refuses."""
        _write(self.folder / self._digest(key), key, layers)

    def get_part(self, key: Mapping[str, Any], who: str) -> tuple[int, list[dict[str, Tensor]]] | None:
        """What `who` had seen when it last saved, and of how many samples; None if it never did."""
        parts = self._parts(key, who)
        if not parts:
            return None
        done = max(parts)
        layers = _read(parts[done], dict(key) | {"who": who, "done": done})
        return None if layers is None else (done, layers)

    def put_part(self, key: Mapping[str, Any], who: str, done: int, layers: Layers) -> None:
        """Saves what `who` has seen so far, `done` samples, and forgets what it had saved before."""
        before = self._parts(key, who)
        path = self.folder / f"{self._digest(key)}-{who}-{done}"
        _write(path, dict(key) | {"who": who, "done": done}, layers)
        for old in before.values():
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def drop_parts(self, key: Mapping[str, Any], who: str) -> None:
        """Forgets what `who` had saved of a stage that is finished."""
        for path in self._parts(key, who).values():
            shutil.rmtree(path, ignore_errors=True)

    @property
    def kept(self) -> bool:
        """Whether anything of the stages that were asked for is on disk."""
        return any(self._asked_for())

    def clear(self) -> bool:
        """Removes the stages that were asked for, and the folder if nothing else is in it; says whether it is gone."""
        for path in list(self._asked_for()):
            shutil.rmtree(path, ignore_errors=True)
        if self.folder.is_dir():
            for path in self.folder.glob(".saving-*"):  # of a killed process
                shutil.rmtree(path, ignore_errors=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        return not self.folder.exists()

    def _asked_for(self) -> Iterator[Path]:
        return (path for digest in self.used for path in self.folder.glob(f"{digest}*"))

    def _digest(self, key: Mapping[str, Any]) -> str:
        digest = hashlib.sha256(_dump(key).encode()).hexdigest()[:32]
        self.used.add(digest)
        return digest

    def _parts(self, key: Mapping[str, Any], who: str) -> dict[int, Path]:
        """Saved parts by how many samples they hold: one, or two if a process was killed between two steps."""
        prefix = f"{self._digest(key)}-{who}-"
        found = {path.name.removeprefix(prefix): path for path in self.folder.glob(f"{prefix}*")}
        return {int(done): path for done, path in found.items() if re.fullmatch(r"\d+", done)}


def _dump(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)


def _write(path: Path, key: Mapping[str, Any], layers: Layers) -> None:
    if path.is_dir():  # another process was faster: the same key means the same bytes
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".saving-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        hashes = []
        for layer, tensors in enumerate(layers):
            data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
            hashes.append(hashlib.sha256(data).hexdigest())
            _write_file(staging / _file(layer), data)
        _write_file(staging / RECORD, _dump({"version": VERSION, "key": key, "sha256": hashes}).encode())
        try:
            os.rename(staging, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, key: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
    if not path.is_dir():
        return None
    try:
        record = json.loads((path / RECORD).read_text())
        version, its_key, hashes = record["version"], record["key"], record["sha256"]
    except FileNotFoundError as error:
        if not path.is_dir():  # removed by another process in the meantime
            return None
        raise _damaged(path, f"there is no {RECORD} in it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{RECORD} cannot be read") from error
    if version != VERSION:
        raise _damaged(path, f"it is of version {version}, this Signpost reads version {VERSION}")
    if _dump(its_key) != _dump(key):
        raise _damaged(path, "it belongs to another run: its settings or inputs differ")
    layers = []
    for layer, expected in enumerate(hashes):
        try:
            data = (path / _file(layer)).read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise _damaged(path, f"{_file(layer)} was altered since it was written")
            layers.append(load(data))
        except (FileNotFoundError, SafetensorError) as error:
            raise _damaged(path, f"{_file(layer)} is missing or no safetensors file") from error
    return layers


def _file(layer: int) -> str:
    return f"layer-{layer:03d}.safetensors"


def _damaged(path: Path, reason: str) -> StageError:
    return StageError(f"the statistics in {path} cannot be used: {reason}. Delete that folder to collect them again")
