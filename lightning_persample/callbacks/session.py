"""One capture per training step, shared by all per-sample callbacks of a Trainer.

This is the one file that knows in which order Lightning calls things. In automatic optimization one batch runs

    on_train_batch_start -> training_step -> zero_grad -> on_before_backward -> LightningModule.backward
    -> on_after_backward -> on_before_optimizer_step -> clipping -> step -> on_train_batch_end

and the capture has to be open during `training_step` and during `backward`. No callback hook surrounds either of them,
so both methods are replaced on the instance for the time of a fit; strategies look them up there by name. In manual
optimization everything from zero_grad to step happens inside `training_step`; for it `manual_backward` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.batch import EmptyBatchError, OfLoaders, count_samples
from lightning_persample.callbacks.class_loss import (
    CLASS_LOSSES,
    ClassLosses,
    class_losses_noted,
    place_by_marks,
    place_in_batch,
)
from lightning_persample.callbacks.lightning_internals import (
    ObservedMethod,
    holds_compiled_code,
    logging_step,
    logs_copies,
    logs_now,
    skips_hooks,
    why_unsupported,
)
from lightning_persample.callbacks.manual import (
    NO_FALLBACK,
    NOT_VERIFIED,
    ManualStep,
    unseen,
    why_not_manual,
)
from lightning_persample.callbacks.observed_step import ObservedStep, Reports, SampleChoice
from lightning_persample.callbacks.sample_index import BatchIndices
from lightning_persample.callbacks.second_pass import (
    SecondEngine,
    SumsDifferError,
    on_other_batches,
    verify_values,
    why_no_record,
)
from lightning_persample.capture.failure import Once, fault_of, guard, run_all
from lightning_persample.capture.graph import on_arrival
from lightning_persample.capture.observing import keep_offering_writes, stop_offering_writes
from lightning_persample.capture.parameters import is_sharded
from lightning_persample.capture.record import OwnScale, PerSampleRecord, warning_texts
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError, UnsupportedError, of_user
from lightning_persample.options import CAPTURE_DEFAULTS
from lightning_persample.reference.samples import Samples, loss_of


def is_logging_step(trainer: Trainer, every_n_steps: int | None = None) -> bool:
    """Whether the optimizer step that the current batch belongs to is logged."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return True
    if every_n_steps is None and trainer.world_size == 1:
        return logs_now(trainer)
    # Of several processes one alone may be asked to stop: what they do together goes by the count of steps.
    every = trainer.log_every_n_steps if every_n_steps is None else every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (logging_step(trainer) + 1) % every == 0


def shared_capture(trainer: Trainer) -> SharedCapture | None:
    """The capture of the fit that a Trainer is in, or None."""
    found = [getattr(callback, "_shared", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return next((each for each in found if isinstance(each, SharedCapture)), None)


ONE_OF_SEVERAL = (
    "runs training_step on single samples, and where several data loaders draw unequal numbers of rows, a sample of "
    "one of them leaves the others without any"
)
_NOT_COMPARED = (
    "could not be compared with the gradient of the batch, because training_step draws random numbers: where samples "
    "influence each other or are weighted differently from loss_reduction, the values are not those of the training "
    "step"
)
_EACH_ITS_OWN = {"unsupported", "verify"}


def _check_options_agree(trainer: Trainer, callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that cannot share one capture."""

    def described(callback: Any, option: str) -> str:
        place = trainer.callbacks.index(callback)  # type: ignore[attr-defined]
        return f"{type(callback).__name__} (callbacks[{place}]) has {option}={getattr(callback, option)!r}"

    first = callbacks[0]
    for option in (name for name in CAPTURE_DEFAULTS if name not in _EACH_ITS_OWN):
        for other in callbacks[1:]:
            if getattr(first, option) != getattr(other, option):
                raise OptionError(
                    f"{described(first, option)}, but {described(other, option)}: all per-sample callbacks of a "
                    f"Trainer share one capture, so {option} must be the same for all of them"
                )


class Rest:
    """Knows beforehand that no callback wants the next batches, so that nothing is done at them."""

    def __init__(self, trainer: Trainer, module: LightningModule, callbacks: Sequence[Any]) -> None:
        self._trainer, self._module, self._callbacks = trainer, module, callbacks
        self.is_on = False
        self._last_step = -1  # the optimizer step of the last batch that was passed over
        self._awake: list[Any] = []  # callbacks with something left to do of earlier batches

    def start(self) -> None:
        """From this batch on, as long as every callback goes by the number of steps."""
        trainer: Any = self._trainer
        if not trainer.fast_dev_run and all(callback._goes_by_steps() for callback in self._callbacks):
            self.is_on, self._last_step = True, logging_step(trainer)
            self._awake = self._not_resting()

    def goes_on(self, failed: Callable[[Exception], None]) -> bool:
        """Whether nobody wants the current batch and nothing of an earlier one is left; asked at every batch."""
        if not self.is_on:
            return False
        try:  # no `guard`: it would be most of what a batch that is not captured costs
            trainer = self._trainer
            step = logging_step(trainer)
            is_due = trainer.should_stop  # then Lightning logs
            for callback in self._callbacks:
                every = callback.every_n_steps
                if every is None:
                    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
                is_due = is_due or bool(every and (step + 1) % every == 0)
            if is_due:
                self._end(step)
            else:
                self._last_step = step
                if self._awake:
                    self._awake = self._not_resting()
        except Exception as error:
            self.is_on = False
            failed(error)
        return self.is_on

    def _not_resting(self) -> list[Any]:
        automatic = self._module.automatic_optimization
        return [callback for callback in self._callbacks if not callback._rest(automatic=automatic)]

    def _end(self, step: int) -> None:
        self.is_on = False
        for callback in self._callbacks:
            if callback not in self._awake:
                callback._end_rest(has_missed=self._last_step == step)


class SharedCapture:
    """The capture that all per-sample callbacks of one Trainer share during one fit."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        callbacks: Sequence[Any],  # PerSampleCallbacks, whose file imports this one
        indices: BatchIndices | None = None,
    ) -> None:
        self.trainer = trainer
        self._indices = indices
        self.module = pl_module
        self._callbacks = tuple(callbacks)
        options = [callback._capture_options() for callback in callbacks]
        choices = {each["unsupported"] for each in options}
        self._falls_back = "vmap" in choices and "error" not in choices
        self.reports = Reports(trainer, pl_module, raises="error" in choices)
        self._verify = any(each["verify"] for each in options)
        self._options = first = options[0]
        self._engine: str = first["engine"]
        self._choice = SampleChoice(first["max_samples"], seed=trainer.global_rank if first["max_samples"] else 0)
        self._second = SecondEngine(trainer, pl_module, first, self._choice)
        self._second_is_compared = self._second_is_refused = False
        self._methods: tuple[ObservedMethod, ...] = ()
        self._in_training_step = False
        self._needs: list[frozenset[str]] = []  # of each receiver
        self._quantities: frozenset[str] = frozenset()
        self._sums_differ = False
        self._opened = 0  # how many steps were to be observed
        self._other_weights: tuple[str, ...] = ()  # how a function's weights differ from those in the loss
        self._averages = trainer.world_size > 1 or is_sharded(pl_module)
        self._rest = Rest(trainer, pl_module, self._callbacks)
        self._forget_batch()

        _check_options_agree(trainer, self._callbacks)
        reason = why_unsupported(trainer, pl_module)
        manual = not pl_module.automatic_optimization
        if reason is None and manual:
            reason = why_not_manual(self._engine)
        if reason is not None:
            if indices is not None:
                indices.uninstall()
            self.reports.refuse(f"{reason}: no per-sample gradients are captured in this fit")
            return
        if manual:
            if self._falls_back:
                self._falls_back = False
                self.reports.refuse(NO_FALLBACK)
            if self._verify:
                self._verify = False
                self.reports.refuse(NOT_VERIFIED)
        observed = partial(ObservedMethod, pl_module, failed=self._failed, is_live=self._is_live)
        is_resting = partial(getattr, self._rest, "is_on")
        self._methods = (
            observed("training_step", self._run_training_step, rests=partial(self._rest.goes_on, self._failed)),
            observed("backward", self._run_backward, rests=is_resting),
            observed("manual_backward", self._run_manual_backward, rests=is_resting),  # a module may go over to it
            *([observed("log", self._run_log, rests=is_resting)] if logs_copies(pl_module) else ()),
        )

    def install(self) -> None:
        """Take the methods' places; whatever goes wrong here, a warning that is an error, `uninstall` undoes it."""
        if self._methods:
            keep_offering_writes(self)
        for method in self._methods:
            method.install()
        for callback in self._callbacks:
            callback._skips = bool(self._methods) and skips_hooks(self.trainer)
            callback._skip_hooks()
            if self._methods and not callback.receives_records():
                self.reports.warn(
                    f"{type(callback).__name__} does not override on_per_sample_gradients, so that nothing is done "
                    "with its records"
                )
        if self._methods and self._engine == "expanded" and holds_compiled_code(self.module):
            self.reports.warn(
                "captured steps run compiled code as it was written, because nothing of a compiled graph can be seen: "
                "their results may differ from those of compiled steps in the last bits, and in random numbers"
            )

    def _is_live(self) -> bool:
        return self.trainer.state.status == TrainerStatus.RUNNING

    def steps_for(self, callback: Any) -> Mapping[int, Sequence[PerSampleRecord]]:
        """The records of each optimizer's step in manual optimization, by place; none if the callback wants none."""
        return self._optimizer_steps if callback in self._receivers else {}

    def end_batch(self) -> None:
        """Forget the batch: close the capture and remove ``grad_sample`` from the parameters. May be called twice."""
        step = self._step
        self._forget_batch()
        if step is None:  # as at every batch that is not captured
            self.reports.end_batch()
        else:
            run_all(self.reports.end_batch, step.close)

    def _forget_batch(self) -> None:
        self.class_losses = ClassLosses()  # since the last backward
        self._batch: Any = None
        self._rerun: Any = None  # the training step as a function of the batch
        self._receivers: list[Any] = []
        self._is_empty = False
        self._step: ObservedStep | None = None
        self.manual: ManualStep | None = None
        self._optimizer_steps: Mapping[int, Sequence[PerSampleRecord]] = {}
        self._record: PerSampleRecord | None = None  # of an extra pass
        self._loss_scale: Tensor | None = None

    def uninstall(self) -> None:
        """Leave the module as it was before the fit. May be called twice."""
        self._rest.is_on = False
        hooks = [callback._restore_hooks for callback in self._callbacks]
        methods = [method.restore for method in reversed(self._methods)]
        run_all(*methods, self.end_batch, *hooks, partial(stop_offering_writes, self))
        self._methods = ()

    def _run_training_step(self, training_step: Once, *args: Any, **kwargs: Any) -> Any:
        # A validation_step that calls self.training_step, and a training_step that calls itself, are not the step.
        elsewhere = not self.trainer.training or self.module._trainer is not self.trainer
        if self._in_training_step or elsewhere:
            return training_step(*args, **kwargs)
        self._in_training_step = True
        try:
            return self._run_once(training_step, args, kwargs)
        finally:
            self._in_training_step = False

    def _run_once(self, training_step: Once, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # An optimizer such as LBFGS runs the step several times for one batch, and each run starts again.
        self.end_batch()
        # A trial fit inside the fit (a learning rate finder) takes the callbacks out of the Trainer for its time.
        present = [callback for callback in self._callbacks if callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        self._receivers = [callback for callback in present if of_user(callback.should_capture, self.trainer)]
        run = partial(training_step, *args, **kwargs)
        if not self._receivers:
            self._rest.start()
            return run()
        self._needs = [frozenset(of_user(each.needs, self.trainer)) for each in self._receivers]
        self._quantities = frozenset().union(*self._needs)
        self._batch = args[0] if args else next(iter(kwargs.values()), None)
        self._rerun = on_other_batches(training_step.function, args, kwargs)
        if self._verify and self.module.automatic_optimization:
            self._verify = not self._is_verified()
        if not self.module.automatic_optimization:
            return self._optimized_manually(run)
        return self._observed(run) if self._engine == "expanded" else self._after_an_extra_pass(run)

    def _is_verified(self) -> bool:
        """Check the values of this batch, if it can be used for that."""
        view, options = self._view(), self._options.copy()
        if isinstance(view, OfLoaders):
            self.reports.refuse(f"verify=True {ONE_OF_SEVERAL}: nothing is verified")
            return True
        options["batch_size"] = options["batch_size"] or self._rows_drawn()
        allow = self._falls_back
        return verify_values(self.trainer, self.module, options, self._rerun, self._batch, view, allow_missing=allow)

    def _rows_drawn(self) -> int | None:
        return None if self._indices is None else self._indices.rows_drawn()

    def _observed(self, training_step: Callable[[], Any]) -> Any:
        step = self._open()
        if step is None:
            return training_step()
        with step.capture.observe():
            outputs = training_step()
        loss = loss_of(outputs)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            self.end_batch()
            return outputs
        step.capture.before_backward = self._backward_starts
        step.capture.after_backward = guard(self._backward_ended, self._failed)
        try:
            step.attach(loss, outputs)
        except PerSampleError as error:
            self.reports.report(error)
            self.end_batch()
        return outputs

    def _optimized_manually(self, training_step: Callable[[], Any]) -> Any:
        reason = why_not_manual(self._engine)
        if reason is not None:
            self.reports.refuse(f"{reason}: this step is not reported")
        step = self._open() if reason is None else None
        if step is None:
            return training_step()
        self.manual = ManualStep(step, self.module, self.trainer.optimizers, self._deliver, self.reports)
        steps = self.trainer.global_step
        with step.capture.observe(), self.manual.watching_optimizers():
            outputs = training_step()
        stepped = self.manual.steps or self.trainer.global_step > steps
        self._optimizer_steps = self.manual.end()
        self.manual = self._step = None
        self._sums_differ = step.sums_differ
        step.capture.close()
        if not step.capture.records and stepped:
            self.reports.refuse(
                "an optimizer stepped in training_step, but no backward pass that can be seen reached a trainable "
                "parameter in it: this step is not reported"
            )
        return outputs

    def _run_manual_backward(self, manual_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.manual is None:
            if self.trainer.training and not (self._in_training_step or self.reports.has_said_fault):
                self.reports.refuse(
                    "manual_backward was called outside of training_step: this backward has no record and is in no "
                    "statistics; call it in training_step"
                )
            return manual_backward(*args, **kwargs)
        return self.manual.manual_backward(manual_backward, *args, **kwargs)

    def _after_an_extra_pass(self, training_step: Callable[[], Any]) -> Any:
        if self._second_is_refused:
            return training_step()
        sums, self._second_is_compared = not self._second_is_compared, True
        record = self._run_second(self._engine, sums=sums)
        if isinstance(record, SumsDifferError):
            self._second_is_refused = True
            self.reports.refuse(f"engine={self._engine!r} is not used in this fit: {record}")
            return training_step()
        if sums and self._second.draws:
            self.reports.warn(f"engine={self._engine!r} {_NOT_COMPARED}")
        note = self._note_of_class_losses(self._place_in_batch)
        with nullcontext() if note is None else class_losses_noted(note):
            outputs = training_step()
        loss = loss_of(outputs)
        if isinstance(record, PerSampleRecord):
            self._record = record
            if isinstance(loss, Tensor) and loss.requires_grad:
                on_arrival(loss, self._keep_scale, self._failed)
        elif isinstance(loss, Tensor):
            self.reports.report(record)
        return outputs

    def _run_second(self, engine: str, *, sums: bool) -> PerSampleRecord | PerSampleError:
        try:
            samples = self._samples()
            if samples is None:
                return UnsupportedError(f"engine={engine!r} {ONE_OF_SEVERAL}; use engine='expanded'")
        except BatchSizeError as error:
            return error
        record = guard(self._second.record, partial(why_no_record, engine))
        return record(engine, self._rerun, samples, self._quantities, sums=sums)

    def _view(self) -> Any:
        """The batch as its samples are looked for."""
        options = self._options
        if self._indices is None:
            return self._batch
        is_declared = options["batch_size"] is not None or options["batch_layout"] is not None
        return self._indices.arranged(self._batch, options["batch_dim"], is_declared=is_declared)

    def _samples_of_batch(self) -> tuple[Any, int]:
        """The batch as its samples are looked for, and how many there are."""
        options, view = self._options, self._view()
        drawn = None if isinstance(view, OfLoaders) else self._rows_drawn()
        return view, count_samples(view, options["batch_dim"], options["batch_size"], drawn, options["batch_layout"])

    def _open(self) -> ObservedStep | None:
        try:
            self._step = guard(self._observed_step, self._cannot_open)()
        except BatchSizeError as error:  # which `expanded_weights` raises to its caller: here, that is no one
            self._cannot_open(error)
        return self._step

    def _observed_step(self) -> ObservedStep:
        view, size = self._samples_of_batch()
        self._opened += 1
        step = ObservedStep(
            self.module,
            self._options,
            self._batch,
            view,
            size,
            self._quantities,
            self._choice.of_batch(size),
            sums_differ=self._sums_differ,
            compare_weights=not self._other_weights and not self._opened & (self._opened - 1),  # of 1, 2, 4, ... steps
            averages=self._averages,
        )
        note = self._note_of_class_losses(partial(place_by_marks, step.capture.mark_of))
        if note is not None:
            step.capture.note_calls(CLASS_LOSSES, note)
        return step

    def _samples(self) -> Samples | None:
        """The samples of the batch, to be taken one by one; None for those of several loaders."""
        view, size = self._samples_of_batch()
        if isinstance(view, OfLoaders):
            return None
        options, is_declared = self._options, self._options["batch_size"] is not None
        dim, layout = options["batch_dim"], options["batch_layout"]
        return Samples(view, size, dim, layout, is_declared=is_declared, like=self._batch)

    def _place_in_batch(self, outputs: Tensor, labels: Tensor) -> BatchAxis | str:
        samples = self._samples()
        return "there is no extra pass" if samples is None else place_in_batch(samples.layout, outputs, labels)

    def _note_of_class_losses(self, place_of: Callable[[Tensor, Tensor], BatchAxis | str]) -> Callable[..., Any] | None:
        """What is given the calls of class losses, if a callback reads them."""
        if not any(callback._reads_class_losses() for callback in self._receivers):
            return None
        return guard(lambda *call: self.class_losses.note(place_of, *call), lambda error: self.class_losses.fail(error))

    def _cannot_open(self, error: Exception) -> None:
        self._is_empty = isinstance(error, EmptyBatchError)
        self.reports.report_failure(error)

    def _failed(self, error: Exception) -> None:
        """Something of this package's has failed around a method of the module: end the capture, and say so."""
        guard(self.end_batch, self.reports.report_failure)()
        self.reports.report_failure(error)

    def _run_log(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run, number = partial(log, *args, **kwargs), args[1] if len(args) > 1 else kwargs.get("value")
        return run() if self._step is None else self._step.capture.run_copying(number, run)

    def _run_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.manual is not None:
            return backward(*args, **kwargs)
        if self._step is not None:
            return self._observed_backward(self._step, partial(backward, *args, **kwargs))
        record, self._record = self._record, None
        if record is None and not self._is_empty:
            return backward(*args, **kwargs)
        self._backward_starts([])
        result = backward(*args, **kwargs)
        if record is not None and self._loss_scale is not None:
            weighting: Literal["mean", "sum"] = "sum" if self._options["loss_reduction"] == "sum" else "mean"
            record = replace(record, _own=OwnScale(weighting, record.batch_size, self._loss_scale))
        self._after_backward(record)  # of a batch without samples, too, which has a part in the optimizer step
        if record is not None:
            self._deliver(record)
        return result

    def _observed_backward(self, step: ObservedStep, backward: Callable[[], Any]) -> Any:
        step.capture.take_dots(self._vectors_of_dots())
        step.start_backward()
        with step.capture.observe():
            result = backward()
        self._step = None
        step.capture.close()
        if len(step.capture.records) == 1:
            text = step.why_sums_differ(step.capture.record)
            if text is not None:
                self.reports.warn(text)
            self._sums_differ = step.sums_differ
            self._deliver(self._complete(step.capture.record))
        else:
            self.reports.refuse(_why_no_record(self.module, len(step.capture.records)))
        return result

    def _vectors_of_dots(self) -> Mapping[str, Tensor]:
        """With what all dots are that are asked for, where that is known now and nothing else needs the gradients."""
        asking = [each for each, needs in zip(self._receivers, self._needs, strict=True) if needs - {"sq_norm"}]
        if len(asking) != 1 or self._quantities - {"sq_norm"} != {"dot"}:
            return {}
        return asking[0]._vectors_of_dots(self.trainer, self.module)

    def _keep_scale(self, grad: Tensor) -> None:
        self._loss_scale = grad.detach().reshape(()) if grad.numel() == 1 else None

    def _backward_starts(self, losses: list[Tensor]) -> None:
        with unseen(self.module.device.type):
            for callback in self._receivers:
                callback._backward_starts(self.trainer)

    def _backward_ended(self, record: PerSampleRecord | None) -> None:
        if record is not None:
            self._after_backward(record)

    def _after_backward(self, record: PerSampleRecord | None) -> None:
        with unseen(self.module.device.type):
            for callback in self._receivers:
                callback._backward_ended(self.trainer, record)

    def _complete(self, record: PerSampleRecord) -> PerSampleRecord:
        """The record, or with ``unsupported="vmap"`` that of the second engine where parameters are missing."""
        if not record.unsupported or not self._falls_back:
            return record
        missing = warning_texts(record)[0]
        failures = ""
        for engine in ("vmap", "loop"):
            found = self._run_second(engine, sums=True)
            if not isinstance(found, PerSampleRecord):
                failures += f"; {found}"
                continue
            self._engine, self._second_is_compared = engine, True
            if self._second.draws:
                failures += f"; engine={engine!r} {_NOT_COMPARED}"
            self.reports.warn(
                f"{missing}\nFrom this step on, captured steps use engine={engine!r}, an extra pass over the "
                f"batch{failures}"
            )
            return found
        self._falls_back = False
        self.reports.warn(f"No second engine can follow this model{failures}")
        return record

    def _without_index(self, record: PerSampleRecord, error: Exception) -> PerSampleRecord:
        self.reports.warn(f"record.sample_index is None: {fault_of(error, 'the sample index')}")
        return record

    def _deliver(self, record: PerSampleRecord) -> None:
        if self._indices is not None:
            attach = guard(self._indices.attach, partial(self._without_index, record))
            record = attach(record, self._batch, self.reports.warn)
        if callable(self._options["loss_reduction"]):
            if self.module.automatic_optimization and self._engine == "expanded" and not record.weighting:
                record = replace(record, weighting=self._other_weights)
            self._other_weights = self._other_weights or record.weighting
        self.reports.deliver(record, self._receivers, self._batch)
        self.class_losses = ClassLosses()


def _why_no_record(pl_module: LightningModule, backward_passes: int) -> str:
    name = f"{type(pl_module).__name__}.backward"
    if backward_passes == 0:
        return (
            f"{name} reached no trainable parameter by a backward pass that can be seen and is of samples (that of a "
            "penalty alone is of none): this step is not reported"
        )
    return (
        f"{backward_passes} backward passes ran in training_step and {name}, but per-sample gradients are those of "
        "exactly one: this step is not reported. Call backward once, on the loss that training_step returned, and "
        "torch.autograd.grad for the gradient of an input"
    )
