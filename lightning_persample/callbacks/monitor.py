"""Per-sample gradient norms in the Trainer's loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_persample.callbacks._optimizer_steps import names_by_optimizer
from lightning_persample.callbacks._requirements import why_unsupported
from lightning_persample.callbacks._step_norms import CapturedBatch, NormsOfAllProcesses, StepNorms, percent
from lightning_persample.callbacks._training_step import logging_step, shared_capture, window_continues
from lightning_persample.callbacks.base import PerSampleCallback, check_option, is_none_or_int
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
    every backward in it that is in ``.grad`` when the optimizer steps: two backward passes on 8 samples are 16 samples.
    Of several steps of one optimizer in a `training_step` (LBFGS, a critic that trains more often) the last one is
    logged. With several optimizers all names are those of one optimizer, ``<prefix>/optimizer_0/norm_mean`` and so on
    in the order of `configure_optimizers`, over the parameters that it holds; one backward may serve several. An
    optimizer without a backward in a logged step has nan in the loggers, and in `callback_metrics` what it had before.

    Args:
        every_n_steps: log every n-th optimizer step; None follows the Trainer's `log_every_n_steps`.
        loss_reduction: how the training loss is made of the samples' own losses, see `PerSampleCallback`.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B; None reads it from the batch's tensors.
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
    ) -> None:
        super().__init__(
            every_n_steps,
            loss_reduction=loss_reduction,
            batch_dim=batch_dim,
            batch_size=batch_size,
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
        self.per_layer = per_layer
        self.quantiles = tuple(float(quantile) for quantile in quantiles)
        self.prefix = prefix
        self.prog_bar = prog_bar
        self._parts: tuple[_Part, ...] = ()
        self._window: dict[int, CapturedBatch] = {}
        self._window_is_whole = True
        self._joined: NormsOfAllProcesses | None = None
        self._of_all: list[StepNorms] | None = None

    def _settings(self) -> dict[str, Any]:
        names = ("per_layer", "quantiles", "prefix", "prog_bar")
        return {**super()._settings(), **{name: getattr(self, name) for name in names}}

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
        names = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        if len(held) > 1:
            self._parts = tuple(
                _Part(f"{self.prefix}/optimizer_{place}", self._groups_of([n for n in names if n in own]))
                for place, own in enumerate(held)
            )
        else:
            self._parts = (_Part(self.prefix, self._groups_of(names)),)
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
        if pl_module.automatic_optimization:
            self._window[batch_idx] = self._captured(record)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note which backward passes this step uses, where there may be several."""
        shared = shared_capture(trainer)
        if shared is not None:
            shared.at_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if this batch completes an optimizer step of which every batch was captured."""
        # A batch whose training_step returned None has no outputs, and no part in the gradient.
        counted = batch_idx if outputs and pl_module.automatic_optimization else None
        if not self._holds(counted):
            self._window_is_whole = False
        if window_continues(trainer):
            return
        steps: list[StepNorms] = []
        if self._joined is None:
            steps = self._own_norms(trainer, counted)
        elif self.should_capture(trainer):
            steps = self._joined_norms(trainer, counted)
        self._start_window()
        captured = {place: step for place, step in enumerate(steps) if step.batches}
        if captured:
            self._write(trainer, pl_module, captured)

    def _holds(self, batch_idx: int | None) -> bool:
        return batch_idx is None or batch_idx in self._window

    def _own_norms(self, trainer: Trainer, last: int | None) -> list[StepNorms]:
        """Those of this process for each part; none, unless all of the step was captured, its last batch included."""
        if trainer.lightning_module.automatic_optimization:
            window = list(self._window.values()) if self._window_is_whole and self._holds(last) else []
            return [StepNorms.of_window(window, self._parts[0].groups)]
        shared = shared_capture(trainer)
        steps = {} if shared is None else shared.steps_for(self)
        return [
            StepNorms.of_window([self._captured(record) for record in steps.get(place, ())], part.groups)
            for place, part in enumerate(self._parts)
        ]

    def _joined_norms(self, trainer: Trainer, last: int | None) -> list[StepNorms]:
        """Those of all processes, which the first monitor that comes to it exchanges for all that log at this step."""
        # What one process has or lacks must not decide whether it takes part: the others would wait for it.
        if self._of_all is None and self._joined is not None:
            due = [each for each in _monitors(trainer) if each is self or each.should_capture(trainer)]
            own = [each._own_norms(trainer, last) for each in due]
            joined = iter(self._joined.join([step for steps in own for step in steps], trainer.strategy.root_device))
            for each, steps in zip(due, own, strict=True):
                each._of_all = [next(joined) for _ in steps]
        found, self._of_all = self._of_all, None
        return found or []

    def _start_window(self) -> None:
        self._window = {}
        self._window_is_whole = True

    def _captured(self, record: PerSampleRecord) -> CapturedBatch:
        groups = {} if self.per_layer is None else record.group_norms(self.per_layer)
        norms = record.norms() if record.names else None
        if record.samples is None:
            return CapturedBatch(record.batch_size, norms, groups, record.coverage)
        own = list(record.samples)
        groups = {name: values[own] for name, values in groups.items()}
        return CapturedBatch(len(own), None if norms is None else norms[own], groups, record.coverage)

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
            if self._joined is not None:
                values["samples"] = 0.0 if step is None else float(step.samples)
            named = {f"{part.prefix}/{name}": value for name, value in values.items()}
            metrics |= named
            if step is not None:
                samples |= dict.fromkeys(named, step.samples)
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
    """Names that are logged together: all, or those of one optimizer."""

    prefix: str
    groups: tuple[str, ...]


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
