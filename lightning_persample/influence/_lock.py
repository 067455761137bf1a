"""A folder is held by the process that writes to it, by a lock of the system, which ends with that process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from lightning_persample.errors import OptionError

__all__ = ["FolderLock"]

_NAME = "_writing.lock"


class FolderLock:
    """Keeps other writers out of a folder until it is released; where the system knows no locks, nobody is kept out."""

    def __init__(self, dirpath: Path) -> None:
        dirpath.mkdir(parents=True, exist_ok=True)
        self._path = dirpath / _NAME
        self._file: IO[Any] | None = None
        while not self._is_taken():
            pass

    def _is_taken(self) -> bool:
        """Take it; False where its last holder removed the file in the same moment: nobody else would see it."""
        file = self._path.open("ab")
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            raise OptionError(
                f"dirpath={os.fspath(self._path.parent)!r} is being written to by another fit or collection, in this "
                "process or another: wait for its end, or pass another dirpath"
            ) from None
        except OSError:  # no locks here
            file.close()
            return True
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            is_there = False
        if is_there:
            self._file = file
        else:
            file.close()
        return is_there

    def release(self) -> None:
        """Let others write."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):  # (Windows removes no file that is open)
            self._path.unlink()
        if fcntl is not None:  # at once, though a forked worker may hold the file, too
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
        if fcntl is None:
            with suppress(OSError):
                self._path.unlink()


def _lock(file: IO[Any]) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
