"""Replacing a folder as a whole: after any interruption it holds the old files or the new ones."""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from artifacts.errors import BundleError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def replace_folder(destination: Path, files: Mapping[str, bytes], marker: str) -> Path:
    """Makes `destination` a folder that holds exactly `files`. Returns it.

    A folder that is already there is replaced only if it holds the file `marker` or nothing at all, so that a mistyped path
    never costs foreign files (BundleError). Everything is written and synced beside the destination first, then swapped in
    by one system call. OSError (disk full, no permission) leaves the destination as it was.
    """
    destination = destination.absolute()
    if destination.exists() and not destination.is_dir():
        raise BundleError(f"{destination} is a file: name a folder")
    if destination.is_dir() and any(destination.iterdir()) and not (destination / marker).is_file():
        raise BundleError(f"{destination} is a folder without {marker}, so not ours to replace: name a new or empty folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent))
    try:
        os.chmod(staging, 0o755)
        for name, data in files.items():
            _write(staging / name, data)
        _sync(staging)
        if destination.exists():
            _exchange(staging, destination)
        else:
            os.rename(staging, destination)
        _sync(destination.parent)
    finally:
        # After the swap the staging name holds the old folder; after an error, the unfinished one.
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two folders by renameat2(RENAME_EXCHANGE). Raises BundleError where the system or file system has no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        code = errno.ENOSYS
    elif function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    else:
        code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise BundleError(
            f"the file system of {other} cannot swap folders atomically ({os.strerror(code)}): "
            "remove the old bundle first, or save to a new path and rename it"
        )
    raise OSError(code, os.strerror(code), str(other))
