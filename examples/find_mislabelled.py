"""Flip 10% of the labels of scikit-learn's digits, train once, and find them in the ledger of that training alone."""

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleGradientWriter
from lightning_persample.influence import SampleScores, el2n, grand, read_ledger, self_influence


class DigitsModule(L.LightningModule):
    """A small network and plain SGD; what it returns beside the loss is written to the ledger."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, object]:
        images, labels = batch
        logits = self.network(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        errors = (logits.softmax(1) - F.one_hot(labels, 10)).norm(dim=1)
        return {"loss": losses.mean(), "per_sample": {"loss": losses, "el2n": errors}}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class StandStill(Callback):
    """Leaves the weights as they are for the first epoch, so that its rows are those at initialisation."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: DigitsModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = pl_module.lr if trainer.current_epoch else 0.0


def found(scores: SampleScores, flipped: Tensor) -> tuple[float, float]:
    """AUC of ranking the flipped samples first, and the share of them among the first 20%."""
    ranked = scores.scores[torch.tensor(scores.index).argsort()]
    first = ranked.argsort(descending=True)[: len(ranked) // 5]
    return float(roc_auc_score(flipped, ranked)), float(flipped[first].sum() / flipped.sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("find_mislabelled"), help="directory for the ledger")
    parser.add_argument("--fast", action="store_true", help="train for 5 epochs instead of 20")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the data is in memory
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    L.seed_everything(0, verbose=False)

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    flipped = torch.rand(len(labels)) < 0.1
    labels = torch.where(flipped, (labels + torch.randint(1, 10, labels.shape)) % 10, labels)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

    ledger = options.output / "ledger"
    callbacks = [PerSampleGradientWriter(ledger, overwrite=True), StandStill()]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=5 if options.fast else 20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=callbacks,
    )
    trainer.fit(DigitsModule(), loader)

    rows = read_ledger(ledger)
    scores = {
        "self-influence": self_influence(rows),
        "mean loss": el2n(rows, "loss"),
        "EL2N": el2n(rows),
        "GraNd": grand(rows),
        "GraNd at initialisation": grand(rows, steps=range(len(loader))),
    }
    print(f"{rows.num_rows} rows of {len(labels)} samples, {int(flipped.sum())} of them with a flipped label")
    print(f"{'score':<24}{'AUC':>7}{'recall at 20%':>15}")
    for name, each in scores.items():
        auc, recall = found(each, flipped)
        print(f"{name:<24}{auc:>7.3f}{recall:>15.3f}")
