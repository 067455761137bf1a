"""Modules whose gradients are collected, and what one-sample autograd gives for each of their samples.

``python -m tests.callbacks.collect_runs FOLDER`` collects in several processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_persample import (
    EigenProjection,
    PerSampleGradientWriter,
    Projection,
    UnsupportedError,
    collect_gradients,
)
from tests.callbacks.runs import make_trainer

FEATURES, CLASSES, COUNT = 5, 3, 22


class Rows(Dataset):
    """Rows that are the same every time, and the order in which they were asked for."""

    def __init__(self, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        self.asked.append(index)
        return self.inputs[index], self.labels[index]


class Net(LightningModule):
    """Has layers that differ in training, logs, counts its steps, and draws random numbers in them."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.dropout = nn.Dropout(0.4)
        self.last = nn.Linear(7, CLASSES)
        self.double()
        self.register_buffer("steps", torch.zeros(()))
        self.seen = []

    def forward(self, inputs):
        return self.last(self.dropout(torch.tanh(self.norm(self.first(inputs)))))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss})
        self.steps += 1
        self.seen.append(batch_idx)
        torch.rand(3)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def loader(count: int = COUNT, batch_size: int = 4, **options) -> DataLoader:
    return DataLoader(Rows(count), batch_size, **options)


def loop(module: nn.Module, dataset: Rows, names=None, weights=None) -> dict[str, torch.Tensor]:
    """Each sample's gradient by parameter, (samples, *shape): one sample after the other, in evaluation."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    was_training = module.training
    module.load_state_dict(state if weights is None else weights)
    module.eval()
    named = {name: p for name, p in module.named_parameters() if (p.requires_grad if names is None else name in names)}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    for inputs, label in zip(dataset.inputs, dataset.labels, strict=True):
        loss = F.cross_entropy(module(inputs[None]), label[None])
        for name, grad in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            rows[name].append(grad)
    module.load_state_dict(state)
    module.train(was_training)
    return {name: torch.stack(grads) for name, grads in rows.items()}


def stored(store, checkpoint: int = 0) -> torch.Tensor:
    """The values at a checkpoint, in the order of the samples."""
    part = store.at(checkpoint)
    values = torch.cat([block.double() for _, block in part.blocks()])
    index = torch.as_tensor(part.rows["sample_index"])
    assert len(index.unique()) == len(index)
    return values[index.argsort()]


def joined(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.flatten(1) for grad in grads.values()], 1)


def projected(grads: dict[str, torch.Tensor], projection) -> torch.Tensor:
    """What the projection's matrices make of gradients, by one einsum."""
    parts = []
    for name, grad in grads.items():
        shape = grad.shape[1:]
        left, right = projection.matrices(name, shape)
        matrix = grad.reshape(len(grad), *((1, -1) if len(shape) < 2 else (shape[0], -1)))
        parts.append(torch.einsum("ap,npd,bd->nab", left, matrix, right).flatten(1))
    return torch.cat(parts, 1)


class Stream(IterableDataset):
    """Rows that tell their own index."""

    def __iter__(self):
        rows = Rows()
        yield from ((rows.inputs[k], rows.labels[k], 100 + k) for k in range(10))


def main(folder: str) -> None:
    """Collect together with other processes: a new store, on top of what one process left, and what is refused."""
    torch.set_num_threads(1)
    trainer = make_trainer(devices=2, strategy="ddp", default_root_dir=folder)
    weights = [Net(seed).state_dict() for seed in (3, 4)]
    options = {"checkpoints": weights, "projection": None, "dtype": "float64", "trainer": trainer}
    for mode in ("new", "again"):
        data = loader(shuffle=True)
        store = collect_gradients(Net(), data, Path(folder) / mode, **options)
        torch.save({"asked": data.dataset.asked, "rows": len(store)}, Path(folder, f"{mode}.{trainer.global_rank}.pt"))
    text = ""
    try:
        collect_gradients(Net(), DataLoader(Stream(), 4), folder, sample_index=lambda batch: batch[2], **options)
    except UnsupportedError as error:
        text = str(error)
    torch.save(text, Path(folder, f"refused.{trainer.global_rank}.pt"))
    projection = EigenProjection.fit(Net(), loader(), 9, trainer=trainer)
    torch.save(
        {name: tuple(basis) for name, basis in projection.bases.items()},
        Path(folder, f"eigen.{trainer.global_rank}.pt"),
    )
    writer = PerSampleGradientWriter(Path(folder) / "ledger", projection=Projection(10**6), dtype="float64")
    fitted = make_trainer([writer], devices=2, strategy="ddp", default_root_dir=folder)
    fitted.fit(Net().eval(), DataLoader(Rows(20), 5))
    torch.save(None, Path(folder, f"fit.{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
