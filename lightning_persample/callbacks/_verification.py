"""Compare the engine with the one-sample loop on a batch of the training, in a second pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_persample.callbacks._consumer import Consumer
from lightning_persample.callbacks._second_pass import NoLossError, second_pass
from lightning_persample.engine import check_per_sample_gradients, warn_user
from lightning_persample.engine.diagnosis import RANDOM
from lightning_persample.engine.samples import loss_of
from lightning_persample.errors import VerificationError

__all__ = ["verify_values"]

_NAMED = 8


def verify_values(
    trainer: Trainer,
    pl_module: LightningModule,
    options: Consumer,
    training_step: Callable[[Any], Any],
    batch: Any,
    *,
    batch_size: int | None,
    allow_missing: bool,
) -> bool:
    """Check the per-sample gradients of a few samples."""
    calls = 0

    def loss_fn(module: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        outputs = training_step(batch)
        if loss_of(outputs) is None:
            raise NoLossError("training_step returned None")
        return outputs

    with second_pass(trainer, pl_module):
        report = check_per_sample_gradients(
            pl_module,
            batch,
            loss_fn,
            loss_reduction=options.loss_reduction,
            batch_dim=options.batch_dim,
            batch_size=batch_size,
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
