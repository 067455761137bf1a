"""Numbers in the Trainer's loggers, and where `ModelCheckpoint` and `EarlyStopping` look for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from lightning.pytorch import Trainer

from lightning_persample.callbacks._logger_media import unless_disk_fails
from lightning_persample.engine import of_user

__all__ = ["log_metrics", "show_means"]


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], new: Iterable[str], *, step: int) -> None:
    """Write values at one step to every logger, and some of them to `callback_metrics`."""
    # With the epoch, as Lightning adds it to the values of its own.
    for logger in trainer.loggers:
        values = {**metrics, "epoch": float(trainer.current_epoch)}
        unless_disk_fails(next(iter(metrics), ""), partial(of_user, logger.log_metrics, values, step=step))
    if not trainer.barebones:
        # Not by self.log, which goes through everything that was ever logged for each of the names.
        trainer.callback_metrics.update({name: torch.tensor(metrics[name]) for name in new})


def show_means(trainer: Trainer, name: str, means: Sequence[float | None]) -> None:
    """Show values in the progress bar."""
    names = [name] if len(means) == 1 else [f"{name}_{place}" for place in range(len(means))]
    # Not by log(..., prog_bar=True), whose names are also those of callback_metrics.
    trainer.progress_bar_metrics.update(
        {n: mean for n, mean in zip(names, means, strict=True) if mean is not None and math.isfinite(mean)}
    )
