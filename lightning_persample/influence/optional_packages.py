"""pyarrow and dask, which are imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def arrow(module: str = "") -> Any:
    """Import pyarrow, or a module of it."""
    return _imported("pyarrow", "influence", "a ledger is written and read by pyarrow", module)


def dask(module: str = "") -> Any:
    """Import dask, or a module of it."""
    return _imported("dask", "dask", "the array is one of dask", module)


def _imported(package: str, extra: str, why: str, module: str) -> Any:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{why}, which is not installed: pip install 'lightning-persample[{extra}]', or '.[{extra}]' in a checkout",
            name=package,
        ) from error
    return importlib.import_module(f"{package}.{module}" if module else package)
