"""Per-sample gradient norms in the Trainer's loggers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch import __version__ as torch_version
from typing_extensions import Unpack

from lightning_persample.callbacks.base import PerSampleCallback
from lightning_persample.callbacks.lightning_internals import (
    logging_step,
    why_no_mean_gradient,
    why_unsupported,
    window_continues,
)
from lightning_persample.callbacks.loggers import log_histogram, log_metrics, log_picture, show_means, takes_pictures
from lightning_persample.callbacks.manual import names_by_optimizer
from lightning_persample.callbacks.sample_index import dataset_size
from lightning_persample.callbacks.session import shared_capture
from lightning_persample.callbacks.statistics import (
    STATISTICS,
    AllProcesses,
    CapturedBatch,
    LoggedMetrics,
    MeanGradient,
    StepNorms,
    Window,
)
from lightning_persample.callbacks.worst import SampleNorms, WorstSamples, write_worst_samples
from lightning_persample.callbacks.writer import PerSampleGradientWriter
from lightning_persample.capture.failure import guard
from lightning_persample.capture.record import PerSampleRecord, group_name, warn_user
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError, of_user
from lightning_persample.influence import charts
from lightning_persample.influence.dataset import MANIFEST
from lightning_persample.influence.optional_packages import matplotlib
from lightning_persample.influence.report import Run, Samples, check_labels, layers_of, read_run, write_report
from lightning_persample.metrics.functional import are_quantiles
from lightning_persample.options import CAPTURE_DEFAULTS, CaptureOptions, check_option, check_options

_NO_STEP = (
    "no step of an optimizer of the Trainer, or of one inside it with the same parameters, followed a captured backward"
)
NOT_IN_A_FIT = "this callback was in no fit; where a library copies callbacks, ask the one in `trainer.callbacks`"

_MOST = 2048  # logged steps that are kept for the page
_BETWEEN_FIGURES = 60  # seconds at least: a figure takes about one


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

    with "noise_scale" among the `statistics`, as by default,

    ========================= =====================================================================================
    ``<prefix>/noise_scale``  simple noise scale B_simple = S / |G|^2, in samples, a ratio of running averages over the
                              logged steps (each 0.95 times the weight of the next); nan before |G|^2 is positive
    ``<prefix>/norm_of_mean`` ||gbar||, norm of the gradient of the loss (the mean over the batches of the step), with
                              penalties, before clipping; with ``loss_reduction="sum"`` divided by the number of samples
    ========================= =====================================================================================

    with "diversity", as by default, ``<prefix>/diversity``, sum ||g_i||^2 / ||sum g_i||^2: 1/B if all gradients are
    equal, 1 if they are orthogonal; with "cosine_to_mean" the mean of g_i . gbar / (||g_i|| ||gbar||) over the samples
    and ``<prefix>/cosine_to_mean_min``; with "signal_to_noise" the mean over the weights of (E g)^2 / Var(g). All of
    these are of the mean gradient that the optimizer step uses, over all accumulated batches and all devices. With a
    callable `loss_reduction` g_i stands for B w_i g_i in them, whose mean is the gradient of the loss. Where the
    gradient of the loss is not that mean (weights that are not given, a penalty) they are nan, but for norm_of_mean,
    and a warning says why. In manual optimization and with ``engine="vmap"`` or
    "loop", whose passes have random numbers of their own, they are left out.

    With `per_layer` there is also ``<prefix>/<group>/norm_mean`` for each group of parameters, nan where a group has
    none, and its noise_scale, diversity and signal_to_noise. TensorBoard and W&B show these as one figure,
    ``<prefix>/layers``, in place of a curve for each: at the ends of epochs, at most once a minute, and of the fit
    (where matplotlib is not installed, as curves). At the end of an epoch the same statistics of all its logged steps
    are logged under names that end in ``_epoch``: of all their samples' norms, the noise scale as the
    ratio of averages over the steps, diversity, cosine and signal to noise as means of the steps. (Those of an epoch
    with one logged step, which are that step's, go to `callback_metrics` alone.)
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
        per_layer: how many leading parts of a parameter's module path name its group: 1 is the module's children, 2 as
            ``encoder.0``; parameters of the module itself go under their own name. None logs no groups.
        quantiles: which quantiles, each strictly between 0 and 1.
        statistics: which statistics are logged beside those of the norms: any of "noise_scale" and "diversity", which
            cost one norm of ``.grad``; "cosine_to_mean", which keeps the activations of the step's batches until its
            last backward; and "signal_to_noise", which forms every sample's gradient, and works on one device alone.
        histogram: write a histogram of the finite norms ||g_i|| as ``<prefix>/norm_histogram`` at each logged step to
            TensorBoard and W&B. Other loggers have none.
        prefix: what the logged names start with.
        prog_bar: show ``<prefix>/norm_mean`` in the progress bar, where it is called ``norm_mean``, or ``norm_mean_0``
            and so on with several optimizers; of several monitors all but the first show theirs with their prefix.
        worst_samples: write that many of the samples with the largest mean norm to ``worst_samples.csv`` in the
            Trainer's `log_dir` at the end of the fit, see `worst`; None writes none.
        report: write the page ``report.html`` to the Trainer's `log_dir` at the end of the fit, see
            `lightning_persample.influence.report`. With a `PerSampleGradientWriter` in the Trainer it is of the
            ledger, if that has norms, else of the logged steps, of which at most 2,048 are kept.
        render: ``render(index)`` gives what the page and the table of the worst samples in TensorBoard and W&B show
            for the sample with this index in the dataset: an image or a text, as for `report`. A picture does not
            say what a sample is labelled: `labels` does.
        labels: further columns of the page and of the table of the worst samples by name, as for `report`: a sequence
            by index, a mapping, or a callable of the index; ``{"label": targets}`` shows what each sample is labelled.
        capture: `loss_reduction`, `batch_dim`, `batch_size`, `sample_index`, `unsupported`, `engine`, `verify`,
            `fuse_weight_grad`, `max_memory` and `max_samples`, see `PerSampleCallback`. With `max_samples`, means,
            quantiles, noise scale and diversity are estimates from a random sample of the batch, without bias but for
            extremes, if batches of a step are of one size.

    Raises:
        OptionError: an option has a value that is not allowed.
    """

    _says_nothing_came = False  # (it has a text of its own)

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        per_layer: int | None = None,
        quantiles: Sequence[float] = (0.5, 0.95),
        statistics: Sequence[str] = ("noise_scale", "diversity"),
        histogram: bool = False,
        prefix: str = "per_sample_grad",
        prog_bar: bool = False,
        worst_samples: int | None = None,
        report: bool = False,
        render: Callable[[Any], Any] | None = None,
        labels: Mapping[str, Any] | None = None,
        **capture: Unpack[CaptureOptions],
    ) -> None:
        super().__init__(every_n_steps, **capture)
        check_options(per_layer=per_layer, histogram=histogram, prog_bar=prog_bar)
        check_options(worst_samples=worst_samples, report=report, render=render)
        between = "a sequence of numbers strictly between 0 and 1 without duplicates"
        check_option("quantiles", quantiles, _is_list(quantiles) and are_quantiles(quantiles), between)
        choices = "a sequence of " + ", ".join(repr(each) for each in STATISTICS) + " without duplicates"
        known = _is_list(statistics) and all(each in STATISTICS for each in statistics)
        check_option("statistics", statistics, known and len(set(statistics)) == len(statistics), choices)
        is_prefix = isinstance(prefix, str) and prefix != "" and not prefix.endswith("/")  # type: ignore[redundant-expr]
        check_option("prefix", prefix, is_prefix, "a str that is not empty and does not end with '/'")
        check_labels(labels)
        self.report, self.render, self.labels = report, render, labels
        self.per_layer = per_layer
        self.quantiles = tuple(float(quantile) for quantile in quantiles)
        self.statistics = tuple(statistics)
        self.histogram = histogram
        self.prefix = prefix
        self.prog_bar = prog_bar
        self.worst_samples = worst_samples
        self._forget_fit(NOT_IN_A_FIT)

    def _forget_fit(self, why_nothing: str) -> None:
        self._why_nothing, self._has_record, self._logged, self._said_coverage = why_nothing, False, False, False
        self._norms, self._steps, self._warnings = SampleNorms(), LoggedSteps(), list[str]()
        self._parts: tuple[LoggedMetrics, ...] = ()
        self._window = Window()
        self._drawn = frozenset[str]()
        self._last_drawn = -1, -math.inf  # the step, and when it was
        self._loaded_norms: dict[str, Any] = {}
        self._loaded_averages: dict[str, Any] = {}
        self._processes: AllProcesses | None = None  # where they exchange what they have
        self._of_all: list[StepNorms] | None = None

    def _settings(self) -> dict[str, Any]:
        # What its state is of: a fit may go on from a checkpoint with another choice of what is logged and shown.
        names = ("every_n_steps", "loss_reduction", "batch_dim", "batch_size", "sample_index", "engine", "prefix")
        return {name: getattr(self, name) for name in names}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the samples of an earlier fit."""
        if stage == "fit":
            self._forget_fit("no step has run yet")
            if self.report:
                try:
                    matplotlib()
                except ModuleNotFoundError as error:  # before the fit, at whose end there would be no page
                    raise OptionError(str(error)) from error

    def worst(self, k: int = 10) -> WorstSamples:
        """The samples with the largest mean gradient norm so far in this fit, with their indices in the dataset.

        Counted are the norms of captured batches: with ``every_n_steps=1`` all of them, else a share. Norms change in a
        training, so that samples are comparable where each was captured in every epoch: with another `every_n_steps`,
        or with `max_samples`, some were captured early, some late and some never, as the table says below its rows. It
        goes on after a checkpoint is resumed. In manual optimization every backward counts. On several devices it is
        over the samples of all processes, and a collective: each process has to call it.

        Args:
            k: how many samples.

        Returns:
            A table; the samples that had a norm that is inf or nan are in its `nonfinite`, and no such norm in a mean.
            Where no captured sample has an index, an `UnsupportedError` says why.
        """
        check_options(k=k)
        return self._norms_of_all().worst(k, self._why_nothing)

    def _norms_of_all(self) -> SampleNorms:
        return self._norms.of_all_processes(self._loaded_norms, together=self._processes is not None)

    def state_dict(self) -> dict[str, Any]:
        """The sums that `worst` ranks, of all processes (each saves a checkpoint), and those of the noise scale."""
        averages = {part.prefix: part.state_dict() for part in self._parts}
        return {"samples": self._norms_of_all().state(), "noise_scale": averages or self._loaded_averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the sums and averages of a checkpoint."""
        self._norms, self._loaded_norms = SampleNorms(), state_dict["samples"]
        self._norms.start_after(self._loaded_norms)
        self._loaded_averages = state_dict["noise_scale"]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of the worst samples, if it is asked for; say so where no step was logged."""
        self._why_nothing, shared = self._why_no_step(trainer), shared_capture(trainer)
        is_said = shared is not None and shared.reports.has_said_fault
        self._warnings += [] if shared is None else shared.reports.texts
        if self.worst_samples is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            norms = self._norms_of_all()
            write_worst_samples(
                trainer,
                norms,
                self.worst_samples,
                self._why_nothing,
                is_said=is_said,
                render=self.render,
                labels=self.labels,
            )
        self._draw_layers(trainer)
        has_no_step = self._has_record and not (pl_module.automatic_optimization or self._warnings)
        why = self._why_nothing or (_NO_STEP if has_no_step else "")
        if why and not (self._logged or self._never(trainer)) and shared is not None and not is_said:
            self._warn(f"`{self.prefix}` has logged nothing: {why}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page, if it is asked for, when every ledger of the Trainer is complete."""
        if not self.report or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder, norms = of_user(getattr, trainer, "log_dir"), self._norms_of_all()  # ask all processes
        if folder is None or not trainer.is_global_zero:
            return
        settings = {
            name: getattr(self, name) for name in ("every_n_steps", "per_layer", "statistics", *CAPTURE_DEFAULTS)
        }
        try:
            run = self._steps.run(trainer, norms, settings)
            run.warnings += self._warnings
            write_report(run, Path(folder) / "report.html", self.render, self.labels, 25)
        except (PerSampleError, OSError) as error:
            warn_user(f"report.html is not written: {error}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix the groups, so that every logged step has the same names."""
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        alike = [callbacks.index(each) for each in _monitors(trainer) if each.prefix == self.prefix]
        if len(alike) > 1:
            raise OptionError(
                f"prefix={self.prefix!r} is that of {len(alike)} monitors, callbacks "
                f"{', '.join(f'[{place}]' for place in alike)} of the Trainer: give each monitor a prefix of its own"
            )
        chosen = self._chosen(pl_module)
        held = names_by_optimizer(pl_module, trainer.optimizers)
        names = [name for name, _ in pl_module.named_parameters()]  # a fit may unfreeze them
        if len(held) > 1:
            groups = [self._groups_of([name for name in names if name in own]) for own in held]
            prefixes = [f"{self.prefix}/optimizer_{place}" for place in range(len(held))]
        else:
            groups, prefixes = [self._groups_of(names)], [self.prefix]
        self._parts = tuple(
            LoggedMetrics(prefix, chosen, self.quantiles, own) for prefix, own in zip(prefixes, groups, strict=True)
        )
        for part in self._parts:
            part.load_state_dict(self._loaded_averages.get(part.prefix, []))
        draws = any(map(takes_pictures, trainer.loggers)) and find_spec("matplotlib") is not None
        names_of_groups = (f"{part.prefix}/{name}" for part in self._parts for name in part.names if "/" in name)
        self._drawn = frozenset(names_of_groups) if draws else frozenset()
        why_not = partial(why_no_mean_gradient, trainer)
        processes, mean = trainer.world_size, None
        if chosen:
            mean = MeanGradient(pl_module, self.per_layer, groups[0], processes, chosen, why_not)
        if "signal_to_noise" in chosen and processes > 1:
            warn_user(f"signal_to_noise of `{self.prefix}` is nan on several devices, of which it needs all gradients")
        self._window = Window(self.per_layer, groups[0], mean)
        are_there = processes > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
        can_join = are_there and why_unsupported(trainer, pl_module) is None
        self._processes, self._of_all = AllProcesses() if can_join else None, None

    def _chosen(self, pl_module: LightningModule) -> tuple[str, ...]:
        return self.statistics if pl_module.automatic_optimization and self.engine == "expanded" else ()

    def _groups_of(self, names: Sequence[str]) -> tuple[str, ...]:
        depth = self.per_layer
        return () if depth is None else tuple(dict.fromkeys(group_name(name, depth) for name in names))

    def _is_done(self, *, automatic: bool) -> bool:
        # Of several devices each takes part in what the others exchange.
        return self._processes is None and self._window.is_new

    def _end_rest(self, *, has_missed: bool) -> None:
        super()._end_rest(has_missed=has_missed)
        if has_missed:
            self._window.miss_batch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start again: an epoch that was broken off leaves no optimizer step behind."""
        self._window.start()
        for part in self._parts:
            part.start_epoch()
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        measured = guard(dataset_size, lambda _: None)
        self._norms.is_complete = self._goes_by_steps() and every == 1 and self.max_samples is None
        self._norms.dataset = measured(trainer) if self.sample_index is None else None

    def needs(self, trainer: Trainer) -> set[str]:
        """Squared norms, and what the chosen statistics need beside them."""
        chosen = self._chosen(trainer.lightning_module)
        more = {"cosine_to_mean": "dot", "signal_to_noise": "square_sum"}
        return {"sq_norm", *(quantity for name, quantity in more.items() if name in chosen)}

    def _backward_starts(self, trainer: Trainer) -> None:
        self._window.before_backward(trainer.fit_loop.epoch_loop.batch_idx)

    def _backward_ended(self, trainer: Trainer, record: PerSampleRecord | None) -> None:
        last = not window_continues(trainer)
        self._window.after_backward(trainer.fit_loop.epoch_loop.batch_idx, record, is_last=last)

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Keep the norms of one backward until the optimizer step is complete."""
        automatic, self._has_record = pl_module.automatic_optimization, True
        self._norms.add(record, trainer.fit_loop.total_batch_idx if automatic else None, self._why_no_index(trainer))
        if automatic:
            self._window.add(batch_idx, record)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note which backward passes this step uses, where there may be several."""
        shared = shared_capture(trainer)
        if shared is not None and shared.manual is not None:
            shared.manual.at_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if this batch completes an optimizer step of which every batch was captured."""
        if not self._parts:  # a subclass has its own `on_fit_start` in place of ours
            return
        # A batch whose training_step returned None has no outputs, and no part in the gradient.
        counted = batch_idx if outputs and pl_module.automatic_optimization else None
        self._window.end_batch(counted)
        if window_continues(trainer):
            return
        steps: list[StepNorms] = []
        if self._processes is None:
            has_some = not (pl_module.automatic_optimization and self._window.is_empty)
            steps = self._own_norms(trainer, counted) if has_some else []
        elif self.should_capture(trainer):
            steps = self._joined_norms(trainer, counted)
        if known := {place: step for place, step in enumerate(steps) if step.batches}:
            self._log_step(trainer, known)
        self._window.start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the statistics of all logged steps of the epoch."""
        found = {f"{part.prefix}/{n}": value for part in self._parts for n, value in part.of_epoch().items()}
        if found:
            # Those of an epoch with one logged step say what that step said: they are for `ModelCheckpoint` alone.
            has_several = any(part.steps > 1 for part in self._parts)
            drawn = {f"{name}_epoch" for name in self._drawn}
            log_metrics(trainer, found if has_several else {}, found, step=logging_step(trainer) - 1, drawn=drawn)
        if time.monotonic() - self._last_drawn[1] > _BETWEEN_FIGURES:
            self._draw_layers(trainer)

    def _draw_layers(self, trainer: Trainer) -> None:
        step, last = logging_step(trainer) - 1, self._last_drawn[0]
        for part in self._parts if self._drawn and trainer.is_global_zero and step != last else ():
            if (image := self._steps.layers(part.prefix)) is not None:
                log_picture(trainer.loggers, f"{part.prefix}/layers", image, step)
        self._last_drawn = step, time.monotonic()

    def _own_norms(self, trainer: Trainer, last: int | None) -> list[StepNorms]:
        """Those of this process for each part; none, unless all of the step was captured, its last batch included."""
        if trainer.lightning_module.automatic_optimization:
            return [self._window.norms(last)]
        shared = shared_capture(trainer)
        steps = {} if shared is None else shared.steps_for(self)
        return [
            StepNorms.of_window(
                [CapturedBatch.of(record, self.per_layer, part.groups) for record in steps.get(place, ())], part.groups
            )
            for place, part in enumerate(self._parts)
        ]

    def _no_norms(self, trainer: Trainer, error: Exception) -> list[StepNorms]:
        """Those of a process that has none: it takes part in the exchange all the same."""
        self._fail(trainer, error)
        if trainer.lightning_module.automatic_optimization:
            return [self._window.norms(-1)]
        return [StepNorms.of_window([], part.groups) for part in self._parts]

    def _joined_norms(self, trainer: Trainer, last: int | None) -> list[StepNorms]:
        """Those of all processes, which the first monitor that comes to it exchanges for all that log at this step."""
        # What one process has or lacks must not decide whether it takes part: the others would wait for it.
        if self._of_all is None and self._processes is not None:
            due = [each for each in _monitors(trainer) if each is self or each.should_capture(trainer)]
            own = [guard(each._own_norms, partial(each._no_norms, trainer))(trainer, last) for each in due]
            joined = iter(self._processes.join([step for steps in own for step in steps], trainer.strategy.root_device))
            for each, steps in zip(due, own, strict=True):
                each._of_all = [next(joined) for _ in steps]
        found, self._of_all = self._of_all, None
        return found or []

    def _log_step(self, trainer: Trainer, steps: Mapping[int, StepNorms]) -> None:
        metrics: dict[str, float] = {}
        new: dict[str, float] = {}
        self._logged = True
        for place, part in enumerate(self._parts):
            step = steps.get(place)
            # Without a step this optimizer rests
            values = dict.fromkeys(part.names, math.nan) if step is None else part.of_step(step)
            if self._processes is not None:
                values["samples"] = 0.0 if step is None else float(step.samples)
            named = {f"{part.prefix}/{name}": value for name, value in values.items()}
            metrics |= named
            if step is not None:
                new |= named
        log_metrics(trainer, metrics, new, step=logging_step(trainer), drawn=self._drawn)
        kept = metrics if self.report else {name: value for name, value in metrics.items() if name in self._drawn}
        norms = [step.norms for step in steps.values()] if self.report else []
        self._steps.add(trainer, logging_step(trainer), kept, norms)
        if self.histogram:
            for place, step in steps.items():
                name = f"{self._parts[place].prefix}/norm_histogram"
                log_histogram(trainer.loggers, name, step.norms, logging_step(trainer))
        if self.prog_bar:
            means = [metrics[f"{part.prefix}/norm_mean"] if n in steps else None for n, part in enumerate(self._parts)]
            first = next(each for each in _monitors(trainer) if each.prog_bar)
            show_means(trainer, "norm_mean" if self is first else f"{self.prefix}/norm_mean", means)
        share = min(step.coverage for step in steps.values())
        of_mean = [metrics.get(f"{part.prefix}/{name}", math.nan) for part in self._parts for name in self.statistics]
        if 0 < share < 1 and any(map(math.isfinite, of_mean)) and not self._said_coverage:
            self._said_coverage = True
            names = ", ".join(self.statistics)
            self._warn(
                f"{names} of `{self.prefix}` are those of the weights that have per-sample gradients alone, "
                f"{share:.2g} of all that got a gradient (see coverage): they say little of the others"
            )
        reason = self._window.why_unknown(steps[min(steps)])
        if reason:
            self._warn(f"{', '.join(self.statistics)} of `{self.prefix}` are nan at steps where {reason}")

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        warn_user(text)

    def _let_go(self) -> None:
        self._window = Window()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_window": Window(), "_processes": None, "_of_all": None}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _monitors(trainer: Trainer) -> list[PerSampleGradientMonitor]:
    return [each for each in trainer.callbacks if isinstance(each, PerSampleGradientMonitor)]  # type: ignore[attr-defined]


# What was logged in a fit, kept for the page that is written at its end


class LoggedSteps:
    """Values and norms of the logged steps, on the process that writes; of many steps every second, fourth, ..."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, dict[str, float], list[Any]]] = []
        self._coverage: list[float] = []  # of every step
        self._epochs: set[int] = set()
        self._every = 1

    def add(self, trainer: Trainer, step: int, values: Mapping[str, float], norms: Iterable[Tensor]) -> None:
        """Keep a logged step."""
        if not trainer.is_global_zero:
            return
        if len(self._coverage) % self._every == 0:
            self._steps.append((step, dict(values), [each.float().numpy() for each in norms]))
        if len(self._steps) > _MOST:
            self._steps, self._every = self._steps[::2], 2 * self._every
        self._coverage.append(min((value for name, value in values.items() if name.endswith("/coverage")), default=1.0))
        self._epochs.add(trainer.current_epoch)

    @property
    def logged(self) -> dict[str, tuple[Any, Any]]:
        """Steps and values by name."""
        names = dict.fromkeys(name for _, values, _ in self._steps for name in values)
        points = {name: [(step, values[name]) for step, values, _ in self._steps if name in values] for name in names}
        arrays = {name: np.array(each, dtype=np.float64) for name, each in points.items()}
        return {name: (array[:, 0], array[:, 1]) for name, array in arrays.items()}

    def layers(self, prefix: str) -> Any:
        """A picture of the statistics of all groups of parameters over the steps; None without a value."""
        empty = np.empty(0)
        run = Run("", empty, empty, logged={**self.logged, f"{prefix}/coverage": (empty, empty)})
        found = {name: layers_of(run, name) for name in ("norm_mean", "noise_scale", "diversity", "signal_to_noise")}
        draws = [
            partial(charts.layers, edges=each["edges"], names=each["names"], values=each["mean"], label=name)
            for name, each in found.items()
            if each is not None
        ]
        return charts.picture(draws) if draws else None

    def run(self, trainer: Trainer, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        """The run that a page shows: of the ledger where the Trainer writes one with norms, with what was logged."""
        found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        writers = [
            each for each in found if isinstance(each, PerSampleGradientWriter) and "sq_norm" in each.needs(trainer)
        ]
        if writers and (writers[0].dirpath / MANIFEST).is_file():
            run = read_run([writers[0].dirpath])
            if run.samples is not None:
                run.samples.dataset = norms.dataset
        else:
            run = self._without_ledger(norms, settings)
        module = trainer.lightning_module
        run.logged, run.title = self.logged, type(module).__name__
        if self._every > 1:
            run.warnings.append(f"Of the {len(self._coverage):,} logged steps every {self._every}th is in the page.")
        return run

    def _without_ledger(self, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        of_steps = [(step, np.concatenate([np.empty(0), *each])) for step, _, each in self._steps]
        sizes = [len(each) for _, each in of_steps]
        batch = [max(map(len, each), default=0) for _, _, each in self._steps]  # of the optimizer with the most samples
        return Run(
            "",
            np.repeat([float(step) for step, _ in of_steps], sizes),
            np.concatenate([np.empty(0), *(each for _, each in of_steps)]),
            samples=_samples(norms),
            batch_size=float(np.median(batch)) if any(batch) and settings["max_samples"] is None else None,
            coverage=np.array(self._coverage),
            epochs=len(self._epochs),
            settings=dict(settings),
            libraries={"torch": torch_version, "lightning": lightning_version},
        )


def _samples(norms: SampleNorms) -> Samples | None:
    """What is known of each sample; None where no sample has an index."""
    try:
        worst = norms.worst(2**62)
    except UnsupportedError:
        return None
    ranked = set(worst.index)
    rows = worst.rows()
    rows += [(index, np.nan, np.nan, n, n) for index, n in worst.nonfinite.items() if index not in ranked]
    index, mean, last, seen, nonfinite = zip(*rows, strict=True)
    counts = np.array(seen, np.int64), np.array(nonfinite, np.int64)
    means = np.array(mean), np.array(last)
    return Samples(list(index), *means, *counts, dataset=worst.dataset, is_complete=worst.is_complete)
