"""The writer of one process's rows of a store of gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.influence._shards import (
    BASE_FIELDS,
    Shard,
    next_counter,
    record_dtype,
    to_storage,
    write_shard,
)
from lightning_persample.influence._store_manifest import StoreManifest

__all__ = ["StoreWriter"]

_SHARD_BYTES = 1 << 26
_DEFAULTS = {"sample_index": -1, "checkpoint": 0, "step": -1}


class _Waiting:
    """Rows that are to be a shard."""

    def __init__(self) -> None:
        self.values: list[NDArray[Any]] = []
        self.records: list[NDArray[Any]] = []

    def __len__(self) -> int:
        return sum(map(len, self.records))


class StoreWriter:
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
        dirpath: the folder, made ready by `open_store`.
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
        self._dirpath, self._manifest, self._rank = Path(dirpath), manifest, rank
        row_bytes = manifest.num_columns * np.dtype(manifest.dtype).itemsize
        self._rows_per_shard = max(1, _SHARD_BYTES // row_bytes) if rows_per_shard is None else rows_per_shard
        self._most_waiting = most_waiting
        self._dtype = record_dtype(manifest.columns)
        self._counter = next_counter(self._dirpath, rank)
        self._waiting: list[_Waiting] = []
        self.lost = 0

    @property
    def waiting(self) -> int:
        """How many rows are not written yet."""
        return sum(map(len, self._waiting))

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
        stored, records["scale"] = to_storage(values, self._manifest.dtype)
        failure: OSError | None = None
        while len(records):
            if not self._waiting or len(self._waiting[-1]) >= self._rows_per_shard:
                self._waiting.append(_Waiting())
                if len(self._waiting) > self._most_waiting:
                    self.lost += len(self._waiting.pop(0))
            last = self._waiting[-1]
            room = self._rows_per_shard - len(last)
            last.values.append(stored[:room])
            last.records.append(records[:room])
            stored, records = stored[room:], records[room:]
            if len(last) == self._rows_per_shard and failure is None:
                try:
                    self._write(only_complete=True)
                except OSError as error:  # said when all rows are taken
                    failure = error
        if failure is not None:
            raise failure

    def _records(self, rows: Mapping[str, Any], count: int) -> NDArray[Any]:
        known = [name for name in (*BASE_FIELDS, *self._manifest.columns) if name != "scale"]
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
        self._write(only_complete=False)

    def _write(self, *, only_complete: bool) -> None:
        while self._waiting and (not only_complete or len(self._waiting[0]) >= self._rows_per_shard):
            first = self._waiting[0]
            shard = Shard.at(self._dirpath, self._rank, self._counter)
            write_shard(shard, first.values, np.concatenate(first.records))
            self._counter += 1
            del self._waiting[0]
