"""The files of a store of gradients: for each shard the values of some rows, and what the rows are.

``shard-<rank>-<counter>.npy`` holds values (rows, K), ``shard-<rank>-<counter>.rows.npy`` a structured array with a
record for each row. The values are written first: a shard counts from the moment its rows are there. A row names its
place among the values, so that rows are taken out again by writing the small file alone, in one step. It also has the
checksums of its values, 16 KiB at a time, which are compared whenever values are read; the small file ends with its
own.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import PerSampleError
from lightning_persample.influence._files import broken_files_named, force_names, write_atomically

__all__ = [
    "BASE_FIELDS",
    "DTYPES",
    "RESERVED",
    "Shard",
    "drop_rows",
    "next_counter",
    "read_records",
    "read_values",
    "record_dtype",
    "remove_uncounted",
    "shards_of",
    "to_storage",
    "write_shard",
]

_NAME = re.compile(r"shard-(\d+)-(\d+)(\.rows)?\.npy")
DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
BASE_FIELDS = {
    "sample_index": "<i8",
    "checkpoint": "<i8",
    "step": "<i8",
    "learning_rate": "<f8",
    "weight": "<f8",
    "scale": "<f8",
}
_POSITION = "position"  # where the values of a row are in its shard
_CHECKSUM = "crc32"  # of the values of a row, one for each 16 KiB
_CHECKED_BYTES = 1 << 14
RESERVED = (*BASE_FIELDS, _POSITION, _CHECKSUM)
_TOP_EXPONENT = 15  # of the largest entry of a float16 row: in [2**14, 2**15)
_LEAST_EXPONENT = -1059  # the scale is a float64 then, and no entry that is not 0 is less than 1 of it


class Shard(NamedTuple):
    """The two files of a shard, by the process that wrote them and their order."""

    rank: int
    counter: int
    values: Path
    rows: Path

    @classmethod
    def at(cls, dirpath: Path, rank: int, counter: int) -> Shard:
        """The shard of a process with this number."""
        name = f"shard-{rank:05d}-{counter:06d}"
        return cls(rank, counter, dirpath / f"{name}.npy", dirpath / f"{name}.rows.npy")


def _found(dirpath: Path) -> dict[tuple[int, int], set[bool]]:
    found: dict[tuple[int, int], set[bool]] = {}
    for path in dirpath.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.setdefault((int(match[1]), int(match[2])), set()).add(match[3] is not None)
    return found


def shards_of(dirpath: Path) -> list[Shard]:
    """The shards of a folder of which both files are there, by process and in the order of writing."""
    return [Shard.at(dirpath, *key) for key, files in sorted(_found(dirpath).items()) if len(files) == 2]


def next_counter(dirpath: Path, rank: int) -> int:
    """The number of the next shard of a process: none that any file has."""
    return 1 + max((counter for found, counter in _found(dirpath) if found == rank), default=-1)


def remove_uncounted(dirpath: Path) -> None:
    """Remove the files of shards of which one file only is there."""
    for key, files in _found(dirpath).items():
        if len(files) == 1:
            shard = Shard.at(dirpath, *key)
            (shard.rows if True in files else shard.values).unlink()


def record_dtype(columns: Sequence[str]) -> np.dtype[Any]:
    """The type of the record of a row: what every store has, then the columns of the user."""
    return np.dtype([*BASE_FIELDS.items(), *((name, "<f8") for name in columns)])


def write_shard(shard: Shard, values: Sequence[NDArray[Any]], records: NDArray[Any]) -> None:
    """Write a shard, in place of the one that is there; records (sum of m,)."""
    checksums = np.concatenate([_checksums(part) for part in values])
    kept = [(_POSITION, "<i8"), (_CHECKSUM, "<u4", checksums.shape[1:])]
    rows = np.empty(len(records), np.dtype([*kept, *records.dtype.descr]))
    rows[_POSITION], rows[_CHECKSUM] = np.arange(len(records)), checksums
    for name in records.dtype.names or ():
        rows[name] = records[name]
    shape = (len(records), values[0].shape[1])
    write_atomically(shard.values, _header(values[0].dtype, shape), *map(np.ascontiguousarray, values))
    try:
        _write_rows(shard, rows)
    except OSError:
        if not shard.rows.exists():  # values alone do not count
            with suppress(OSError):
                shard.values.unlink()
        raise


def _write_rows(shard: Shard, rows: NDArray[Any]) -> None:
    content = _header(rows.dtype, rows.shape) + rows.tobytes()
    write_atomically(shard.rows, content, zlib.crc32(content).to_bytes(4, "little"))


def _read_rows(shard: Shard) -> NDArray[Any]:
    with broken_files_named(shard.rows):
        content = shard.rows.read_bytes()
        if zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
            raise ValueError("the checksum is another one")
        rows: NDArray[Any] = np.load(io.BytesIO(content))
    return rows


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


def read_records(shard: Shard, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint32]]:
    """What the rows of a shard are, where their values are, and the checksums of those."""
    found = _read_rows(shard)
    records = np.empty(len(found), dtype)
    for name in dtype.names or ():
        records[name] = found[name] if name in (found.dtype.names or ()) else np.nan
    return records, found[_POSITION], found[_CHECKSUM]


def drop_rows(dirpath: Path, step: int) -> None:
    """Remove the rows of an optimizer step and of all later ones."""
    # Killed at any moment, it leaves shards that are whole, in which every earlier row is once; the latest are removed
    # first, so that none is missing in between. The values of a shard that keeps some of its rows stay on the disk.
    for shard in reversed(shards_of(dirpath)):
        rows = _read_rows(shard)
        kept = rows[rows["step"] < step]
        if len(kept) == len(rows):
            continue
        if len(kept):
            _write_rows(shard, kept)
        else:
            shard.rows.unlink()  # first: from here on the shard does not count
            force_names(dirpath)
            shard.values.unlink()
    force_names(dirpath)


def to_storage(values: Tensor, dtype: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
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
        stored = values.to(DTYPES[dtype], copy=True)
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
    paths: Sequence[str],
    shard: NDArray[np.int64],
    position: NDArray[np.int64],
    checksums: NDArray[np.uint32],
    scale: NDArray[np.float64],
    ranges: Sequence[tuple[int, int]],
    dtype: str,
) -> NDArray[Any]:
    """The values of rows, read through memory maps: of each shard no more than the pages that hold them."""
    # shard (m,), position (m,), checksums (m, parts of 16 KiB), scale (m,)
    # A file with fewer values than its rows say, or with others, is refused.
    if len(shard):  # before there is room for as many columns as the manifest says
        _mapped(paths[int(shard[0])], int(position[0]), max(stop for _, stop in ranges))
    out = np.empty((len(shard), sum(stop - start for start, stop in ranges)), dtype)
    order = np.argsort(shard, kind="stable")
    is_scaled = False
    for rows in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if len(shard) else ():
        path = paths[int(shard[rows[0]])]
        values = _mapped(path, int(position[rows].max()), max(stop for _, stop in ranges))
        _check(path, values, position[rows], checksums[rows], ranges)
        taken, given = _as_slice(position[rows]), _as_slice(rows)
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
            f"{path!r} holds values of shape {values.shape}, but rows up to {last} and {columns} columns are expected"
        )
    return values


def _check(
    path: str,
    values: NDArray[Any],
    position: NDArray[np.int64],
    checksums: NDArray[np.uint32],
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Compare the checksums of what is read of some rows of a shard."""
    width = _CHECKED_BYTES // values.itemsize
    parts = sorted({part for start, stop in ranges for part in range(start // width, -(-stop // width))})
    for place, expected in zip(position.tolist(), checksums, strict=True):
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
