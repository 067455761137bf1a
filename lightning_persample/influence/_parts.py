"""The files of a ledger: each is whole or not there, whenever the process that writes it is killed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from lightning_persample.influence._arrow import arrow, compute, parquet
from lightning_persample.influence._files import broken_files_named, force_names, write_atomically

__all__ = ["Part", "Parts", "drop_rows", "parts_of", "read_part", "rows_of"]

_NAME = re.compile(r"rows-(\d+)-(\d+)-(\d+)-(\d+)\.parquet")

# Columns in which a value is that of many rows; a dictionary of the others would only take time and room.
_REPEATED = ("step", "epoch", "batch_idx", "backward_index", "rank", "row", "learning_rate", "weight", "coverage")


class Part(NamedTuple):
    """A file of rows: those of one process, from the first to the last of these optimizer steps."""

    rank: int
    counter: int
    first: int
    last: int
    path: Path


def parts_of(dirpath: Path) -> list[Part]:
    """The files of rows in a folder, by rank and in the order in which each process wrote them."""
    found = []
    for path in dirpath.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            rank, first, last, counter = map(int, match.groups())
            found.append(Part(rank, counter, first, last, path))
    return sorted(found)


def _path(dirpath: Path, rank: int, first: int, last: int, counter: int) -> Path:
    return dirpath / f"rows-{rank:05d}-{first:010d}-{last:010d}-{counter:06d}.parquet"


def read_part(path: Path) -> Any:
    """The rows of a file, as a ``pyarrow.Table``."""
    with broken_files_named(path), parquet().ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


def rows_of(path: Path) -> int:
    """How many rows a file has."""
    with broken_files_named(path), parquet().ParquetFile(path) as file:
        rows: int = file.metadata.num_rows
        return rows


def drop_rows(dirpath: Path, step: int) -> None:
    """Remove the rows of an optimizer step and of all later ones."""
    # Killed at any moment, it leaves files that are whole, in which every earlier row is once.
    for part in parts_of(dirpath):
        if part.last < step:
            continue
        if part.first >= step:
            part.path.unlink()
            continue
        table = read_part(part.path)
        table = table.filter(compute().less(table["step"], step))
        # First the rows under the old name, whose last step is then too late, which does no harm; then the name.
        write_atomically(part.path, _encoded(table))
        last = compute().max(table["step"]).as_py()
        os.replace(part.path, _path(dirpath, part.rank, part.first, last, part.counter))
    force_names(dirpath)


def _encoded(table: Any) -> Any:
    sink = arrow().BufferOutputStream()
    repeated = [name for name in _REPEATED if name in table.column_names]
    # The others need few bytes as they are, and each column that is compressed takes time.
    compressed = {name: "zstd" for name in table.column_names if name not in repeated or name == "row"}
    options = {"compression": compressed, "use_dictionary": repeated, "write_page_checksum": True}
    parquet().write_table(table, sink, **options)
    return sink.getvalue()


class Parts:
    """Writes the files of one process, and keeps rows that could not be written for the next try.

    Args:
        dirpath: the folder.
        rank: the process.
        most_waiting: how many tables wait for the next try at most; the oldest of more are given up.
    """

    def __init__(self, dirpath: Path, rank: int, most_waiting: int = 16) -> None:
        self._dirpath, self._rank, self._most_waiting = dirpath, rank, most_waiting
        counters = [part.counter for part in parts_of(dirpath) if part.rank == rank]
        self._counter = max(counters, default=-1) + 1
        self._waiting: list[Any] = []
        self._has_new_names = False
        self.lost = 0

    @property
    def waiting(self) -> int:
        """How many rows wait for the next try."""
        return sum(table.num_rows for table in self._waiting)

    def add(self, table: Any) -> None:
        """Take rows that are to be written."""
        if table.num_rows:
            self._waiting.append(table)
            while len(self._waiting) > self._most_waiting:
                self.lost += self._waiting.pop(0).num_rows

    def write(self) -> None:
        """Write all rows that wait to a file of their own; where that fails, they wait for the next try."""
        # The file is whole whatever happens, but its name may be lost with the machine's power until `settle`.
        if not self._waiting:
            return
        table = arrow().concat_tables(self._waiting).combine_chunks()
        steps = table["step"].to_numpy()
        path = _path(self._dirpath, self._rank, int(steps.min()), int(steps.max()), self._counter)
        write_atomically(path, _encoded(table), is_name_forced=False)
        self._counter += 1
        self._waiting = []
        self._has_new_names = True

    def settle(self) -> None:
        """Force the names of the files to the disk, once for all that are new; costs as much as a file."""
        if self._has_new_names:
            force_names(self._dirpath)
            self._has_new_names = False
