"""A process that writes to a folder, another one that wants it, and what is left when the first is killed.

``python -m tests.callbacks.two_writers FOLDER``, POSIX. What it finds it prints as JSON in the last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_persample import OptionError, PerSampleError, PerSampleGradientWriter, collect_gradients
from lightning_persample.influence import GradientStore, read_ledger
from tests.callbacks.ledger_runs import Noted, data, fit

SAMPLES = 22


class Waits(Noted):
    """Says that it has come to a batch, and waits there to be killed."""

    def __init__(self, batch: int, there: Path) -> None:
        super().__init__()
        self.batch, self.there = batch, there

    def training_step(self, batch, batch_idx):
        if batch_idx == self.batch:
            self.there.touch()
            time.sleep(60)
        return super().training_step(batch, batch_idx)


def fits(folder: Path, module: Noted | None = None, **options) -> None:
    fit(PerSampleGradientWriter(folder, flush_every=1, **options), module, max_epochs=1)


def collects(folder: Path, module: Noted | None = None, **options) -> None:
    collect_gradients(module or Noted(), data(), folder, rows_per_shard=4, **options)


def tried(function: Callable[[], object]) -> str:
    try:
        return f"{function()}"
    except (OptionError, PerSampleError) as error:
        return str(error)


def found(folder: Path, write: Callable[..., None], read: Callable[..., int], batch: int) -> dict[str, object]:
    """What others are told while a process is at this batch, and what they do with what it leaves."""
    there = folder.with_name(f"{folder.name} is there")
    child = os.fork()
    if child == 0:
        write(folder, Waits(batch, there))
        os._exit(0)
    while not there.exists():
        time.sleep(0.01)
    files = sorted(path.name for path in folder.iterdir())
    said = {name: tried(lambda options=options: write(folder, **options)) for name, options in OPTIONS.items()}
    same = sorted(path.name for path in folder.iterdir()) == files
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = [tried(lambda: read(folder)), tried(lambda: read(folder, partial=True))]
    after = {name: tried(lambda options=options: write(folder, **options)) for name, options in OPTIONS.items()}
    return {"while": said, "untouched": same, "left": left, "after": after, "rows": tried(lambda: read(folder))}


OPTIONS = {"plain": {}, "overwrite": {"overwrite": True}}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for batch in (0, 2):
        for name, write, read in (
            ("fit", fits, lambda path, **options: read_ledger(path, **options).num_rows),
            ("collect", collects, lambda path, **options: len(GradientStore(path, **options))),
        ):
            results[f"{name} {batch}"] = found(Path(folder, f"{name}_{batch}"), write, read, batch)
    print()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
