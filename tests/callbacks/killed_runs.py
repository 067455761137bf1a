"""Fits that are killed and resumed: ``python -m tests.callbacks.killed_runs FOLDER MOMENTS SEED``, for POSIX.

The fits run in forks of this process, which itself trains nothing. Half of the moments are of time, half are one of the
calls that write, rename or remove a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from lightning_persample.callbacks import PerSampleGradientWriter
from lightning_persample.influence import dataset, read_ledger
from tests import killed_processes
from tests.callbacks.ledger_runs import Noted, SaveAfter, assert_rows, data, fit, rows
from tests.killed_processes import die_at_call, say

BATCHES, SIZE = 8, 3  # batches of an epoch, and samples of a batch
EPOCHS = 3
NAMES = ("step", "epoch", "batch_idx", "row", "sample_index", "learning_rate", "norm", "loss")


class Logged(Noted):
    """Writes its notes to a file at once, a line for each batch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_start(self, batch, batch_idx):
        self.notes = []
        super().on_train_batch_start(batch, batch_idx)
        say(self.path, {"notes": self.notes})


class SaveEach(SaveAfter):
    """Saves a checkpoint after every fifth batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.batches = self.batches or 5


class Killed(Noted):
    def training_step(self, batch, batch_idx):
        os._exit(9)


def free_after_a_kill_before_the_first_row(folder: Path) -> None:
    assert not killed_processes.in_fork(lambda: fit(PerSampleGradientWriter(folder), Killed()), 60.0, interval=0.01)
    assert (folder / "_manifest.json").exists()

    def again() -> None:
        notes = fit(PerSampleGradientWriter(folder)).notes
        assert_rows(rows(folder, NAMES), notes)

    assert killed_processes.in_fork(again, 60.0, interval=0.01)
    print("a run killed before its first row: its folder is free")


def train(folder: Path, kill_at_call: int) -> None:
    """A fit from the latest checkpoint, which ends itself at one of its calls."""
    calls = die_at_call(kill_at_call)
    write = dataset.PartWriter.write

    def write_and_say(parts):
        steps = [step for table in parts._waiting for step in table["step"].to_pylist()]
        write(parts)
        if steps:
            say(folder / "log", {"flushed": max(steps)})

    dataset.PartWriter.write = write_and_say
    checkpoint = folder / "latest.ckpt"
    say(folder / "log", {"from": torch.load(checkpoint)["global_step"] if checkpoint.exists() else 0})
    writer = PerSampleGradientWriter(folder / "ledger", flush_every=2, overwrite=True)
    fit(
        writer,
        Logged(folder / "log"),
        data(BATCHES * SIZE, SIZE, shuffle=True),
        checkpoint if checkpoint.exists() else None,
        [SaveEach(5, checkpoint)],
        max_epochs=EPOCHS,
    )
    say(folder / "log", {"calls": calls()})


def in_fork(folder: Path, kill_at_call: int = 0, kill_after: float = 60.0) -> bool:
    """Train in a fork that is killed after some seconds at the latest; whether it came to its end."""
    return killed_processes.in_fork(lambda: train(folder, kill_at_call), kill_after, interval=0.0005)


def logged(folder: Path):
    """The notes of the batches by step, the latest of each, and the last step that was flushed."""
    notes, flushed = {}, -1
    for line in (folder / "log").read_text().splitlines() if (folder / "log").exists() else ():
        found = json.loads(line)
        for note in found.get("notes", ()):
            if note["row"] == 0:
                notes[note["step"]] = []
            notes[note["step"]].append({name: note[name] for name in NAMES})
        flushed = max(flushed, found.get("flushed", -1))
        flushed = min(flushed, found.get("from", BATCHES * EPOCHS) - 1)  # what is trained again is written again
    return notes, flushed


def check(folder: Path, *, is_whole: bool) -> None:
    """Every file is readable, every row is once, and none of a step that was flushed is missing."""
    notes, flushed = logged(folder)
    is_there = (folder / "ledger" / "_manifest.json").exists()
    by_step = {}
    for row in read_ledger(folder / "ledger", partial=not is_whole).to_pylist() if is_there else []:
        by_step.setdefault(row["step"], []).append(row)
    steps = range(EPOCHS * BATCHES if is_whole else flushed + 1)
    assert set(steps) <= by_step.keys(), (sorted(by_step), flushed)
    for step, found in by_step.items():
        assert len(found) == SIZE, (step, found)
        if step in steps:
            assert all(
                abs(row[name] - note[name]) <= 1e-9 * (1 + abs(note[name]))
                for row, note in zip(found, notes[step], strict=True)
                for name in NAMES
            ), (step, found, notes[step])


def killed_on_its_way(folder: Path, moment: int, calls: int, duration: float, generator: random.Random) -> int:
    """How often a fit was killed before it came to its end; after the third time it is left alone."""
    for killed in range(4):
        last = killed == 3
        at_call = 0 if last or (moment + killed) % 2 else generator.randint(1, calls)
        ended = in_fork(folder, at_call, 60.0 if last or at_call else generator.uniform(0, duration))
        check(folder, is_whole=ended)
        if ended:
            break
    assert ended
    left = [path.name for path in (folder / "ledger").iterdir() if path.name.startswith(".")]
    assert left == [], left
    return killed


def main(folder: str, moments: str, seed: str) -> None:
    torch.set_num_threads(1)
    generator = random.Random(int(seed))
    free_after_a_kill_before_the_first_row(Path(folder, "without rows"))
    first = Path(folder, "undisturbed")
    first.mkdir()
    started = time.monotonic()
    assert in_fork(first)
    duration = time.monotonic() - started
    check(first, is_whole=True)
    calls = json.loads((first / "log").read_text().splitlines()[-1])["calls"]
    for moment in range(int(moments)):
        killed, tries = 0, 0
        while killed == 0:  # a fit that was at its end before its moment came is no trial
            own = Path(folder, f"{moment}.{tries}")
            own.mkdir()
            killed = killed_on_its_way(own, moment, calls, duration / (tries + 1), generator)
            tries += 1
        print(f"moment {moment}: killed {killed} times, whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
