"""pyarrow, pandas, dask and matplotlib, which are imported only where they are used."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any


def _imported(package: str, extra: str, why: str, module: str = "") -> Any:
    """Import a package, or a module of it."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{why}, which is not installed: pip install 'lightning-persample[{extra}]', or '.[{extra}]' in a checkout",
            name=package,
        ) from error
    return importlib.import_module(f"{package}.{module}" if module else package)


pandas = partial(_imported, "pandas", "influence", "a table is one of pandas")
arrow = partial(_imported, "pyarrow", "influence", "a ledger is written and read by pyarrow")
dask = partial(_imported, "dask", "dask", "the array is one of dask")
matplotlib = partial(_imported, "matplotlib", "report", "a report is drawn by matplotlib")
