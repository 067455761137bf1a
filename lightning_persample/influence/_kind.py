"""The text on a folder that holds a ledger where gradients are wanted, and the reverse."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lightning_persample.errors import PerSampleError
from lightning_persample.influence._files import GRADIENTS, MANIFEST, broken_files_named

__all__ = ["refuse_ledger", "refuse_store"]


def refuse_ledger(dirpath: Path) -> None:
    """Say where the gradients of a ledger are."""
    if _format(dirpath) == "lightning_persample ledger":
        raise PerSampleError(
            f"{os.fspath(dirpath)!r} is a ledger and no store of gradients: its gradients, if it was written with "
            f"`projection`, are in {os.fspath(dirpath / GRADIENTS)!r}; its rows are read with read_ledger"
        )


def refuse_store(dirpath: Path) -> None:
    """Say where the ledger beside gradients is."""
    if _format(dirpath) == "lightning_persample gradients":
        raise PerSampleError(
            f"{os.fspath(dirpath)!r} is a store of gradients and no ledger: open it with GradientStore; its ledger, if "
            f"it was written during training as the folder {GRADIENTS!r} of one, is in {os.fspath(dirpath.parent)!r}"
        )


def _format(dirpath: Path) -> object:
    """The format that a folder's manifest tells; None without a manifest."""
    path = dirpath / MANIFEST
    with broken_files_named(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found.get("format") if isinstance(found, dict) else None
