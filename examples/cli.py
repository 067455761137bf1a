"""Train on scikit-learn's digits as a YAML file says: python examples/cli.py fit --config examples/cli.yaml."""

import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CLASS_WEIGHTS = torch.tensor([1.0] * 8 + [2.0] * 2)  # eights and nines count twice


def share_of_the_loss(outputs: Any, batch: Any) -> Tensor:
    """Each sample's weight in the loss; the YAML file names this function, which needs its annotation for that."""
    weights = CLASS_WEIGHTS[batch[1]]
    return weights / weights.sum()


class DigitsClassifier(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of per-sample gradients."""

    def __init__(self, hidden: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, 10)
        self.learning_rate = learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.encoder(batch[0])), batch[1], weight=CLASS_WEIGHTS)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        accuracy = (self.head(self.encoder(batch[0])).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Digits(L.LightningDataModule):
    """1797 images of 8 x 8 pixels, a fifth of them for validation."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        pixels, digits = load_digits(return_X_y=True)
        images = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
        self.train, self.val = random_split(images, [0.8, 0.2], torch.Generator().manual_seed(0))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the data is in memory
    LightningCLI(DigitsClassifier, Digits)
