"""What the shared capture of a Trainer knows of the callbacks it serves, asks of them, and reports to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_persample.callbacks.lightning_internals import why_strategy_is_unsupported
from lightning_persample.capture.failure import FAULT, fault_of, of_user, stop
from lightning_persample.capture.record import PerSampleRecord, warn_user, warning_texts
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.options import CAPTURE_DEFAULTS, CaptureOptions


class Consumer(Protocol):
    """A `PerSampleCallback`, as far as the capture goes: its options, what it asks for and where records go."""

    every_n_steps: int | None

    def needs(self, trainer: Trainer) -> set[str]:
        """The quantities that it reads."""

    def should_capture(self, trainer: Trainer) -> bool:
        """Whether it wants the record of the current batch."""

    def receives_records(self) -> bool:
        """Whether it does anything with the records."""

    def _capture_options(self) -> CaptureOptions: ...

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Take the record of a captured batch."""

    def _backward_starts(self, trainer: Trainer) -> None: ...

    def _backward_ended(self, trainer: Trainer, record: PerSampleRecord | None) -> None: ...

    def _goes_by_steps(self) -> bool: ...

    def _rest(self, *, automatic: bool) -> bool: ...

    def _end_rest(self, *, has_missed: bool) -> None: ...

    def _skip_hooks(self) -> None: ...

    def _restore_hooks(self) -> None: ...


_EACH_ITS_OWN = {"unsupported", "verify"}


def check_options_agree(trainer: Trainer, callbacks: Sequence[Consumer]) -> None:
    """Refuse callbacks that cannot share one capture."""

    def described(callback: Consumer, option: str) -> str:
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


def why_unsupported(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why this way of training cannot be captured, or None where it can."""
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step(self, dataloader_iter) is not supported, because it hides the batch"
    return why_strategy_is_unsupported(trainer, pl_module)


_SIZES = re.compile(r"\([\d, ]*\)")


class Reports:
    """Hands records to callbacks, and says each trouble once in a fit, or raises it."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule, *, raises: bool) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._raises = raises
        self._said: set[str] = set()
        self.has_said_fault = False  # whether values are missing by a fault of this package
        self._grad_samples: dict[torch.nn.Parameter, Tensor] = {}

    def deliver(self, record: PerSampleRecord, receivers: Sequence[Consumer], batch: Any) -> None:
        """Give a record to the callbacks that want it, and its gradients to the parameters."""
        texts = warning_texts(record)
        if record.unsupported and self._raises:
            stop(UnsupportedError(texts[0]))
        for text in texts:
            self.warn(text)
        if record.grad_samples:
            parameters = dict(self._module.named_parameters(remove_duplicate=False))
            for name, grad_sample in record.grad_samples.items():
                self._grad_samples[parameters[name]] = grad_sample  # first: an interrupt may come at any moment
                parameters[name].grad_sample = grad_sample  # type: ignore[attr-defined]
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        for callback in receivers:
            of_user(callback.on_per_sample_gradients, self._trainer, self._module, record, batch, batch_idx)

    def end_batch(self) -> None:
        """Remove ``grad_sample`` from the parameters."""
        for parameter, grad_sample in self._grad_samples.items():
            if getattr(parameter, "grad_sample", None) is grad_sample:
                del parameter.grad_sample  # type: ignore[attr-defined]
        self._grad_samples = {}

    def report(self, error: PerSampleError) -> None:
        """Say why something is not captured, or raise it if a callback has ``unsupported="error"``."""
        if self._raises:
            stop(error)
        self.warn(str(error))

    def report_failure(self, error: Exception) -> None:
        """`report` what has failed in this package, by its own fault unless it is a `PerSampleError`."""
        if not isinstance(error, PerSampleError):
            error = UnsupportedError(fault_of(error, "the capture of the training step"))
        self.report(error)

    def warn(self, text: str) -> None:
        """Say each thing once: the same trouble with tensors of other sizes is the same trouble, and a fault is one."""
        said = FAULT if FAULT in text else _SIZES.sub("", text)
        self.has_said_fault |= FAULT in text
        if said not in self._said:
            self._said.add(said)
            warn_user(text)
