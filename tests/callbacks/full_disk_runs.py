"""Fits whose ledger is on a file system without room: ``python -m tests.callbacks.full_disk_runs FOLDER RESULTS``.

A small file system is mounted at FOLDER, for Linux; the results go elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from lightning_persample import PerSampleError, PerSampleGradientWriter, PerSampleWarning
from tests.callbacks.ledger_runs import Noted, data, fit, rows
from tests.callbacks.runs import make_trainer

EPOCHS, BATCHES = 4, 6
FIRST = 5  # the batch at whose end the room is taken, behind the writer


NEW_NAME_SPACES = 0x00020000 | 0x10000000  # of mounts and of users: CLONE_NEWNS, CLONE_NEWUSER
PRIVATE = 0x4000 | 0x40000  # MS_REC, MS_PRIVATE


def mount_small(path: Path) -> None:
    """A file system of 4 MiB in memory, seen by this process alone and gone when it ends."""
    system = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    maps = {"setgroups": "deny", "uid_map": f"0 {os.geteuid()} 1", "gid_map": f"0 {os.getegid()} 1"}
    checked(system.unshare(NEW_NAME_SPACES))
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    checked(system.mount(b"none", b"/", None, PRIVATE, None))
    checked(system.mount(b"tmpfs", bytes(path), b"tmpfs", 0, b"size=4m"))


def fill(path: Path, leave: int = 0) -> None:
    """Write a file until the system says that no room is left; then give back some bytes."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(file.tell() - leave)


class Filled(Callback):
    """Takes the room of a file system at the end of a batch, and gives it back at the end of a later one."""

    def __init__(self, folder: Path, last: int, leave: int) -> None:
        self.path, self.last, self.leave = folder / "filling", last, leave
        self.batches = 0
        self.room: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        if self.batches == FIRST:
            fill(self.path, self.leave)
        if FIRST <= self.batches < self.last:
            found = os.statvfs(self.path.parent)
            self.room.append(found.f_bavail * found.f_frsize)
        if self.batches == self.last:
            self.path.unlink()


def run(mounted: Path, name: str, last: int, leave: int = 0) -> dict[str, object]:
    """A fit that has no room between two batches, and what became of it."""
    ledger, filled = mounted / name, Filled(mounted, last, leave)
    writer = PerSampleGradientWriter(ledger, flush_every=1, per_layer=2)  # files of more than a page
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(writer, loader=data(BATCHES * 4), callbacks=[filled], max_epochs=EPOCHS)
    filled.path.unlink(missing_ok=True)
    return {
        "texts": [str(each.message) for each in caught if each.category is PerSampleWarning],
        "weights": module.state_dict(),
        "notes": module.notes,
        "rows": rows(ledger, partial=True),
        "lacks": lacks(ledger),
        "sizes": {path.name: path.stat().st_size for path in ledger.iterdir()},
        "room": filled.room,
    }


def lacks(ledger: Path) -> str:
    """What is said where the ledger is read as one that is complete; nothing where it is."""
    try:
        rows(ledger)
    except PerSampleError as error:
        return str(error)
    return ""


def full_from_the_start(mounted: Path) -> tuple[int, str]:
    """How many samples a fit trains on whose folder has no room for a manifest, and what it says."""
    fill(mounted / "filling")
    module, refused = Noted(), ""
    try:
        fit(PerSampleGradientWriter(mounted / "start"), module)
    except ValueError as error:
        refused = str(error)
    (mounted / "filling").unlink()
    return len(module.notes), refused


def main(mounted: str, results: str) -> None:
    torch.set_num_threads(1)
    try:
        mount_small(Path(mounted))
    except OSError as error:
        torch.save(str(error), Path(results, "found.pt"))
        return
    without = Noted()
    make_trainer(max_epochs=EPOCHS).fit(without, data(BATCHES * 4))
    end = EPOCHS * BATCHES
    found = {
        "without": without.state_dict(),
        "nothing": run(Path(mounted), "nothing", last=9),
        "half": run(Path(mounted), "half", last=9, leave=4096),
        "late": run(Path(mounted), "late", last=end - 1),
        "never": run(Path(mounted), "never", last=end + 1),
        "start": full_from_the_start(Path(mounted)),
    }
    torch.save(found, Path(results, "found.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
