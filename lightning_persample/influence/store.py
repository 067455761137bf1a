"""Stores of per-sample gradients: one row for each sample at each checkpoint, as .npy files in a folder.

The values are read through memory maps, so that a store may be larger than the memory. Beside the shards,
``_manifest.json`` says which parameters the columns are of, how they were projected and which checkpoints there are.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.influence.dataset import difference
from lightning_persample.influence.optional_packages import dask
from lightning_persample.influence.shards import (
    CHECKSUM,
    ParameterColumns,
    Shards,
    columns_for,
    read_values,
    record_dtype,
)

_BLOCK_BYTES = 1 << 26


class GradientStore:
    """The gradients of a store, or a part of them.

    Rows are ordered by checkpoint, then by the process that wrote them and the order of writing. Opening a store reads
    what its rows are, about 80 bytes a row, and none of the values; nor does `at`, `select` or `parameters`.

    Args:
        dirpath: the store's folder. A folder without a manifest, or with one of another format, is refused.
        partial: whether to read what there is of a store that lacks rows: of a collection or a fit that was broken off
            or goes on, or of which files were removed. Else it is refused.

    Raises:
        PerSampleError: rows are missing, or a file is not as it was written. Values are compared with their checksums
            when they are read.

    Attributes:
        dirpath: the folder, as an absolute path.
        manifest: what the rows are; of a part by parameters with the columns of that part.
        rows: (rows,), a structured numpy array with "sample_index" (-1 if unknown), "checkpoint" (its number among the
            manifest's), "step", "learning_rate", "weight" (nan if unknown), "scale" and the columns of the user.
    """

    def __init__(self, dirpath: str | os.PathLike[str], *, partial: bool = False) -> None:
        self.dirpath = Path(dirpath).absolute()
        self.manifest = Shards(dirpath).manifest()
        shards, dtype = Shards(self.dirpath), record_dtype(self.manifest.columns)
        parts = shards.parts()
        rows = [shards.read(part) for part in parts] or [np.empty(0, [*dtype.descr, (CHECKSUM, "<u4", (0,))])]
        if len({each.dtype for each in rows}) > 1:
            raise PerSampleError(f"the shards in {os.fspath(self.dirpath)!r} are of several stores, with other columns")
        lengths, joined = list(map(len, rows)), np.concatenate(rows)
        order = np.argsort(joined["checkpoint"], kind="stable")
        self.rows: NDArray[Any] = repack_fields(joined[order][list(dtype.names or ())])
        self._paths = tuple(os.fspath(part.path) for part in parts)
        lies = np.empty(len(joined), [("shard", "<i8"), ("position", "<i8"), (CHECKSUM, joined.dtype[CHECKSUM])])
        lies["shard"], lies[CHECKSUM] = np.repeat(np.arange(len(lengths)), lengths), joined[CHECKSUM]
        lies["position"] = np.concatenate([*map(np.arange, lengths)])
        self._lies = lies[order]  # where each row lies
        self._ranges: tuple[tuple[int, int], ...] = ((0, self.manifest.num_columns),)
        if not partial:
            shards.check_complete(self.manifest, len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        size = f"{len(self)} rows of {self.num_columns} numbers at checkpoints {list(self.checkpoints)}"
        return f"{type(self).__name__}({os.fspath(self.dirpath)!r}: {size})"

    @property
    def num_columns(self) -> int:
        """K, how many numbers a row has."""
        return self.manifest.num_columns

    def columns_of(self, parameter: str) -> slice:
        """The columns of a parameter.

        Args:
            parameter: its name.

        Returns:
            Where they are in a row.
        """
        found = self._named(parameter)
        return slice(found.start, found.stop)

    def _named(self, parameter: str) -> ParameterColumns:
        for each in self.manifest.parameters:
            if each.name == parameter:
                return each
        names = ", ".join(each.name for each in self.manifest.parameters)
        raise OptionError(f"the store in {os.fspath(self.dirpath)!r} has no parameter {parameter!r}; it has {names}")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The checkpoints that have rows, by their number among the manifest's."""
        return tuple(np.unique(self.rows["checkpoint"]).tolist())

    @property
    def nonfinite(self) -> Tensor:
        """(rows,), bool: rows of a gradient that was not finite; all of their values are nan."""
        return torch.from_numpy(np.isnan(self.rows["scale"]))

    @property
    def visited(self) -> Tensor:
        """Whether each sample of the dataset has a row here, be it one that is not finite; bool, (samples,).

        Raises:
            PerSampleError: the size of the dataset is not known.
        """
        if self.manifest.samples is None:
            raise PerSampleError(
                f"the store in {os.fspath(self.dirpath)!r} does not know the size of its dataset: ask for samples, "
                "has(checkpoint, sample_index)"
            )
        index = self.rows["sample_index"]
        found = torch.zeros(self.manifest.samples, dtype=torch.bool)
        found[torch.from_numpy(index[index >= 0])] = True
        return found

    def has(self, checkpoint: int, sample_index: Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
        """Which samples have a row at a checkpoint.

        Args:
            checkpoint: its number.
            sample_index: (m,), the samples' indices in the dataset.

        Returns:
            (m,), bool.
        """
        there = self.rows["sample_index"][self.rows["checkpoint"] == checkpoint]
        return torch.from_numpy(np.isin(np.asarray(sample_index), there))

    def at(self, checkpoint: int) -> GradientStore:
        """The rows of a checkpoint.

        Args:
            checkpoint: its number among the manifest's.

        Returns:
            A part of this store; it has no rows if none were written yet.

        Raises:
            OptionError: there is no such checkpoint.
        """
        if checkpoint not in self.checkpoints and not 0 <= checkpoint < len(self.manifest.checkpoints):
            raise OptionError(
                f"the store in {os.fspath(self.dirpath)!r} has no checkpoint {checkpoint!r}; it has {self.checkpoints}"
            )
        return self.select(self.rows["checkpoint"] == checkpoint)

    def select(self, rows: Tensor | NDArray[Any] | Sequence[int] | Sequence[bool]) -> GradientStore:
        """Some of the rows.

        Args:
            rows: (rows,), bool, which ones; or positions, the rows of the part in that order.

        Returns:
            A part of this store.

        Raises:
            OptionError: neither a mask of all rows nor positions among them.
        """
        chosen = np.asarray(rows)
        if chosen.dtype == np.bool_ and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        elif chosen.size == 0 and chosen.ndim == 1 and chosen.dtype != np.bool_:
            chosen = chosen.astype(np.int64)
        elif chosen.ndim != 1 or chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= len(self):
            raise OptionError(
                f"rows are {chosen.dtype} of shape {chosen.shape}; allowed is a mask of shape ({len(self)},), or "
                f"positions from 0 to {len(self) - 1}"
            )
        part = copy.copy(self)
        part.rows, part._lies = self.rows[chosen], self._lies[chosen]
        return part

    def parameters(self, names: Sequence[str]) -> GradientStore:
        """The columns of some parameters.

        Args:
            names: of the parameters; the columns of the part are in this order.

        Returns:
            A part of this store.

        Raises:
            OptionError: a parameter is not there, or named twice.
        """
        found = [self._named(name) for name in names]
        if not found or len(set(names)) < len(names):
            raise OptionError(f"names={list(names)!r}; allowed is one parameter at least, each named once")
        part = copy.copy(self)
        sizes = {each.name: (each.shape, each.stop - each.start) for each in found}
        part.manifest = replace(self.manifest, parameters=columns_for(sizes))
        part._ranges = tuple(each for parameter in found for each in self._within(parameter.start, parameter.stop))
        return part

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Which columns of the shards are some columns of this part."""
        at = 0
        for first, last in self._ranges:
            low, high = max(start, at), min(stop, at + last - first)
            if low < high:
                yield first + low - at, first + high - at
            at += last - first

    def _result_type(self, dtype: torch.dtype | None) -> str:
        if dtype is None:
            return "float64" if self.manifest.dtype == "float64" else "float32"
        if dtype not in (torch.float32, torch.float64):
            raise OptionError(f"dtype={dtype!r}; allowed is None, torch.float32 or torch.float64")
        return str(dtype).removeprefix("torch.")

    def _read(self, start: int, stop: int, dtype: str) -> tuple[Any, ...]:
        """The arguments of `read_values` for these rows."""
        lies, scale = self._lies[start:stop].copy(), self.rows["scale"][start:stop]
        used, lies["shard"] = np.unique(lies["shard"], return_inverse=True)
        return tuple(self._paths[i] for i in used), lies, scale, self._ranges, dtype

    def _cut(self, max_memory: int | None, dtype: str, held: int) -> list[tuple[int, int]]:
        """Rows from start to stop that are read at once: as they are stored, and as they are given `held` times."""
        each = self.num_columns * (np.dtype(self.manifest.dtype).itemsize + held * np.dtype(dtype).itemsize)
        if not isinstance(max_memory, int | None):
            raise OptionError(f"max_memory={max_memory!r} is not allowed: it must be None or an int, in bytes")
        limit = max(_BLOCK_BYTES, each) if max_memory is None else max_memory
        if limit < each:
            raise OptionError(
                f"max_memory={max_memory!r} does not hold one row of {self.num_columns} numbers; it takes {each} bytes"
            )
        size = limit // each
        return [(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def blocks(
        self, max_memory: int | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The values, some rows at a time, read through memory maps: a store may be larger than the memory.

        Args:
            max_memory: bytes that a block takes while it is read, with those of the block before it, which a loop still
                holds then. Mapped pages do not count; the system takes them back when needed. None takes 64 MiB, or
                what one row needs.
            dtype: torch.float32 or torch.float64; None is float64 for a store of that type, else float32. In float32 an
                entry of a float16 store below 2**-150 is 0.

        Yields:
            Positions (m,) of the rows, int64, from the first row to the last, and their values (m, K). Rows that are
            not finite are nan.
        """
        name = self._result_type(dtype)
        for start, stop in self._cut(max_memory, name, held=2):
            yield torch.arange(start, stop), torch.from_numpy(read_values(*self._read(start, stop, name)))

    def to_dask(self, max_memory: int | None = None) -> Any:
        """The values as a dask array, for computations on many machines, which all see the folder under its path.

        Args:
            max_memory: bytes that a chunk takes while it is read, as in `blocks`.

        Returns:
            A ``dask.array.Array`` (rows, K) in float32, float64 for a store of that type; nothing is read yet.
        """
        array, delayed = dask("array"), dask().delayed
        name = self._result_type(None)
        read = delayed(read_values, pure=False)
        chunks = []
        for start, stop in self._cut(max_memory, name, held=1):
            values = read(*self._read(start, stop, name))
            chunks.append(array.from_delayed(values, (stop - start, self.num_columns), name))
        return array.concatenate(chunks) if chunks else array.zeros((0, self.num_columns), dtype=name)


def check_comparable(one: GradientStore, other: GradientStore) -> None:
    """Refuse two stores whose columns are not of the same numbers.

    Args:
        one: a store, or a part of one.
        other: another one.

    Raises:
        PerSampleError: they differ in the projection or in the parameters; the text shows both.
    """
    found = difference(one.manifest, other.manifest, ("projection", "parameters"), ())
    if found is not None:
        raise PerSampleError(
            f"gradients of these stores cannot be compared: {os.fspath(one.dirpath)!r} has {found[0]}, and "
            f"{os.fspath(other.dirpath)!r} has {found[1]}; collect both with the same projection and parameters, or "
            "take what both have with store.parameters(names)"
        )
