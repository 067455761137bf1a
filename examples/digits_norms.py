"""Flip 5% of the labels of scikit-learn's digits, train, and find the flipped samples by their gradient norms."""

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleCallback, PerSampleGradientMonitor, PerSampleRecord


class DigitsModule(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of per-sample gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(inplace=True)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class NormsBySample(PerSampleCallback):
    """Keeps the gradient norm of every sample in every epoch."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__(every_n_steps=1)
        self.norms = torch.full((epochs, samples), torch.nan)

    def on_per_sample_gradients(self, trainer, pl_module, record: PerSampleRecord, batch, batch_idx) -> None:
        self.norms[trainer.current_epoch, record.sample_index] = record.norms()


def plot(norms: Tensor, flipped: Tensor, path: Path) -> None:
    """Left each epoch's norms as quantile bands; right how the samples' mean norms are distributed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    epochs, means = range(1, len(norms) + 1), norms.mean(0)
    bins = torch.logspace(float(means.min().log10()), float(means.max().log10()), 31).tolist()
    for name, chosen, colour in (("flipped labels", flipped, "tab:red"), ("clean labels", ~flipped, "tab:blue")):
        low, median, high = torch.quantile(norms[:, chosen], torch.tensor([0.1, 0.5, 0.9]), dim=1)
        left.plot(epochs, median, color=colour, label=name)
        left.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
        share = torch.full_like(means[chosen], 100 / float(chosen.sum()))
        right.hist(means[chosen], bins, weights=share, color=colour, alpha=0.6, orientation="horizontal", label=name)
    left.set(title="Each epoch: median, and 10% to 90% of the samples", xlabel="epoch", yscale="log")
    left.set_ylabel("per-sample gradient norm")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.yaxis.set_major_formatter("{x:g}")
    right.set(title="Mean of a sample over all epochs", xlabel="share of the samples (%)")
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("digits_norms"), help="directory for logs and plot")
    parser.add_argument("--fast", action="store_true", help="train for 3 epochs instead of 20")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the data is in memory
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    L.seed_everything(0, verbose=False)

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    flipped = torch.rand(len(labels)) < 0.05
    labels = torch.where(flipped, (labels + torch.randint(1, 10, labels.shape)) % 10, labels)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)

    epochs = 3 if options.fast else 20
    collected = NormsBySample(epochs, len(labels))
    callbacks = [PerSampleGradientMonitor(prog_bar=True), collected]
    loggers = [CSVLogger(options.output, "csv"), TensorBoardLogger(options.output, "tensorboard")]
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=10, logger=loggers, callbacks=callbacks)
    trainer.fit(DigitsModule(), loader)

    means, count = collected.norms.mean(0), int(flipped.sum())
    found = int(flipped[means.topk(count).indices].sum())
    print(f"mean gradient norm: {means[flipped].mean():.2f} of flipped samples, {means[~flipped].mean():.2f} of clean")
    print(f"of the {count} samples with the largest norms, {found} have a flipped label")
    plot(collected.norms, flipped, options.output / "norms.png")
    print(f"logs and norms.png are in {options.output}")
