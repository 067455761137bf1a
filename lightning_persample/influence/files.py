"""Files that are whole or not there, a folder's manifest, and the lock of the process that writes there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_persample.errors import OptionError, PerSampleError

__all__ = [
    "GRADIENTS",
    "MANIFEST",
    "FolderLock",
    "broken_files_named",
    "force_names",
    "read_json",
    "refuse_ledger",
    "refuse_store",
    "remove_partial_files",
    "write_atomically",
    "write_json",
]

# What reads folders of Parquet files passes over names that begin with an underscore.
MANIFEST = "_manifest.json"
GRADIENTS = "_gradients"  # the store of gradients in a ledger's folder
_PARTIAL = re.compile(r"\.(rows-[\d-]+\.parquet|shard-[\d-]+(\.rows)?\.npy|_manifest\.json)\.tmp")


def write_atomically(path: Path, *contents: Any, is_name_forced: bool = True) -> None:
    """Write a file so that it is there as a whole, or as it was before."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # what went wrong first is what is raised
            partial.unlink()
        raise
    if is_name_forced:
        force_names(path.parent)


def force_names(dirpath: Path) -> None:
    """Force the names in a folder to the disk, where a system lets a folder be opened."""
    if os.name == "posix":
        folder = os.open(dirpath, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_partial_files(dirpath: Path) -> None:
    """Remove what a killed process left under a temporary name."""
    for path in list(dirpath.iterdir()):
        if _PARTIAL.fullmatch(path.name):
            path.unlink()


@contextmanager
def broken_files_named(path: Path) -> Iterator[None]:
    """Name the file that cannot be decoded, or lacks what is asked of it; one that is absent stays so."""
    try:
        yield
    except (ValueError, EOFError, KeyError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; pyarrow's own have none
            raise
        raise PerSampleError(
            f"{os.fspath(path)!r} is broken: it is no whole file of its kind (cut off, or changed by something else). "
            "Put it back from a copy, or write the folder again"
        ) from error


def read_json(dirpath: Path, kind: str, format_version: int) -> dict[str, Any]:
    """What the manifest of a folder says."""
    path = dirpath / MANIFEST
    if not path.is_file():
        named = "ledger" if kind == "ledger" else f"store of {kind}"
        raise PerSampleError(f"{os.fspath(dirpath)!r} holds no {named}: {MANIFEST} is missing")
    with broken_files_named(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    said = (found.get("format"), found.get("format_version")) if isinstance(found, dict) else (None, None)
    expected = f"lightning_persample {kind}"
    if said != (expected, format_version):
        raise PerSampleError(
            f"{os.fspath(path)!r} is of format {said[0]!r}, version {said[1]!r}; this version of lightning_persample "
            f"reads format {expected!r}, version {format_version}"
        )
    return found


def write_json(
    dirpath: Path, kind: str, format_version: int, values: Mapping[str, Any], *, is_name_forced: bool = True
) -> None:
    """Write the manifest of a folder, in place of the one that is there."""
    found = {"format": f"lightning_persample {kind}", "format_version": format_version, **values}
    write_atomically(dirpath / MANIFEST, json.dumps(found, indent=2).encode(), is_name_forced=is_name_forced)


def refuse_ledger(dirpath: Path) -> None:
    """Say where the gradients of a ledger are."""
    if _format(dirpath) == "lightning_persample ledger":
        raise PerSampleError(
            f"{os.fspath(dirpath)!r} is a ledger and no store of gradients: its gradients, if it was written with "
            f"`projection`, are in {os.fspath(dirpath / GRADIENTS)!r}; its rows are read with read_ledger"
        )


def refuse_store(dirpath: Path) -> None:
    """Say where the ledger beside gradients is."""
    if _format(dirpath) == "lightning_persample gradients":
        raise PerSampleError(
            f"{os.fspath(dirpath)!r} is a store of gradients and no ledger: open it with GradientStore; its ledger, if "
            f"it was written during training as the folder {GRADIENTS!r} of one, is in {os.fspath(dirpath.parent)!r}"
        )


def _format(dirpath: Path) -> object:
    """The format that a folder's manifest tells; None without a manifest."""
    path = dirpath / MANIFEST
    with broken_files_named(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found.get("format") if isinstance(found, dict) else None


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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
