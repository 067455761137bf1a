"""Stores under limits of the system: ``python -m tests.influence.limited_stores FOLDER``, for Linux.

What it finds it prints as JSON in the last line.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lightning_persample.influence import GradientStore, StoreWriter
from lightning_persample.influence.shards import columns_for
from tests.influence.stores import MANIFEST, gradients, made, names

COLUMNS, ROWS = 2048, 8192  # 64 MiB in float32
SIZES = {"a": ((1000,), 1000), "b": ((48,), 48), "c": ((1000,), 1000)}
BLOCK = 4 << 20
ROOM = 24 << 20


def limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def full_disk(folder: Path) -> dict:
    """Write until the system refuses: no file of this process may be longer than 64 KiB."""
    limit(resource.RLIMIT_FSIZE, 1 << 16)
    manifest = replace(MANIFEST, dtype="float64")
    values = gradients(1199, dtype=torch.float64)
    small = StoreWriter(made(folder, manifest), manifest, rows_per_shard=100)
    small.add(values[:200], {"step": 1})
    large = StoreWriter(folder, manifest, rows_per_shard=1000)
    large.add(values[200:], {"step": 2})
    said = {}
    try:
        large.flush()
    except OSError as error:
        said["refused"] = str(error)
    store = GradientStore(folder)
    ((_, read),) = store.blocks()
    said |= {"waiting": large.waiting, "rows": len(store), "files": names(folder)}
    said["whole"] = torch.equal(read, values[:200])
    limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    large.flush()
    ((_, read),) = GradientStore(folder).blocks()
    return {**said, "later": len(read) if torch.equal(read, values) else 0}


def private_bytes() -> int:
    """The memory that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmData:")[1].split()[0])


def tried(function) -> str:
    try:
        return "right" if function() else "wrong"
    except (MemoryError, RuntimeError) as error:  # the second of torch
        return "MemoryError" if "alloc" in str(error) else f"{error}"


def little_memory(folder: Path) -> dict:
    """Read a store that the memory does not hold."""
    manifest = replace(MANIFEST, parameters=columns_for(SIZES), samples=None)
    writer = StoreWriter(made(folder, manifest), manifest, rows_per_shard=500)
    rows = torch.arange(ROWS, dtype=torch.float32)
    columns = torch.arange(COLUMNS, dtype=torch.float32)
    for start in range(0, ROWS, 512):
        writer.add(rows[start : start + 512, None] + columns, {"sample_index": torch.arange(start, start + 512)})
    writer.flush()
    store = GradientStore(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    limit(resource.RLIMIT_DATA, private_bytes() + ROOM)

    def in_blocks(part, columns) -> bool:
        index = torch.from_numpy(part.rows["sample_index"])
        for positions, values in part.blocks(max_memory=BLOCK):
            for i, row in zip(index[positions].tolist(), values, strict=True):
                if not torch.equal(row, columns + i):
                    return False
        return True

    order = np.random.default_rng(0).permutation(ROWS)
    two = torch.cat([columns[1048:], columns[:1000]])
    return {
        "limit": ROOM,
        "store": size,
        "blocks": tried(lambda: in_blocks(store, columns)),
        "in another order": tried(lambda: in_blocks(store.select(order), columns)),
        "of two parameters": tried(lambda: in_blocks(store.parameters(["c", "a"]), two)),
        "all at once": tried(lambda: len(torch.cat([values for _, values in store.blocks(max_memory=BLOCK)]))),
        "one block": tried(lambda: len([values for _, values in store.blocks(max_memory=1 << 40)])),
    }


def main(folder: str) -> None:
    torch.set_num_threads(1)
    said = full_disk(Path(folder, "full"))
    said |= little_memory(Path(folder, "large"))
    limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
