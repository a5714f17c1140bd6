"""What a run is refused for at once, without importing torch, which takes longer: texts, models, packages, folders."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HFValidationError

from artifacts.atomic import Owned, refuse_foreign, replace_folder
from artifacts.bundle import MANIFEST, owned_files
from artifacts.errors import SignpostError
from calib.config import ConfigError, ModelConfig, Settings, TextConfig
from calib.names import model_path


class DataError(SignpostError, ValueError):
    """Text that cannot be used: empty, too short, not UTF-8, not there."""


def check(settings: Settings) -> None:
    """Raises ConfigError, DataError, BundleError, and what a budget's choice raises. Leaves nothing behind."""
    config, measured = settings.config, False
    check_writable(Path(config.out), f"out={config.out}", owned_files)
    if config.work is not None:  # whose files it is all right to find there
        check_writable(settings.work / "stage", f"work={config.work}", os.listdir)
    if config.budget is not None:
        from calib.allocation.again import choice  # imports scipy
        from calib.allocation.table import FILES, RECORD

        choice(settings)
        measured = (settings.table / RECORD).exists()
        if not measured:
            check_writable(settings.table, f"table={settings.table}", lambda _: FILES)
    if not measured:
        _check_text(config.data, "data")
    _check_text(config.eval, "eval")
    if not measured or config.eval.source != "none":
        _check_model(config.model)


def check_writable(path: Path, name: str, ours: Owned) -> None:
    """Raises what replacing a folder would raise: foreign files, no permission, no way to swap folders.

    name: of the folder in messages. Rehearsed in the nearest folder that is there, which keeps nothing of it.
    """
    destination = Path(os.path.realpath(path))
    try:
        refuse_foreign(destination, ours, name)
        home = next(folder for folder in destination.parents if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".signpost-", dir=home) as scratch:
            rehearsed = Path(scratch) / destination.relative_to(home)
            for _ in ("new", "replaced"):
                replace_folder(rehearsed, {MANIFEST: b""}, ours=lambda _: (MANIFEST,))
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written ({error.strerror or error}): name a folder that can be made"
        ) from error


def text_files(path: Path, name: str | None = None) -> list[Path]:
    """The file itself, or all .txt files of a folder in name order. Raises DataError where there is none.

    name: of the path in messages, where it is not the path.
    """
    if not path.exists():
        raise DataError(f"{name or path} does not exist: name a UTF-8 text file or a folder of .txt files")
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        raise DataError(f"{name or path} cannot be read (no permission): name a file or folder that can")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{name or path} holds no .txt file: name a UTF-8 text file or a folder of .txt files")
    return files


def without_datasets(name: str) -> DataError:
    """What to say where a text of the hub is asked for."""
    return DataError(f"{name} needs the package `datasets`: pip install 'signpost-kv[datasets]'")


def _check_text(text: TextConfig, where: str) -> None:
    if text.source == "text":
        text_files(Path(text.path or ""), f"{where}.path={text.path}")
    elif text.source not in ("generated", "none") and find_spec("datasets") is None:
        raise without_datasets(f"{where}={text.source}")


def _check_model(model: ModelConfig) -> None:
    """Raises ConfigError for what is neither a folder with a model nor can be a hub id."""
    place = model_path(model.path)
    path, way_out = Path(place), "name a folder that holds a Hugging Face model, or a hub id"
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"model.path={path} holds no config.json: {way_out}")
        return
    if path.exists():
        raise ConfigError(f"model.path={path} is a file: {way_out}")
    try:
        hf_hub_url(place, "config.json")  # looks at the name
    except HFValidationError as error:
        raise ConfigError(
            f"model.path={model.path}: there is no such folder, and hub ids look different: {way_out}"
        ) from error
