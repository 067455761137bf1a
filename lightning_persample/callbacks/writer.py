"""Rows of per-sample gradient norms on disk, one for each sample of each captured step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch import __version__ as torch_version
from typing_extensions import Unpack

from lightning_persample.callbacks.base import PerSampleCallback
from lightning_persample.callbacks.class_loss import CLASS_COLUMNS
from lightning_persample.callbacks.lightning_internals import window_continues
from lightning_persample.callbacks.rows import (
    CapturedRows,
    GradientRows,
    LearningRates,
    checked_types,
    columns_of,
    opened,
    table_of,
)
from lightning_persample.callbacks.sample_index import keys_of
from lightning_persample.callbacks.session import shared_capture
from lightning_persample.capture.record import PerSampleRecord, group_name, warn_user
from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.dataset import GRADIENTS, FolderLock, PartWriter
from lightning_persample.influence.ledger import Ledger, Manifest
from lightning_persample.influence.optional_packages import arrow
from lightning_persample.influence.shards import Shards, StoreManifest
from lightning_persample.options import CaptureOptions, check_option, check_options, is_path

Columns: TypeAlias = Sequence[Literal["loss", "el2n", "margin"]] | Callable[[Any, Any], Mapping[str, Tensor]] | None

_MOST_WAITING = 16  # files that could not be written


class PerSampleGradientWriter(PerSampleCallback):
    """Writes a ledger: one row for each sample of each captured training step, as Parquet files in a folder.

    A row has the step, the epoch, the batch, the process, the sample's index in the dataset, the learning rate, the
    sample's weight in the step and the norm of its gradient, see `read_ledger` for all columns. What training_step
    returns under "per_sample", ``{"loss": loss, "per_sample": {"loss": losses, "el2n": errors}}`` with tensors (B,), is
    written as well. The columns of a ledger are those of its first row: later a name that is missing is null.

    Rows are kept in memory and written to a file of their own each `flush_every` captured batches, at the end of the
    fit and of a fit that fails, and whenever a checkpoint is saved. A process that is killed loses no more than the
    rows since, and no file is ever there in part; where the machine itself fails (its power), what a checkpoint has is
    sure, and of the files since the last ones may be missing. A fit that goes on from a checkpoint
    (``trainer.fit(..., ckpt_path=...)``) removes the rows of the steps that the checkpoint does not have and writes
    them again: in the end every step is there once. (A callback that saves a checkpoint in its `on_train_batch_end` and
    stands before the writer among the callbacks saves it before the rows of that batch are complete: they are written
    at the end of that batch. A process that is killed in between loses them.)

    With ``Trainer(fast_dev_run=True)`` rows are made and none is written, as Lightning saves no checkpoint then.

    Where a file cannot be written (the disk is full), one warning says so and the training goes on. The rows wait and
    are tried again with the next ones; beyond those of 16 files the oldest are given up, which a warning at the end of
    the fit counts.

    With `projection` the samples' gradients themselves are kept, too, in the folder "_gradients" of the ledger's: a
    `GradientStore` with the rows of the ledger that have the same step and sample_index, written and resumed with them.
    Its columns are those of the parameters that are trainable when the fit starts, without those that the first
    captured step has no per-sample gradients of, that are complex or that have no entries. A sample_index that is no
    int is -1 in it.

    The folder has to be one that all processes share. In manual optimization a row is one of a backward, and `step`
    counts batches, which the manifests say as ``settings["step_unit"]``. Where an optimizer runs its closure several
    times (LBFGS), a row is of the first run, at the weights of its step, and has no value in columns that the run adds,
    which are known of the last one only. A gradient is that of the backward, before any clipping, and `weight` has no
    factor of it: a step whose gradient is clipped by norm moves the weights by less.

    Args:
        dirpath: the folder of the ledger. One that holds the ledger of another run is refused.
        every_n_steps: capture every n-th optimizer step; None captures the Trainer's own logging steps.
        columns: further columns. Names choose from those that are read where `training_step` calls ``F.cross_entropy``
            (or ``F.nll_loss``) once with a gradient, on outputs f (B, C) and integer labels y (B,): "loss",
            ``-log softmax(f)_y`` whatever options the loss has; "el2n", the error ``||softmax(f) - onehot(y)||``;
            "margin", ``f_y - max_{c != y} f_c``, of which the mean over a training is the area under the margin. Rows
            in another order than the batch are followed to their samples. The columns are nan, with a warning, where
            that cannot be read: where it is not known which row is which sample's, the labels are not those of the
            same rows, or (the margin) there is one class; with the engines "vmap" and "loop", where y is not a tensor
            of the batch as it came. A label that is ignored has no value. A column of that name that training_step
            returns takes their place. A callable ``(outputs, batch)`` returns a dict of tensors (B,) by name, where
            outputs is what `training_step` returned, without graph.
        per_layer: how many leading parts of a parameter's module path name its group, for a norm of each group in the
            column ``norm/<group>``; None writes none.
        projection: how gradients are projected that are kept; None keeps none.
        dtype: of the numbers that are kept of gradients. In "float16" each row has a scale of its own.
        flush_every: count of captured batches from one file to the next.
        overwrite: remove the ledger of another run from the folder, and its gradients.
        capture: `loss_reduction`, `batch_dim`, `batch_size`, `sample_index`, `unsupported`, `engine`, `verify`,
            `fuse_weight_grad`, `max_memory` and `max_samples`, see `PerSampleCallback`. The engines "vmap" and "loop"
            do not know the samples' weights.

    Raises:
        OptionError: an option has a value that is not allowed.

    Reference: Paul et al. 2021, Deep learning on a data diet, definition 2.2, arXiv 2107.07075 (el2n); Pleiss et al.
    2020, Identifying mislabeled data using the area under the margin ranking, equation 1, arXiv 2001.10528 (margin).
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_steps: int | None = 1,
        *,
        columns: Columns = None,
        per_layer: int | None = None,
        projection: Projection | None = None,
        dtype: Literal["float16", "float32", "float64"] = "float32",
        flush_every: int = 100,
        overwrite: bool = False,
        **capture: Unpack[CaptureOptions],
    ) -> None:
        super().__init__(every_n_steps, **capture)
        check_option("dirpath", dirpath, is_path(dirpath), "the path of a folder")
        is_other = columns is None or callable(columns)
        is_allowed = is_other or (isinstance(columns, (list, tuple)) and set(columns) <= {*CLASS_COLUMNS})
        expected = f"some of {', '.join(map(repr, CLASS_COLUMNS))}, or a callable (outputs, batch) -> dict of tensors"
        check_option("columns", columns, is_allowed, f"None, {expected}")
        is_projection = projection is None or isinstance(projection, Projection)
        check_option("projection", projection, is_projection, "None or a Projection as Projection(dim=64)")
        check_option("dtype", dtype, dtype in ("float16", "float32", "float64"), "'float16', 'float32' or 'float64'")
        check_options(flush_every=flush_every, per_layer=per_layer, overwrite=overwrite)
        self._write_to(Path(dirpath))
        self.columns = columns
        self.per_layer = per_layer
        self.projection, self.dtype = projection, dtype
        self.flush_every = flush_every
        self.overwrite = overwrite
        self._run = ""
        self._loaded: dict[str, int] = {}
        self._written: dict[str, tuple[dict[int, int], dict[int, int]]] = {}  # by run its files, of rows and gradients
        self._groups: tuple[str, ...] = ()
        self._batches, self._last_step, self._has_stepped = 0, -1, True
        self._forget_rows()

    def _write_to(self, dirpath: Path) -> None:
        self.dirpath = dirpath
        self._folder = dirpath.absolute()  # wherever the process works later
        self._ledger, self._store = Ledger(self._folder), Shards(self._folder / GRADIENTS)
        self._lock = FolderLock(self._folder)

    def _forget_rows(self) -> None:
        self._parts: PartWriter[Manifest] | None = None
        self._gradients: GradientRows | None = None
        self._rates: LearningRates | None = None
        self._current: list[CapturedRows] = []  # of the batch that is running
        self._held: list[CapturedRows] = []  # of batches whose optimizer step is still to come
        self._captured: list[CapturedRows] = []
        self._types: dict[str, str] = {}
        self._was_automatic = True
        self._said: set[str] = set()
        self._unread: Collection[str] = ()  # of the columns that are chosen by name
        self._why_unread = ""
        self._backwards, self._is_behind = 0, False  # runs in this batch; a checkpoint has a batch without its rows

    def _settings(self) -> dict[str, Any]:
        # The folder alone names the state: a fit may go on from a checkpoint with other settings.
        return {"dirpath": str(self.dirpath)}

    def needs(self, trainer: Trainer) -> set[str]:
        """Norms, and projections of gradients where they are kept."""
        return {"sq_norm"} if self.projection is None else {"sq_norm", "projection"}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what an earlier fit resumed, and see that Parquet can be written, in a folder of its own."""
        if stage == "fit":
            try:
                arrow()
            except ModuleNotFoundError as error:  # said before the fit, which would end without a ledger
                raise OptionError(str(error)) from error
            self._loaded = {}
            others = [each for each in trainer.callbacks if isinstance(each, PerSampleGradientWriter)]  # type: ignore[attr-defined]
            if sum(each._folder == self._folder for each in others) > 1:
                raise OptionError(f"dirpath={str(self.dirpath)!r}: two writers of this Trainer have one folder")

    def state_dict(self) -> dict[str, Any]:
        """Which run this is, and the first step that it does not have."""
        # A batch whose rows are not complete yet has been trained on all the same.
        return {"run": self._run, "batches": self._batches + bool(self._current), "files": {}, "gradient_files": {}}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write, on all processes before one saves it, what a fit that goes on from here will not see again."""
        self._flush(trainer)
        self._settle()
        self._is_behind = bool(self._current or self._held)
        if not trainer.interrupted:  # a process that fails alone would wait for the others for ever
            trainer.strategy.barrier("PerSampleGradientWriter.on_save_checkpoint")
        state = checkpoint["callbacks"].get(self.state_key)
        if state is not None and self._parts is not None:  # what a fit that goes on has to find
            state["files"] = self._ledger.files()
            state["gradient_files"] = self._store.files()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note of which run the checkpoint is; the folder may have had another name then."""
        manual = not pl_module.automatic_optimization
        own = type(self).__qualname__ + "{"  # how the state keys of this class start
        states = [state for key, state in checkpoint["callbacks"].items() if key.startswith(own)]
        self._loaded = {
            state["run"]: state["batches"] if manual else checkpoint["global_step"] for state in states if state["run"]
        }
        self._batches = max((state["batches"] for state in states), default=0)
        self._written = {state["run"]: (state["files"], state["gradient_files"]) for state in states}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the folder ready: new, or as it was at the checkpoint."""
        self._let_go()  # of a fit that did not see its end
        self._forget_rows()
        self._lock.release()
        depth, names = self.per_layer, dict(pl_module.named_parameters())
        self._groups = () if depth is None else tuple(dict.fromkeys(group_name(name, depth) for name in names))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._follow(trainer, pl_module)
            return
        if not self._loaded:
            step = trainer.global_step
            first = self._last_step + self._has_stepped  # rows of a window that was not completed are written again
            if pl_module.automatic_optimization and self._run and step >= first:
                self._loaded = {self._run: step}  # a further fit of the same Trainer
            else:
                self._batches, self._last_step, self._has_stepped = 0, -1, True
                self._written = {}
        open_folder = partial(self._open, self._new_manifest(trainer, pl_module))
        manifest, there = opened(trainer, self._lock, open_folder, "a ledger")
        self._run, self._types = manifest.run, dict(manifest.columns)
        self._ledger.run = manifest.run
        rank = trainer.global_rank
        if self.projection is not None:
            fields = {"dtype": self.dtype, **{n: getattr(manifest, n) for n in ("run", "libraries", "processes")}}
            fields["settings"] = {name: manifest.settings[name] for name in ("loss_reduction", "step_unit")}
            self._gradients = GradientRows(self._store, self.projection, pl_module, rank, self._warn, there, fields)
        self._parts = PartWriter(self._ledger, rank, _MOST_WAITING)
        self._follow(trainer, pl_module)

    def _open(self, new: Manifest) -> tuple[Manifest, StoreManifest | None]:
        """Make the folder ready, in one process: what the ledger's rows are, and what gradients go on."""
        before = self._ledger.manifest_if_there()
        files, gradient_files = self._written.get("" if before is None else before.run, ({}, {}))
        # Before anything is removed.
        self._ledger.check(new, self._loaded, overwrite=self.overwrite, files=files)
        there: StoreManifest | None = None
        if self.projection is not None:
            there, alike = self._store.manifest_if_there(), None
            if there is not None and there.run in self._loaded:
                alike = replace(there, projection=self.projection.settings(), dtype=self.dtype)
            there = self._store.open(alike, self._loaded, overwrite=self.overwrite, files=gradient_files)
        elif self._store.dirpath.is_dir():
            self._store.open(None, self._loaded, overwrite=self.overwrite)
            with suppress(OSError):  # it is not empty
                self._store.dirpath.rmdir()
        return self._ledger.open(new, self._loaded, overwrite=self.overwrite) or new, there

    def _follow(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what rows are made with."""
        self._rates = LearningRates(pl_module, trainer.optimizers, self._warn, partial(self._fail, trainer))
        self._was_automatic = pl_module.automatic_optimization

    def _forget_steps(self) -> None:
        """The optimizer step is over, or there is none any more: nothing waits for it."""
        if self._rates is not None:
            self._rates.forget()

    def _new_manifest(self, trainer: Trainer, pl_module: LightningModule) -> Manifest:
        reduction = self.loss_reduction
        named = reduction if isinstance(reduction, str) else getattr(reduction, "__qualname__", "a callable")
        libraries = {"torch": torch_version, "lightning": lightning_version, "pyarrow": arrow().__version__}
        others = ("per_layer", "every_n_steps", "max_samples", "engine")
        unit = "optimizer steps" if pl_module.automatic_optimization else "batches"
        settings = {"loss_reduction": named, "step_unit": unit, **{name: getattr(self, name) for name in others}}
        names = tuple(name for name, _ in pl_module.named_parameters())
        return Manifest(
            uuid.uuid4().hex, {}, names, settings=settings, libraries=libraries, processes=trainer.world_size, rows=-1
        )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Count the runs of an optimizer's closure."""
        self._backwards += 1

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Keep the norms of a backward until the batch ends."""
        rates, gradients, automatic = self._rates, self._gradients, pl_module.automatic_optimization
        # A closure that runs again does so at weights that are those of no step.
        if rates is None or (automatic and self._backwards > 1):
            return
        if automatic != self._was_automatic:  # Lightning counts the steps of each way on their own
            self._warn("automatic_optimization was changed in the middle of the fit: batches since then have no rows")
            return
        step, rate = trainer.global_step if automatic else self._batches, rates.of_record(record)
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of mixed precision
        divisor = float(trainer.world_size if scaler is None else scaler.get_scale() * trainer.world_size)
        backward = step, trainer.current_epoch, batch_idx, record.backward_index, record.coverage
        samples = keys_of(record), record.samples, record.batch_size
        norms = self._norms_of(record)
        groups = {} if self.per_layer is None else record.group_norms(self.per_layer)
        values = None if gradients is None else gradients.values_of(record)
        rows = CapturedRows(*backward, *samples, rate, record.factor, divisor, norms, groups, values)
        rows.columns = {**self._of_class_loss(trainer, rows), **self._added(trainer, pl_module, record, rows)}
        self._current.append(rows)
        rates.wait(rows, record)

    @property
    def _named(self) -> Sequence[str]:
        """The columns that are chosen by name."""
        return () if callable(self.columns) or self.columns is None else self.columns

    def _reads_class_losses(self) -> bool:
        return bool(self._named)

    def _of_class_loss(self, trainer: Trainer, rows: CapturedRows) -> dict[str, Tensor]:
        """The columns of a backward that are chosen by name, each (m,)."""
        shared = shared_capture(trainer)
        if not self._named or shared is None:
            return {}
        found, why = shared.class_losses.of_samples(rows.batch_size)
        if why:
            self._unread, self._why_unread = [name for name in self._named if name not in found], why
        unknown = torch.full((rows.batch_size,), float("nan"))
        return rows.own({name: found.get(name, unknown) for name in self._named})

    def _norms_of(self, record: PerSampleRecord) -> Tensor | None:
        """The column of norms, (m,), if there is one."""
        return record.norms()

    def _added(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, rows: CapturedRows
    ) -> dict[str, Tensor]:
        """Further columns of the rows of a backward, each (m,)."""
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Complete the rows of the batch, and release those of an optimizer step that is over."""
        self._batches += 1
        automatic = pl_module.automatic_optimization
        if self._current:
            self._complete(outputs, batch, ran_again=self._backwards > 1 and automatic)
        self._backwards = 0
        if automatic and window_continues(trainer):  # an epoch that is broken off leaves it without its step
            return
        if self._gradients is not None:
            self._gradients.add(self._held)
        self._captured += self._held
        self._held = []
        if automatic:
            self._forget_steps()
        elif self._rates is not None and self._gradients is not None:
            self._rates.wrote(())
        if len(self._captured) >= self.flush_every or self._is_behind:
            self._flush(trainer)
        if self._is_behind:
            self._is_behind = False
            self._settle()

    def _is_done(self, *, automatic: bool) -> bool:
        # In manual optimization every batch is counted.
        return automatic and not (self._current or self._held or self._is_behind)

    def _complete(self, outputs: Any, batch: Any, *, ran_again: bool) -> None:
        current, self._current = self._current, []
        unread, self._unread = self._unread, ()
        columns = columns_of(outputs, batch, self.columns if callable(self.columns) else None)
        unread = [repr(name) for name in unread if name not in columns]
        if unread:
            self._warn(
                f"columns of the ledger are nan: {', '.join(unread)} cannot be read, because {self._why_unread}; let "
                "training_step return them, {'loss': ..., 'per_sample': {name: tensor of shape (B,)}}, or pass columns="
                "<function of (outputs, batch) that returns them>"
            )
        own = [{**rows.columns, **rows.own(columns)} for rows in current]
        taken = sorted((columns.keys() & current[0].columns.keys()) - {*self._named})
        if taken:
            raise OptionError(
                f"the column {taken[0]!r} of the run has the name of one of {type(self).__name__}: rename it"
            )
        self._types = checked_types(self._types, self._groups, current[0], own[0])
        if isinstance(current[0].keys, list) and self._types["sample_index"] != "string":
            self._warn("the sampler drew keys that are no ints after it had drawn ints: their sample_index is null")
        if not ran_again:  # what was returned last is of other weights
            for rows, values in zip(current, own, strict=True):
                rows.columns = values
        self._held += current
        self._last_step = max(self._last_step, current[0].step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget what the last epoch left without an optimizer step: Lightning drops its gradients, too."""
        self._held = []
        if pl_module.automatic_optimization:
            self._forget_steps()

    def _flush(self, trainer: Trainer) -> None:
        there: Manifest | None = None
        if self._parts is not None:
            with suppress(PerSampleError, OSError):  # writing says what is wrong
                there = self._ledger.manifest()
        if there is not None and there.run != self._run:
            self._warn(
                f"the folder {str(self.dirpath)!r} was taken by run {there.run} (overwrite=True) while this fit, run "
                f"{self._run}, was writing to it: rows of this fit are no longer written. Give each fit its dirpath"
            )
            self._parts, self._gradients = None, None
        if self._gradients is not None:
            self._gradients.flush()
        captured, self._captured = self._captured, []
        if self._rates is not None:
            self._rates.wrote([*self._current, *self._held])
        parts = self._parts
        if parts is None:
            return
        if captured:
            table = table_of(captured, self._types, trainer.global_rank)
            if table.num_rows:
                parts.wait(table)
        try:
            if trainer.is_global_zero and self._types and there is not None and not there.columns:
                self._ledger.write_manifest(replace(there, columns=self._types))
            parts.write()
        except OSError as error:
            self._warn(
                f"the ledger in {str(self.dirpath)!r} cannot be written: {error}. Training goes on; the rows are kept "
                f"in memory and tried again with the next ones, until those of {_MOST_WAITING} files wait"
            )

    def _settle(self) -> None:
        try:
            if self._parts is not None:
                self._parts.settle()
        except OSError as error:
            start = f"the ledger in {str(self.dirpath)!r} cannot be written: {error} (of the names of its files)"
            self._warn(f"{start}. Training goes on; a loss of power may cost the files since the last checkpoint")

    def _warn(self, text: str) -> None:
        start = text.partition(":")[0]
        if start not in self._said:
            self._said.add(start)
            warn_user(text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what there is, and say what is missing."""
        is_open = self._parts is not None
        lost = torch.tensor(self._finish(trainer), device=trainer.strategy.root_device)
        # of all processes, which have written
        rows, gradients = trainer.strategy.reduce(lost, reduce_op="sum").tolist()
        if is_open and trainer.is_global_zero:
            self._promise(rows, gradients)
        self._lock.release()

    def _promise(self, rows: int, gradients: int) -> None:
        """Say in the manifests how many rows were made, with those that were not written: a loss is seen later."""
        with suppress(PerSampleError, OSError):  # then they say that the fit has not ended
            self._ledger.promise(self._run, rows)
            self._store.promise(self._run, gradients)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is; the rows of a batch that was not completed are left out."""
        is_open = self._parts is not None
        lost = self._finish(trainer)
        if is_open and trainer.world_size == 1:
            self._promise(*lost)
            self._ledger.remove_if_empty(self._run)
        self._lock.release()

    def _fail(self, trainer: Trainer | None, error: Exception) -> None:
        self._lock.release()  # it writes nothing more in this fit, and its hooks at the end do not run
        super()._fail(trainer, error)

    def _let_go(self) -> None:
        if self._rates is not None:
            self._rates.close()
        self._rates = None

    def _finish(self, trainer: Trainer) -> tuple[int, int]:
        """Write what there is; how many rows of the ledger, and of gradients, were not written."""
        self._current, self._held = [], []
        self._forget_steps()
        self._flush(trainer)
        self._settle()
        gradients, parts = self._gradients, self._parts
        self._gradients = self._parts = None
        lost_gradients = 0 if gradients is None else gradients.finish()
        self._let_go()
        if parts is None:
            return 0, lost_gradients
        self._has_stepped = trainer.global_step > self._last_step
        self._written = {self._run: (self._ledger.files(), self._store.files())}  # for a further fit
        lost = parts.lost + parts.waiting
        if lost:
            self._warn(f"{lost} rows of the ledger in {str(self.dirpath)!r} were not written")
        return lost, lost_gradients

    def __getstate__(self) -> dict[str, Any]:
        left_out = dict.fromkeys(("_parts", "_rates", "_gradients"))
        return {**super().__getstate__(), **left_out, "_current": [], "_held": [], "_captured": []}
