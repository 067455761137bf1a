"""Small Trainer runs on the CPU, and what they logged."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample.callbacks import PerSampleCallback

FEATURES, CLASSES = 6, 4


class Classifier(L.LightningModule):
    """Trains `network` with cross entropy and plain SGD."""

    def __init__(self, network: nn.Module | None = None, *, reduction: str = "mean", lr: float = 0.1) -> None:
        super().__init__()
        self.network = network or nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.reduction = reduction
        self.lr = lr

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.network(inputs), labels, reduction=self.reduction)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class WithReference(Classifier):
    """Computes each sample's own gradient norm with plain autograd, before the training step sees the batch."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.reference: list[Tensor] = []

    def sample_loss(self, batch, i: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs[i : i + 1]), labels[i : i + 1])

    def on_train_batch_start(self, batch, batch_idx):
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        norms = []
        for i in range(len(batch[0])):
            gradients = torch.autograd.grad(self.sample_loss(batch, i), parameters)
            norms.append(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])))
        self.reference.append(torch.stack(norms))


class Recorder(PerSampleCallback):
    """Keeps every record it gets."""

    def __init__(self, *args, quantities=("sq_norm",), **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.quantities = quantities
        self.records = []
        self.batch_indices = []

    def needs(self, trainer):
        return set(self.quantities)

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        self.records.append(record)
        self.batch_indices.append(batch_idx)


def loader(count: int = 24, batch_size: int = 8, **kwargs) -> DataLoader:
    """Random inputs and labels, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, **kwargs)


def as_loader(batches: list) -> DataLoader:
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None)


def make_trainer(callbacks=(), tmp_path: Path | None = None, **kwargs) -> L.Trainer:
    """A Trainer without any output, except for a CSV logger in `tmp_path`."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False if tmp_path is None else CSVLogger(tmp_path),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(**{**settings, **kwargs}, callbacks=list(callbacks))


def fit(module: L.LightningModule, callbacks=(), tmp_path: Path | None = None, data=None, **kwargs) -> L.Trainer:
    """Train and return the Trainer."""
    trainer = make_trainer(callbacks, tmp_path, **kwargs)
    trainer.fit(module, loader() if data is None else data)
    return trainer


def logged(trainer: L.Trainer, start: str = "per_sample_grad/", *, epochs: bool = False) -> list[dict[str, float]]:
    """The rows of steps, or of epochs, that hold names with that start, as {name: value} with the step under "step"."""
    with open(Path(trainer.logger.log_dir) / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value != ""} for row in csv.DictReader(file)]
    rows = [{n: v for n, v in row.items() if n != "epoch"} for row in rows if any(n.startswith(start) for n in row)]
    return [row for row in rows if any(name.endswith("_epoch") for name in row) == epochs]


def of_norms(norms: Tensor, quantiles: Sequence[float] = (0.5, 0.95)) -> dict[str, float]:
    """What is logged of the norms of some samples, all of them finite, by NumPy."""
    values = norms.double().numpy()
    return {
        "norm_mean": values.mean(),
        "norm_std": values.std(ddof=1) if len(values) > 1 else math.nan,
        "norm_min": values.min(),
        "norm_max": values.max(),
        **{f"norm_p{100 * q:.10g}": np.quantile(values, q) for q in quantiles},
        "nonfinite": 0.0,
    }


def column(trainer: L.Trainer, name: str) -> list[float]:
    """The logged values of one name, in the order of the steps."""
    return [row[name] for row in logged(trainer, name)]
