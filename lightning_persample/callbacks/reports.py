"""What the shared capture of a Trainer hands to the callbacks it serves, and says to the user."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_persample.capture.failure import FAULT, fault_of, of_user, stop
from lightning_persample.capture.record import ROWS_MADE, PerSampleRecord, warn_user, warning_texts
from lightning_persample.errors import PerSampleError, UnsupportedError

_SIZES = re.compile(r"\([\d, ]*\)| \(\d+ of \d+ add nothing[^)]*\)|\d+ (?=samples|rows)")


class Reports:
    """Hands records to callbacks, and says each trouble once in a fit, or raises it."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule, *, raises: bool) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._raises = raises
        self._said: set[str] = set()
        self.texts: list[str] = []  # of the warnings, as they were given
        self.has_said_fault = False  # whether values are missing by a fault of this package
        self._grad_samples: dict[torch.nn.Parameter, Tensor] = {}

    def deliver(self, record: PerSampleRecord, receivers: Sequence[Any], batch: Any) -> None:
        """Give a record to the callbacks that want it, and its gradients to the parameters."""
        texts = warning_texts(record)
        if record.unsupported and self._raises:
            stop(UnsupportedError(texts[0]))
        for text in texts:
            self.warn(text)
        grad_samples = record._asked_grad_samples
        if grad_samples:
            parameters = dict(self._module.named_parameters(remove_duplicate=False))
            for name, grad_sample in grad_samples.items():
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

    def refuse(self, reason: str) -> None:
        """`report` that something is not supported, and why."""
        self.report(UnsupportedError(reason))

    def report_failure(self, error: Exception) -> None:
        """`report` what has failed in this package, by its own fault unless it is a `PerSampleError`."""
        if not isinstance(error, PerSampleError):
            error = UnsupportedError(fault_of(error, "the capture of the training step"))
        self.report(error)

    def warn(self, text: str) -> None:
        """Say each thing once: the same trouble with tensors of other sizes is the same trouble, and a fault is one."""
        said = FAULT if FAULT in text else _SIZES.sub("", ROWS_MADE.sub("", text))
        self.has_said_fault |= FAULT in text
        if said not in self._said:
            remedies = set(ROWS_MADE.findall(text))
            for remedy in remedies & self._said:
                text = text.replace(remedy, "")
            self._said |= {said, *remedies}
            self.texts.append(text)
            warn_user(text)
