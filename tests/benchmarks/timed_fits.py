"""Whole fits that are timed, and the ratios of pairs of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.timed_models import Built

EPOCH = 50  # batches


class Classifier(L.LightningModule):
    """Trains a module to tell ten classes apart."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.module(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def prepared_fit(
    build: Callable[[], Built], steps: int, folder: str, callbacks: list[L.Callback], accelerator: str = "cpu"
) -> Callable[[], None]:
    """A fit that is ready to run, with its logs in the folder."""
    torch.manual_seed(0)
    module, x = build()
    data = TensorDataset(x, torch.randint(0, 10, (len(x),)))
    loader = DataLoader(data, batch_size=len(x), sampler=[*range(len(x))] * EPOCH)
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator=accelerator,
        devices=1,
        logger=CSVLogger(folder),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    classifier = Classifier(module)
    return lambda: trainer.fit(classifier, loader)


def middle(ratios: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"ratio": median, "low": low, "high": high}
