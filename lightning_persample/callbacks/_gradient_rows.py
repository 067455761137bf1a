"""The store of projected gradients that a writer keeps beside its ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_persample.callbacks._gradient_values import layout_of, values_of
from lightning_persample.callbacks._ledger_rows import keys_of
from lightning_persample.engine import PerSampleRecord, listed
from lightning_persample.errors import OptionError
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence._files import MANIFEST, remove_partial_files
from lightning_persample.influence._shards import shards_of
from lightning_persample.influence._store_manifest import difference, remove_store
from lightning_persample.influence.store import (
    ParameterColumns,
    StoreManifest,
    StoreWriter,
    open_store,
    read_store_manifest,
    write_store_manifest,
)

__all__ = ["GradientRows", "settle_gradients"]


def settle_gradients(dirpath: Path, continued: Mapping[str, int], *, overwrite: bool) -> None:
    """Leave no gradient beside a ledger that is not of a row of it; of several processes one alone calls this."""
    # The store of a run that goes on keeps the rows of its earlier steps. That of another run is removed.
    if not dirpath.is_dir():
        return
    manifest = dirpath / MANIFEST
    found = read_store_manifest(dirpath) if manifest.exists() else None
    if found is not None and (found.run in continued or (shards_of(dirpath) and not overwrite)):
        open_store(dirpath, found, continued)
        return
    remove_partial_files(dirpath)
    remove_store(dirpath)
    if not any(dirpath.iterdir()):
        dirpath.rmdir()


class _Captured(NamedTuple):
    """What is kept of a backward until its batch ends."""

    values: Tensor
    rows: dict[str, Any]


class GradientRows:
    """Writes a row for each sample of each captured backward of a fit, in this process.

    Args:
        dirpath: the folder of the store.
        projection: how gradients are projected.
        dtype: of the stored numbers.
        rank: this process.
        warn: takes what went wrong.
    """

    def __init__(
        self, dirpath: Path, projection: Projection, dtype: str, rank: int, warn: Callable[[str], None]
    ) -> None:
        self._dirpath, self._projection, self._dtype = dirpath, projection, dtype
        self._rank, self._warn = rank, warn
        self._found: StoreManifest | None = None
        self._fields: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._left_out: frozenset[str] = frozenset()
        self._writer: StoreWriter | None = None
        self._layout: tuple[ParameterColumns, ...] = ()
        self._current: list[_Captured] = []
        self._ended: list[_Captured] = []

    def prepare(self, continued: Mapping[str, int], *, overwrite: bool) -> StoreManifest | None:
        """Make the folder ready; of several processes one alone calls this."""
        manifest = self._dirpath / MANIFEST
        found = read_store_manifest(self._dirpath) if manifest.exists() else None
        if found is None or found.run not in continued:
            settle_gradients(self._dirpath, continued, overwrite=overwrite)
            self._dirpath.mkdir(parents=True, exist_ok=True)
            return None
        alike = replace(found, projection=self._projection.settings(), dtype=self._dtype)
        return open_store(self._dirpath, alike, continued, overwrite=overwrite)

    def start(self, found: StoreManifest | None, fields: Mapping[str, Any], module: nn.Module) -> None:
        """Note what goes on and the manifest's fields; it is written as soon as the parameters are known."""
        self._found, self._fields = found, dict(fields)
        trainable = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._shapes = {name: p.shape for name, p in trainable.items() if not p.is_complex()}
        self._left_out = frozenset(trainable) - frozenset(self._shapes)
        if self._left_out:
            names = listed(sorted(self._left_out))
            self._warn(f"gradients of {names} are not stored: they are complex, but rows are of real numbers")

    def capture(
        self,
        record: PerSampleRecord,
        *,
        step: int,
        rate: float | Tensor,
        divisor: float,
    ) -> dict[str, Any] | None:
        """Keep the gradients of a backward until its batch ends."""
        if self._writer is None:
            self._open(record)
        if self._writer is None:
            return None
        others = [name for name in record.names if name not in self._shapes and name not in self._left_out]
        if others:
            self._warn(f"gradients of {listed(others)} are not stored: they became trainable after the fit had started")
        index = keys_of(record)
        rows: dict[str, Any] = {"step": step, "learning_rate": torch.as_tensor(rate, dtype=torch.float64)}
        if isinstance(index, Tensor):
            rows["sample_index"] = index
        elif index is not None:
            self._warn(
                "the sampler draws keys that are no ints: the ledger has them, but the store of gradients has "
                "sample_index -1, so that no score can tell its samples apart; let the sampler draw ints, or pass "
                "sample_index=<function of the batch that returns the index of each sample>"
            )
        if record.factor is not None:
            rows["weight"] = record.factor.double() / divisor
        self._current.append(_Captured(values_of(record, self._layout, self._projection), rows))
        return rows

    def _open(self, record: PerSampleRecord) -> None:
        """The first record with values tells which parameters have none."""
        shapes = {name: shape for name, shape in self._shapes.items() if name not in record.unsupported}
        if not any(shape.numel() for shape in shapes.values()):
            self._warn("no gradients are stored: no parameter has per-sample gradients that could be")
            return
        self._layout = layout_of(shapes, self._projection)
        manifest = StoreManifest(
            parameters=self._layout, projection=self._projection.settings(), dtype=self._dtype, **self._fields
        )
        differing = None if self._found is None else difference(self._found, manifest)
        if differing is not None:
            raise OptionError(
                f"dirpath={str(self._dirpath)!r} holds gradients of this run that were written with {differing[0]}, "
                f"but now there is {differing[1]}: go on with what there was, or pass another dirpath"
            )
        self._writer = StoreWriter(self._dirpath, manifest, self._rank)
        if self._rank == 0:
            self._try(partial(write_store_manifest, self._dirpath, manifest))

    def end_batch(self) -> None:
        """Take what was captured of the batch as rows, which wait for the end of the optimizer step."""
        self._ended += self._current
        self._current = []

    def end_step(self) -> None:
        """Hand on the rows of the batches that have ended."""
        ended, self._ended = self._ended, []
        writer = self._writer
        if writer is not None:
            for found in ended:
                self._try(partial(writer.add, found.values, dict(found.rows)))
                found.rows.clear()

    def forget(self) -> None:
        """Drop the rows of a step that was not completed."""
        self._current, self._ended = [], []

    def flush(self) -> None:
        """Write the rows that were handed on."""
        if self._writer is not None:
            self._try(self._writer.flush)

    def finish(self) -> None:
        """Write the rows that were handed on, and say what is missing."""
        self.forget()
        self.flush()
        writer, self._writer = self._writer, None
        if writer is not None and writer.lost + writer.waiting:
            self._warn(f"{writer.lost + writer.waiting} rows of gradients in {str(self._dirpath)!r} were not written")

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._warn(
                f"the gradients in {str(self._dirpath)!r} cannot be written: {error}. Training goes on; the rows "
                "are kept in memory and tried again with the next ones"
            )
