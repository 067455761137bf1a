"""pyarrow and dask, which are imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["arrow", "compute", "dask_array", "delayed", "parquet"]


def arrow() -> Any:
    """Import pyarrow."""
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a ledger is written and read by pyarrow, which is not installed: "
            "pip install 'lightning-persample[influence]', or '.[influence]' in a checkout",
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


def dask_array() -> Any:
    """Import dask.array."""
    try:
        return importlib.import_module("dask.array")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the array is one of dask, which is not installed: "
            "pip install 'lightning-persample[dask]', or '.[dask]' in a checkout",
            name="dask",
        ) from error


def delayed() -> Any:
    """The function ``dask.delayed``."""
    dask_array()
    return importlib.import_module("dask").delayed
