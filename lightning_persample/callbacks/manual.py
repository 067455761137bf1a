"""Manual optimization: one record for each backward inside a training step, before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_persample.callbacks.observed_step import ObservedStep
from lightning_persample.callbacks.optimizer_steps import ManualSteps
from lightning_persample.callbacks.reports import Reports
from lightning_persample.capture.failure import guard
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.torch_internals import without_torch_function

NO_BACKWARD = (
    "an optimizer stepped in training_step, but no backward pass that can be seen reached a trainable parameter in it: "
    "this step is not reported"
)
OUTSIDE_STEP = (
    "manual_backward was called outside of training_step: this backward has no record and is in no statistics; call it "
    "in training_step"
)
_STEPS = "would step the optimizers, because in manual optimization training_step does"

NOT_VERIFIED = (
    f"verify=True runs training_step again on single samples, which {_STEPS}: the values are not checked; call "
    "check_per_sample_gradients on the module and a loss function instead"
)
NO_FALLBACK = (
    f"unsupported='vmap' would run training_step again on single samples, which {_STEPS}: parameters whose gradients "
    "are not known are named and left out, as with unsupported='warn'"
)


def why_not_manual(engine: str) -> str | None:
    """Why an engine cannot be used in manual optimization, as the start of a sentence, or None."""
    if engine == "expanded":
        return None
    return f"engine={engine!r} runs training_step again on single samples, which {_STEPS}; use engine='expanded'"


class ManualStep:
    """Attends to the backward passes and the optimizers' steps inside one training step."""

    def __init__(
        self,
        step: ObservedStep,
        optimizers: Sequence[torch.optim.Optimizer],
        deliver: Callable[[PerSampleRecord], None],
        reports: Reports,
    ) -> None:
        self._step = step
        self._optimizers = optimizers
        self._deliver = deliver
        self._reports = reports
        self._announced: Tensor | None = None
        self._weights_are_wrong = False
        self._device = step.module.device.type
        self.steps = ManualSteps(step.module, optimizers, reports.warn)
        step.capture.before_backward = self._before
        step.capture.after_backward = guard(self._after, reports.report_failure)

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """See every step of an optimizer, whoever calls it, in this context."""
        handles, failed = [], self._reports.report_failure
        try:
            for place, optimizer in enumerate(self._optimizers):
                if isinstance(optimizer, torch.optim.Optimizer):
                    handles.append(optimizer.register_step_pre_hook(guard(partial(self._stepping, place), failed)))
                    handles.append(optimizer.register_step_post_hook(guard(partial(self._stepped, place), failed)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def manual_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `manual_backward` of the module: what it multiplies its loss by (loss scaling) is not left in."""
        loss = args[0] if args else kwargs.get("loss")
        self._announced = loss if isinstance(loss, Tensor) and loss.requires_grad else None
        try:
            return backward(*args, **kwargs)
        finally:
            self._announced = None

    def at_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The Trainer's hook before a step: gradients are unscaled, and a scaled step may yet be skipped."""
        for place, each in enumerate(self._optimizers):
            if each is optimizer:
                with unseen(self._device):
                    self.steps.at_step(place)

    def _stepping(self, place: int, *args: Any) -> None:
        with unseen(self._device):
            self.steps.before_step(place)

    def _stepped(self, place: int, *args: Any) -> None:
        with unseen(self._device):
            self.steps.after_step(place)

    def _before(self, roots: list[Tensor]) -> None:
        loss = self._announced
        if loss is None and len(roots) == 1:
            (loss,) = roots
        self._weights_are_wrong = False
        with unseen(self._device):
            self.steps.before_backward()
        if loss is not None and loss.requires_grad:
            try:
                self._step.attach(loss, loss)
            except PerSampleError as error:
                self._weights_are_wrong = True
                self._reports.report(error)
        self._step.start_backward()

    def _after(self, record: PerSampleRecord | None) -> None:
        # Forward and backward are in one autocast region here; a callback's own arithmetic belongs to neither.
        with unseen(self._device):
            self.steps.after_backward(record, is_valid=not self._weights_are_wrong)
        if self._weights_are_wrong or record is None:
            return
        with without_autocast(self._device), torch.enable_grad():
            text = self._step.why_sums_differ(record)
            if text is not None:
                self._reports.warn(text)
            self._deliver(record)


@contextmanager
def unseen(device: str) -> Iterator[None]:
    """What is computed in this context is in no graph, and the capture does not see it."""
    with without_torch_function(), torch.no_grad(), without_autocast(device):
        yield
