"""A ledger: one row for each sample of each captured training step, as Parquet files in a folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.influence.files import (
    MANIFEST,
    broken_files_named,
    force_names,
    read_json,
    refuse_store,
    remove_partial_files,
    write_atomically,
    write_json,
)
from lightning_persample.influence.optional_packages import arrow, compute, parquet

__all__ = [
    "BASE_COLUMNS",
    "Manifest",
    "Part",
    "Parts",
    "as_tensors",
    "check_ledger",
    "drop_rows",
    "open_ledger",
    "parts_of",
    "promise_rows",
    "read_ledger",
    "read_manifest",
    "read_part",
    "remove_empty",
    "rows_of",
    "schema_of",
    "write_manifest",
]

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


FORMAT_VERSION = 1
_KIND = "ledger"
BASE_COLUMNS = {
    "step": "int64",
    "epoch": "int64",
    "batch_idx": "int64",
    "backward_index": "int64",
    "rank": "int64",
    "row": "int64",
    "sample_index": "int64",
    "learning_rate": "double",
    "weight": "double",
    "norm": "double",
    "coverage": "double",
}
_MEANING = ("loss_reduction", "per_layer", "step_unit")  # settings that a run cannot change on its way
_ORDER = ("step", "rank", "epoch", "batch_idx", "backward_index", "row")


@dataclass(frozen=True)
class Manifest:
    """What the rows of a ledger are.

    Attributes:
        run: names the run; a checkpoint of it has the same.
        columns: the columns and their Arrow types ("int64", "double", "bool", "string"); empty before the first row.
        parameters: the names of the module's parameters.
        settings: the options of the callback that tell what the values are, and the "step_unit": "optimizer steps", or
            "batches" in manual optimization.
        libraries: the versions of what wrote them.
        processes: number of processes of the run, or of its latest part after it was resumed.
        rows: how many rows complete the ledger; None before the fit has ended.
    """

    run: str
    columns: Mapping[str, str]
    parameters: tuple[str, ...]
    settings: Mapping[str, Any]
    libraries: Mapping[str, str]
    processes: int
    rows: int | None = None


def read_manifest(dirpath: str | os.PathLike[str]) -> Manifest:
    """The manifest of a ledger; a folder without one, or with one of another format, is refused.

    Args:
        dirpath: the ledger's folder.

    Returns:
        What its rows are.
    """
    refuse_store(Path(dirpath))
    found = read_json(Path(dirpath), _KIND, FORMAT_VERSION)
    with broken_files_named(Path(dirpath) / MANIFEST):
        values = {field.name: found[field.name] for field in fields(Manifest) if field.name != "rows"}
        return Manifest(**{**values, "parameters": tuple(values["parameters"]), "rows": found.get("rows")})


def write_manifest(dirpath: Path, manifest: Manifest) -> None:
    """Write the manifest of a ledger, in place of the one that is there."""
    # Its name is forced to the disk with those of the files of rows, see `Parts.settle`: without rows it tells nothing.
    write_json(dirpath, _KIND, FORMAT_VERSION, asdict(manifest), is_name_forced=False)


def promise_rows(dirpath: Path, run: str) -> None:
    """Say in the manifest of a run that has ended how many rows its ledger has; of several processes one calls this."""
    manifest = read_manifest(dirpath)
    if manifest.run == run:
        write_manifest(dirpath, replace(manifest, rows=sum(rows_of(part.path) for part in parts_of(dirpath))))


def _what_is_missing(dirpath: Path, manifest: Manifest, before: float = math.inf) -> str:
    """Which files or rows of a ledger are not there any more, as far as rows of steps before this one tell; or ""."""
    parts = parts_of(dirpath)
    for rank in dict.fromkeys(part.rank for part in parts):
        own = [part.counter for part in parts if part.rank == rank and part.first < before]
        gaps = sorted(set(range(max(own, default=0))) - set(own))
        if gaps:
            return f"file {gaps[0]} of process {rank}, which has written {own[-1] + 1}"
    there = 0 if manifest.rows is None else sum(rows_of(part.path) for part in parts)
    return f"{manifest.rows - there} of {manifest.rows} rows" if manifest.rows and there < manifest.rows else ""


def read_ledger(dirpath: str | os.PathLike[str], *, complete: bool = True) -> Any:
    """The rows of a ledger, those of all processes together.

    Columns are

    ================== ================================================================================================
    ``step``           optimizer steps behind the weights that the gradient is taken at (by an optimizer that runs its
                       closure several times, in the first run); in manual optimization, batches
    ``epoch``          the epoch, from 0
    ``batch_idx``      the batch in the epoch, from 0
    ``backward_index`` the backward of the batch, from 0; others than 0 are of manual optimization
    ``rank``           the process
    ``row``            the sample's place in the batch
    ``sample_index``   its index in the dataset, int64, or string where a sampler draws other keys; null if unknown
    ``learning_rate``  eta of the optimizer step. Where groups of parameters have different ones, the sample's own
                       ``sum_p eta_p ||g_p||^2 / ||g||^2``, so that ``learning_rate * norm^2`` is right all the same
    ``weight``         w: the sample adds ``w * g`` to the gradient of the step before any clipping, the mean over
                       processes included; null if unknown
    ``norm``           ``||g||``, norm of the gradient of the sample's own loss
    ``coverage``       share of the weights with a gradient that g covers, 0 to 1
    ``norm/<group>``   the norm over a group of parameters, with `per_layer`; null if it has no gradient
    ================== ================================================================================================

    and those that the run added. Files that a killed process left unfinished are not read.

    Args:
        dirpath: the ledger's folder.
        complete: whether a ledger is refused of which files were removed. False reads what there is.

    Raises:
        PerSampleError: files are missing, or one cannot be read.

    Returns:
        A ``pyarrow.Table``, by step, rank, batch and row; its ``to_pandas()`` gives a ``DataFrame``.
    """
    pyarrow = arrow()
    manifest = read_manifest(dirpath)
    missing = _what_is_missing(Path(dirpath), manifest) if complete else ""
    if missing:
        raise PerSampleError(
            f"the ledger in {os.fspath(dirpath)!r} lacks {missing}: put the files back, or read what there is with "
            "read_ledger(..., complete=False)"
        )
    tables = [read_part(part.path) for part in parts_of(Path(dirpath))]
    if not tables:
        return schema_of(manifest.columns or BASE_COLUMNS).empty_table()
    table = pyarrow.concat_tables(tables, promote_options="default")
    return table.sort_by([(name, "ascending") for name in _ORDER])


def as_tensors(table: Any) -> dict[str, Tensor | list[str | None]]:
    """The columns of a ledger as tensors.

    Args:
        table: a ``pyarrow.Table`` from `read_ledger`, or a part of one.

    Returns:
        By name (rows,), int64, float64 or bool; a column of strings is a list. Null is nan in float64.

    Raises:
        PerSampleError: a column of another type has a null.
    """
    found: dict[str, Tensor | list[str | None]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = str(column.type)
        if kind == "string":
            found[name] = column.to_pylist()
            continue
        if column.null_count and kind != "double":
            raise PerSampleError(
                f"column {name!r} has no value in {column.null_count} of {len(column)} rows, and {kind} has nothing to "
                f"say so: take the rows that have one, table.filter(pyarrow.compute.field({name!r}).is_valid())"
            )
        found[name] = torch.tensor(column.to_numpy())
    return found


def schema_of(columns: Mapping[str, str]) -> Any:
    """The ``pyarrow.Schema`` of columns and their types."""
    pyarrow = arrow()
    types = {
        "int64": pyarrow.int64(),
        "double": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "string": pyarrow.string(),
    }
    return pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])


def check_ledger(dirpath: Path, manifest: Manifest, continued: Mapping[str, int], *, overwrite: bool) -> None:
    """See that a folder can take the rows of a run; nothing is written."""
    if not dirpath.exists():
        return
    parts = parts_of(dirpath)
    found = read_manifest(dirpath) if (dirpath / MANIFEST).exists() else None
    if found is not None and found.run in continued:
        _check_alike(dirpath, found, manifest)
        missing = _what_is_missing(dirpath, found, continued[found.run])
        if missing:
            raise OptionError(
                f"dirpath={os.fspath(dirpath)!r} lacks {missing} of this run: put the files back, or pass another "
                "dirpath"
            )
    elif parts and not overwrite:
        steps = f"{len(parts)} files, steps {min(p.first for p in parts)} to {max(p.last for p in parts)}"
        known = "a run without manifest" if found is None else f"run {found.run}"
        new = f"continues run {' or '.join(continued)}" if continued else "starts a new run"
        raise OptionError(
            f"dirpath={os.fspath(dirpath)!r} holds the ledger of {known} ({steps}), but this fit {new}: pass another "
            "dirpath, go on from a checkpoint of that run with trainer.fit(..., ckpt_path=...), or remove its rows "
            "with overwrite=True"
        )


def open_ledger(dirpath: Path, manifest: Manifest, continued: Mapping[str, int], *, overwrite: bool) -> Manifest:
    """Make a folder ready for the rows of a run; of several processes one alone calls this."""
    check_ledger(dirpath, manifest, continued, overwrite=overwrite)
    dirpath.mkdir(parents=True, exist_ok=True)
    remove_partial_files(dirpath)
    found = read_manifest(dirpath) if (dirpath / MANIFEST).exists() else None
    if found is not None and found.run in continued:
        drop_rows(dirpath, continued[found.run])
        manifest = replace(manifest, run=found.run, columns=found.columns)
    else:
        (dirpath / MANIFEST).unlink(missing_ok=True)  # first, so that a part of a ledger is not taken for the whole
        for part in parts_of(dirpath):
            part.path.unlink()
        if len(continued) == 1:
            manifest = replace(manifest, run=next(iter(continued)))
    write_manifest(dirpath, manifest)
    return manifest


def remove_empty(dirpath: Path, run: str) -> None:
    """Remove the manifest of a run that failed before it had a row, so that the next one may have the folder."""
    manifest = dirpath / MANIFEST
    if manifest.exists() and not parts_of(dirpath) and read_manifest(dirpath).run == run:
        manifest.unlink()


def _check_alike(dirpath: Path, found: Manifest, new: Manifest) -> None:
    differing = [
        (f"{name}={found.settings.get(name)!r}", f"{name}={value!r}")
        for name, value in new.settings.items()
        if name in _MEANING and found.settings.get(name) != value
    ]
    if found.parameters != new.parameters:
        pairs = zip((*found.parameters, None), (*new.parameters, None), strict=False)
        before, now = next((a, b) for a, b in pairs if a != b)
        differing.append(
            (
                f"{len(found.parameters)} parameters with {before!r} where they differ first",
                f"{len(new.parameters)} with {now!r}",
            )
        )
    if differing:
        before, now = differing[0]
        raise OptionError(
            f"dirpath={os.fspath(dirpath)!r} holds rows of this run that were written with {before}, but now there "
            f"is {now}: go on with what there was, or pass another dirpath"
        )
