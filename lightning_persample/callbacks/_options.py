"""Which values the options of callbacks may have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_persample.callbacks._statistics import STATISTICS
from lightning_persample.callbacks._step_norms import percent

__all__ = [
    "are_quantiles",
    "are_statistics",
    "is_path",
    "is_prefix",
]


def is_path(value: object) -> bool:
    """Whether the value can be the path of a folder."""
    return isinstance(value, (str, Path)) and str(value) != ""


def are_quantiles(quantiles: object) -> bool:
    """Whether the value is a sequence of quantiles of different names."""
    if not isinstance(quantiles, Sequence) or isinstance(quantiles, str):
        return False
    if not all(isinstance(quantile, (int, float)) and 0 < quantile < 1 for quantile in quantiles):
        return False
    return len({percent(float(quantile)) for quantile in quantiles}) == len(quantiles)


def are_statistics(statistics: object) -> bool:
    """Whether the value is a sequence of different names of statistics."""
    if not isinstance(statistics, Sequence) or isinstance(statistics, str):
        return False
    return all(each in STATISTICS for each in statistics) and len(set(statistics)) == len(statistics)


def is_prefix(prefix: object) -> bool:
    """Whether the value can start the names that are logged."""
    return isinstance(prefix, str) and prefix != "" and not prefix.endswith("/")
