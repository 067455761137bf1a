"""One capture per training step, shared by all per-sample callbacks of a Trainer.

This is the one file that knows in which order Lightning calls things. In automatic optimization one batch runs

    on_train_batch_start -> training_step -> zero_grad -> on_before_backward -> LightningModule.backward
    -> on_after_backward -> on_before_optimizer_step -> clipping -> step -> on_train_batch_end

and the capture has to be open during `training_step` and during `backward`. No callback hook surrounds either of them,
so both methods are replaced on the instance for the time of a fit; strategies look them up there by name.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_persample.engine import Capture, PerSampleRecord, expanded_weights, warning_texts
from lightning_persample.errors import OptionError, PerSampleError, PerSampleWarning, UnsupportedError

if TYPE_CHECKING:
    from lightning_persample.callbacks.base import PerSampleCallback

__all__ = ["SharedCapture", "is_logging_step", "logging_step", "window_continues"]

_ABSENT = object()
_CAPTURE_OPTIONS = ("loss_reduction", "batch_dim", "batch_size")


def is_logging_step(trainer: Trainer, every_n_steps: int | None = None) -> bool:
    """Whether the optimizer step that the current batch belongs to is logged.

    Args:
        trainer: a Trainer inside its training loop.
        every_n_steps: count of optimizer steps from one logged step to the next; None follows the Trainer's own
            `log_every_n_steps`, where 0 means never.

    Returns:
        True on the steps on which ``self.log`` values reach the loggers, or on every n-th step; always in
        `fast_dev_run`, as in Lightning.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return True
    if every_n_steps is None:
        return bool(trainer._logger_connector.should_update_logs)
    return (logging_step(trainer) + 1) % every_n_steps == 0


def logging_step(trainer: Trainer) -> int:
    """The step number under which Lightning logs what happens in the current batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def window_continues(trainer: Trainer) -> bool:
    """Whether the current batch ends without an optimizer step, because gradients are being accumulated."""
    return trainer.fit_loop._should_accumulate()


class ObservedMethod:
    """Stands in a module's instance dictionary for one of its methods.

    A deep copy and a pickle of it are the method it stands for, bound to the copied module, so that copies of a module
    in the middle of a fit carry nothing of ours.

    Args:
        module: the module whose method is replaced.
        name: the method's name.
        run: called instead of the method, with the method first and then the method's arguments.
    """

    def __init__(self, module: LightningModule, name: str, run: Callable[..., Any]) -> None:
        method = getattr(module, name)
        functools.update_wrapper(self, method)
        # Lightning counts the arguments of one level of __wrapped__: it must find what it would find without us.
        self.__wrapped__ = getattr(method, "__wrapped__", method)
        self._module = module
        self._name = name
        self._own = module.__dict__.get(name, _ABSENT)
        self._method = method
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is _ABSENT:
            return getattr, (self._module, self._name)
        return _as_it_is, (self._own,)

    def install(self) -> None:
        """Take the method's place."""
        self._module.__dict__[self._name] = self

    def restore(self) -> None:
        """Put back exactly what was there; where somebody else has replaced the method since, leave theirs alone."""
        if self._module.__dict__.get(self._name) is not self:
            return
        if self._own is _ABSENT:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self._own


def _as_it_is(value: Any) -> Any:
    return value


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
        self._raise = any(callback.unsupported == "error" for callback in callbacks)
        self._said: set[str] = set()
        self._methods: tuple[ObservedMethod, ...] = ()
        self._in_training_step = False
        self._capture: Capture | None = None
        self._receivers: list[PerSampleCallback] = []
        self._batch: Any = None
        self._grad_samples: list[tuple[torch.nn.Parameter, Tensor]] = []

        _check_options_agree(trainer, self._callbacks)
        reason = _why_unsupported(trainer, pl_module)
        if reason is not None:
            self._report(UnsupportedError(f"{reason}: no per-sample gradients are captured in this fit"))
            return
        self._methods = (
            ObservedMethod(pl_module, "training_step", self._run_training_step),
            ObservedMethod(pl_module, "backward", self._run_backward),
        )
        for method in self._methods:
            method.install()

    def belongs_to(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether this is the capture of that Trainer and module."""
        return self._trainer is trainer and self._module is pl_module

    def end_batch(self) -> None:
        """Forget the batch: close the capture and remove ``grad_sample`` from the parameters. May be called twice."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
        self._receivers = []
        self._batch = None
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
        if not self._methods or self._in_training_step or not self._trainer.training:
            return training_step(*args, **kwargs)
        # An optimizer such as LBFGS runs the step several times for one batch, and each run starts anew.
        self.end_batch()
        batch = args[0] if args else next(iter(kwargs.values()), None)
        capture = self._open(batch)
        if capture is None:
            return training_step(*args, **kwargs)
        self._in_training_step = True
        try:
            with _without_compilation(), capture.observe():
                outputs = training_step(*args, **kwargs)
        finally:
            self._in_training_step = False
        self._capture, self._batch = capture, batch
        if not self._attach(capture, outputs, batch):
            self.end_batch()
        return outputs

    def _open(self, batch: Any) -> Capture | None:
        trainer = self._trainer
        # A trial fit inside the fit (a learning rate finder) takes the callbacks out of the Trainer for its time.
        present = [callback for callback in self._callbacks if callback in trainer.callbacks]  # type: ignore[attr-defined]
        self._receivers = [callback for callback in present if callback.should_capture(trainer)]
        if not self._receivers:
            return None
        quantities: set[str] = set()
        for callback in self._receivers:
            quantities |= callback.needs(trainer)
        first = self._callbacks[0]
        try:
            return expanded_weights(
                self._module,
                batch,
                loss_reduction="sum" if callable(first.loss_reduction) else first.loss_reduction,
                batch_dim=first.batch_dim,
                batch_size=first.batch_size,
                quantities=tuple(sorted(quantities)),
                unsupported="error" if self._raise else "ignore",  # what there is to warn about is said in _deliver
            )
        except OptionError:  # a callback's own mistake, not the model's
            raise
        except PerSampleError as error:
            self._report(error)
            return None

    def _attach(self, capture: Capture, outputs: Any, batch: Any) -> bool:
        """Tell the capture the loss; False where there is none to go backward from, or none that can be used."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return False
        reduction = self._callbacks[0].loss_reduction
        try:
            if callable(reduction):
                with torch.no_grad():
                    weights = reduction(outputs, batch)
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
        return True

    def _run_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        capture = self._capture
        if capture is None or not self._methods:
            return backward(*args, **kwargs)
        with _without_compilation(), capture.observe():
            result = backward(*args, **kwargs)
        self._capture = None
        capture.close()
        if len(capture.records) == 1:
            self._deliver(capture.record)
        else:
            self._report(UnsupportedError(_why_no_record(self._module, len(capture.records))))
        return result

    def _deliver(self, record: PerSampleRecord) -> None:
        for text in warning_texts(record):
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
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, PerSampleWarning, stacklevel=2)


def _without_compilation() -> AbstractContextManager[object]:
    """Run compiled code as it was written, because a capture sees nothing of it; the next step is compiled again."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _why_no_record(pl_module: LightningModule, backward_passes: int) -> str:
    name = f"{type(pl_module).__name__}.backward"
    if backward_passes == 0:
        return f"{name} reached no trainable parameter by a backward pass that can be seen: this step is not reported"
    return (
        f"{name} ran {backward_passes} backward passes, but per-sample gradients are those of exactly one: this step "
        "is not reported. Call backward once, on the loss that training_step returned"
    )


def _check_options_agree(trainer: Trainer, callbacks: Sequence[PerSampleCallback]) -> None:
    def described(callback: PerSampleCallback, option: str) -> str:
        place = trainer.callbacks.index(callback)  # type: ignore[attr-defined]
        return f"{type(callback).__name__} (callbacks[{place}]) has {option}={getattr(callback, option)!r}"

    first = callbacks[0]
    for option in _CAPTURE_OPTIONS:
        for other in callbacks[1:]:
            if getattr(first, option) != getattr(other, option):
                raise OptionError(
                    f"{described(first, option)}, but {described(other, option)}: all per-sample callbacks of a "
                    f"Trainer share one capture, so {option} must be the same for all of them"
                )


def _why_unsupported(trainer: Trainer, pl_module: LightningModule) -> str | None:
    if not pl_module.automatic_optimization:
        return "manual optimization (automatic_optimization=False) is not supported yet"
    if trainer.world_size > 1:
        return f"training on {trainer.world_size} devices is not supported yet"
    strategy = trainer.strategy
    if strategy.model is not pl_module and not isinstance(strategy.model, DistributedDataParallel):
        return f"{type(strategy).__name__} is not supported yet"
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step(self, dataloader_iter) is not supported, because it hides the batch"
    return None
