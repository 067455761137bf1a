"""Files that are whole or not there, whenever the process that writes them is killed; and a folder's manifest.

A file is written under a temporary name in the same folder, forced to the disk and then renamed, which replaces what
has that name in one step. Files that are left under a temporary name belong to nobody.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_persample.errors import PerSampleError

__all__ = [
    "GRADIENTS",
    "MANIFEST",
    "broken_files_named",
    "force_names",
    "read_json",
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
