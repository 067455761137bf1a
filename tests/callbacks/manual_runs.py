"""Manual optimization in one of two processes, named fits: ``python -m tests.callbacks.manual_runs FOLDER NAME...``.

What a run gave goes to ``FOLDER/<name>.<rank>.pt``. `tests.processes` starts the processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_persample import PerSampleGradientMonitor
from tests.callbacks.runs import Recorder
from tests.callbacks.strategy_models import rank
from tests.callbacks.strategy_runs import trained
from tests.callbacks.test_optimizer_steps import Trunk
from tests.callbacks.ways import BATCH, CLASSES, FEATURES, GAN, Referred

STEPS = 6


def own_batches() -> list[tuple[torch.Tensor, ...]]:
    """Four samples a batch, other ones in each process."""
    generator = torch.Generator().manual_seed(7 + rank())
    inputs = [torch.randn(BATCH, FEATURES, generator=generator) for _ in range(STEPS)]
    return [(each, torch.randint(0, CLASSES, (BATCH,), generator=generator)) for each in inputs]


class RestsOnOneRank(Trunk):
    """The second optimizer of rank 1 does not step on odd batches, and that of neither on the last one."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.go_backward(self.loss_of_both, *batch)
        first.step()
        if batch_idx < STEPS - 1 and (batch_idx % 2 == 0 or rank() == 0):
            second.step()


class Accumulates(Trunk):
    """Two backward passes; the gradients of the first are averaged over processes together with those of the second."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        inputs, labels = batch
        with first.toggle_model(sync_grad=False):
            self.go_backward(self.loss_of_first, inputs, labels)
        with first.toggle_model(sync_grad=True):
            self.go_backward(self.loss_of_first, 2 * inputs, labels)
        first.step()


class FailsOnOneRank(Trunk):
    """Takes a batch whose tensors do not agree about its size."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch[:2], batch_idx)


class NoBackwardOnOneRank(Trunk):
    """Rank 1 has no backward that can be seen in its third batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            with self.trainer.strategy.model.no_sync():
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                if rank() == 0:
                    self.go_backward(self.loss_of_both, *batch)
                    for optimizer in self.optimizers():
                        optimizer.step()
            return
        super().training_step(batch, batch_idx)


def both(kind: type[Referred], data: list[Any], every: int = 1) -> dict[str, Any]:
    """A fit without callbacks and with the loop, and one with them."""
    runs = {}
    for name in ("plain", "watched"):
        torch.manual_seed(3)
        monitors = [PerSampleGradientMonitor(every), PerSampleGradientMonitor(3, prefix="per_sample_third")]
        callbacks = [] if name == "plain" else [*monitors, Recorder(1)]
        strategy = DDPStrategy(find_unused_parameters=True)
        runs[name] = trained(kind(name == "plain"), callbacks, data, strategy)
    return runs


def main(folder: str, *names: str) -> None:
    """Do the named runs."""
    torch.set_num_threads(1)
    kinds = {each.__name__: each for each in (Trunk, GAN, RestsOnOneRank, Accumulates, FailsOnOneRank)}
    kinds["NoBackwardOnOneRank"] = NoBackwardOnOneRank
    for name in names:
        data: list[Any] = list(own_batches())
        if name == "FailsOnOneRank" and rank() == 1:
            data[2] = (*data[2], torch.zeros(3, 2))
        torch.save(both(kinds[name], data, 2 if name == "GAN" else 1), Path(folder) / f"{name}.{rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
