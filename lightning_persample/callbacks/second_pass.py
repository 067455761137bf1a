"""Run a training step a second time: nothing is logged, and training goes on as if it had not run.

So values are verified, and so single samples run, by the engines "vmap" and "loop", where a model cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import Lost
from lightning_persample.batch_axis.batch import BatchLayout, with_kinds_of
from lightning_persample.callbacks.lightning_internals import loss_scale
from lightning_persample.callbacks.observed_step import SampleChoice, Sums
from lightning_persample.capture.failure import in_smaller_chunks
from lightning_persample.capture.observing import without_compilation
from lightning_persample.capture.parameters import computed_in, is_sharded
from lightning_persample.capture.record import OF_KEPT, KeptGradients, PerSampleRecord, warn_user
from lightning_persample.capture.values import samples_with_values
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError, VerificationError, of_user
from lightning_persample.gradients import Dense
from lightning_persample.gradients.cost import MEMORY_BUDGET, halved
from lightning_persample.options import QUANTITIES, CaptureOptions
from lightning_persample.reference.loops import batch_statistics_explained, vmap_per_sample_grads
from lightning_persample.reference.samples import (
    Samples,
    Weighting,
    described,
    gradients_of,
    loss_of,
    own_loss,
    tensors_of,
    with_tensors,
)
from lightning_persample.reference.untouched import ModuleState, replaced, untouched, without_dropout
from lightning_persample.reference.verify import RANDOM, check_per_sample_gradients
from lightning_persample.torch_internals import COLLECTIVES, TorchDispatchMode

_MUTED = ("log", "log_dict", "print")


class NoLossError(Exception):
    """A training step returned, in a second pass, None: it skips this batch."""


def _outputs_of(training_step: Callable[[Any], Any], batch: Any) -> Any:
    outputs = training_step(batch)
    if loss_of(outputs) is None:
        raise NoLossError("training_step returned None")
    return outputs


@contextmanager
def second_pass(trainer: Trainer, pl_module: LightningModule) -> Iterator[ModuleState]:
    """Run training steps as the Trainer runs them, and leave no trace of them."""
    # ``log``, ``log_dict`` and ``print`` of the module do nothing, the Trainer's loggers are replaced by dummies,
    # compiled code runs as written, and at the end the module, learning rates and their schedulers, and the random
    # number generators are put back.
    if is_sharded(pl_module):
        raise UnsupportedError(
            f"{type(pl_module).__name__} is sharded (fully_shard), so that every process has to take part in each of "
            "its forward passes, and single samples cannot be run on one of them; use engine='expanded' and "
            "verify=False"
        )
    loggers, caches = trainer.loggers, torch.is_autocast_cache_enabled()
    groups = [optimizer.param_groups for optimizer in trainer.optimizers]
    schedulers = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with (
            muted(pl_module),
            untouched(pl_module, groups, schedulers) as state,
            without_compilation(),
            trainer.precision_plugin.train_step_context(),
            torch.enable_grad(),
            _AloneHere() if trainer.world_size > 1 else nullcontext(),
        ):
            # A weight that autocast casts here must not be found by the training step itself.
            torch.set_autocast_cache_enabled(False)
            yield state
    finally:
        torch.set_autocast_cache_enabled(caches)
        trainer.loggers = loggers


def muted(module: nn.Module) -> AbstractContextManager[None]:
    """Let ``log``, ``log_dict`` and ``print`` of a module do nothing in this context."""
    return replaced(vars(module), dict.fromkeys(_MUTED, lambda *args, **kwargs: None))


def on_other_batches(
    training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], Any]:
    """The training step as a function of its first argument, the batch."""

    def step(batch: Any) -> Any:
        if args:
            return training_step(batch, *args[1:], **kwargs)
        return training_step(**{**kwargs, **dict.fromkeys(list(kwargs)[:1], batch)})

    return step


class _AloneHere(TorchDispatchMode):
    """Refuses whatever waits for other processes: the next one may have fewer samples, and never come."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op, unless it is a collective."""
        namespace, _, name = str(func).partition(".")
        if namespace in COLLECTIVES:
            raise UnsupportedError(
                f"training_step waits for other processes (`{name.partition('.')[0]}`: a gathered tensor, synchronized "
                "batch normalization), so that it cannot be run on single samples; use engine='expanded' and "
                "verify=False"
            )
        return func(*args, **(kwargs or {}))


_NAMED = 8


def verify_values(
    trainer: Trainer,
    pl_module: LightningModule,
    options: CaptureOptions,
    training_step: Callable[[Any], Any],
    batch: Any,
    view: Any,
    *,
    allow_missing: bool,
) -> bool:
    """Check the per-sample gradients of a few samples of a batch; `view` is the batch as its samples are looked for."""
    calls, reduction = 0, cast("Any", options["loss_reduction"])

    def loss_fn(module: nn.Module, part: Any) -> Any:
        nonlocal calls
        calls += 1
        return _outputs_of(training_step, with_kinds_of(part, batch))

    def weights(outputs: Any, part: Any) -> Any:
        return reduction(outputs, with_kinds_of(part, batch))

    with second_pass(trainer, pl_module):
        report = check_per_sample_gradients(
            pl_module,
            view,
            loss_fn,
            loss_reduction=weights if callable(reduction) else reduction,
            batch_dim=options["batch_dim"],
            batch_size=options["batch_size"],
            batch_layout=options["batch_layout"],
        )
    if isinstance(report.failure, NoLossError) and calls == 1:
        return False
    right = ("agrees", "unused", "missing") if allow_missing else ("agrees", "unused")
    rest = [row for row in report.parameters if row.status not in right]
    if report.reason or any(row.reason != RANDOM for row in rest):
        raise VerificationError(
            f"verify=True, and not every value is right; with verify=False the fit warns of what it can tell and goes "
            f"on. {report}"
        ) from report.failure
    if rest:
        named = ", ".join(f"`{row.name}`" for row in rest[:_NAMED]) + (", ..." if rest[_NAMED:] else "")
        warn_user(f"verify=True could not compare the gradients of {named}: {RANDOM}")
    return True


# Single samples, by vmap or one after the other


_NO_FACTOR = "the samples run in a pass of their own, with random numbers of its own"

_NOT_ONE_BY_ONE = (
    "The loss of the batch is not made of the losses of its samples as loss_reduction says (samples that weigh "
    "otherwise, samples that influence each other as in batch normalization, a term that belongs to no sample), or the "
    "batch is cut otherwise than its data lie"
)


class SumsDifferError(UnsupportedError):
    """The samples, each run alone, do not add up to the gradient of their batch."""


class SecondEngine:
    """Runs the training step a second time, on single samples: one after the other, or many at once with vmap."""

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, options: CaptureOptions, choice: SampleChoice
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._weighting: Weighting = options["loss_reduction"]
        self._choice = choice
        self.draws = False  # whether a sample draws random numbers even without dropout, so that nothing was compared

    def record(
        self,
        engine: str,
        training_step: Callable[[Any], Any],
        batch: Samples,
        quantities: Collection[str],
        *,
        sums: bool,
    ) -> PerSampleRecord:
        """The gradients of each sample's own loss; with `sums` a `SumsDifferError` where they are not the batch's."""
        unknown = [quantity for quantity in quantities if quantity not in QUANTITIES]
        if unknown:
            raise OptionError(
                f"engine={engine!r} does not give the quantities {unknown}; it gives {', '.join(map(repr, QUANTITIES))}"
            )
        size = batch.layout.batch_size
        _refuse_what_cannot_be_cut(batch.layout, engine)
        chosen = self._choice.of_batch(size)
        weights = self._weigh(training_step, batch)
        in_loss, samples, _ = samples_with_values(chosen, None, weights)  # of the others, what they lose is not known
        weights = weights if samples is None else weights[samples]
        compares = sums and chosen is None

        def collect() -> _Collected:
            collected = _Collected(size, samples, frozenset(quantities), weights if compares else None)
            collected.in_loss = size if in_loss is None else len(in_loss)
            self._collect(engine, training_step, batch, collected)
            return collected

        run_pass = partial(in_smaller_chunks, collect) if engine == "vmap" else collect
        collected = run_pass()
        if compares:
            with without_dropout(self._module):
                self._compare_sums(training_step, batch.take(0, size), run_pass() if collected.drew else collected)
        return collected.record(list(self._trainable()))

    def _collect(self, engine: str, training_step: Callable[[Any], Any], batch: Samples, collected: _Collected) -> None:
        """Run single samples of a batch, and take their gradients."""
        chunk = 1
        if engine == "vmap":
            if batch.are_ragged():
                raise UnsupportedError(
                    "the batch holds one item per sample, not rows of tensors, which vmap cannot stack"
                )
            bytes_each = sum(parameter.numel() * parameter.element_size() for parameter in self._trainable().values())
            chunk = max(1, halved(MEMORY_BUDGET) // max(bytes_each, 1))
        scale, run = loss_scale(self._trainer, batch.layout.batch_size), self._vmap if engine == "vmap" else self._loop

        def loss_of_one(one: Any) -> Tensor:
            return own_loss(_outputs_of(training_step, one), one, self._weighting) * scale

        with second_pass(self._trainer, self._module) as state, batch_statistics_explained(self._module):
            for start in range(0, len(collected.places), chunk):
                samples = collected.places[start : start + chunk]
                ones = [batch.take(sample, sample + 1) for sample in samples]
                for name, rows in run(loss_of_one, ones).items():
                    collected.add(name, start, rows, scale)
                # Random numbers go on, so that samples do not share one dropout mask.
                state.restore(random_states=False)
            collected.drew = state.drew_random_numbers()

    def _loop(self, loss_of_one: Callable[[Any], Tensor], ones: list[Any]) -> dict[str, Tensor]:
        loss = loss_of_one(*ones)
        return {name: grad[None] for name, grad in gradients_of(loss, self._trainable()).items()}

    def _vmap(self, loss_of_one: Callable[[Any], Tensor], ones: list[Any]) -> dict[str, Tensor]:
        stacked = [torch.stack(tensors) for tensors in zip(*map(tensors_of, ones), strict=True)]

        def loss(module: Any, *tensors: Tensor) -> Tensor:
            return loss_of_one(with_tensors(ones[0], [tensor.squeeze(0) for tensor in tensors]))

        _, grads = vmap_per_sample_grads(self._module, loss, *stacked, randomness="different")
        return {name: rows.detach() for name, rows in grads.items()}

    def _compare_sums(self, training_step: Callable[[Any], Any], batch: Any, collected: _Collected) -> None:
        """Compare the sums of a pass with the gradient of the batch, of which no parameter is given any."""
        parameters, scale = self._trainable(), loss_scale(self._trainer, 1)
        with second_pass(self._trainer, self._module) as state:
            loss = loss_of(training_step(batch))
            if not isinstance(loss, Tensor):
                raise NoLossError
            grads = gradients_of(loss * scale, parameters)
            self.draws = collected.drew or state.drew_random_numbers()
            dtypes = computed_in(parameters.values(), loss.device)

        def compared(factor: float) -> Sums:
            sums = Sums(loss.detach() * scale, dtypes)
            for name, total in collected.totals.items():
                if name in grads:
                    parts = collected.parts(name) * factor * scale
                    sums.add(name, total * factor * scale, grads[name].to(total.dtype), parts)
            return sums

        causes, size, given = _NOT_ONE_BY_ONE, len(collected.places), self._weighting
        if size > 1 and given == "mean" and not compared(float(size)).too_far():
            causes = (
                "The loss is a sum over the samples and no mean: pass loss_reduction='sum'; where it is divided by a "
                "fixed number of samples, divide by the rows of the batch"
            )
        elif size > 1 and given == "sum" and not compared(1.0 / size).too_far():
            causes = "The loss is a mean over the samples and no sum: pass loss_reduction='mean'"
        text = compared(1.0).text("the gradient of the batch, both taken without dropout", causes)
        if text is not None and not self.draws:
            raise SumsDifferError(text)

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def _weigh(self, training_step: Callable[[Any], Any], samples: Samples) -> Tensor:
        """What each sample weighs in the loss of the batch, (B,)."""
        size = samples.layout.batch_size
        if not callable(self._weighting):
            return torch.full((size,), 1.0 if self._weighting == "sum" else 1.0 / size)
        batch = samples.take(0, size)
        with second_pass(self._trainer, self._module), torch.no_grad():
            weights: Any = of_user(self._weighting, _outputs_of(training_step, batch), batch)
        if not isinstance(weights, Tensor) or weights.shape != (size,):
            must = f"it must return a tensor of shape ({size},)"
            raise OptionError(f"loss_reduction returned {described(weights)}, but {must}")
        return weights.detach().cpu()


def why_no_record(engine: str, error: Exception) -> PerSampleError:
    """Why an extra pass over the batch gives no record: single samples must not end the training."""
    if isinstance(error, PerSampleError):
        return error
    if isinstance(error, NoLossError):
        return UnsupportedError(f"training_step returned None in the extra pass of engine={engine!r}")
    text = next(iter(str(error).strip().splitlines()), "")
    return UnsupportedError(f"engine={engine!r} failed with {type(error).__name__}: {text}")


class _Collected:
    """What is asked for of the samples that have run, `samples` (m,) or all; with `weights` (m,) their sums."""

    def __init__(
        self, batch_size: int, samples: Tensor | None, quantities: frozenset[str], weights: Tensor | None = None
    ) -> None:
        self.places = range(batch_size) if samples is None else samples.tolist()
        self._batch_size = batch_size
        self._samples = samples
        self._quantities = quantities
        self._weights = weights
        self.totals: dict[str, Tensor] = {}  # the weighted sums by parameter
        self.drew = False  # whether the samples drew random numbers
        self.in_loss = batch_size  # number of samples with a part in the loss
        self._sq_norms: dict[str, Tensor] = {}
        self._grad_samples: dict[str, Tensor] = {}
        self._square_sums: dict[str, Tensor] = {}

    def add(self, name: str, start: int, rows: Tensor, scale: float) -> None:
        """Take the gradients of the samples from `start` on, (samples, *shape), of losses multiplied by `scale`."""
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        own = wide if scale == 1.0 else wide / scale
        chosen, number = slice(start, start + len(rows)), len(self.places)
        sq_norms = Dense(own).sq_norm()
        self._sq_norms.setdefault(name, sq_norms.new_zeros(number))[chosen] = sq_norms
        if self._weights is not None:
            weights = self._weights[chosen].to(own.device, own.dtype)
            weighted = own * weights.reshape(-1, *(1,) * (own.dim() - 1))  # (a product of matrices would be autocast)
            self.totals[name] = weighted.sum(0) + self.totals.get(name, 0.0)
        if "square_sum" in self._quantities:
            self._square_sums[name] = Dense(own).square_sum() + self._square_sums.get(name, 0.0)
        if self._quantities & {"grad_sample", *OF_KEPT}:
            if name not in self._grad_samples:
                self._grad_samples[name] = rows.new_zeros(number, *rows.shape[1:])
            self._grad_samples[name][chosen] = own.to(rows.dtype)

    def parts(self, name: str) -> Tensor:
        """What the samples add to a parameter, as if nothing cancelled: sum_i |w_i| ||g_i||."""
        norms = self._sq_norms[name].sqrt()
        return norms.sum() if self._weights is None else (self._weights.abs().to(norms) * norms).sum()

    def record(self, names: list[str]) -> PerSampleRecord:
        """The record of the trainable parameters with these names."""
        used = [name for name in names if name in self._sq_norms]
        rows = {name: self._grad_samples[name] for name in used if name in self._grad_samples}
        asked: dict[str, Any] = {}
        if "grad_sample" in self._quantities:
            asked["grad_samples"] = rows
        if "square_sum" in self._quantities:
            asked["square_sums"] = {name: self._square_sums[name] for name in used}
        if self._quantities & OF_KEPT:
            dtypes = {name: grads.dtype for name, grads in rows.items()}
            structures = {name: Dense(grads) for name, grads in rows.items()}
            asked["_kept"] = KeptGradients(structures, dtypes, None, self._quantities)
        return PerSampleRecord(
            batch_size=self._batch_size,
            sq_norms={name: self._sq_norms[name] for name in used},
            coverage=1.0,
            unused=tuple(name for name in names if name not in self._sq_norms),
            samples=self._samples,
            in_loss=self.in_loss,
            why_no_factor=_NO_FACTOR,
            **asked,
        )


def _refuse_what_cannot_be_cut(layout: BatchLayout, engine: str) -> None:
    """Refuse a batch with a tensor of which it is not known what of it is one sample's."""
    for place in layout.places:
        if isinstance(place, Lost) and place.alone is None and not place.listed:
            raise UnsupportedError(
                f"engine={engine!r} cannot cut the batch into samples: {place.reason}; keep data that all samples "
                "share out of the batch, as a buffer of the module or a number (rows that offsets, an index or "
                "mark_samples give to the samples are for engine='expanded')"
            )
