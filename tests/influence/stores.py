"""Small stores of gradients, and what they are read as by numpy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from lightning_persample.influence.shards import Shards, StoreManifest, StoreWriter, columns_for

SIZES = {"weight": ((4, 3), 12), "bias": ((4,), 4), "scale": ((2, 2), 4)}
PARAMETERS = columns_for(SIZES)
CHECKPOINTS = ({"step": 5, "learning_rate": 0.1, "path": "a.ckpt"}, {"step": 9, "learning_rate": 0.01, "path": None})
MANIFEST = StoreManifest("first", PARAMETERS, samples=30, checkpoints=CHECKPOINTS, columns=("loss",))
K = 20


def gradients(count: int, seed: int = 0, dtype: torch.dtype = torch.float32, columns: int = K) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator, dtype=dtype)


def write(folder: Path, values: torch.Tensor, rank: int = 0, manifest: StoreManifest = MANIFEST, **rows) -> None:
    """One flush of rows, in shards of four."""
    writer = StoreWriter(folder, manifest, rank, rows_per_shard=4)
    writer.add(values, rows)
    writer.flush()


def made(folder: Path, manifest: StoreManifest = MANIFEST) -> Path:
    folder.mkdir(exist_ok=True)
    Shards(folder).write_manifest(manifest)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_numpy(folder: Path) -> list[dict]:
    """Every row that counts, from the files alone: its fields, and its values in float64."""
    json.loads((folder / "_manifest.json").read_text())
    found = []
    for path in sorted(folder.glob("shard-*.npy")):
        with path.open("rb") as file:  # two arrays, one after the other
            values, records = np.load(file), np.load(file)
        for row, record in zip(values, records, strict=True):
            own = dict(zip(record.dtype.names, record.item(), strict=True))
            found.append({**own, "values": row.astype(np.float64) * own["scale"]})
    return found
