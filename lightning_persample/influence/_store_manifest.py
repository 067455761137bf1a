"""What a store of gradients holds, and when a run may go on with the store that is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from lightning_persample.errors import OptionError
from lightning_persample.influence._files import (
    MANIFEST,
    broken_files_named,
    read_json,
    remove_partial_files,
    write_json,
)
from lightning_persample.influence._kind import refuse_ledger
from lightning_persample.influence._shards import DTYPES, RESERVED, drop_rows, remove_uncounted, shards_of

__all__ = [
    "ParameterColumns",
    "StoreManifest",
    "columns_for",
    "difference",
    "open_store",
    "read_store_manifest",
    "remove_store",
    "write_store_manifest",
]

FORMAT_VERSION = 2
_KIND = "gradients"
_MEANING = ("projection", "parameters", "dtype", "columns", "samples")  # what a run cannot change on its way


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


def columns_for(sizes: Mapping[str, tuple[tuple[int, ...], int]]) -> tuple[ParameterColumns, ...]:
    """Columns for parameters, one after the other."""
    found: list[ParameterColumns] = []
    for name, (shape, size) in sizes.items():
        start = found[-1].stop if found else 0
        found.append(ParameterColumns(name, tuple(shape), start, start + size))
    return tuple(found)


@dataclass(frozen=True)
class StoreManifest:
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

    run: str
    parameters: tuple[ParameterColumns, ...]
    projection: Mapping[str, Any] | None = None
    dtype: str = "float32"
    columns: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    samples: int | None = None
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    processes: int = 1
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype={self.dtype!r}; allowed is one of {', '.join(map(repr, DTYPES))}")
        taken = sorted(set(self.columns) & set(RESERVED))
        if taken or len(set(self.columns)) < len(self.columns):
            raise OptionError(
                f"columns={self.columns!r}: each needs a name of its own, other than {', '.join(RESERVED)}"
            )
        at = 0
        for each in self.parameters:
            full = prod(each.shape)
            is_too_short = each.stop < at or (each.stop == at and full > 0)
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


def read_store_manifest(dirpath: str | os.PathLike[str]) -> StoreManifest:
    """The manifest of a store; a folder without one, or with one of another format, is refused."""
    refuse_ledger(Path(dirpath))
    found = read_json(Path(dirpath), _KIND, FORMAT_VERSION)
    with broken_files_named(Path(dirpath) / MANIFEST):
        values = {field.name: found[field.name] for field in fields(StoreManifest) if field.name != "rows"}
        values["rows"] = found.get("rows")
        parameters = tuple(
            ParameterColumns(each["name"], tuple(each["shape"]), each["start"], each["stop"])
            for each in values["parameters"]
        )
        tuples = {name: tuple(values[name]) for name in ("columns", "checkpoints")}
        return StoreManifest(**{**values, "parameters": parameters, **tuples})


def write_store_manifest(dirpath: Path, manifest: StoreManifest) -> None:
    """Write the manifest of a store, in place of the one that is there."""
    write_json(dirpath, _KIND, FORMAT_VERSION, asdict(manifest))


def open_store(
    dirpath: Path, manifest: StoreManifest, continued: Mapping[str, int] | None = None, *, overwrite: bool = False
) -> StoreManifest:
    """Make a folder ready for rows; of several processes one alone calls this, before the others write."""
    # A store that goes on keeps its name of the run. Its checkpoints may be more, or fewer, than those of `manifest`,
    # but those that both have must be the same: the longer list counts. One of `continued` keeps its columns where
    # `manifest` names none, as a run may not know them before its first row.
    dirpath.mkdir(parents=True, exist_ok=True)
    remove_partial_files(dirpath)
    found = read_store_manifest(dirpath) if (dirpath / MANIFEST).exists() else None
    shards = shards_of(dirpath)
    goes_on = found is not None and (continued is None or found.run in continued)
    if found is not None and goes_on and continued is not None and not manifest.columns:
        manifest = replace(manifest, columns=found.columns)
    differing = difference(found, manifest) if found is not None and goes_on else None
    if found is not None and goes_on and differing is None:
        remove_uncounted(dirpath)
        if continued is not None:
            drop_rows(dirpath, continued[found.run])
        checkpoints = max(found.checkpoints, manifest.checkpoints, key=len)
        promised = found.rows if continued is None else None
        manifest = replace(manifest, run=found.run, checkpoints=checkpoints, rows=promised)
    elif shards and not overwrite:
        if differing is not None:
            raise OptionError(
                f"dirpath={os.fspath(dirpath)!r} holds gradients that were written with {differing[0]}, but now there "
                f"is {differing[1]}: go on with what there was, pass another dirpath, or remove them with "
                "overwrite=True"
            )
        known = "a run without manifest" if found is None else f"run {found.run}"
        new = f"continues run {' or '.join(continued)}" if continued else "starts a new run"
        raise OptionError(
            f"dirpath={os.fspath(dirpath)!r} holds the gradients of {known} ({len(shards)} shards), but this one "
            f"{new}: pass another dirpath, go on from a checkpoint of that run, or remove its rows with overwrite=True"
        )
    else:
        remove_store(dirpath)
        if continued is not None and len(continued) == 1:
            manifest = replace(manifest, run=next(iter(continued)))
    write_store_manifest(dirpath, manifest)
    return manifest


def remove_store(dirpath: Path) -> None:
    """Remove the manifest and all shards of a folder; other files stay."""
    (dirpath / MANIFEST).unlink(missing_ok=True)  # first, so that a part of a store is not taken for the whole
    for shard in shards_of(dirpath):
        shard.rows.unlink()
    remove_uncounted(dirpath)


def difference(
    one: StoreManifest, other: StoreManifest, names: tuple[str, ...] | None = None
) -> tuple[str, str] | None:
    """Where the values of two stores are not alike."""
    for name in _MEANING if names is None else names:
        if name == "parameters":
            found = _different_parameter(one, other)
            if found is not None:
                return found
        elif _plain(getattr(one, name)) != _plain(getattr(other, name)):
            return f"{name}={getattr(one, name)!r}", f"{name}={getattr(other, name)!r}"
    if names is not None:
        return None
    for name in dict.fromkeys((*one.settings, *other.settings)):
        before, now = one.settings.get(name), other.settings.get(name)
        if _plain(before) != _plain(now):
            return f"{name}={before!r}", f"{name}={now!r}"
    for i, (a, b) in enumerate(zip(one.checkpoints, other.checkpoints, strict=False)):
        if _plain(a) != _plain(b):
            return f"checkpoint {i} {dict(a)!r}", f"checkpoint {i} {dict(b)!r}"
    return None


def _different_parameter(one: StoreManifest, other: StoreManifest) -> tuple[str, str] | None:
    if one.parameters == other.parameters:
        return None
    for a, b in zip((*one.parameters, None), (*other.parameters, None), strict=False):
        if a != b:
            break
    return _said(one, a), _said(other, b)


def _said(manifest: StoreManifest, parameter: ParameterColumns | None) -> str:
    count = f"{len(manifest.parameters)} parameters"
    if parameter is None:
        return f"{count} and no further one"
    size = parameter.stop - parameter.start
    return f"{count}, where they differ first {parameter.name!r} of shape {parameter.shape} in {size} numbers"


def _plain(value: Any) -> str:
    """A value as a manifest has it, in which a tuple is a list and nan is nan."""
    return json.dumps(value, sort_keys=True)
