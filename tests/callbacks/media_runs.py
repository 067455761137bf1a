"""Fits with histograms; ``python -m tests.callbacks.media_runs ranks FOLDER`` is one of two processes.

With ``csv`` it is one process with a CSVLogger, which says what it has imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.strategy_models import STEPS, Referenced, network, own_batches, rank
from tests.callbacks.strategy_runs import trained


def main(mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    {"ranks": ranks, "csv": with_csv}[mode](folder)


def with_csv(folder: str) -> None:
    """Import the package as if nobody had, and fit."""
    watched = {"wandb", "mlflow", "tensorboard", "matplotlib.pyplot"}
    for name in [name for name in sys.modules if name in watched or name.startswith(("lightning_persample", "tests."))]:
        del sys.modules[name]
    import lightning_persample
    from tests.callbacks import runs

    monitor = lightning_persample.PerSampleGradientMonitor(3, histogram=True)
    runs.fit(runs.Classifier(), [monitor], logger=CSVLogger(folder))
    print(sorted(watched & set(sys.modules)))


def ranks(folder: str) -> None:
    """Ranks of five and two samples: what was logged, and how many collectives it took beside those of a plain fit."""
    sizes, runs = (5, 2), []
    for callbacks in ([], [PerSampleGradientMonitor(2, histogram=True)]):
        loggers = [TensorBoardLogger(folder, "tensorboard"), CSVLogger(folder, "csv")] if callbacks else False
        module = Referenced(network())
        runs.append(trained(module, callbacks, own_batches(sizes), DDPStrategy(), logger=loggers))
    plain, watched = runs
    result = {
        "steps": [batch for batch, name in watched["calls"] if name == "all_gather" and batch < STEPS],
        "reference": watched["reference"],
        "collectives": watched["collectives"] - plain["collectives"],
    }
    torch.save(result, Path(folder, f"{rank()}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
