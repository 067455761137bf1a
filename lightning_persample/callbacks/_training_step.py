"""One capture per training step, shared by all per-sample callbacks of a Trainer.

This is the one file that knows in which order Lightning calls things. In automatic optimization one batch runs

    on_train_batch_start -> training_step -> zero_grad -> on_before_backward -> LightningModule.backward
    -> on_after_backward -> on_before_optimizer_step -> clipping -> step -> on_train_batch_end

and the capture has to be open during `training_step` and during `backward`. No callback hook surrounds either of them,
so both methods are replaced on the instance for the time of a fit; strategies look them up there by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_persample.callbacks._aside import NoLossError, on_other_batches
from lightning_persample.callbacks._observed_method import ObservedMethod
from lightning_persample.callbacks._requirements import (
    check_options_agree,
    holds_compiled_code,
    why_unsupported,
)
from lightning_persample.callbacks._second_engine import SecondEngine
from lightning_persample.callbacks._sum_check import SumCheck
from lightning_persample.callbacks._verification import verify_values
from lightning_persample.engine import (
    FAILURES,
    Capture,
    PerSampleRecord,
    expanded_weights,
    is_sharded,
    reason_of,
    warning_texts,
)
from lightning_persample.engine.samples import loss_of
from lightning_persample.errors import (
    OptionError,
    PerSampleError,
    PerSampleWarning,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lightning_persample.callbacks.base import PerSampleCallback

__all__ = ["SharedCapture", "is_logging_step", "logging_step", "window_continues"]

_SIZES = re.compile(r"\([\d, ]*\)")


def is_logging_step(trainer: Trainer, every_n_steps: int | None = None) -> bool:
    """Whether the optimizer step that the current batch belongs to is logged.

    Args:
        trainer: a Trainer inside its training loop.
        every_n_steps: count of optimizer steps from one logged step to the next; None follows the Trainer's own
            `log_every_n_steps`, where 0 means never.

    Returns:
        True on the steps on which ``self.log`` values reach the loggers, or on every n-th step; always in
        `fast_dev_run`, as in Lightning. Of several processes each gets the same answer.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return True
    if every_n_steps is None and trainer.world_size == 1:
        return bool(trainer._logger_connector.should_update_logs)
    # Of several processes one alone may be told to stop: what they do together goes by the count of steps.
    every = trainer.log_every_n_steps if every_n_steps is None else every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (logging_step(trainer) + 1) % every == 0


def logging_step(trainer: Trainer) -> int:
    """The step number under which Lightning logs what happens in the current batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def window_continues(trainer: Trainer) -> bool:
    """Whether the current batch ends without an optimizer step, because gradients are being accumulated."""
    return trainer.fit_loop._should_accumulate()


class SharedCapture:
    """The capture that all per-sample callbacks of one Trainer share during one fit.

    Args:
        trainer: the Trainer, after its strategy was set up.
        pl_module: the module that is trained.
        callbacks: the Trainer's per-sample callbacks.

    Raises:
        OptionError: two callbacks differ in an option of the capture.
        UnsupportedError: this way of training is not supported and a callback has ``unsupported="error"``.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, callbacks: Sequence[PerSampleCallback]) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._callbacks = tuple(callbacks)
        choices = {callback.unsupported for callback in callbacks}
        self._raise = "error" in choices
        self._falls_back = "vmap" in choices and not self._raise
        self._verify = any(callback.verify for callback in callbacks)
        first = callbacks[0]
        self._engine: Literal["expanded", "vmap", "loop"] = first.engine
        self._second = SecondEngine(trainer, pl_module, first.loss_reduction, first.batch_dim, first.batch_size)
        self._said: set[str] = set()
        self._methods: tuple[ObservedMethod, ...] = ()
        self._in_training_step = False
        self._receivers: list[PerSampleCallback] = []
        self._quantities: frozenset[str] = frozenset()
        self._capture: Capture | None = None
        self._record: PerSampleRecord | None = None
        self._step_aside: Callable[[Any], Any] | None = None
        self._sum_check: SumCheck | None = None
        self._sums_differ = False
        self._averages = trainer.world_size > 1 or is_sharded(pl_module)
        self._batch: Any = None
        self._grad_samples: list[tuple[torch.nn.Parameter, Tensor]] = []

        check_options_agree(trainer, self._callbacks)
        reason = why_unsupported(trainer, pl_module)
        if reason is not None:
            self._report(UnsupportedError(f"{reason}: no per-sample gradients are captured in this fit"))
            return
        self._methods = (
            ObservedMethod(pl_module, "training_step", self._run_training_step, self._is_live),
            ObservedMethod(pl_module, "backward", self._run_backward, self._is_live),
        )
        for method in self._methods:
            method.install()
        for callback in self._callbacks:
            if not callback.receives_records():
                self._warn(
                    f"{type(callback).__name__} does not override on_per_sample_gradients, so that nothing is done "
                    "with its records"
                )
        if self._engine == "expanded" and holds_compiled_code(pl_module):
            self._warn(
                "captured steps run compiled code as it was written, because nothing of a compiled graph can be seen: "
                "their results may differ from those of compiled steps in the last bits, and in random numbers"
            )

    def _is_live(self) -> bool:
        return self._trainer.state.status == TrainerStatus.RUNNING

    def belongs_to(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether this is the capture of that Trainer and module."""
        return self._trainer is trainer and self._module is pl_module

    def end_batch(self) -> None:
        """Forget the batch: close the capture and remove ``grad_sample`` from the parameters. May be called twice."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
        if self._sum_check is not None:
            self._sum_check.close()
        self._receivers = []
        self._record = self._step_aside = self._sum_check = self._batch = None
        for parameter, grad_sample in self._grad_samples:
            if getattr(parameter, "grad_sample", None) is grad_sample:
                del parameter.grad_sample  # type: ignore[attr-defined]
        self._grad_samples = []

    def uninstall(self) -> None:
        """Leave the module as it was before the fit. May be called twice."""
        self.end_batch()
        methods, self._methods = self._methods, ()
        for method in reversed(methods):
            method.restore()

    def _run_training_step(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A validation_step that calls self.training_step, and a training_step that calls itself, are not the step.
        elsewhere = not self._trainer.training or self._module._trainer is not self._trainer
        if not self._methods or self._in_training_step or elsewhere:
            return training_step(*args, **kwargs)
        # An optimizer such as LBFGS runs the step several times for one batch, and each run starts anew.
        self.end_batch()
        # A trial fit inside the fit (a learning rate finder) takes the callbacks out of the Trainer for its time.
        present = [callback for callback in self._callbacks if callback in self._trainer.callbacks]  # type: ignore[attr-defined]
        self._receivers = [callback for callback in present if callback.should_capture(self._trainer)]
        if not self._receivers:
            return training_step(*args, **kwargs)
        self._quantities = frozenset().union(*(callback.needs(self._trainer) for callback in self._receivers))
        self._batch = args[0] if args else next(iter(kwargs.values()), None)
        self._step_aside = on_other_batches(training_step, args, kwargs)
        first = self._callbacks[0]
        self._in_training_step = True
        try:
            if self._verify:
                verified = verify_values(
                    self._trainer, self._module, first, self._step_aside, self._batch, allow_missing=self._falls_back
                )
                self._verify = not verified
            run = self._observed if self._engine == "expanded" else self._after_an_extra_pass
            return run(training_step, args, kwargs)
        finally:
            self._in_training_step = False

    def _observed(self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture = self._open()
        if capture is None:
            return training_step(*args, **kwargs)
        self._capture = capture  # before the step runs, so that an error in it finds something to close
        with capture.observe():
            outputs = training_step(*args, **kwargs)
        if not self._attach(capture, outputs):
            self.end_batch()
        return outputs

    def _after_an_extra_pass(
        self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        record = self._run_aside(self._engine)
        outputs = training_step(*args, **kwargs)
        loss = loss_of(outputs)
        if isinstance(record, PerSampleRecord):
            self._record = record
        elif isinstance(loss, Tensor):
            self._report(record)
        return outputs

    def _run_aside(self, engine: Literal["expanded", "vmap", "loop"]) -> PerSampleRecord | PerSampleError:
        """The record of an extra pass over the batch, or why there is none."""
        if self._step_aside is None or engine == "expanded":
            return UnsupportedError("there is no batch to run aside")
        try:
            return self._second.record(engine, self._step_aside, self._batch, self._quantities)
        except OptionError:  # a callback's own mistake, not the model's
            raise
        except PerSampleError as error:
            return error
        except NoLossError:
            return UnsupportedError(f"training_step returned None in the extra pass of engine={engine!r}")
        except (
            AssertionError,
            *FAILURES,
        ) as error:  # single samples must not end the training
            text = next(iter(str(error).strip().splitlines()), "")
            return UnsupportedError(f"engine={engine!r} failed with {type(error).__name__}: {text}")

    def _open(self) -> Capture | None:
        first = self._callbacks[0]
        try:
            return expanded_weights(
                self._module,
                self._batch,
                loss_reduction="sum" if callable(first.loss_reduction) else first.loss_reduction,
                batch_dim=first.batch_dim,
                batch_size=first.batch_size,
                quantities=tuple(sorted(self._quantities)),
                unsupported="ignore",  # what there is to say is said in _deliver
            )
        except OptionError:  # a callback's own mistake, not the model's
            raise
        except FAILURES as error:
            self._report(
                error if isinstance(error, PerSampleError) else UnsupportedError(reason_of(error, "the batch"))
            )
            return None

    def _attach(self, capture: Capture, outputs: Any) -> bool:
        """Tell the capture the loss; False where there is none to go backward from, or none that can be used."""
        loss = loss_of(outputs)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return False
        reduction = self._callbacks[0].loss_reduction
        weights: Tensor | float = 1.0 if reduction == "sum" else 1.0 / capture.batch_size
        try:
            if callable(reduction):
                with torch.no_grad():
                    weights = reduction(outputs, self._batch)
                if not isinstance(weights, Tensor):
                    raise OptionError(
                        f"loss_reduction returned {type(weights).__name__}, but it must return a tensor of shape "
                        f"({capture.batch_size},) with the weight of each sample in the loss"
                    )
                capture.attach_loss(loss, weights)
            else:
                capture.attach_loss(loss)
        except PerSampleError as error:
            self._report(error)
            return False
        if "grad_sample" in self._quantities and not self._sums_differ:
            self._sum_check = SumCheck(self._module, loss, weights, averaged=self._averages)
        return True

    def _run_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        capture = self._capture
        if not self._methods or (capture is None and self._record is None):
            return backward(*args, **kwargs)
        if capture is None:
            result = backward(*args, **kwargs)
            record, self._record = self._record, None
            if record is not None:
                self._deliver(record)
            return result
        if self._sum_check is not None:
            self._sum_check.start_backward()
        with capture.observe():
            result = backward(*args, **kwargs)
        self._capture = None
        capture.close()
        if len(capture.records) == 1:
            self._check_sums(capture.record)
            self._deliver(self._complete(capture.record))
        else:
            self._report(UnsupportedError(_why_no_record(self._module, len(capture.records))))
        return result

    def _check_sums(self, record: PerSampleRecord) -> None:
        check, self._sum_check = self._sum_check, None
        text = None if check is None else check.finish(record)
        if text is not None:
            self._sums_differ = True
            self._warn(text)

    def _complete(self, record: PerSampleRecord) -> PerSampleRecord:
        """The record, or with ``unsupported="vmap"`` that of the second engine where parameters are missing."""
        if not record.unsupported or not self._falls_back:
            return record
        missing = warning_texts(record)[0]
        failures = ""
        for engine in ("vmap", "loop"):
            found = self._run_aside(engine)
            if isinstance(found, PerSampleRecord):
                self._engine = engine
                self._warn(
                    f"{missing}\nFrom this step on, captured steps use engine={engine!r}, an extra pass over the "
                    f"batch{failures}"
                )
                return found
            failures += f"; {found}"
        self._falls_back = False
        self._warn(f"No second engine can follow this model{failures}")
        return record

    def _deliver(self, record: PerSampleRecord) -> None:
        texts = warning_texts(record)
        if record.unsupported and self._raise:
            raise UnsupportedError(texts[0])
        for text in texts:
            self._warn(text)
        if record.grad_samples:
            parameters = dict(self._module.named_parameters(remove_duplicate=False))
            for name, grad_sample in record.grad_samples.items():
                parameters[name].grad_sample = grad_sample  # type: ignore[attr-defined]
                self._grad_samples.append((parameters[name], grad_sample))
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        for callback in self._receivers:
            callback.on_per_sample_gradients(self._trainer, self._module, record, self._batch, batch_idx)

    def _report(self, error: PerSampleError) -> None:
        if self._raise:
            raise error
        self._warn(str(error))

    def _warn(self, text: str) -> None:
        """Say each thing once: the same trouble with tensors of other sizes is the same trouble."""
        said = _SIZES.sub("", text)
        if said not in self._said:
            self._said.add(said)
            warnings.warn(text, PerSampleWarning, stacklevel=2)


def _why_no_record(pl_module: LightningModule, backward_passes: int) -> str:
    name = f"{type(pl_module).__name__}.backward"
    if backward_passes == 0:
        return f"{name} reached no trainable parameter by a backward pass that can be seen: this step is not reported"
    return (
        f"{name} ran {backward_passes} backward passes, but per-sample gradients are those of exactly one: this step "
        "is not reported. Call backward once, on the loss that training_step returned"
    )
