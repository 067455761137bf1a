"""Fits whose modules note the batches that they train on, and what a probe must have made of the labels.

``python -m tests.callbacks.label_noise_runs ranks FOLDER`` is a fit of several processes.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_persample import LabelNoiseProbe
from tests.callbacks.runs import make_trainer

COUNT, CLASSES = 40, 4
Pair = namedtuple("Pair", ["inputs", "label"])


def parts(count=COUNT):
    """Inputs whose first feature is the index, and labels that the others decide."""
    inputs = torch.randn(count, 1 + CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[:, 0] = torch.arange(count)
    return inputs, inputs[:, 1:].argmax(1)


def noisy(labels, fraction=0.2, seed=0, classes=tuple(range(CLASSES))):
    """The labels with flips, as the class says them, drawn again: samples first, then how many classes further."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(labels), generator=generator)[: max(1, round(fraction * len(labels)))]
    further = torch.randint(1, len(classes), index.shape, generator=generator)
    new = labels.clone()
    for place, offset in zip(index.tolist(), further.tolist(), strict=True):
        new[place] = classes[(classes.index(int(labels[place])) + offset) % len(classes)]
    return new


class Noting(L.LightningModule):
    """Notes the index and the label of each sample that it trains on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, CLASSES)).double()
        self.trained = []

    def inputs_and_labels(self, batch):
        return (batch["inputs"], batch["label"]) if isinstance(batch, dict) else batch

    def training_step(self, batch, batch_idx):
        inputs, labels = self.inputs_and_labels(batch)
        self.trained += zip(inputs[:, 0].int().tolist(), labels.tolist(), strict=True)
        return F.cross_entropy(self.net(inputs[:, 1:]), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.5)


class Validating(Noting):
    """Notes those that it validates on, too."""

    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        inputs, labels = self.inputs_and_labels(batch)
        self.validated += zip(inputs[:, 0].int().tolist(), labels.tolist(), strict=True)


class Samples(Dataset):
    """Samples of one kind, made at each access of what it holds."""

    def __init__(self, make=lambda x, y: (x, y), labels=None):
        self.inputs, self.labels = parts()
        self.labels = self.labels if labels is None else labels
        self.make = make

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.make(self.inputs[index], self.labels[index])


def as_dict(x, y):
    return {"inputs": x, "label": y}


def relabel_dict(sample, change):
    return {**sample, "label": change(sample["label"])}


def fit(probe, module=None, data=None, *, seed=5, ckpt_path=None, callbacks=(), validation=None, **settings):
    """A fit with random numbers that begin alike; the module."""
    module = module or Noting()
    torch.manual_seed(seed)
    data = DataLoader(TensorDataset(*parts()), 8, shuffle=True) if data is None else data
    trainer = make_trainer([*([] if probe is None else [probe]), *callbacks], **{"max_epochs": 2, **settings})
    trainer.fit(module, data, validation, ckpt_path=ckpt_path)
    return module


def main(mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    probe = LabelNoiseProbe(0.2, dirpath=Path(folder) / "ledger")
    settings = {"max_epochs": 12, "devices": 2, "strategy": "ddp", "default_root_dir": folder}
    module = fit(probe, data=DataLoader(TensorDataset(*parts()), 4, shuffle=True), **settings)
    found = {"trained": module.trained, "report": probe.report, "flipped": probe.flipped}
    torch.save(found, Path(folder, f"{mode}.{module.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
