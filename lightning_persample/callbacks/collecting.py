"""The pass over a dataset in which gradients are collected: every sample once, each of its own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, default_collate

from lightning_persample.batch_axis.batch import count_samples, with_samples_at
from lightning_persample.callbacks.checkpoints import Checkpoints, Direction, adam_directions, fingerprint_of_data
from lightning_persample.callbacks.lightning_internals import is_lightning_module, lightning_module_for, loss_scale
from lightning_persample.callbacks.observed_step import ObservedStep
from lightning_persample.callbacks.row_order import Column, RowOrder
from lightning_persample.callbacks.rows import opened, values_of
from lightning_persample.callbacks.sample_index import PASS_INDEX, checked_index
from lightning_persample.callbacks.second_pass import muted
from lightning_persample.callbacks.tagged_loader import TaggedLoader, last_drawn, why_no_keys
from lightning_persample.capture.record import PerSampleRecord, warn_user, warning_texts
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.dataset import FolderLock
from lightning_persample.influence.shards import Shards, StoreManifest, StoreWriter
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import CaptureOptions
from lightning_persample.reference.samples import described, loss_of
from lightning_persample.reference.untouched import recurrent_layers_can_go_backward, without_dropout

_NAMED = 8


class _Fetched(NamedTuple):
    """A batch on its way to the step."""

    place: int  # which checkpoint it is for
    number: int  # which batch of the checkpoint it is, in this process
    batch: Any
    keys: list[int] | None  # the index of each sample; None where the batch tells it
    places: tuple[Any, ...] | None  # see `Drawn`
    columns: list[Column]  # of its rows as the loader gave them


class SamplesOnce:
    """The samples of a loader, each once, split among processes; where they have no indices it is refused."""

    # A DataLoader of a dataset with a length is made again: what its sampler would draw plays no part, so that
    # shuffling, weights and ``drop_last`` change nothing; the sampler of a subset alone is asked for its indices. Other
    # data are taken as they come, by one process, and have to tell the samples' indices themselves (`has_index`).

    def __init__(self, loader: Iterable[Any], has_index: bool) -> None:
        self._loader = loader
        self._has_index = has_index
        self.order = RowOrder(None)
        unknown = why_no_keys(loader)
        why = "" if unknown is None else unknown.why
        if not why and isinstance(loader, DataLoader) and loader.batch_sampler is None:
            why = "the dataset gives whole batches (batch_size=None)"
        if not why and not isinstance(_batch_size(loader), int):
            why = f"{type(getattr(loader, 'batch_sampler', None)).__name__} has no batch_size"
        self._is_made_again, self._why = not why, why
        if why and not has_index:
            raise UnsupportedError(f"the samples cannot be separated, because {why}; {PASS_INDEX}")
        self.size = len(loader.dataset) if isinstance(loader, DataLoader) and self._is_made_again else None  # type: ignore[arg-type]

    def fingerprint(self) -> str | None:
        """The fingerprint of the data; None where it is unknown, or where the indices are not those of the dataset."""
        return None if self._has_index else fingerprint_of_data(getattr(self._loader, "dataset", None))

    def indices(self) -> np.ndarray[Any, Any] | None:
        """The index of each sample that is visited, in order; None where only the batches tell it."""
        return None if self._has_index else self._indices()

    def check_processes(self, processes: int) -> None:
        """Refuse what cannot be split."""
        if processes > 1 and not self._is_made_again:
            raise UnsupportedError(
                f"the samples cannot be split among {processes} processes, because {self._why}: pass a DataLoader of a "
                "dataset with a length, or run in one process"
            )

    def batches(
        self, places: int, visited: Callable[[int], np.ndarray[Any, Any]], rank: int, processes: int
    ) -> Iterator[_Fetched]:
        """The batches of one process, for one checkpoint after the other."""
        for place in range(places):
            done = np.empty(0, np.int64) if self._has_index else visited(place)
            for number, (batch, keys, of_rows) in enumerate(self._keyed(done, rank, processes)):
                columns = [] if keys is None else self.order.start_from(batch, len(keys))
                yield _Fetched(place, number, batch, keys, of_rows, columns)

    def check_complete(self, rows: np.ndarray[Any, Any], places: int) -> None:
        """Refuse a store that lacks a sample."""
        expected = self.indices()
        if expected is None:
            return
        for place in range(places):
            missing = np.setdiff1d(expected, rows["sample_index"][rows["checkpoint"] == place]).tolist()
            if missing:
                more = ", ..." if missing[_NAMED:] else ""
                raise PerSampleError(
                    f"{len(missing)} samples have no row at checkpoint {place}: {str(missing[:_NAMED])[1:-1]}{more}. "
                    "The call can be repeated, and goes on with them"
                )

    def _keyed(self, done: np.ndarray[Any, Any], rank: int, processes: int) -> Iterator[tuple[Any, Any, Any]]:
        if not self._is_made_again:
            holds_fields = getattr(self._loader, "collate_fn", None) is default_collate
            for batch in self._loader:
                yield batch, None, () if holds_fields else None
            return
        loader: Any = self._loader
        pending = np.setdiff1d(self._indices(), done)[rank::processes].tolist()
        size = _batch_size(loader)
        batches = [pending[k : k + size] for k in range(0, len(pending), size)]
        again = _like(loader, batches)
        iterator = iter(TaggedLoader(again))
        given = 0
        for batch in iterator:
            given += 1
            drawn = last_drawn(iterator, again)
            if drawn.keys is None and not self._has_index:
                raise UnsupportedError(f"the samples of a batch are unknown, because {drawn.why}; {PASS_INDEX}")
            yield batch, None if self._has_index else drawn.keys, drawn.places
        if given < len(batches):
            raise PerSampleError(
                f"the loader ended after {given} of {len(batches)} batches: one of the samples {batches[given]} gave a "
                "StopIteration, which a dataset must not raise. What was collected before is written"
            )

    def _indices(self) -> np.ndarray[Any, Any]:
        loader: Any = self._loader
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)  # a batch sampler of the user has its own
        if isinstance(sampler, SubsetRandomSampler):
            return np.unique(np.asarray(list(sampler.indices), np.int64))
        return np.arange(self.size or 0)


def _batch_size(loader: Any) -> Any:
    """The batch size of a DataLoader, or of its batch sampler."""
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None)


def _like(loader: DataLoader[Any], batches: list[list[int]]) -> DataLoader[Any]:
    """A DataLoader with the same rows and workers that makes these batches."""
    names = ["num_workers", "collate_fn", "pin_memory", "worker_init_fn"]
    if loader.num_workers:
        names += ["multiprocessing_context", "prefetch_factor", "timeout"]
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass over every sample of a dataset: options of `collect_gradients`, see there, and what it made of them."""

    module: nn.Module
    samples: SamplesOnce
    checkpoints: Checkpoints
    names: Sequence[str]  # of the parameters whose gradients are looked at
    loss: Callable[[Any, Any], Any] | None
    capture: CaptureOptions  # `loss_reduction`, `batch_dim`, `batch_size`, `batch_layout` and `max_memory`
    quantity: str  # of the records
    sample_index: Callable[[Any], Any] | None


@dataclass(frozen=True, eq=False)
class Collection(Pass):
    """A pass whose gradients are stored."""

    dirpath: Path
    manifest: StoreManifest  # as far as it is known before the processes are there
    trainable: Mapping[str, bool]  # by parameter whether the module as it was given trains it
    not_compared: Sequence[str]  # the options that are callables which their names do not tell from others
    columns: Mapping[str, Callable[[Any, Any], Tensor]]
    projection: Projection | None
    direction: Literal["adam"] | None
    rows_per_shard: int | None
    overwrite: bool


if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object


def _as_the_module(hook: str) -> Callable[..., Any]:
    """A hook that moves the batch on its way as the module does it."""

    def moved(self: Passing, batch: _Fetched, *args: Any, **kwargs: Any) -> Any:
        if not is_lightning_module(self.module):
            return getattr(super(Passing, self), hook)(batch, *args, **kwargs)
        return batch._replace(batch=getattr(self.module, hook)(batch.batch, *args, **kwargs))

    return moved


Kind = TypeVar("Kind", bound="Passing")


class Passing(_Base):
    """Holds the module that gradients are of, and sees those of every sample of a dataset at each checkpoint."""

    def __init__(self, asked: Pass) -> None:
        super().__init__()
        self.module = asked.module
        self._asked, self._has_warned = asked, False
        self._place = -1

    def setup(self, stage: str) -> None:
        """Make the module ready: all processes are there."""
        trainer = self.trainer
        if is_lightning_module(self.module):  # Lightning does it for modules under its own package name alone
            self.module.to(trainer.strategy.root_device)
            self.module.trainer = trainer
        self._asked.samples.check_processes(trainer.world_size)

    def predict_dataloader(self) -> Iterator[_Fetched]:
        """The batches that are wanted, those of this process; without a length, as one process may have none."""
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        return self._asked.samples.batches(len(self._asked.checkpoints), self._visited_at, rank, processes)

    def _visited_at(self, place: int) -> np.ndarray[Any, Any]:
        return np.empty(0, np.int64)

    def _move_to(self, place: int) -> Mapping[str, Any] | None:
        """Give the module the weights of a checkpoint."""
        checkpoint = self._asked.checkpoints.read(self.trainer, place)
        self._asked.checkpoints.load(place, checkpoint, self.module)
        self._place = place
        return checkpoint

    def predict_step(self, fetched: _Fetched, batch_idx: int) -> int:
        """Look at the gradients of the samples of a batch that are wanted."""
        if fetched.place != self._place:
            self._move_to(fetched.place)
        batch, asked = fetched.batch, self._asked
        why = asked.samples.order.why_lost(fetched.columns, batch)
        if why:
            raise UnsupportedError(f"the samples of a batch are unknown, because {why}; {PASS_INDEX}")
        view = batch if fetched.places is None else with_samples_at(batch, fetched.places)
        drawn = None if fetched.keys is None or asked.sample_index is not None else len(fetched.keys)
        capture = asked.capture
        size = count_samples(view, capture["batch_dim"], capture["batch_size"], drawn, capture["batch_layout"])
        index = self._index_of(fetched, size)
        wanted = torch.from_numpy(~np.isin(index.numpy(), self._visited_at(fetched.place))).nonzero().flatten()
        if not len(wanted):
            return 0
        with torch.enable_grad(), muted(self.module), self._observed(fetched, view, wanted, size) as (record, outputs):
            samples = wanted if record.samples is None else record.samples.cpu()
            self._take(record, outputs, fetched, index, samples)
        return len(samples)

    def _take(self, record: PerSampleRecord, outputs: Any, fetched: _Fetched, index: Tensor, samples: Tensor) -> None:
        """Use the record of some samples, (m,) places in the batch, whose samples have these indices, (B,)."""
        raise NotImplementedError

    @contextmanager
    def _observed(self, fetched: _Fetched, view: Any, wanted: Tensor, size: int) -> Iterator[tuple[Any, Any]]:
        """The record of the wanted samples, by their places (m,), and what the loss was taken from."""
        step = ObservedStep(
            self.module,
            self._asked.capture,
            fetched.batch,
            view,
            size,
            ("sq_norm", self._asked.quantity),
            None if len(wanted) == size else wanted,
            sums_differ=True,  # there is no ``.grad`` to compare with
            compare_weights=fetched.number == 0,
            averages=False,
        )
        try:
            with step.capture.observe(), without_dropout(self.module), recurrent_layers_can_go_backward(self.module):
                outputs = self._outputs(fetched.batch, fetched.number)
                loss = self._checked_loss(outputs)
                step.attach(loss, outputs)
                with torch.autocast(loss.device.type, enabled=False):
                    step.capture.backward_into_record(loss * loss_scale(self.trainer, size))
            self._check(step.capture.record)
            yield step.capture.record, outputs
        finally:
            step.close()

    def _outputs(self, batch: Any, number: int) -> Any:
        if self._asked.loss is not None:
            return self._asked.loss(self.module, batch)
        step: Any = self.module.training_step
        needs_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return step(batch, number) if needs_number else step(batch)

    def _checked_loss(self, outputs: Any) -> Tensor:
        loss = loss_of(outputs)
        said = "loss(module, batch)" if self._asked.loss is not None else f"{type(self.module).__name__}.training_step"
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            got = "a loss without a graph" if isinstance(loss, Tensor) else type(loss).__name__
            raise UnsupportedError(f"{said} gave {got}, but gradients need the loss of every batch")
        if loss.numel() != 1:
            raise OptionError(
                f"{said} gave a loss of shape {tuple(loss.shape)}; allowed is one number, the loss of the batch: "
                "reduce it, with .mean() for loss_reduction='mean' or .sum() for 'sum'"
            )
        return loss

    def _check(self, record: PerSampleRecord) -> None:
        """Refuse values that are missing, or that are not those of each sample's own loss."""
        if any(name in self._asked.names for name in record.unsupported):
            raise UnsupportedError(
                f"{warning_texts(record)[0]}\nLeave them out with parameters=[...], the names of all others, or change "
                "the texts on them"
            )
        rest = [text for text in warning_texts(record) if not text.startswith("Per-sample gradients are missing")]
        if record.mixing or record.axis_lost:
            raise UnsupportedError(f"{rest[0]}\nThis is not collected: pass loss=..., or a module, without such calls")
        if record.weighting:
            raise UnsupportedError(rest[0])
        if record.not_additive and not self._has_warned:
            self._has_warned = True
            warn_user(rest[0])

    def _index_of(self, fetched: _Fetched, size: int) -> torch.Tensor:
        if self._asked.sample_index is not None:
            return checked_index(self._asked.sample_index(fetched.batch), size)
        return torch.tensor(fetched.keys, dtype=torch.int64)

    on_before_batch_transfer = _as_the_module("on_before_batch_transfer")
    transfer_batch_to_device = _as_the_module("transfer_batch_to_device")
    on_after_batch_transfer = _as_the_module("on_after_batch_transfer")


class Storing(Passing):
    """Stores the gradients of the samples that the store lacks."""

    _asked: Collection

    def __init__(self, asked: Collection) -> None:
        super().__init__(asked)
        self._shards, self._manifest = Shards(asked.dirpath), asked.manifest
        self._visited: dict[int, np.ndarray[Any, Any]] = {}
        self._adam: dict[str, Direction] = {}
        self._writer: StoreWriter | None = None
        self.lock = FolderLock(asked.dirpath)

    def setup(self, stage: str) -> None:
        """Open the store: all processes are there. A folder that holds another one gives an `OptionError`."""
        # It is done here because an error in `predict_dataloader` would leave Lightning's changes in torch's
        # DataLoader.
        super().setup(stage)
        trainer = self.trainer
        self._manifest = opened(trainer, self.lock, self._open, "gradients")
        rows = GradientStore(self._asked.dirpath, partial=True).rows
        for place in np.unique(rows["checkpoint"]).tolist():
            self._visited[place] = rows["sample_index"][rows["checkpoint"] == place]
        if trainer.is_global_zero:
            self._warn_of_kept()
            self._promise(self._expected(len(rows)))
        trainer.strategy.barrier("all have read the store")  # and nobody has written to it
        self._writer = StoreWriter(self._asked.dirpath, self._manifest, trainer.global_rank, self._asked.rows_per_shard)

    def _expected(self, there: int) -> int:
        """How many rows the store is going to have; -1 where only the batches tell it."""
        indices = self._asked.samples.indices()
        if indices is None:
            return -1
        lacking = (np.setdiff1d(indices, self._visited_at(place)) for place in range(len(self._asked.checkpoints)))
        return there + sum(map(len, lacking))

    def _promise(self, rows: int) -> None:
        """Say in the manifest how many rows complete the store, and no fewer than were to be there before."""
        promised = rows if rows < 0 else max(rows, self._manifest.rows or 0)
        self._manifest = replace(self._manifest, rows=promised)
        self._write(self._shards.write_manifest, self._manifest)

    def _warn_of_kept(self) -> None:
        """Nobody knows whether the rows that are kept are of these data, or of these callables."""
        unknown = ["the data"] if self._manifest.settings["data"] is None else []
        unknown += [f"{name} (a lambda, or an object)" for name in self._asked.not_compared]
        if not unknown:
            return
        indices = self._asked.samples.indices()
        visited = [self._visited_at(place) for place in range(len(self._asked.checkpoints))]
        kept = sum(len(there) if indices is None else int(np.isin(indices, there).sum()) for there in visited)
        if kept:
            of = "" if indices is None else f" of the {len(indices) * len(visited)}"
            warn_user(
                f"dirpath={str(self._asked.dirpath)!r} holds {kept}{of} rows already, which are kept; "
                f"{', '.join(unknown)} are not compared with those that they are of: after a change of them (inputs, "
                "labels, what a function does) pass another folder, or overwrite=True"
            )

    def _open(self) -> StoreManifest:
        """Make the folder ready, in one process."""
        # None goes on with what is there, and no run is one that goes on with overwrite
        continued: dict[str, int] | None = {} if self._asked.overwrite else None
        new = self._described(self.trainer)
        return self._shards.open(new, continued, overwrite=self._asked.overwrite) or new

    def _described(self, trainer: Trainer) -> StoreManifest:
        """The manifest of these data and checkpoints, which says no more of them than that of rows that are there."""
        data = self._asked.samples.fingerprint()
        checkpoints = self._asked.checkpoints.described(trainer, self.module, self._asked.direction == "adam")
        there = None if self._asked.overwrite else self._shards.manifest_if_there()
        if there is not None and self._shards.parts():
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

    def _take(self, record: PerSampleRecord, outputs: Any, fetched: _Fetched, index: Tensor, samples: Tensor) -> None:
        if self._writer is None:
            return
        asked, layout = self._asked, self._manifest.parameters
        values = self._directions(record) if asked.direction else values_of(record, layout, asked.projection)
        columns = self._columns(outputs, fetched.batch, len(index), samples)
        checkpoint = self._manifest.checkpoints[fetched.place]
        step, rate = checkpoint["step"], checkpoint["learning_rate"]
        self._write(
            self._writer.add,
            values,
            {
                "sample_index": index[samples],
                "checkpoint": fetched.place,
                "step": -1 if step is None else step,
                "learning_rate": float("nan") if rate is None else rate,
                **columns,
            },
        )

    def _directions(self, record: PerSampleRecord) -> Tensor:
        parameters = dict(self.module.named_parameters())
        projection = self._asked.projection
        parts = {}
        for each in self._manifest.parameters:
            parameter = parameters[each.name]
            is_known = each.name in record.names
            grads = record.grad_samples[each.name] if is_known else parameter.new_zeros(record.num_values, *each.shape)
            found = self._adam[each.name](grads)
            rows = found[..., None].flatten(1)
            parts[each.name] = rows if projection is None else Dense(found).project(projection, each.name)
        return torch.cat(list((parts if projection is None else projection.joined(parts)).values()), 1)

    def _columns(self, outputs: Any, batch: Any, size: int, samples: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, column in self._asked.columns.items():
            with torch.no_grad():
                values: Any = column(outputs, batch)
            if not isinstance(values, Tensor) or tuple(values.shape) != (size,) or values.is_complex():
                allowed = f"one real number per sample, ({size},)"
                raise OptionError(f"columns[{name!r}] returned {described(values)}; allowed is {allowed}")
            found[name] = values.detach().to("cpu", torch.float64)[samples]
        return found

    def _move_to(self, place: int) -> Mapping[str, Any] | None:
        """Give the module the weights of a checkpoint."""
        checkpoint = super()._move_to(place)
        if self._asked.direction == "adam":
            names = self._asked.names
            self._adam = adam_directions(checkpoint, self.module, self.trainer, names, self._asked.trainable)
        return checkpoint

    def on_predict_end(self) -> None:
        """Write what there is, and wait until all processes have."""
        self.write()
        self.trainer.strategy.barrier("all gradients are written")
        if self.trainer.is_global_zero:
            self._promise(len(GradientStore(self._asked.dirpath, partial=True)))
        self.lock.release()

    def write(self) -> None:
        """Write the rows that wait."""
        if self._writer is not None:
            self._write(self._writer.flush)

    def _write(self, write: Callable[..., None], *given: Any) -> None:
        try:
            write(*given)
        except OSError as error:
            raise PerSampleError(
                f"the gradients in dirpath={str(self._asked.dirpath)!r} cannot be written: {error}. What was written "
                "before is whole: make room and repeat the call, which goes on there"
            ) from error


def _as_before(now: dict[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as the store describes it, if the weights are the same, for a state dict tells less than a file."""
    if now["weights"] != was.get("weights"):
        return now
    known = [name for name in ("step", "learning_rate") if now[name] is None or was.get(name) is None]
    return {**now, **{name: was.get(name) for name in ("path", *known)}}


class Collecting(Storing, LightningModule):
    """For Trainers of the package `lightning`; at the top of a file, so that it can be sent to other processes."""


def made_for(trainer: Trainer, kind: type[Kind]) -> type[Kind]:
    """The class of a module that a Trainer predicts with: Trainers of `pytorch_lightning` take no other modules."""
    base = lightning_module_for(trainer)
    return Collecting if (kind, base) == (Storing, LightningModule) else type(kind.__name__, (kind, base), {})
