"""The pass over the data in which gradients are collected, as a module that a Trainer predicts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_persample.callbacks._adam_states import AdamState, adam_states
from lightning_persample.callbacks._batch_gradients import BatchGradients, GradientOptions
from lightning_persample.callbacks._checkpoints import Checkpoints
from lightning_persample.callbacks._lightning_names import is_lightning_module, lightning_module_for
from lightning_persample.callbacks._sample_index import checked_index
from lightning_persample.callbacks._samples_once import Fetched, SamplesOnce
from lightning_persample.callbacks._second_pass import muted
from lightning_persample.engine import warn_user
from lightning_persample.engine.batch import count_samples, with_samples_at
from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.influence._files import MANIFEST
from lightning_persample.influence._lock import FolderLock
from lightning_persample.influence._shards import shards_of
from lightning_persample.influence.store import (
    GradientStore,
    StoreManifest,
    StoreWriter,
    open_store,
    read_store_manifest,
    write_store_manifest,
)

__all__ = ["Collecting", "WritesInAnyCase", "collecting_with"]

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object


class _Collecting(_Base):
    """Holds the module that gradients are of, and stores those of the batches that it is given.

    Args:
        module: the module.
        samples: the data.
        checkpoints: the weights.
        options: how gradients are computed.
        requires_grad: by parameter whether it is trainable in the module as it was given.
        dirpath: the folder of the store.
        manifest: of the store, as far as it is known before the processes are there.
        rows_per_shard: see `StoreWriter`.
        overwrite: remove the store that is in the folder.
        sample_index: gives the indices of a batch's samples; None takes those of the dataset.
        untold: the options that are callables which their names do not tell from others.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: SamplesOnce,
        checkpoints: Checkpoints,
        options: GradientOptions,
        *,
        requires_grad: Mapping[str, bool],
        dirpath: Path,
        manifest: StoreManifest,
        rows_per_shard: int | None,
        overwrite: bool,
        sample_index: Callable[[Any], Any] | None,
        untold: Sequence[str],
    ) -> None:
        super().__init__()
        self.module = module
        self._samples = samples
        self._checkpoints = checkpoints
        self._options = options
        self._requires_grad = requires_grad
        self._gradients = BatchGradients(module, manifest.parameters, options)
        self._dirpath = dirpath
        self._manifest = manifest
        self._rows_per_shard = rows_per_shard
        self._overwrite = overwrite
        self._sample_index = sample_index
        self._untold = tuple(untold)
        self._visited: dict[int, np.ndarray[Any, Any]] = {}
        self._place = -1
        self._adam: dict[str, AdamState] = {}
        self._writer: StoreWriter | None = None
        self._lock: FolderLock | None = None

    def setup(self, stage: str) -> None:
        """Open the store: all processes are there. A folder that holds another one gives an `OptionError`."""
        # It is done here because an error in `predict_dataloader` would leave Lightning's changes in torch's
        # DataLoader.
        trainer = self.trainer
        if is_lightning_module(self.module):  # Lightning does it for modules under its own package name alone
            self.module.to(trainer.strategy.root_device)
            self.module.trainer = trainer
        self._samples.check_processes(trainer.world_size)
        self._manifest = self._opened(trainer)
        rows = GradientStore(self._dirpath, complete=False).rows
        for place in np.unique(rows["checkpoint"]).tolist():
            self._visited[place] = rows["sample_index"][rows["checkpoint"] == place]
        if trainer.is_global_zero:
            self._warn_of_kept()
            self._promise(self._expected(len(rows)))
        trainer.strategy.barrier("all have read the store")  # and nobody has written to it
        self._writer = StoreWriter(self._dirpath, self._manifest, trainer.global_rank, self._rows_per_shard)

    def predict_dataloader(self) -> _Batches:
        """The batches that the store lacks, those of this process."""
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        return _Batches(lambda: self._samples.batches(len(self._checkpoints), self._visited_at, rank, processes))

    def _expected(self, there: int) -> int:
        """How many rows the store is going to have; -1 where only the batches tell it."""
        indices = self._samples.indices()
        if indices is None:
            return -1
        lacking = (np.setdiff1d(indices, self._visited_at(place)) for place in range(len(self._checkpoints)))
        return there + sum(map(len, lacking))

    def _promise(self, rows: int) -> None:
        """Say in the manifest how many rows complete the store, and no fewer than were to be there before."""
        promised = rows if rows < 0 else max(rows, self._manifest.rows or 0)
        self._manifest = replace(self._manifest, rows=promised)
        self._write(write_store_manifest, self._dirpath, self._manifest)

    def _warn_of_kept(self) -> None:
        """Nobody knows whether the rows that are kept are of these data, or of these callables."""
        untold = ["the data"] if self._manifest.settings["data"] is None else []
        untold += [f"{name} (a lambda, or an object)" for name in self._untold]
        if not untold:
            return
        indices = self._samples.indices()
        visited = [self._visited_at(place) for place in range(len(self._checkpoints))]
        kept = sum(len(there) if indices is None else int(np.isin(indices, there).sum()) for there in visited)
        if kept:
            of = "" if indices is None else f" of the {len(indices) * len(visited)}"
            warn_user(
                f"dirpath={str(self._dirpath)!r} holds {kept}{of} rows already, which are kept; "
                f"{', '.join(untold)} are not compared with those that they are of: after a change of them (inputs, "
                "labels, what a function does) pass another folder, or overwrite=True"
            )

    def _opened(self, trainer: Trainer) -> StoreManifest:
        manifest: StoreManifest | None = None
        refusal: PerSampleError | None = None
        if trainer.is_global_zero:
            try:
                # None goes on with what is there, and no run is one that goes on with overwrite
                continued: dict[str, int] | None = {} if self._overwrite else None
                self._lock = FolderLock(self._dirpath)
                new = self._described(trainer)
                manifest = open_store(self._dirpath, new, continued, overwrite=self._overwrite)
            except PerSampleError as error:  # said to the other processes, which would wait for this one
                refusal = error
            except OSError as error:
                refusal = OptionError(f"dirpath={str(self._dirpath)!r} cannot hold gradients: {error}")
        manifest, refusal = trainer.strategy.broadcast((manifest, refusal))
        if refusal is not None:
            self.release()
            raise refusal
        if manifest is None:
            raise PerSampleError("the first process has sent no manifest of the store")
        return manifest

    def _described(self, trainer: Trainer) -> StoreManifest:
        """The manifest of these data and checkpoints, which says no more of them than that of rows that are there."""
        data = self._samples.fingerprint()
        checkpoints = self._checkpoints.described(trainer, self.module, self._options.direction == "adam")
        if not self._overwrite and (self._dirpath / MANIFEST).exists() and shards_of(self._dirpath):
            there = read_store_manifest(self._dirpath)
            data = data if there.settings.get("data") is not None else None
            before: list[Mapping[str, Any]] = [*there.checkpoints, *checkpoints[len(there.checkpoints) :]]
            checkpoints = tuple(_as_before(now, was) for now, was in zip(checkpoints, before, strict=False))
        return replace(
            self._manifest,
            settings={**self._manifest.settings, "data": data},
            checkpoints=checkpoints,
            processes=trainer.world_size,
        )

    def _visited_at(self, place: int) -> np.ndarray[Any, Any]:
        return self._visited.get(place, np.empty(0, np.int64))

    def predict_step(self, fetched: Fetched, batch_idx: int) -> int:
        """Store the gradients of the samples of a batch that the store lacks."""
        if self._writer is None:
            return 0
        if fetched.place != self._place:
            self._move_to(fetched.place)
        batch, options = fetched.batch, self._options
        view = batch if fetched.places is None else with_samples_at(batch, fetched.places)
        drawn = None if fetched.keys is None or self._sample_index is not None else len(fetched.keys)
        size = count_samples(view, options.batch_dim, options.batch_size, drawn)
        index = self._index_of(fetched, size)
        wanted = torch.from_numpy(~np.isin(index.numpy(), self._visited_at(fetched.place))).nonzero().flatten()
        if not len(wanted):
            return 0
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else max(1.0, scaler.get_scale() / size)
        with torch.enable_grad(), muted(self.module):
            found = self._gradients.of(batch, view, fetched.number, wanted, size, scale, self._adam)
        checkpoint = self._manifest.checkpoints[fetched.place]
        step, rate = checkpoint["step"], checkpoint["learning_rate"]
        self._write(
            self._writer.add,
            found.values,
            {
                "sample_index": index[found.samples],
                "checkpoint": fetched.place,
                "step": -1 if step is None else step,
                "learning_rate": float("nan") if rate is None else rate,
                **found.columns,
            },
        )
        return len(found.samples)

    def _move_to(self, place: int) -> None:
        """Give the module the weights of a checkpoint."""
        checkpoint = self._checkpoints.read(self.trainer, place)
        self._checkpoints.load(place, checkpoint, self.module)
        if self._options.direction == "adam":
            names = [each.name for each in self._manifest.parameters]
            self._adam = adam_states(checkpoint, self.module, self.trainer, names, self._requires_grad)
        self._place = place

    def _index_of(self, fetched: Fetched, size: int) -> torch.Tensor:
        if self._sample_index is not None:
            return checked_index(self._sample_index(fetched.batch), size)
        return torch.tensor(fetched.keys, dtype=torch.int64)

    def on_predict_end(self) -> None:
        """Write what there is, and wait until all processes have."""
        self.write()
        self.trainer.strategy.barrier("all gradients are written")
        if self.trainer.is_global_zero:
            self._promise(len(GradientStore(self._dirpath, complete=False)))
        self.release()

    def release(self) -> None:
        """Let others write to the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def write(self) -> None:
        """Write the rows that wait."""
        if self._writer is not None:
            self._write(self._writer.flush)

    def _write(self, write: Callable[..., None], *given: Any) -> None:
        try:
            write(*given)
        except OSError as error:
            raise PerSampleError(
                f"the gradients in dirpath={str(self._dirpath)!r} cannot be written: {error}. What was written before "
                "is whole: make room and repeat the call, which goes on there"
            ) from error

    def on_before_batch_transfer(self, batch: Fetched, dataloader_idx: int) -> Any:
        """As the module does it."""
        if not is_lightning_module(self.module):
            return super().on_before_batch_transfer(batch, dataloader_idx)
        return batch._replace(batch=self.module.on_before_batch_transfer(batch.batch, dataloader_idx))

    def transfer_batch_to_device(self, batch: Fetched, device: torch.device, dataloader_idx: int) -> Any:
        """As the module does it."""
        if not is_lightning_module(self.module):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch._replace(batch=self.module.transfer_batch_to_device(batch.batch, device, dataloader_idx))

    def on_after_batch_transfer(self, batch: Fetched, dataloader_idx: int) -> Any:
        """As the module does it."""
        if not is_lightning_module(self.module):
            return super().on_after_batch_transfer(batch, dataloader_idx)
        return batch._replace(batch=self.module.on_after_batch_transfer(batch.batch, dataloader_idx))


def _as_before(now: dict[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as the store describes it, if the weights are the same, for a state dict tells less than a file."""
    if now["weights"] != was.get("weights"):
        return now
    known = [name for name in ("step", "learning_rate") if now[name] is None or was.get(name) is None]
    return {**now, **{name: was.get(name) for name in ("path", *known)}}


class Collecting(_Collecting, LightningModule):
    """For Trainers of the package `lightning`; at the top of a file, so that it can be sent to other processes."""


def collecting_with(trainer: Trainer) -> type[_Collecting]:
    """The class of a module that a Trainer predicts with: Trainers of `pytorch_lightning` take no other modules."""
    base = lightning_module_for(trainer)
    return Collecting if base is LightningModule else type("Collecting", (_Collecting, base), {})


class WritesInAnyCase(Callback):
    """Writes what was collected before an error: the next call goes on behind it."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the rows that wait."""
        if isinstance(pl_module, _Collecting):
            try:
                pl_module.write()
            finally:
                pl_module.release()


class _Batches:
    """Batches without a length: of several processes one may have none."""

    def __init__(self, batches: Callable[[], Iterator[Fetched]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Fetched]:
        yield from self._batches()
