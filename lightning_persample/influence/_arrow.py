"""pyarrow, which is imported only where a ledger is written or read."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["arrow", "compute", "parquet"]


def arrow() -> Any:
    """Import pyarrow."""
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a ledger is written and read by pyarrow, which is not installed: "
            "pip install 'lightning-persample[influence]'",
            name="pyarrow",
        ) from error


def parquet() -> Any:
    """The module ``pyarrow.parquet``."""
    arrow()
    return importlib.import_module("pyarrow.parquet")


def compute() -> Any:
    """The module ``pyarrow.compute``."""
    arrow()
    return importlib.import_module("pyarrow.compute")
