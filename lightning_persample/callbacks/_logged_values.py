"""Numbers in the Trainer's loggers, and where `ModelCheckpoint` and `EarlyStopping` look for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["log_metrics", "show_means"]


def log_metrics(
    trainer: Trainer,
    pl_module: LightningModule,
    metrics: Mapping[str, float],
    samples: Mapping[str, int],
    *,
    step: int,
    at_epoch_end: bool = False,
) -> None:
    """Write values at one step to every logger, and some of them to `callback_metrics`.

    Args:
        trainer: the Trainer.
        pl_module: its module.
        metrics: the values, by name.
        samples: for those that are new, the number of samples they are of; the others keep what they were there.
        step: the step in the loggers.
        at_epoch_end: whether this is said at the end of an epoch.
    """
    # With the epoch, as Lightning adds it to the values of its own.
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": float(trainer.current_epoch)}, step=step)
    if trainer.barebones:
        return
    if at_epoch_end:  # as self.log would keep it, which on several devices advises to average what is the same on all
        trainer.callback_metrics.update({name: torch.tensor(metrics[name]) for name in samples})
        return
    for name, count in samples.items():
        LightningModule.log(  # the module may have a `log` of its own
            pl_module,
            name,
            torch.tensor(metrics[name]),
            logger=False,
            on_step=True,
            on_epoch=False,
            batch_size=count,
        )


def show_means(trainer: Trainer, name: str, means: Sequence[float | None]) -> None:
    """Show values in the progress bar.

    Args:
        trainer: the Trainer.
        name: a short one: a terminal has one line for everything that is shown.
        means: one value, or one for each optimizer, which then have its number behind the name; None shows nothing new.
    """
    names = [name] if len(means) == 1 else [f"{name}_{place}" for place in range(len(means))]
    # Not by log(..., prog_bar=True), whose names are also those of callback_metrics.
    trainer.progress_bar_metrics.update(
        {n: mean for n, mean in zip(names, means, strict=True) if mean is not None and math.isfinite(mean)}
    )
