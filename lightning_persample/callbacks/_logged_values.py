"""Numbers in the Trainer's loggers, and where `ModelCheckpoint` and `EarlyStopping` look for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["log_metrics"]


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
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)
    for name, count in samples.items():
        LightningModule.log(  # the module may have a `log` of its own
            pl_module,
            name,
            torch.tensor(metrics[name]),
            logger=False,
            on_step=not at_epoch_end,
            on_epoch=at_epoch_end,
            batch_size=count,
        )
