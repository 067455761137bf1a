"""Linear regression with Gaussian inputs, of which the noise scale is known; a fit in one of several processes.

With y = x.u + s e, weights w = 0 and the loss (x.w - y)^2 / 2, a sample has the gradient g = -x (x.u + s e), mean -u;
E |g|^2 = E |x|^2 (x.u)^2 + s^2 E |x|^2 = (d + 2) |u|^2 + d s^2. So tr(Sigma) = (d + 1) |u|^2 + d s^2, over |u|^2.

Run as ``python -m tests.callbacks.known_noise_scale FOLDER ACCUMULATE``.
"""

from __future__ import annotations

import os
import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.runs import make_trainer

D, NOISE, BATCH_SIZE, STEPS = 5, 1.0, 32, 60
DIRECTION = torch.tensor([0.6, 0.0, -0.8, 0.0, 0.0])
TRACE, SQ_NORM = (D + 1) * 1.0 + D * NOISE**2, 1.0


class Regression(L.LightningModule):
    """Stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return (self.layer(inputs).flatten() - targets).square().mean() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def main(folder: str, accumulate: str) -> None:
    """Steps of BATCH_SIZE samples times the accumulated batches times the processes, each with data of its own."""
    torch.set_num_threads(1)
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(7 + rank)
    inputs = torch.randn(STEPS * int(accumulate) * BATCH_SIZE, D)
    targets = inputs @ DIRECTION + NOISE * torch.randn(len(inputs))
    data = DataLoader(TensorDataset(inputs, targets), BATCH_SIZE)
    settings = {"devices": processes, "strategy": "ddp", "use_distributed_sampler": False} if processes > 1 else {}
    trainer = make_trainer(
        [PerSampleGradientMonitor()], folder, accumulate_grad_batches=int(accumulate), max_epochs=1, **settings
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
