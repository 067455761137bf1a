"""The files of a store of gradients, its manifest, and the writer of one process's rows."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.influence.dataset import (
    UNFINISHED,
    BaseManifest,
    Dataset,
    Part,
    PartWriter,
    broken_files_named,
    difference,
    plain,
    write_atomically,
)

_DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_BASE_FIELDS = {
    "sample_index": "<i8",
    "checkpoint": "<i8",
    "step": "<i8",
    "learning_rate": "<f8",
    "weight": "<f8",
    "scale": "<f8",
}
CHECKSUM = "crc32"  # of the values of a row, one for each 16 KiB
_CHECKED_BYTES = 1 << 14
_RESERVED = (*_BASE_FIELDS, CHECKSUM)
_TOP_EXPONENT = 15  # of the largest entry of a float16 row: in [2**14, 2**15)
_LEAST_EXPONENT = -1059  # the scale is a float64 then, and no entry that is not 0 is less than 1 of it


@dataclass(frozen=True)
class ParameterColumns:
    """Which columns of a store are those of a parameter.

    Attributes:
        name: of the parameter in the module.
        shape: of the parameter.
        start: the first column.
        stop: the first column behind them.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name!r} of shape {self.shape} in {self.stop - self.start} numbers"


def columns_for(sizes: Mapping[str, tuple[tuple[int, ...], int]]) -> tuple[ParameterColumns, ...]:
    """Columns for parameters, one after the other."""
    found: list[ParameterColumns] = []
    for name, (shape, size) in sizes.items():
        start = found[-1].stop if found else 0
        found.append(ParameterColumns(name, tuple(shape), start, start + size))
    return tuple(found)


@dataclass(frozen=True)
class StoreManifest(BaseManifest):
    """What the rows of a store of gradients are.

    Attributes:
        run: names the run; a checkpoint of it has the same.
        parameters: the parameters and their columns, which follow one another from 0 on.
        projection: the settings of the projection; None where gradients are stored in full, entry by entry.
        dtype: "float16", "float32" or "float64".
        columns: the names of what the user adds to a row.
        settings: further options that tell what the values are.
        libraries: the versions of what wrote them.
        samples: size of the dataset, or None if that is not known.
        checkpoints: of each checkpoint "step", "learning_rate" and "path", as far as they are known; what the rows call
            checkpoint counts these.
        processes: number of processes of the run, or of its latest part after it was resumed.
        rows: how many rows complete the store; -1 while that is not known yet, None where nothing is promised.

    Raises:
        OptionError: a value is not allowed.
    """

    parameters: tuple[ParameterColumns, ...]
    projection: Mapping[str, Any] | None = None
    dtype: str = "float32"
    columns: tuple[str, ...] = ()
    samples: int | None = None
    checkpoints: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_eigen(self) -> bool:
        """Whether the columns are directions of an `EigenProjection`."""
        return self.projection is not None and self.projection.get("kind") == "eigen"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise OptionError(f"dtype={self.dtype!r}; allowed is one of {', '.join(map(repr, _DTYPES))}")
        taken = sorted(set(self.columns) & set(_RESERVED))
        if taken or len(set(self.columns)) < len(self.columns):
            raise OptionError(
                f"columns={self.columns!r}: each needs a name of its own, other than {', '.join(_RESERVED)}"
            )
        at = 0
        for each in self.parameters:
            full = prod(each.shape)
            may_be_empty = full == 0 or self.is_eigen  # a bias that is a column of its weight has none of its own
            is_too_short = each.stop < at + (not may_be_empty)
            if each.start != at or is_too_short or (self.projection is None and each.stop - at != full):
                number = f"{full}, all entries as there is no projection" if self.projection is None else "one at least"
                raise OptionError(
                    f"parameters: {each.name!r} of shape {each.shape} has columns {each.start} to {each.stop}; they "
                    f"must start at {at} and be {number}"
                )
            at = each.stop
        if at == 0:
            raise OptionError("parameters=(); a store needs one at least")

    @property
    def num_columns(self) -> int:
        """K, how many numbers a row has."""
        return self.parameters[-1].stop


def record_dtype(columns: Sequence[str]) -> np.dtype[Any]:
    """The type of the record of a row: what every store has, then the columns of the user."""
    return np.dtype([*_BASE_FIELDS.items(), *((name, "<f8") for name in columns)])


@dataclass(eq=False)
class _Rows:
    """Rows of a shard: their values, each (m, K), and what they are, each (m,)."""

    values: list[NDArray[Any]]
    records: list[NDArray[Any]]

    def __len__(self) -> int:
        return sum(map(len, self.records))


class Shards(Dataset[StoreManifest]):
    """A folder of .npy files: of each the values of rows, then an array of what each row is, and its checksum."""

    manifest_type, kind, version, title, rows_are = StoreManifest, "gradients", 4, "store of gradients", "gradients"
    prefix, suffix = "shard", ".npy"

    def _remedy(self, manifest: StoreManifest) -> str:
        reads = "GradientStore(..., partial=True) reads what there is"
        if manifest.checkpoints:
            return (
                "its collection was broken off or goes on, or files were removed. Put them back, or repeat the call of "
                f"collect_gradients, which adds what is missing; {reads}"
            )
        removed = "files were removed, or the disk was full when they were to be written: put them back"
        return f"{UNFINISHED if manifest.rows == -1 else removed}; {reads}"

    def _restored(self, values: dict[str, Any]) -> StoreManifest:
        parameters = tuple(
            ParameterColumns(each["name"], tuple(each["shape"]), each["start"], each["stop"])
            for each in values["parameters"]
        )
        tuples = {name: tuple(values[name]) for name in ("columns", "checkpoints")}
        return super()._restored({**values, "parameters": parameters, **tuples})

    def read(self, part: Part) -> NDArray[Any]:
        """What the rows of a part are, (rows,), with the checksums of their values; the values are passed over."""
        with broken_files_named(part.path), part.path.open("rb") as file:
            values = np.load(part.path, mmap_mode="r")
            is_of_rows = values.ndim == 2 and values.flags.c_contiguous
            if not is_of_rows or values.dtype not in [np.dtype(name).newbyteorder("<") for name in _DTYPES]:
                raise ValueError(f"it has values of type {values.dtype} and shape {values.shape}")
            file.seek(values.offset + values.nbytes)
            content = file.read()
            if self.checksum(part, content[:-4]) != content[-4:]:
                raise ValueError("the checksum is another one")
            rows: NDArray[Any] = np.load(io.BytesIO(content))
        return rows

    def _steps(self, part: Part) -> NDArray[np.int64]:
        return self.read(part)["step"]

    def _keep(self, part: Part, kept: NDArray[np.bool_]) -> None:
        rows = self.read(part)[kept]  # with their checksums: values that something else has changed stay noticed
        with broken_files_named(part.path):
            values = np.load(part.path)[kept]
        self._write(part, [values], rows)

    def write(self, part: Part, rows: Any) -> None:
        """Write a part."""
        records = np.concatenate(rows.records)
        checksums = np.concatenate([_checksums(each) for each in rows.values])
        written = np.empty(len(records), [*records.dtype.descr, (CHECKSUM, "<u4", checksums.shape[1:])])
        for name in records.dtype.names or ():
            written[name] = records[name]
        written[CHECKSUM] = checksums
        self._write(part, rows.values, written)

    def _write(self, part: Part, values: Sequence[NDArray[Any]], rows: NDArray[Any]) -> None:
        described = _header(rows.dtype, rows.shape) + rows.tobytes()
        header = _header(values[0].dtype, (len(rows), values[0].shape[1]))
        checksum = self.checksum(part, described)
        write_atomically(part.path, header, *map(np.ascontiguousarray, values), described, checksum)

    def _difference(self, there: StoreManifest, new: StoreManifest) -> tuple[str, str] | None:
        settings = dict.fromkeys((*there.settings, *new.settings))
        differing = difference(there, new, ("projection", "parameters", "dtype", "columns", "samples"), [*settings])
        if differing is None:
            for i, (a, b) in enumerate(zip(there.checkpoints, new.checkpoints, strict=False)):
                if plain(a) != plain(b):
                    return f"checkpoint {i} {dict(a)!r}", f"checkpoint {i} {dict(b)!r}"
        return differing

    def _continued(self, there: StoreManifest, new: StoreManifest) -> StoreManifest:
        # Of two lists of checkpoints, which are alike as far as both go, the longer one counts.
        return replace(new, run=there.run, checkpoints=max(there.checkpoints, new.checkpoints, key=len))


def _checksums(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Of each row, one for each part of 16 KiB; values (m, K)."""
    width = _CHECKED_BYTES // values.itemsize
    starts = range(0, values.shape[1], width)
    values = np.ascontiguousarray(values)
    found = [[zlib.crc32(row[start : start + width]) for start in starts] for row in values]
    return np.array(found, np.uint32).reshape(len(values), len(starts))


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """How a .npy file starts, in the format that has no limit of its size."""
    written = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(written, description)
    return written.getvalue()


def _to_storage(values: Tensor, dtype: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Rows as they are stored, and their scales: a row is ``scale * stored``; values (m, K)."""
    # In float16 the scale of a row is the power of two that brings its largest entry into [2**14, 2**15). A row with an
    # entry that is not finite, or not in the stored type, is nan as a whole, and so is its scale.
    values = values.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    if dtype == "float16":
        largest = _largest(values)
        stored, scale = _to_float16(values, largest)
    else:
        stored = values.to(_DTYPES[dtype], copy=True)
        largest, scale = _largest(stored), np.ones(len(values))
    bad = ~np.isfinite(largest)
    if bad.any():
        stored[torch.from_numpy(bad).to(stored.device)] = torch.nan
        scale[bad] = np.nan
    return stored.cpu().numpy(), scale


def _largest(values: Tensor) -> NDArray[np.float64]:
    """The largest entry of each row; inf or nan where one of them is."""
    return values.abs().amax(dim=1).double().cpu().numpy()


def _to_float16(values: Tensor, largest: NDArray[np.float64]) -> tuple[Tensor, NDArray[np.float64]]:
    is_scaled = np.isfinite(largest) & (largest > 0)
    exponent = np.where(is_scaled, np.maximum(np.frexp(largest)[1], _LEAST_EXPONENT), _TOP_EXPONENT) - _TOP_EXPONENT
    # In two steps, as one factor alone may be out of range; of powers of two, they round nothing that float16 keeps.
    for part in (-exponent // 2, -exponent - (-exponent // 2)):
        values = values * torch.from_numpy(np.ldexp(1.0, part)).to(values)[:, None]
    if values.dtype == torch.float64:  # torch rounds float64 twice on the way
        stored = torch.from_numpy(values.cpu().numpy().astype(np.float16))
    else:
        stored = values.half()
    return stored, np.ldexp(1.0, exponent)


def read_values(
    paths: Sequence[str], lies: NDArray[Any], scale: NDArray[Any], ranges: Sequence[tuple[int, int]], dtype: str
) -> NDArray[Any]:
    """The values of rows, read through memory maps: of each shard no more than the pages that hold them."""
    # lies (m,): the shard of each row, its position there, and the checksums of its values; scale (m,)
    # A file with fewer values than its rows say, or with others, is refused.
    shard, end = lies["shard"], max(stop for _, stop in ranges)
    if len(lies):  # before there is room for as many columns as the manifest says
        _mapped(paths[int(shard[0])], int(lies["position"][0]), end)
    out = np.empty((len(lies), sum(stop - start for start, stop in ranges)), dtype)
    order = np.argsort(shard, kind="stable")
    is_scaled = False
    for rows in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if len(lies) else ():
        path, position = paths[int(shard[rows[0]])], lies["position"][rows]
        values = _mapped(path, int(position.max()), end)
        _check(path, values, lies[rows], ranges)
        taken, given = _as_slice(position), _as_slice(rows)
        at = 0
        for start, stop in ranges:
            out[given, at : at + stop - start] = values[taken, start:stop]
            at += stop - start
        is_scaled |= values.dtype == np.float16
    if is_scaled:  # in float64, which holds every scale, and rounded once
        np.multiply(out, scale[:, None], out=out, casting="same_kind")
    return out


def _mapped(path: str, last: int, columns: int) -> NDArray[Any]:
    with broken_files_named(Path(path)):
        values = np.load(path, mmap_mode="r")
    if values.ndim != 2 or values.shape[0] <= last or values.shape[1] < columns:
        raise PerSampleError(
            f"{path!r} holds values of shape {values.shape}, but rows up to {last} and {columns} columns are expected: "
            "it or the manifest of its folder was changed. Put it back from a copy, or write the folder again"
        )
    return values


def _check(path: str, values: NDArray[Any], lies: NDArray[Any], ranges: Sequence[tuple[int, int]]) -> None:
    """Compare the checksums of what is read of some rows of a shard."""
    width = _CHECKED_BYTES // values.itemsize
    parts = sorted({part for start, stop in ranges for part in range(start // width, -(-stop // width))})
    for place, expected in zip(lies["position"].tolist(), lies[CHECKSUM], strict=True):
        row = values[place]
        found = [zlib.crc32(row[part * width : (part + 1) * width]) for part in parts]
        if parts[-1] >= len(expected) or found != expected[parts].tolist():
            raise PerSampleError(
                f"{path!r} is broken: the values of row {place} are not those that were written (their checksums "
                "differ). Put the file back from a copy, or write the folder again"
            )


def _as_slice(places: NDArray[np.int64]) -> Any:
    """Places that follow one another as a slice, which copies nothing."""
    follow = bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if follow else places


_SHARD_BYTES = 1 << 26
_DEFAULTS = {"sample_index": -1, "checkpoint": 0, "step": -1}


class StoreWriter(PartWriter[StoreManifest]):
    """Writes the shards of one process, and keeps rows that could not be written for the next try.

    A shard is written when it has all of its rows, and by `flush`. Where that fails, ``OSError`` says so, and all rows
    that were added wait, those of the failed call among them: they are tried again when the next shard is complete, and
    by `flush`. What was written before is not touched.

    In float16 each row is divided by a power of two of its own, so that its largest entry M lies in [2**14, 2**15):
    however small a gradient is, no entry x of it is off by more than the larger of ``2**-11 |x|`` and ``2**-39 |M|``
    (so entries up to ``2**-39 |M|`` may become 0). Stored in float32, an entry is off by half of its last place, and up
    to ``2**-150`` it becomes 0.

    A row with an entry that is not finite, or that the stored type cannot hold, is stored as nan as a whole, and
    marked.

    Args:
        dirpath: the folder, with the manifest.
        manifest: what the rows are.
        rank: the process.
        rows_per_shard: how many rows a shard has; None takes as many as 64 MiB hold.
        most_waiting: how many shards wait for the next try at most; the oldest of more are given up and counted by
            `lost`.

    Raises:
        OptionError: `rows_per_shard` or `most_waiting` is less than 1.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        manifest: StoreManifest,
        rank: int = 0,
        rows_per_shard: int | None = None,
        most_waiting: int = 8,
    ) -> None:
        for name, value in (("rows_per_shard", rows_per_shard), ("most_waiting", most_waiting)):
            if value is not None and value < 1:
                raise OptionError(f"{name}={value!r}; allowed is an int >= 1")
        shards = Shards(dirpath)
        shards.run = manifest.run
        super().__init__(shards, rank, most_waiting)
        self._manifest = manifest
        row_bytes = manifest.num_columns * np.dtype(manifest.dtype).itemsize
        self._rows_per_shard = max(1, _SHARD_BYTES // row_bytes) if rows_per_shard is None else rows_per_shard
        self._dtype = record_dtype(manifest.columns)

    def add(self, values: Tensor, rows: Mapping[str, Any]) -> None:
        """Take rows, and write the shards that they complete; where that fails, ``OSError`` says so, and all rows wait.

        Args:
            values: (m, K), of a floating type, on any device.
            rows: what the rows are: tensors or arrays (m,), or one number for all of them, under "sample_index" (-1 if
                None or not given: unknown), "checkpoint" (0), "step" (-1), "learning_rate" and "weight" (nan) and the
                manifest's columns (nan).

        Raises:
            OptionError: a shape, a name or a type does not go with the manifest; no row was taken.
        """
        expected = (len(values) if values.ndim else 0, self._manifest.num_columns)
        if tuple(values.shape) != expected or not values.is_floating_point():
            raise OptionError(
                f"values are {values.dtype} of shape {tuple(values.shape)}; a store of these parameters takes floats "
                f"of shape (m, {expected[1]})"
            )
        records = self._records(rows, len(values))
        stored, records["scale"] = _to_storage(values, self._manifest.dtype)
        failure: OSError | None = None
        while len(records):
            if not self._waiting or len(self._waiting[-1]) >= self._rows_per_shard:
                self.wait(_Rows([], []))
            last = self._waiting[-1]
            room = self._rows_per_shard - len(last)
            last.values.append(stored[:room])
            last.records.append(records[:room])
            stored, records = stored[room:], records[room:]
            if len(last) == self._rows_per_shard and failure is None:
                try:
                    self.write(self._rows_per_shard)
                    self.settle()
                except OSError as error:  # said when all rows are taken
                    failure = error
        if failure is not None:
            raise failure

    def _records(self, rows: Mapping[str, Any], count: int) -> NDArray[Any]:
        known = [name for name in (*_BASE_FIELDS, *self._manifest.columns) if name != "scale"]
        unknown = sorted(set(rows) - set(known))
        if unknown:
            raise OptionError(f"rows have a column {unknown[0]!r}; this store has {', '.join(known)}")
        records = np.empty(count, self._dtype)
        for name in known:
            given = rows.get(name)
            if given is None:
                given = _DEFAULTS.get(name, np.nan)
            column = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
            if column.shape not in ((), (count,)):
                raise OptionError(f"rows: {name!r} is of shape {column.shape}, but there are {count} rows")
            if column.size and self._dtype[name].kind == "i" and column.dtype.kind not in "iu":
                raise OptionError(f"rows: {name!r} is of type {column.dtype}, but must be of integers")
            records[name] = column
        samples = self._manifest.samples
        if samples is not None and count and int(records["sample_index"].max()) >= samples:
            raise OptionError(
                f"rows: sample_index {int(records['sample_index'].max())}, but the dataset has {samples} samples"
            )
        return records

    def flush(self) -> None:
        """Write all rows that wait; where that fails, ``OSError`` says so, and they wait for the next try."""
        self.write()
        self.settle()
