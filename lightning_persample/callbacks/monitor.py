"""Per-sample gradient norms in the Trainer's loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_persample.callbacks._optimizer_steps import ManualSteps, names_by_optimizer, restricted
from lightning_persample.callbacks._requirements import why_unsupported
from lightning_persample.callbacks._step_norms import CapturedBatch, NormsOfAllProcesses, StepNorms, percent
from lightning_persample.callbacks._training_step import logging_step, window_continues
from lightning_persample.callbacks._worst_samples import SampleNorms, WorstSamples, write_worst_samples
from lightning_persample.callbacks.base import PerSampleCallback, check_option, is_int, is_none_or_int
from lightning_persample.engine import PerSampleRecord, group_name
from lightning_persample.errors import OptionError

__all__ = ["PerSampleGradientMonitor"]


class PerSampleGradientMonitor(PerSampleCallback):
    """Logs statistics of the per-sample gradient norms ||g_i|| of an optimizer step.

    g_i is the gradient of sample i's own loss over all parameters that are captured. A logged step has, over all
    samples that the optimizer step uses (those of every accumulated batch):

    ========================= =====================================================================================
    ``<prefix>/norm_mean``    mean of ||g_i||
    ``<prefix>/norm_std``     unbiased standard deviation; nan with one sample
    ``<prefix>/norm_min``     smallest
    ``<prefix>/norm_max``     largest
    ``<prefix>/norm_p50`` ... quantiles, named by percent
    ``<prefix>/coverage``     share of the weights with a gradient that g_i covers, 0 to 1; least of accumulated batches
    ``<prefix>/nonfinite``    number of samples whose norm is inf or nan; the statistics are of the others
    ========================= =====================================================================================

    and with `per_layer` also ``<prefix>/<group>/norm_mean`` for each group of parameters, nan where a group has none.
    They go to every logger of the Trainer at the step number of ``self.log`` values, and to `callback_metrics`, so that
    `ModelCheckpoint` and `EarlyStopping` can monitor them.

    In manual optimization a logged step is one `training_step`, as it is for ``self.log``, and its samples are those of
    every backward in it that the optimizer's step uses: two backward passes on 8 samples are 16 samples. Of several
    steps of one optimizer in a `training_step` (LBFGS, a critic that trains more often) the last one is logged. With
    several optimizers all names are those of one optimizer, ``<prefix>/optimizer_0/norm_mean`` and so on in the order
    of `configure_optimizers`, over the parameters that it holds; a backward belongs to the first optimizer that steps
    after it and holds a parameter it reached. An optimizer without a backward in a logged step has nan in the loggers,
    and in `callback_metrics` what it had before.

    Args:
        every_n_steps: log every n-th optimizer step; None follows the Trainer's `log_every_n_steps`.
        loss_reduction: how the training loss is made of the samples' own losses, see `PerSampleCallback`.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B; None reads it from the batch's tensors.
        sample_index: a callable ``(batch)`` that returns each sample's index, see `PerSampleCallback`.
        per_layer: how many leading parts of a parameter's module path name its group: 1 is the module's children, 2 as
            ``encoder.0``; parameters of the module itself go under their own name. None logs no groups.
        quantiles: which quantiles, each strictly between 0 and 1.
        unsupported: "warn", "error" or "vmap", see `PerSampleCallback`.
        engine: "expanded", "vmap" or "loop", see `PerSampleCallback`.
        verify: check the values on the first captured batch, see `PerSampleCallback`.
        fuse_weight_grad: form gradients once for norms and training, see `PerSampleCallback`.
        max_memory: bytes that the temporaries of one kernel may take, see `PerSampleCallback`.
        autotune: measure which kernels are fastest, see `PerSampleCallback`.
        prefix: what the logged names start with.
        prog_bar: show ``<prefix>/norm_mean`` in the progress bar.
        worst_samples: write that many of the samples with the largest mean norm to ``worst_samples.csv`` in the
            Trainer's `log_dir` at the end of the fit, see `worst`; None writes none.

    Raises:
        OptionError: an option has a value that is not allowed.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor] = "mean",
        batch_dim: int = 0,
        batch_size: int | None = None,
        sample_index: Callable[[Any], Any] | None = None,
        per_layer: int | None = None,
        quantiles: Sequence[float] = (0.5, 0.95),
        unsupported: Literal["warn", "error", "vmap"] = "warn",
        engine: Literal["expanded", "vmap", "loop"] = "expanded",
        verify: bool = False,
        fuse_weight_grad: bool = False,
        max_memory: int | None = None,
        autotune: bool = False,
        prefix: str = "per_sample_grad",
        prog_bar: bool = False,
        worst_samples: int | None = None,
    ) -> None:
        super().__init__(
            every_n_steps,
            loss_reduction=loss_reduction,
            batch_dim=batch_dim,
            batch_size=batch_size,
            sample_index=sample_index,
            unsupported=unsupported,
            engine=engine,
            verify=verify,
            fuse_weight_grad=fuse_weight_grad,
            max_memory=max_memory,
            autotune=autotune,
        )
        check_option("per_layer", per_layer, is_none_or_int(per_layer, 1), "None or an int >= 1")
        check_option(
            "quantiles",
            quantiles,
            _are_quantiles(quantiles),
            "a sequence of numbers strictly between 0 and 1 without duplicates",
        )
        check_option("prefix", prefix, _is_prefix(prefix), "a str that is not empty and does not end with '/'")
        check_option("prog_bar", prog_bar, prog_bar in (True, False), "True or False")
        check_option("worst_samples", worst_samples, is_none_or_int(worst_samples, 1), "None or an int >= 1")
        self.per_layer = per_layer
        self.quantiles = tuple(float(quantile) for quantile in quantiles)
        self.prefix = prefix
        self.prog_bar = prog_bar
        self.worst_samples = worst_samples
        self._norms = SampleNorms()
        self._loaded_norms: dict[str, Any] = {}
        self._parts: tuple[_Part, ...] = ()
        self._manual: ManualSteps | None = None
        self._window: dict[int, CapturedBatch] = {}
        self._window_is_whole = True
        self._joined: NormsOfAllProcesses | None = None
        self._of_all: StepNorms | None = None

    def _settings(self) -> dict[str, Any]:
        names = ("per_layer", "quantiles", "prefix", "prog_bar", "worst_samples")
        return {**super()._settings(), **{name: getattr(self, name) for name in names}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the samples of an earlier fit."""
        if stage == "fit":
            self._norms, self._loaded_norms, self._joined = SampleNorms(), {}, None

    def worst(self, k: int = 10) -> WorstSamples:
        """The samples with the largest mean gradient norm so far in this fit, with their indices in the dataset.

        Counted are the norms of captured batches: with ``every_n_steps=1`` all of them, else a share. It goes on after
        a checkpoint is resumed. In manual optimization every backward counts. On several devices it is over the samples
        of all processes, and a collective: each process has to call it.

        Args:
            k: how many samples.

        Returns:
            A table; the samples that had a norm that is inf or nan are in its `nonfinite`, and no such norm in a mean.
            Where no captured sample has an index, an `UnsupportedError` says why.
        """
        check_option("k", k, is_int(k, 1), "an int >= 1")
        return self._norms_of_all().worst(k)

    def _norms_of_all(self) -> SampleNorms:
        return self._norms.of_all_processes(self._loaded_norms, together=self._joined is not None)

    def state_dict(self) -> dict[str, Any]:
        """The sums that `worst` ranks, of all processes; Lightning saves a checkpoint on each of them."""
        return self._norms_of_all().state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the sums of a checkpoint."""
        self._norms, self._loaded_norms = SampleNorms(), state_dict
        self._norms.start_after(state_dict)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of the worst samples, if it is asked for."""
        if self.worst_samples is not None:
            write_worst_samples(trainer, self._norms_of_all(), self.worst_samples)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix the groups, so that every logged step has the same names."""
        alike = [
            trainer.callbacks.index(each)  # type: ignore[attr-defined]
            for each in _monitors(trainer)
            if each.prefix == self.prefix
        ]
        if len(alike) > 1:
            raise OptionError(
                f"prefix={self.prefix!r} is that of {len(alike)} monitors, callbacks "
                f"{', '.join(f'[{place}]' for place in alike)} of the Trainer: give each monitor a prefix of its own"
            )
        held = names_by_optimizer(pl_module, trainer.optimizers)
        self._manual = None if pl_module.automatic_optimization else ManualSteps(held)
        names = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        if len(held) > 1:
            self._parts = tuple(
                _Part(f"{self.prefix}/optimizer_{place}", self._groups_of([n for n in names if n in own]), own)
                for place, own in enumerate(held)
            )
        else:
            self._parts = (_Part(self.prefix, self._groups_of(names), None),)
        together = torch.distributed.is_available() and torch.distributed.is_initialized() and trainer.world_size > 1
        captured = together and why_unsupported(trainer, pl_module) is None
        self._joined, self._of_all = NormsOfAllProcesses() if captured else None, None
        self._start_window()

    def _groups_of(self, names: Sequence[str]) -> tuple[str, ...]:
        depth = self.per_layer
        return () if depth is None else tuple(dict.fromkeys(group_name(name, depth) for name in names))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew: an epoch that was broken off leaves no optimizer step behind."""
        self._start_window()

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Keep the norms of one backward until the optimizer step is complete."""
        again = None if self._manual is not None else trainer.fit_loop.total_batch_idx
        self._norms.add(record, again, self._why_no_index(trainer))
        if self._manual is not None:
            self._manual.add(record)
        else:
            self._window[batch_idx] = self._captured(record)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note which backward passes this step uses, where there may be several."""
        if self._manual is not None:
            for place, each in enumerate(trainer.optimizers):
                if each is optimizer:
                    self._manual.step(place)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if this batch completes an optimizer step of which every batch was captured."""
        if self._manual is not None:
            steps = {
                place: self._joined_backwards(records, place, pl_module)
                for place, records in self._manual.end().items()
            }
            if steps:
                self._write(trainer, pl_module, steps)
            return
        # A batch whose training_step returned None has no outputs, and no part in the gradient.
        counted = batch_idx if outputs else None
        if not self._holds(counted):
            self._window_is_whole = False
        if window_continues(trainer):
            return
        step: StepNorms | None = None
        if self._joined is None:
            step = self._own_norms(counted)
        elif self.should_capture(trainer):
            step = self._joined_norms(trainer, counted)
        self._start_window()
        if step is not None and step.batches:
            self._write(trainer, pl_module, {0: step})

    def _holds(self, batch_idx: int | None) -> bool:
        return batch_idx is None or batch_idx in self._window

    def _own_norms(self, last: int | None) -> StepNorms:
        """Those of this process; none, unless every batch of the step was captured, the last one included."""
        is_whole = self._window_is_whole and self._holds(last)
        return StepNorms.of_window(list(self._window.values()) if is_whole else [], self._parts[0].groups)

    def _joined_norms(self, trainer: Trainer, last: int | None) -> StepNorms | None:
        """Those of all processes, which the first monitor that comes to it exchanges for all that log at this step."""
        # What one process has or lacks must not decide whether it takes part: the others would wait for it.
        if self._of_all is None and self._joined is not None:
            due = [each for each in _monitors(trainer) if each is self or each.should_capture(trainer)]
            joined = self._joined.join([each._own_norms(last) for each in due], trainer.strategy.root_device)
            for each, norms in zip(due, joined, strict=True):
                each._of_all = norms
        step, self._of_all = self._of_all, None
        return step

    def _start_window(self) -> None:
        self._window = {}
        self._window_is_whole = True
        if self._manual is not None:
            self._manual.end()

    def _captured(self, record: PerSampleRecord) -> CapturedBatch:
        groups = {} if self.per_layer is None else record.group_norms(self.per_layer)
        return CapturedBatch(record.batch_size, record.norms() if record.names else None, groups, record.coverage)

    def _joined_backwards(
        self, records: Sequence[PerSampleRecord], place: int, pl_module: LightningModule
    ) -> StepNorms:
        """The norms of an optimizer's step, over the parameters that this optimizer holds."""
        part = self._parts[place]
        if part.parameters is not None:
            records = [restricted(record, part.parameters, pl_module) for record in records]
        return StepNorms.of_window([self._captured(record) for record in records], part.groups)

    def _write(self, trainer: Trainer, pl_module: LightningModule, steps: Mapping[int, StepNorms]) -> None:
        metrics: dict[str, float] = {}
        samples: dict[str, int] = {}
        for place, part in enumerate(self._parts):
            step = steps.get(place)
            if step is None:  # this optimizer rests
                nothing = StepNorms.of_window([], part.groups).statistics(self.quantiles, part.groups)
                values = dict.fromkeys(nothing, math.nan)
            else:
                values = step.statistics(self.quantiles, part.groups)
            if self._joined is not None and step is not None:
                values["samples"] = float(step.samples)
            named = {f"{part.prefix}/{name}": value for name, value in values.items()}
            metrics |= named
            if step is not None:
                samples |= dict.fromkeys(named, step.samples)
        self._norms.settle()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))
        shown = {f"{part.prefix}/norm_mean" for part in self._parts} if self.prog_bar else set()
        for name, count in samples.items():
            LightningModule.log(  # the module may have a `log` of its own
                pl_module,
                name,
                torch.tensor(metrics[name]),
                prog_bar=name in shown,
                logger=False,
                on_step=True,
                on_epoch=False,
                batch_size=count,
            )


@dataclass(frozen=True)
class _Part:
    """Names that are logged together: all, or those of one optimizer with the parameters it holds."""

    prefix: str
    groups: tuple[str, ...]
    parameters: frozenset[str] | None


def _monitors(trainer: Trainer) -> list[PerSampleGradientMonitor]:
    return [each for each in trainer.callbacks if isinstance(each, PerSampleGradientMonitor)]  # type: ignore[attr-defined]


def _are_quantiles(quantiles: object) -> bool:
    if not isinstance(quantiles, Sequence) or isinstance(quantiles, str):
        return False
    if not all(isinstance(quantile, (int, float)) and 0 < quantile < 1 for quantile in quantiles):
        return False
    return len({percent(float(quantile)) for quantile in quantiles}) == len(quantiles)


def _is_prefix(prefix: object) -> bool:
    return isinstance(prefix, str) and prefix != "" and not prefix.endswith("/")
