"""Fits of two processes on one dataset; run as ``python -m tests.callbacks.indexed_ranks FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_persample import PerSampleGradientMonitor
from tests.callbacks.indexed_data import Indexed, WithNorms, seed_all
from tests.callbacks.runs import Recorder, make_trainer
from tests.callbacks.strategy_models import rank

COUNT = 23  # odd: the sampler repeats one sample


def fit(workers: int, callbacks, **settings):
    """Lightning gives each process a DistributedSampler of its own, which shuffles anew in each epoch."""
    seed_all()
    module = WithNorms()
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = make_trainer(callbacks, devices=2, strategy="ddp", **settings)
    trainer.fit(module, DataLoader(Indexed(COUNT), 3, shuffle=True, num_workers=workers), ckpt_path=ckpt_path)
    return trainer, module


def result(module, monitor, recorder):
    """What tests compare, as plain containers."""
    return {
        "own": [batch[1].tolist() for batch in module.batches],
        "index": [record.sample_index.tolist() for record in recorder.records],
        "norms": module.norms,
        "worst": None if monitor is None else monitor.worst(5).rows(),
        "samples": None if monitor is None else monitor.worst(5).samples,
        "inputs": [batch[0] for batch in module.batches],
        "weights": [parameter.detach() for parameter in module.parameters()],
        "random": torch.get_rng_state(),
    }


def main(folder: str) -> None:
    """Without and with callbacks, with workers, and resumed after a checkpoint in the second epoch."""
    torch.set_num_threads(1)
    for workers in (0, 2):
        for name, callbacks in {
            "plain": [],
            "watched": [PerSampleGradientMonitor(1, worst_samples=4), Recorder(1)],
        }.items():
            _, module = fit(workers, callbacks, max_epochs=2, default_root_dir=folder)
            monitor, recorder = callbacks or (None, Recorder(1))
            torch.save(result(module, monitor, recorder), Path(folder, f"{name}.{workers}.{rank()}.pt"))
    stopped = PerSampleGradientMonitor(1)
    trainer, first = fit(0, [stopped], max_steps=6, max_epochs=-1)
    checkpoint = Path(folder, "middle.ckpt")
    trainer.save_checkpoint(checkpoint)
    monitor, recorder = PerSampleGradientMonitor(1), Recorder(1)
    _, second = fit(0, [monitor, recorder], max_epochs=3, ckpt_path=checkpoint)
    run = {**result(second, monitor, recorder), "before": first.norms}
    torch.save(run, Path(folder, f"resumed.0.{rank()}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
