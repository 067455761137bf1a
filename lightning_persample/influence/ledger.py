"""A ledger: one row for each sample of each captured training step, as Parquet files in a folder."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial as partial_of
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import PerSampleError
from lightning_persample.influence.dataset import (
    UNFINISHED,
    BaseManifest,
    Dataset,
    Part,
    broken_files_named,
    difference,
    write_atomically,
)
from lightning_persample.influence.optional_packages import arrow

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
_MEANING = ("loss_reduction", "per_layer", "step_unit", "label_noise")  # settings that a run cannot change on its way
_ORDER = ("step", "rank", "epoch", "batch_idx", "backward_index", "row")
_READERS = 2  # threads that read files ahead
# Columns in which a value is that of many rows; a dictionary of the others would only take time and room.
_REPEATED = ("step", "epoch", "batch_idx", "backward_index", "rank", "row", "learning_rate", "weight", "coverage")


@dataclass(frozen=True)
class Manifest(BaseManifest):
    """What the rows of a ledger are.

    Attributes:
        run: names the run; a checkpoint of it has the same.
        columns: the columns and their Arrow types ("int64", "double", "bool", "string"); empty before the first row.
        parameters: the names of the module's parameters.
        settings: the options of the callback that tell what the values are, and the "step_unit": "optimizer steps", or
            "batches" in manual optimization.
        libraries: the versions of what wrote them.
        processes: number of processes of the run, or of its latest part after it was resumed.
        rows: how many rows complete the ledger; -1 before the fit has ended.
    """

    columns: Mapping[str, str]
    parameters: tuple[str, ...]


class Ledger(Dataset[Manifest]):
    """A folder of Parquet files, each with a checksum of its footer in front of it, where no reader looks."""

    manifest_type, kind, version, title, rows_are = Manifest, "ledger", 4, "ledger", "rows of this run"
    prefix, suffix = "rows", ".parquet"

    def _restored(self, values: dict[str, Any]) -> Manifest:
        return super()._restored({**values, "parameters": tuple(values["parameters"])})

    def read(self, part: Part, columns: Collection[str] | None = None) -> Any:
        """The rows of a part, as a ``pyarrow.Table``; of the columns those that it has, or all."""
        options = {"page_checksum_verification": True, "pre_buffer": False}
        # A file that is opened here takes half the time of a path, for which pyarrow looks for a file system.
        with broken_files_named(part.path), arrow().OSFile(os.fspath(part.path)) as source:
            _check_footer(source, partial_of(self.checksum, part))
            with arrow("parquet").ParquetFile(source, **options) as file:
                there = file.schema_arrow.names
                names = None if columns is None else [name for name in there if name in columns]
                return file.read(names, use_threads=False)

    def columns(self) -> list[str]:
        """The names of the columns, as the manifest or the first part has them."""
        columns = self.manifest().columns or next((self.read(part).column_names for part in self.parts()), BASE_COLUMNS)
        return list(columns)

    def tables(self, columns: Collection[str] | None = None, *, partial: bool = False) -> Iterator[Any]:
        """The rows of all parts, one after the other; where some are missing, an error before the end says so."""
        manifest, count = self.manifest(), 0
        self.refuse(manifest, "" if partial else self.gap())
        for table in _ahead(partial_of(self.read, columns=columns), self.parts()):
            count += len(table)
            yield table
        if not partial:
            self.check_complete(manifest, count)

    def _remedy(self, manifest: Manifest) -> str:
        reads = "read what there is with read_ledger(..., partial=True)"
        if manifest.rows == -1:
            return f"{UNFINISHED}, or {reads}"
        return f"files were removed, or the disk was full when they were to be written: put them back, or {reads}"

    def _steps(self, part: Part) -> NDArray[np.int64]:
        return self.read(part, ["step"])["step"].to_numpy()

    def _keep(self, part: Part, kept: NDArray[np.bool_]) -> None:
        self.write(part, self.read(part).filter(arrow().array(kept)))

    def write(self, part: Part, rows: Any) -> None:
        """Write a ``pyarrow.Table`` as a part."""
        sink = arrow().BufferOutputStream()
        repeated = [name for name in _REPEATED if name in rows.column_names]
        # The others need few bytes as they are, and each column that is compressed takes time.
        compressed = {name: "zstd" for name in rows.column_names if name not in repeated or name == "row"}
        options = {"compression": compressed, "use_dictionary": repeated, "write_page_checksum": True}
        arrow("parquet").write_table(rows, sink, **options)
        content = memoryview(sink.getvalue())
        start = len(content) - _footer_bytes(content[-8:])
        write_atomically(part.path, content[:start], self.checksum(part, content[start:]), content[start:])

    def _difference(self, there: Manifest, new: Manifest) -> tuple[str, str] | None:
        settings = [name for name in _MEANING if name in new.settings]
        return difference(there, new, ("parameters",), settings)

    def _continued(self, there: Manifest, new: Manifest) -> Manifest:
        return replace(new, run=there.run, columns=there.columns)


def _ahead(read: Callable[[Part], Any], parts: Iterable[Part]) -> Iterator[Any]:
    """What is read of each part, in their order; the next ones are read while one is used."""
    with ThreadPoolExecutor(_READERS) as readers:
        waiting: deque[Future[Any]] = deque()
        try:
            for part in parts:
                waiting.append(readers.submit(read, part))
                if len(waiting) > _READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # where nobody wants the rest, or one of them is broken
            for each in waiting:
                each.cancel()


def _footer_bytes(end: bytes | memoryview) -> int:
    """How long the footer of a Parquet file is, by the last 8 bytes of it: its own length and the file's name."""
    return int.from_bytes(end[:4], "little") + 8


def _check_footer(file: Any, checksum: Callable[[bytes], bytes]) -> None:
    """Compare the checksum of a file's footer: names and types of columns, numbers and places of rows."""
    file.seek(max(0, file.size() - 8))
    length = _footer_bytes(file.read())
    if length + 4 > file.size():
        raise ValueError(f"it has no footer of {length} bytes")
    file.seek(file.size() - length - 4)
    if file.read(4) != checksum(file.read()):
        raise ValueError("the checksum of the footer is another one")
    file.seek(0)


def read_manifest(dirpath: str | os.PathLike[str]) -> Manifest:
    """The manifest of a ledger; a folder without one, or with one of another format, is refused.

    Args:
        dirpath: the ledger's folder.

    Returns:
        What its rows are.
    """
    return Ledger(dirpath).manifest()


def read_ledger(dirpath: str | os.PathLike[str], *, partial: bool = False) -> Any:
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
        partial: whether to read what there is of a ledger that lacks rows: of a fit that goes on or was killed, or for
            which the disk was full, or of which files were removed. Else it is refused.

    Returns:
        A ``pyarrow.Table``, by step, rank, batch and row; its ``to_pandas()`` gives a ``DataFrame``.

    It is a `PerSampleError` where rows are missing, or a file cannot be read.
    """
    pyarrow, ledger = arrow(), Ledger(dirpath)
    manifest, tables = ledger.manifest(), list(ledger.tables(partial=partial))
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
    return arrow().schema(list(columns.items()))
