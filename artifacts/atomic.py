"""Replacing a folder as a whole: after any interruption it holds the old files or the new ones."""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from artifacts.errors import BundleError

# Names of files in a folder that may be replaced with it.
Owned = Callable[[Path], Collection[str]]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)  # what rename says of a folder with files, or a mount point
_CANNOT_SWAP = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EBUSY)


def replace_folder(destination: Path, files: Mapping[str, bytes], ours: Owned) -> Path:
    """Makes `destination` a folder that holds exactly `files`. Returns its path with symbolic links followed.

    A folder that is already there is replaced only if it holds nothing but names that `ours` gives for it, so that a
    mistyped path never costs foreign files (BundleError). Everything is written and synced beside the destination
    first, then moved or swapped in by one system call. OSError (disk full, no permission) leaves the destination as it
    was, save where the very last step, syncing the parent folder, is refused: then the new files are in place. A killed
    process leaves at most a folder `.saving-*` beside the destination, which nothing reads.
    """
    destination = Path(os.path.realpath(destination))
    refuse_foreign(destination, ours, str(destination))
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.parent / f".saving-{secrets.token_hex(8)}"
    try:
        staging.mkdir()
    except OSError as error:  # it names the folder that was asked for
        raise OSError(error.errno, error.strerror, str(destination)) from error
    try:
        for name, data in files.items():
            _write(staging / name, data)
        _sync(staging)
        _put(staging, destination)
        _sync(destination.parent)
    finally:
        # After a swap the staging name holds the old folder; after an error, the unfinished one.
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def refuse_foreign(destination: Path, ours: Owned, name: str) -> None:
    """Raises BundleError, which calls it `name`, where `destination` is a file or a folder with files not `ours`."""
    if destination.exists() and not destination.is_dir():
        raise BundleError(f"{name} is a file: name a folder")
    if not destination.is_dir():
        return
    # Names before owners: another process may put a whole folder there between the two, and owners that were asked
    # of what stood there before would call its files foreign.
    names = set(os.listdir(destination))
    if foreign := sorted(names - set(ours(destination))):
        raise BundleError(f"{name} holds {foreign[0]}, so it is not ours to replace: name a new or empty folder")


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


def _put(staging: Path, destination: Path) -> None:
    """Moves the folder `staging` to `destination`, a free name or an empty folder, or swaps it with a full one."""
    try:
        os.rename(staging, destination)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        _exchange(staging, destination)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two folders by renameat2(RENAME_EXCHANGE). Raises BundleError where the system or file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        code = errno.ENOSYS
    elif function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    else:
        code = ctypes.get_errno()
    if code in _CANNOT_SWAP:
        raise BundleError(
            f"{other} cannot be swapped atomically on its file system ({os.strerror(code)}): "
            "remove the old bundle first, or save to a new path"
        )
    raise OSError(code, os.strerror(code), str(other))
