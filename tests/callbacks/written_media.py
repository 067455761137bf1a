"""What loggers wrote, read back from their files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 2**15, 7  # of the log format of LevelDB, in which W&B writes
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], Path]:
    """The rows of an offline run of W&B that has ended, and the folder of its media.

    wandb has had no reader in Python since its writer is a program of its own, which may be late with the last records.
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found, deadline = [], time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in found) and time.monotonic() < deadline:
        found = [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]
        time.sleep(0.01)
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return rows, file.parent / "files"


def _records(content: bytes) -> list[bytes]:
    assert content[:4] == b":W&B"
    records, place, parts = [], _HEADER, b""
    while place + _HEADER <= len(content):
        if place % _BLOCK > _BLOCK - _HEADER:  # too little room for a header: the rest of the block is empty
            place += _BLOCK - place % _BLOCK
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        if kind == 0 or place + _HEADER + size > len(content):  # not written yet
            break
        chunk = content[place + _HEADER : place + _HEADER + size]
        place += _HEADER + size
        parts = chunk if kind in (_FULL, _FIRST) else parts + chunk
        if kind in (_FULL, _LAST):
            records.append(parts)
    return records


def read_tensorboard(folder: Path) -> Any:
    """The events of a run: its ``Histograms``, ``Tensors`` and ``Scalars`` by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance=dict.fromkeys(("histograms", "tensors", "scalars"), 0))
    return events.Reload()
