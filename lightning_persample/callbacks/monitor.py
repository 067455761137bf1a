"""Per-sample gradient norms in the Trainer's loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_persample.callbacks._optimizer_steps import ManualSteps, names_by_optimizer, restricted
from lightning_persample.callbacks._training_step import logging_step, window_continues
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
        self._manual: ManualSteps | None = None
        self._window: dict[int, _Captured] = {}
        self._window_is_whole = True

    def _settings(self) -> dict[str, Any]:
        names = ("per_layer", "quantiles", "prefix", "prog_bar")
        return {**super()._settings(), **{name: getattr(self, name) for name in names}}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix the groups, so that every logged step has the same names."""
        alike = [
            place
            for place, callback in enumerate(trainer.callbacks)  # type: ignore[attr-defined]
            if isinstance(callback, PerSampleGradientMonitor) and callback.prefix == self.prefix
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
            steps = self._manual.end()
            windows = {place: [self._captured(record, place, pl_module) for record in steps[place]] for place in steps}
            if windows:
                self._write(trainer, pl_module, windows)
            return
        # A batch whose training_step returned None has no outputs, and no part in the gradient.
        if outputs and batch_idx not in self._window:
            self._window_is_whole = False
        if window_continues(trainer):
            return
        window = list(self._window.values())
        if window and self._window_is_whole:
            self._write(trainer, pl_module, {0: window})
        self._start_window()

    def _start_window(self) -> None:
        self._window = {}
        self._window_is_whole = True
        if self._manual is not None:
            self._manual.end()

    def _captured(self, record: PerSampleRecord, place: int = 0, pl_module: LightningModule | None = None) -> _Captured:
        names = self._parts[place].parameters
        if names is not None and pl_module is not None:
            record = restricted(record, names, pl_module)
        groups = {} if self.per_layer is None else record.group_norms(self.per_layer)
        return _Captured(record.batch_size, record.norms() if record.names else None, groups, record.coverage)

    def _write(self, trainer: Trainer, pl_module: LightningModule, windows: dict[int, list[_Captured]]) -> None:
        metrics: dict[str, float] = {}
        samples: dict[str, int] = {}
        for place, part in enumerate(self._parts):
            window = windows.get(place, [])
            values = {f"{part.prefix}/{name}": value for name, value in self._statistics(window, part.groups).items()}
            metrics |= values
            if window:
                samples |= dict.fromkeys(values, sum(captured.batch_size for captured in window))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))
        for name, count in samples.items():
            LightningModule.log(  # the module may have a `log` of its own
                pl_module,
                name,
                torch.tensor(metrics[name]),
                prog_bar=self.prog_bar and name in {f"{part.prefix}/norm_mean" for part in self._parts},
                logger=False,
                on_step=True,
                on_epoch=False,
                batch_size=count,
            )

    def _statistics(self, window: list[_Captured], groups: Sequence[str]) -> dict[str, float]:
        norms, *group_norms = _to_host(window, groups)
        finite = norms.isfinite()
        values = _describe(norms[finite], self.quantiles)
        values["coverage"] = min((captured.coverage for captured in window), default=math.nan)
        values["nonfinite"] = float((~finite).sum()) if window else math.nan
        for group, own in zip(groups, group_norms, strict=True):
            values[f"{group}/norm_mean"] = own[finite & ~own.isnan()].mean().item()
        return values


@dataclass(frozen=True)
class _Part:
    """Names that are logged together: all, or those of one optimizer with the parameters it holds."""

    prefix: str
    groups: tuple[str, ...]
    parameters: frozenset[str] | None


@dataclass(frozen=True)
class _Captured:
    """What is kept of one backward: norms (B,), or None if no parameter was captured, and norms (B,) by group."""

    batch_size: int
    norms: Tensor | None
    groups: dict[str, Tensor]
    coverage: float


def _to_host(window: list[_Captured], groups: Sequence[str]) -> Tensor:
    """Norms of all samples and below them those of each group, (1 + groups, samples), in one transfer."""
    blocks = []
    for captured in window:
        if captured.norms is not None:
            absent = torch.full_like(captured.norms, math.nan)
            rows = [captured.norms, *(captured.groups.get(group, absent).to(absent.dtype) for group in groups)]
            blocks.append(torch.stack(rows))
    if not blocks:
        return torch.empty(1 + len(groups), 0, dtype=torch.float64)
    return torch.cat(blocks, dim=1).cpu().double()


def _describe(norms: Tensor, quantiles: Sequence[float]) -> dict[str, float]:
    names = ["norm_mean", "norm_std", "norm_min", "norm_max", *(f"norm_{_percent(q)}" for q in quantiles)]
    if norms.numel() == 0:
        return dict.fromkeys(names, math.nan)
    std = norms.std() if norms.numel() > 1 else torch.tensor(math.nan)
    parts = [norms.mean(), std, norms.min(), norms.max(), *torch.quantile(norms, norms.new_tensor(quantiles))]
    return {name: part.item() for name, part in zip(names, parts, strict=True)}


def _percent(quantile: float) -> str:
    return f"p{100 * quantile:.10g}"


def _are_quantiles(quantiles: object) -> bool:
    if not isinstance(quantiles, Sequence) or isinstance(quantiles, str):
        return False
    if not all(isinstance(quantile, (int, float)) and 0 < quantile < 1 for quantile in quantiles):
        return False
    return len({_percent(float(quantile)) for quantile in quantiles}) == len(quantiles)


def _is_prefix(prefix: object) -> bool:
    return isinstance(prefix, str) and prefix != "" and not prefix.endswith("/")
