"""Per-sample gradients of a whole dataset at given weights, in a store on disk."""

from __future__ import annotations

import functools
import inspect
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch import __version__ as torch_version
from torch.utils.data import DataLoader, SubsetRandomSampler, default_collate

from lightning_persample.batch_axis.batch import count_samples, with_samples_at
from lightning_persample.callbacks.base import name_of
from lightning_persample.callbacks.checkpoints import (
    Checkpoints,
    Direction,
    Source,
    adam_directions,
    fingerprint_of_data,
    requiring_gradients,
)
from lightning_persample.callbacks.lightning_internals import (
    borrowed,
    is_a,
    is_lightning_module,
    lightning_module_for,
    loss_scale,
    outputs_of,
    quiet_trainer,
)
from lightning_persample.callbacks.observed_step import ObservedStep
from lightning_persample.callbacks.rows import layout_of, opened, values_of
from lightning_persample.callbacks.sample_index import (
    PASS_INDEX,
    Column,
    Drawn,
    RowOrder,
    TaggedLoader,
    checked_index,
    last_drawn,
    why_no_keys,
)
from lightning_persample.callbacks.second_pass import muted
from lightning_persample.capture.parameters import is_sharded
from lightning_persample.capture.record import PerSampleRecord, warn_user, warning_texts
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.dataset import FolderLock
from lightning_persample.influence.shards import Shards, StoreManifest, StoreWriter
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import CaptureOptions, check_option, check_options, is_path
from lightning_persample.reference.samples import described, loss_of
from lightning_persample.reference.untouched import recurrent_layers_can_go_backward, untouched, without_dropout
from lightning_persample.torch_internals import COMPILED

_NAMED = 8
_ADDRESS = " at 0x"  # in what Python shows of an object that says nothing of itself


class _Fetched(NamedTuple):
    """A batch on its way to the step."""

    place: int  # which checkpoint it is for
    number: int  # which batch of the checkpoint it is, in this process
    batch: Any
    drawn: Drawn  # without keys where the batch tells the index of each sample
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
        if why and not has_index:
            raise UnsupportedError(f"the samples cannot be separated, because {why}; {PASS_INDEX}")
        self._why = why  # of what is taken as it comes, else ""
        given: Any = loader
        self.size = None if why else len(given.dataset)
        self._visited = np.arange(self.size or 0)
        # a batch sampler of the user has its own
        sampler = None if why else getattr(given.batch_sampler, "sampler", given.sampler)
        if isinstance(sampler, SubsetRandomSampler):
            self._visited = np.unique(np.asarray(list(sampler.indices), np.int64))
        self.indices = None if has_index else self._visited  # in order; None where only the batches tell them

    def fingerprint(self) -> str | None:
        """The fingerprint of the data; None where it is unknown, or where the indices are not those of the dataset."""
        return None if self._has_index else fingerprint_of_data(getattr(self._loader, "dataset", None))

    def check_processes(self, processes: int) -> None:
        """Refuse what cannot be split."""
        if processes > 1 and self._why:
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
            for number, (batch, drawn) in enumerate(self._batches(done, rank, processes)):
                columns = [] if drawn.keys is None else self.order.start_from(batch, len(drawn.keys))
                yield _Fetched(place, number, batch, drawn, columns)

    def check_complete(self, rows: np.ndarray[Any, Any], places: int) -> None:
        """Refuse a store that lacks a sample."""
        expected = np.empty(0, np.int64) if self.indices is None else self.indices
        for place in range(places):
            missing = np.setdiff1d(expected, rows["sample_index"][rows["checkpoint"] == place]).tolist()
            if missing:
                more = ", ..." if missing[_NAMED:] else ""
                raise PerSampleError(
                    f"{len(missing)} samples have no row at checkpoint {place}: {str(missing[:_NAMED])[1:-1]}{more}. "
                    "The call can be repeated, and goes on with them"
                )

    def _batches(self, done: np.ndarray[Any, Any], rank: int, processes: int) -> Iterator[tuple[Any, Drawn]]:
        if self._why:
            holds_fields = getattr(self._loader, "collate_fn", None) is default_collate
            for batch in self._loader:
                yield batch, Drawn(None, places=() if holds_fields else None)
            return
        loader: Any = self._loader
        pending = np.setdiff1d(self._visited, done)[rank::processes].tolist()
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
            yield batch, drawn._replace(keys=None) if self._has_index else drawn
        if given < len(batches):
            raise PerSampleError(
                f"the loader ended after {given} of {len(batches)} batches: one of the samples {batches[given]} gave a "
                "StopIteration, which a dataset must not raise. What was collected before is written"
            )


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


@dataclass(eq=False)
class Pass:
    """A pass over every sample of a dataset: options of `collect_gradients`, see there, where all are allowed."""

    module: nn.Module
    dataloader: Iterable[Any]
    sources: Sequence[Source] | None
    loss: Callable[[Any, Any], Any] | None
    parameters: Sequence[str] | None
    sample_index: Callable[[Any], Any] | None
    weights_only: bool | None
    capture: CaptureOptions  # `loss_reduction`, `batch_dim`, `batch_size`, `batch_layout` and `max_memory`
    quantity: str  # of the records

    def __post_init__(self) -> None:
        for name, given in {"loss": self.loss, "sample_index": self.sample_index}.items():
            check_option(name, given, given is None or callable(given), "None or a callable")
        check_options(**self.capture)
        are_plain = self.weights_only in (None, True, False)
        check_option("weights_only", self.weights_only, are_plain, "None, True or False")
        self.module = module = getattr(self.module, COMPILED, self.module)  # what torch.compile wraps
        if self.loss is None and not is_lightning_module(module):
            raise OptionError("loss=None takes module.training_step: pass a LightningModule, or loss=...")
        if self.loss is None and not module.automatic_optimization:
            raise OptionError("loss=None takes module.training_step, which steps the optimizers itself: pass loss=...")
        self.names = _chosen(module, self.parameters)
        self.checkpoints = Checkpoints(_places(self.sources), self.weights_only)
        if is_a(self.dataloader, "LightningDataModule"):
            raise OptionError(
                f"dataloader is the LightningDataModule {type(self.dataloader).__name__}, which has several: call its "
                "setup('fit') and pass one of its loaders, e.g. dataloader=datamodule.train_dataloader()"
            )
        self.samples = SamplesOnce(self.dataloader, self.sample_index is not None)
        known = dict(module.named_parameters())
        refused = [name for name in self.names if known[name].is_complex()]
        if refused:
            raise UnsupportedError(
                f"{', '.join(f'`{name}`' for name in refused)}: gradients of complex parameters are not stored, but "
                "only real ones: leave them out with parameters=[...], the names of all others"
            )
        frozen = [name for name, parameter in known.items() if parameter.is_inference()]
        if frozen:
            raise OptionError(f"`{frozen[0]}` was made under torch.inference_mode and has no gradient: make it outside")


@dataclass(eq=False)
class Collection(Pass):
    """A pass whose gradients are stored."""

    dirpath: Path
    columns: Mapping[str, Callable[[Any, Any], Tensor]]
    projection: Projection | None
    dtype: str
    direction: Literal["adam"] | None
    rows_per_shard: int | None
    overwrite: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        known = dict(self.module.named_parameters())
        # by parameter whether the module as it was given trains it
        self.trainable = {name: parameter.requires_grad for name, parameter in known.items()}
        callables: dict[str, Any] = {"loss": self.loss, "loss_reduction": self.capture["loss_reduction"]}
        callables |= {f"columns[{name!r}]": column for name, column in self.columns.items()}
        # the options that are callables which their names do not tell from others
        self.not_compared = [name for name, each in callables.items() if not _is_known_by_name(each)]
        by_name = {name: named(each) for name, each in callables.items()}
        self.manifest = StoreManifest(  # as far as it is known before the processes are there
            run=uuid.uuid4().hex,
            parameters=layout_of({name: known[name].shape for name in self.names}, self.projection),
            projection=None if self.projection is None else self.projection.settings(),
            dtype=self.dtype,
            columns=tuple(self.columns),
            settings={"direction": self.direction, **by_name},
            libraries={"torch": torch_version, "lightning": lightning_version, "numpy": np.__version__},
            samples=None if self.sample_index is not None else self.samples.size,
        )


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
        self._visited: dict[int, np.ndarray[Any, Any]] = {}  # by checkpoint the samples that are not wanted any more

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
        return self._visited.get(place, np.empty(0, np.int64))

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
        capture, keys, places = asked.capture, fetched.drawn.keys, fetched.drawn.places
        view = batch if places is None else with_samples_at(batch, places)
        drawn = None if keys is None else len(keys)
        size = count_samples(view, capture["batch_dim"], capture["batch_size"], drawn, capture["batch_layout"])
        if asked.sample_index is None:
            index = torch.tensor(keys, dtype=torch.int64)
        else:
            index = checked_index(asked.sample_index(batch), size)
        wanted = torch.from_numpy(~np.isin(index.numpy(), self._visited_at(fetched.place))).nonzero().flatten()
        if not len(wanted):
            return 0
        step = ObservedStep(
            self.module,
            capture,
            batch,
            view,
            size,
            ("sq_norm", asked.quantity),
            None if len(wanted) == size else wanted,
            sums_differ=True,  # there is no ``.grad`` to compare with
            compare_weights=fetched.number == 0,
            averages=False,
        )
        with torch.enable_grad(), muted(self.module), closing(step):
            with step.capture.observe(), without_dropout(self.module), recurrent_layers_can_go_backward(self.module):
                outputs = outputs_of(self.module, asked.loss, batch, fetched.number)
                loss = self._checked_loss(outputs)
                step.attach(loss, outputs)
                with torch.autocast(loss.device.type, enabled=False):
                    step.capture.backward_into_record(loss * loss_scale(self.trainer, size))
            record = step.capture.record
            self._check(record)
            self._take(record, outputs, fetched, index, wanted if record.samples is None else record.samples.cpu())
        return len(wanted)

    def _take(self, record: PerSampleRecord, outputs: Any, fetched: _Fetched, index: Tensor, samples: Tensor) -> None:
        """Use the record of some samples, (m,) places in the batch, whose samples have these indices, (B,)."""
        raise NotImplementedError

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

    on_before_batch_transfer = _as_the_module("on_before_batch_transfer")
    transfer_batch_to_device = _as_the_module("transfer_batch_to_device")
    on_after_batch_transfer = _as_the_module("on_after_batch_transfer")


class Storing(Passing):
    """Stores the gradients of the samples that the store lacks."""

    _asked: Collection

    def __init__(self, asked: Collection) -> None:
        super().__init__(asked)
        self._shards, self._manifest = Shards(asked.dirpath), asked.manifest
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
            wanted, kept = self._wanted_and_kept()
            self._warn_of_kept(wanted, kept)
            self._promise(-1 if wanted is None else len(rows) + wanted - kept)
        trainer.strategy.barrier("all have read the store")  # and nobody has written to it
        self._writer = StoreWriter(self._asked.dirpath, self._manifest, trainer.global_rank, self._asked.rows_per_shard)

    def _wanted_and_kept(self) -> tuple[int | None, int]:
        """How many rows are wanted, None where only the batches tell it, and how many of them are there already."""
        indices = self._asked.samples.indices
        visited = [self._visited_at(place) for place in range(len(self._asked.checkpoints))]
        if indices is None:
            return None, sum(map(len, visited))
        return len(indices) * len(visited), sum(int(np.isin(indices, there).sum()) for there in visited)

    def _promise(self, rows: int) -> None:
        """Say in the manifest how many rows complete the store, and no fewer than were to be there before."""
        promised = rows if rows < 0 else max(rows, self._manifest.rows or 0)
        self._manifest = replace(self._manifest, rows=promised)
        self._write(self._shards.write_manifest, self._manifest)

    def _warn_of_kept(self, wanted: int | None, kept: int) -> None:
        """Nobody knows whether the rows that are kept are of these data, or of these callables."""
        unknown = ["the data"] if self._manifest.settings["data"] is None else []
        unknown += [f"{name} (a lambda, or an object)" for name in self._asked.not_compared]
        if unknown and kept:
            of = "" if wanted is None else f" of the {wanted}"
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
            settings={**self._manifest.settings, "precision": trainer.precision, "data": data},
            checkpoints=checkpoints,
            processes=trainer.world_size,
        )

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


# The call


def named(value: Any) -> str | None:
    """An option as a manifest names it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        given = [_shown(each) for each in value.args]
        given += [f"{name}={_shown(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join([str(named(value.func)), *given])})"
    return name_of(value)


def _is_known_by_name(value: Any) -> bool:
    """Whether two options of equal names are alike, as long as nobody edits their code."""
    if value is None or isinstance(value, (str, type)):
        return True
    if isinstance(value, functools.partial):
        return _is_known_by_name(value.func) and not any(
            _ADDRESS in repr(each) for each in (value.args, value.keywords)
        )
    if inspect.ismethod(value) and not isinstance(value.__self__, (nn.Module, type)):
        return False
    return inspect.isroutine(value) and "<" not in value.__qualname__


def _shown(value: Any) -> str:
    shown = repr(value)
    return type(value).__qualname__ if _ADDRESS in shown else shown


_DEFAULT_PROJECTION = Projection()


def collect_gradients(
    module: nn.Module,
    dataloader: Iterable[Any],
    dirpath: str | os.PathLike[str],
    *,
    checkpoints: Sequence[Source] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    columns: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
    projection: Projection | None = _DEFAULT_PROJECTION,
    dtype: Literal["float16", "float32", "float64"] = "float32",
    direction: Literal["adam"] | None = None,
    parameters: Sequence[str] | None = None,
    loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor] = "mean",
    batch_dim: int = 0,
    batch_size: int | None = None,
    batch_layout: Callable[[Any], Mapping[Tensor, Any]] | None = None,
    sample_index: Callable[[Any], Any] | None = None,
    trainer: Trainer | None = None,
    rows_per_shard: int | None = None,
    max_memory: int | None = None,
    weights_only: bool | None = None,
    overwrite: bool = False,
) -> GradientStore:
    """Store the gradient of each sample's own loss, for every sample of a dataset at each checkpoint.

    The module runs in evaluation mode, through ``trainer.predict``. Every sample of ``dataloader.dataset`` is visited
    once, in order, in batches as the loader makes them: its sampler plays no part, so that a loader that shuffles will
    do (of a ``SubsetRandomSampler``, the subset). Of several processes (``strategy="ddp"``) each visits its share. The
    module has to be complete; of its hooks only those that move a batch to the device run, and what it logs is dropped.

    Afterwards the module (weights, buffers, mode, ``.grad``, ``requires_grad``, every attribute), the Trainer and the
    random numbers are as before, also after an error, for which the memory of one more copy of the module is taken.

    A call that was interrupted is repeated: it goes on where the store ends. A folder that holds a store of other
    gradients is refused, as far as that is known: by the options, the weights, and the data where the dataset is a
    ``TensorDataset``, one of Hugging Face, or a ``Subset`` or ``ConcatDataset`` of such, without `sample_index`. For
    other data a warning counts the rows that are kept: after a change of inputs or labels pass another folder, or
    ``overwrite=True``. The code of the module, of the loss and of a collate function is not compared.

    Samples whose gradient is not finite have rows of nan and are marked in ``store.nonfinite``.

    Args:
        module: whose gradients they are.
        dataloader: a DataLoader of a dataset with a length. Anything else that gives batches needs `sample_index`, and
            one process.
        dirpath: the folder of the store, which all processes share.
        checkpoints: the weights that gradients are taken at: paths of what a Trainer or ``ModelCheckpoint`` saved, or
            state dicts (of the module, or a Trainer's whole checkpoint). None takes the module as it is.
        loss: a callable ``(module, batch)`` that returns the loss, or a dict with "loss" and whatever `columns` need.
            None takes ``module.training_step(batch, batch_idx)``.
        columns: further columns: by name a callable ``(outputs, batch)`` that returns one number per sample, (B,),
            where outputs is what the loss was taken from.
        projection: what is kept of a gradient; None keeps it in full.
        dtype: of the stored numbers. In "float16" each row has a scale of its own.
        direction: "adam" stores in place of a gradient g what Adam would step along if g were the gradient of the next
            step, from the optimizer's state in the checkpoint, see `adam_direction`.
        parameters: the names of the parameters whose gradients are stored, trainable or not; None takes all that are
            trainable.
        loss_reduction: how the loss is made of the samples' own losses, see `PerSampleCallback`; a callable is given
            what the loss was taken from, and the batch.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B of each batch; None reads it from the batch's tensors.
        batch_layout: says where the samples lie in tensors that do not hold them along `batch_dim`, see
            `PerSampleCallback`.
        sample_index: a callable ``(batch)`` that returns the index of each sample, in place of that in the dataset.
        trainer: decides on devices, strategy and precision; its own callbacks, loggers and data module have no part.
            None takes one of one device that shows nothing; of several processes each needs to be given one.
        rows_per_shard: number of rows of a file; None takes as many as 64 MiB hold. A process that is killed loses no
            more than the rows of one.
        max_memory: bytes that the temporaries of one kernel may take, see `expanded_weights`.
        weights_only: whether files of checkpoints may hold nothing but tensors and plain values; None is the choice of
            Lightning and torch.
        overwrite: remove the store that is in the folder, whatever it is of, and begin again.

    Returns:
        The store, with the rows of all processes.

    It is an `OptionError` where an option has a value that is not allowed or the folder holds another store, and an
    `UnsupportedError` where a gradient is not known exactly or the module is sharded; the text says why.
    """
    path = os.fspath(dirpath) if isinstance(dirpath, os.PathLike) else dirpath
    check_option("dirpath", dirpath, is_path(path), "the path of a folder")
    folder = Path(dirpath).absolute()  # wherever a loader goes
    check_options(overwrite=overwrite, rows_per_shard=rows_per_shard)
    check_option("direction", direction, direction in (None, "adam"), "None or 'adam'")
    is_projection = projection is None or isinstance(projection, Projection)
    check_option("projection", projection, is_projection, "None (in full) or a Projection as Projection(dim=64)")
    by_name: Any = {} if columns is None else columns
    are_columns = isinstance(by_name, Mapping) and all(map(callable, by_name.values()))
    check_option("columns", columns, are_columns, "None or a dict of callables (outputs, batch)")
    asked = Collection(
        module,
        dataloader,
        sources=checkpoints,
        loss=loss,
        parameters=parameters,
        sample_index=sample_index,
        weights_only=weights_only,
        capture=CaptureOptions(
            loss_reduction=loss_reduction,
            batch_dim=batch_dim,
            batch_size=batch_size,
            batch_layout=batch_layout,
            max_memory=max_memory,
        ),
        quantity="grad_sample" if direction or projection is None else "projection",
        dirpath=folder,
        columns={} if columns is None else dict(columns),
        projection=projection,
        dtype=dtype,
        direction=direction,
        rows_per_shard=rows_per_shard,
        overwrite=overwrite,
    )
    run_pass(asked, quiet_trainer() if trainer is None else trainer, Storing, [_WritesInAnyCase()])
    store = GradientStore(folder, partial=True)
    asked.samples.check_complete(store.rows, len(asked.checkpoints))
    return store


class _WritesInAnyCase(Callback):
    """Writes what was collected before an error: the next call goes on behind it."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the rows that wait."""
        if isinstance(pl_module, Storing):
            try:
                pl_module.write()
            finally:
                pl_module.lock.release()


def run_pass(asked: Pass, trainer: Trainer, kind: type[Kind], callbacks: Sequence[Callback] = ()) -> Kind:
    """Let a Trainer predict with a module of this kind, and leave the user's module and the Trainer as they were."""
    module = asked.module
    if is_sharded(module) or not is_a(trainer.strategy, "SingleDeviceStrategy", "DDPStrategy"):
        held = f"{type(module).__name__} is sharded" if is_sharded(module) else type(trainer.strategy).__name__
        raise UnsupportedError(f"{held}: gradients are collected on one device, or under strategy='ddp'")
    with (
        torch.inference_mode(False),
        borrowed(trainer, list(callbacks)),
        untouched(module),
        requiring_gradients(module, dict.fromkeys(asked.names, True)),
    ):
        # Trainers of `pytorch_lightning` take no modules of `lightning`, nor the reverse.
        base = lightning_module_for(trainer)
        is_plain = kind is Storing and base is LightningModule
        made: Kind = (Collecting if is_plain else type(kind.__name__, (kind, base), {}))(asked)
        trainer.predict(made, return_predictions=False)
    return made


def _places(checkpoints: Any) -> Sequence[Source | None]:
    if checkpoints is None:
        return (None,)
    is_list = isinstance(checkpoints, Iterable) and not isinstance(checkpoints, (str, os.PathLike, Mapping))
    found = tuple(checkpoints) if is_list else ()
    check_option("checkpoints", checkpoints, bool(found), "a list of at least one")
    for place, each in enumerate(found):
        is_source = isinstance(each, (str, os.PathLike, Mapping))
        check_option(f"checkpoints[{place}]", each, is_source, "the path of a checkpoint, or a state dict")
    return found


def _chosen(module: nn.Module, names: Sequence[str] | None) -> list[str]:
    """The parameters that are stored, in the order of the module."""
    known = dict(module.named_parameters())
    if names is None:
        found = [name for name, parameter in known.items() if parameter.requires_grad]
        if not found:
            raise OptionError(f"{type(module).__name__} has no trainable parameter: name some with parameters=[...]")
        return found
    unknown = [name for name in names if name not in known]
    if isinstance(names, str) or unknown or not names:
        shown = (
            f"{unknown[0]!r} is none" if unknown and not isinstance(names, str) else f"{names!r} is not a list of names"
        )
        raise OptionError(f"parameters: {shown}; allowed are names of module.named_parameters(): {', '.join(known)}")
    return [name for name in known if name in set(names)]
