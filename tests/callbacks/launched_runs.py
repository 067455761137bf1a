"""The Trainer starts the other process itself; run as ``python -m tests.callbacks.launched_runs STRATEGY FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.runs import Recorder, as_loader, make_trainer
from tests.callbacks.strategy_models import STEPS, Referenced, joined, network
from tests.callbacks.strategy_runs import Steps


class Launched(Referenced):
    """Each process makes its own batches, four samples of each joined batch."""

    def train_dataloader(self):
        chosen = slice(4 * self.trainer.global_rank, 4 * self.trainer.global_rank + 4)
        return as_loader([(inputs[chosen], labels[chosen]) for inputs, labels in joined()])


class Saves(L.Callback):
    """Writes what this process has at the end of a fit."""

    def __init__(self, start: Path) -> None:
        self.start = start

    def on_fit_end(self, trainer, pl_module):
        found = {type(callback): callback for callback in trainer.callbacks}
        run = {
            "weights": {name: parameter.detach() for name, parameter in pl_module.named_parameters()},
            "values": found[Steps].values if Steps in found else [],
            "norms": [record.norms() for record in found[Recorder].records] if Recorder in found else [],
            "reference": pl_module.reference,
        }
        torch.save(run, f"{self.start}.{trainer.global_rank}.pt")


class Fails(Launched):
    """The second process fails in its fourth step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.trainer.global_rank == 1:
            raise RuntimeError("a mistake in training_step")
        return super().training_step(batch, batch_idx)


def main(strategy: str, folder: str, fits: str) -> None:
    """Fit with one module and the same callbacks, which go to the other process anew each time, and without them."""
    torch.set_num_threads(1)
    settings = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    if fits == "fails":
        make_trainer([PerSampleGradientMonitor(1)], **settings).fit(Fails(network()))
    for kind, callbacks in {"plain": [], "watched": [PerSampleGradientMonitor(STEPS), Recorder(1), Steps()]}.items():
        module = Launched(network())
        for fit in range(int(fits)):
            trainer = make_trainer([*callbacks, Saves(Path(folder, f"{kind}.{fit}"))], **settings)
            trainer.fit(module)
            print("left behind:", "training_step" in module.__dict__, sorted(trainer.callback_metrics))


if __name__ == "__main__":
    main(*sys.argv[1:])
