"""dask, which is imported only where a store is handed to it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["dask_array", "delayed"]


def dask_array() -> Any:
    """Import dask.array."""
    try:
        return importlib.import_module("dask.array")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the array is one of dask, which is not installed: pip install 'lightning-persample[dask]'",
            name="dask",
        ) from error


def delayed() -> Any:
    """The function ``dask.delayed``."""
    dask_array()
    return importlib.import_module("dask").delayed
