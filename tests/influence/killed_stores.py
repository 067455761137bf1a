"""Writers of stores that are killed and go on: ``python -m tests.influence.killed_stores FOLDER MOMENTS SEED``, POSIX.

The writers run in forks of this process. Half of the moments are of time, half are one of the calls that force, rename
or remove a file.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lightning_persample.influence import GradientStore, StoreWriter
from lightning_persample.influence.shards import Shards
from tests import killed_processes
from tests.influence.stores import MANIFEST, K, by_numpy
from tests.killed_processes import die_at_call, say

STEPS, ROWS = 24, 3  # steps of a run, and rows of a step; a shard has four
OWN = replace(MANIFEST, dtype="float16", samples=None)


def values_of(step: int) -> torch.Tensor:
    """Numbers that float16 holds as they are."""
    return torch.arange(ROWS * K).view(ROWS, K) % 7 + 2.0 ** (step % 9)


def write(folder: Path, kill_at_call: int) -> None:
    """Write from the latest saved step on, in a process that ends itself at one of its calls."""
    calls = die_at_call(kill_at_call)
    saved = folder / "saved"
    start = int(saved.read_text()) if saved.exists() else 0
    say(folder / "log", {"from": start})
    manifest = Shards(folder / "store").open(OWN, {"first": start})
    writer = StoreWriter(folder / "store", manifest, rows_per_shard=4)
    for step in range(start, STEPS):
        writer.add(values_of(step), {"step": step, "sample_index": torch.arange(ROWS)})
        if step % 4 == 3:
            writer.flush()
            say(folder / "log", {"flushed": step})
        if step % 8 == 7:
            (folder / "saved.tmp").write_text(str(step + 1))
            (folder / "saved.tmp").rename(saved)
    say(folder / "log", {"calls": calls()})


def in_fork(folder: Path, kill_at_call: int = 0, kill_after: float = 60.0) -> bool:
    """Write in a fork that is killed after some seconds at the latest; whether it came to its end."""
    return killed_processes.in_fork(lambda: write(folder, kill_at_call), kill_after, interval=0.0002)


def least_rows(folder: Path) -> int:
    """How many rows must be there: those that were flushed and are not written anew."""
    flushed = -1
    for line in (folder / "log").read_text().splitlines():
        found = json.loads(line)
        flushed = min(max(flushed, found.get("flushed", -1)), found.get("from", STEPS) - 1)
    return (flushed + 1) * ROWS


def check(folder: Path, *, is_whole: bool) -> int:
    """The rows are the first ones of the run, as many as were flushed at least; how many there are."""
    if not (folder / "store" / "_manifest.json").exists():
        assert is_whole is False
        return 0
    store = GradientStore(folder / "store")
    count = len(store)
    assert (count == STEPS * ROWS) if is_whole else (count >= least_rows(folder)), (count, least_rows(folder))
    assert store.rows["step"].tolist() == [i // ROWS for i in range(count)]
    assert store.rows["sample_index"].tolist() == [i % ROWS for i in range(count)]
    expected = torch.cat([values_of(step) for step in range(STEPS)])[:count]
    for positions, values in store.blocks(max_memory=1000):
        assert torch.equal(values, expected[positions])
    raw = by_numpy(folder / "store")  # each counted shard is whole
    assert len(raw) == count
    assert not count or np.array_equal(np.stack([row["values"] for row in raw]), expected.numpy())
    return count


def main(folder: str, moments: str, seed: str) -> None:
    torch.set_num_threads(1)
    generator = random.Random(int(seed))
    first = Path(folder, "undisturbed")
    first.mkdir()
    started = time.monotonic()
    assert in_fork(first)
    duration = time.monotonic() - started
    check(first, is_whole=True)
    calls = json.loads((first / "log").read_text().splitlines()[-1])["calls"]
    tries = 0
    for moment in range(int(moments)):
        killed = 0
        while killed == 0:  # a run that was at its end before its moment came is no trial
            own = Path(folder, str(tries))
            own.mkdir()
            tries += 1
            counts = []
            for again in range(4):
                last = again == 3
                at_call = 0 if last or (moment + again) % 2 else generator.randint(1, calls)
                ended = in_fork(own, at_call, 60.0 if last or at_call else generator.uniform(0, duration))
                counts.append(check(own, is_whole=ended))
                if ended:
                    break
                killed += 1
            assert ended
            left = [path.name for path in (own / "store").iterdir() if path.name.startswith(".")]
            assert left == [], left
        print(f"moment {moment}: rows at each end {counts}, whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
