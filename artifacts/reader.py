"""Reading the files of a folder that somebody else may have written, and may be replacing right now."""

import errno
import mmap
import os
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType

from artifacts.errors import BundleCorruptError, BundleNotFoundError, shown

Data = bytearray | memoryview


class FolderReader:
    """An open folder. All files come from the folder that was opened, even if another one takes its path meanwhile.

    Only plain files that lie in it are read: no links, folders, pipes or devices, so nothing outside is ever opened and
    nothing can block. Use it in `with`. Raises BundleNotFoundError where there is no folder, OSError where the system
    does not let us in.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise BundleNotFoundError(f"no bundle at {path}: it is a file. Name the bundle's folder") from error
        except FileNotFoundError as error:
            raise BundleNotFoundError(
                f"no bundle at {path}: there is no such folder. Make one with `python -m calib out={path}`"
            ) from error

    def __enter__(self) -> "FolderReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._folder)

    def replaced(self) -> bool:
        """Whether the path leads to another folder by now, or to none."""
        try:
            now = os.stat(self.path)
        except OSError:
            return True
        return not os.path.samestat(now, os.fstat(self._folder))

    def holds(self, name: str) -> bool:
        """Whether something of that name lies in the folder, whatever it is."""
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def holding(self, name: str, most: int) -> list[str]:
        """Folders in it in which something of that name lies, of so many that are looked at."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in islice(entries, most):
                with suppress(OSError):  # what we may not look at
                    if entry.is_dir(follow_symlinks=False) and self.holds(os.path.join(entry.name, name)):
                        found.append(entry.name)
        return sorted(found)

    def read(self, name: str, limit: int, size: int | None = None, mapped: bool = False) -> Data:
        """The bytes of file `name`: at most `limit`, and just `size` where that is given.

        The file's own length is checked before anything is allocated. mapped: private pages of the file instead of a
        copy. Raises BundleCorruptError for a file that is missing, no plain file, or of another size.
        """
        handle = self._open(name)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise BundleCorruptError(f"{self.path / name} is not a plain file. Fetch the bundle again")
            length = status.st_size
            if size is not None and length != size:
                raise BundleCorruptError(
                    f"{self.path / name}: {length} bytes, the manifest says {size}. Fetch the bundle again"
                )
            if length > limit:
                raise BundleCorruptError(f"{self.path / name}: {length} bytes, at most {limit} can be right. Fetch "
                                         "the bundle again")  # fmt: skip
            return _map(handle, length) if mapped else self._copy(handle, name, length)
        finally:
            os.close(handle)

    def _open(self, name: str) -> int:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise BundleCorruptError(f"{self.path}: {shown(name)} is not the name of a file in it")
        try:
            return os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=self._folder
            )
        except FileNotFoundError as error:
            raise BundleCorruptError(f"{self.path / name} is missing. Fetch the bundle again") from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BundleCorruptError(
                    f"{self.path / name} is a symbolic link, and bundles hold plain files: copy the folder with "
                    "`cp -rL`, or fetch it with `python -m artifacts pull`"
                ) from error
            if error.errno == errno.ENXIO:  # a socket, or a device that is not there
                raise BundleCorruptError(f"{self.path / name} is not a plain file. Fetch the bundle again") from error
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error

    def _copy(self, handle: int, name: str, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            count = os.readv(handle, [view[done:]])
            if not count:
                raise BundleCorruptError(f"{self.path / name} became shorter while it was read. Load it again")
            done += count
        return data


def _map(handle: int, length: int) -> Data:
    if not length:  # nothing to map
        return bytearray()
    return memoryview(mmap.mmap(handle, length, access=mmap.ACCESS_COPY))
