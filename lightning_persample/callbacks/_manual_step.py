"""Manual optimization: one record for each backward inside a training step, before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_persample.callbacks._observed_step import ObservedStep
from lightning_persample.engine import PerSampleRecord
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients.precision import without_autocast

__all__ = ["NOT_VERIFIED", "NO_BACKWARD", "ManualStep", "why_not_manual"]

NO_BACKWARD = (
    "an optimizer stepped in training_step, but no backward pass that can be seen reached a trainable parameter in it: "
    "this step is not reported"
)
_STEPS = "would step the optimizers, because in manual optimization training_step does"

NOT_VERIFIED = (
    f"verify=True runs training_step on single samples aside, which {_STEPS}: the values are not checked; call "
    "check_per_sample_gradients on the module and a loss function instead"
)


def why_not_manual(engine: str) -> str | None:
    """Why an engine cannot be used in manual optimization, as the start of a sentence, or None."""
    if engine == "expanded":
        return None
    return f"engine={engine!r} runs training_step on single samples aside, which {_STEPS}; use engine='expanded'"


class ManualStep:
    """Attends to the backward passes inside one training step.

    Args:
        step: the observed step.
        deliver: is given each record, when its backward has run and before the next line of `training_step`.
        warn: is told what does not add up.
        report: is told why a backward cannot be split by sample.
    """

    def __init__(
        self,
        step: ObservedStep,
        deliver: Callable[[PerSampleRecord], None],
        warn: Callable[[str], None],
        report: Callable[[PerSampleError], None],
    ) -> None:
        self._step = step
        self._deliver = deliver
        self._warn = warn
        self._report = report
        self._announced: Tensor | None = None
        self._weights_are_wrong = False
        self._device = step.module.device.type
        step.capture.before_backward = self._before
        step.capture.after_backward = self._after

    def manual_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `manual_backward` of the module: what it multiplies its loss by (loss scaling) is not left in."""
        loss = args[0] if args else kwargs.get("loss")
        self._announced = loss if isinstance(loss, Tensor) and loss.requires_grad else None
        try:
            return backward(*args, **kwargs)
        finally:
            self._announced = None

    def _before(self, roots: list[Tensor]) -> None:
        loss = self._announced
        if loss is None and len(roots) == 1:
            (loss,) = roots
        self._weights_are_wrong = False
        if loss is not None and loss.requires_grad:
            try:
                self._step.attach(loss, loss)
            except PerSampleError as error:
                self._weights_are_wrong = True
                self._report(error)
        self._step.start_backward()

    def _after(self, record: PerSampleRecord) -> None:
        if self._weights_are_wrong:
            return
        # Forward and backward are in one autocast region here; a callback's own arithmetic belongs to neither.
        with without_autocast(self._device), torch.enable_grad():
            text = self._step.why_sums_differ(record)
            if text is not None:
                self._warn(text)
            self._deliver(record)
