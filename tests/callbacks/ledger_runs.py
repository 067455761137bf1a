"""Fits that write a ledger, and what their modules note of every sample by themselves.

``python -m tests.callbacks.ledger_runs ranks FOLDER`` are fits of several processes: one in which a process that writes
its rows slowly saves a checkpoint together with the others, and one that is read by itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_persample.callbacks import PerSampleGradientWriter
from lightning_persample.influence import read_ledger
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, make_trainer
from tests.callbacks.strategy_models import rank

GROUPS = ("network.0", "network.2")
NAMES = ("step", "epoch", "batch_idx", "rank", "row", "sample_index", "learning_rate", "norm", "loss", "is_first")
NAMES += tuple(f"norm/{group}" for group in GROUPS)


class Noted(Classifier):
    """Notes of every sample, by plain autograd on it alone and in float64, what its row has to hold."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.double()
        self.notes: list[dict[str, float]] = []

    def losses(self, batch):
        return F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")

    def on_train_batch_start(self, batch, batch_idx):
        named = dict(self.named_parameters())
        (rate,) = {group["lr"] for group in self.trainer.optimizers[0].param_groups}
        for place, index in enumerate(batch[2].tolist()):
            sample = [part[place : place + 1] for part in batch]
            loss = self.losses(sample).squeeze()
            value = loss.item()
            squares = dict.fromkeys(GROUPS, 0.0)
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
                squares[name.rpartition(".")[0]] += float(gradient.square().sum())
            note = {"step": self.trainer.global_step, "epoch": self.current_epoch, "batch_idx": batch_idx}
            note |= {"rank": self.global_rank, "row": place, "sample_index": index, "learning_rate": rate}
            note |= {"norm": sum(squares.values()) ** 0.5, "loss": value, "is_first": index == 0}
            self.notes.append(note | {f"norm/{group}": square**0.5 for group, square in squares.items()})

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        return {"loss": losses.mean(), "per_sample": {"loss": losses, "is_first": batch[2] == 0}}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithDropout(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.network.insert(1, nn.Dropout(0.3))

    def on_train_batch_start(self, batch, batch_idx):
        """Note nothing: it would draw random numbers."""


def data(count: int = 22, batch_size: int = 4, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels, torch.arange(count)), batch_size, **options)


def fit(writer, module=None, loader=None, ckpt_path=None, callbacks=(), **settings):
    """A fit with a writer; its module."""
    module = module or Noted()
    trainer = make_trainer([writer, *callbacks], **settings)
    trainer.fit(module, loader or data(shuffle=True), ckpt_path=ckpt_path)
    return module


class StopAfter(Callback):
    """Fails after a batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches -= 1
        if self.batches == 0:
            raise KeyError("stopped")


class SaveAfter(Callback):
    """Saves a checkpoint after a batch, behind the writer."""

    def __init__(self, batches: int, path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)


def rows(folder, names=NAMES, **options):
    return read_ledger(folder, **options).select(list(names)).to_pylist()


def assert_rows(found, notes):
    """One row for each note, in the order of the training, and equal to 1e-10."""
    assert len(found) == len(notes)
    for row, note in zip(found, notes, strict=True):
        assert row == {name: pytest.approx(note[name], rel=1e-10) for name in row}


class SlowOnOne(PerSampleGradientWriter):
    """Comes to write the rows of process 1 late."""

    def _flush(self, trainer):
        if trainer.global_rank == 1 and self._captured:
            time.sleep(1)
        super()._flush(trainer)


class LooksWhenSaving(TorchCheckpointIO):
    """Notes which rows are on the disk when the checkpoint is written."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(rows(self.ledger, ("step", "rank", "row"), partial=True), Path(path).parent / "at_checkpoint.pt")
        super().save_checkpoint(checkpoint, path, storage_options)


def main(mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    loader = data(24, 3, sampler=DistributedSampler(range(24), 2, rank(), shuffle=False))
    saved = Path(folder) / "saved"
    settings = {"devices": 2, "strategy": "ddp", "default_root_dir": folder, "plugins": LooksWhenSaving(saved)}
    fit(SlowOnOne(saved), loader=loader, callbacks=[SaveAfter(3, Path(folder) / "middle.ckpt")], **settings)
    writer = PerSampleGradientWriter(Path(folder) / "ledger", flush_every=2, per_layer=2)
    module = fit(writer, loader=loader, devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder)
    refused = ""
    try:
        fit(PerSampleGradientWriter(Path(folder) / "ledger"), loader=loader, devices=2, strategy="ddp")
    except ValueError as error:
        refused = str(error)
    torch.save({"notes": module.notes, "refused": refused}, Path(folder, f"{mode}.{module.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
