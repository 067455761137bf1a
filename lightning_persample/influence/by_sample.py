"""Numbers for each different sample of a dataset, in arrays by ascending index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

AT_DIFFERENT_TIMES = (
    "norms change in a training: samples that were captured at different times are not comparable; every_n_steps=1, "
    "without max_samples, captures each in every epoch"
)


def how_often(samples: int, times: tuple[int, int], dataset: int | None) -> str:
    """How many samples were captured, how often each (fewest, most), and how many of the dataset never were."""
    fewest, most = times
    often = f"{fewest:,} to {most:,} times" if fewest != most else "once" if most == 1 else f"{most:,} times"
    text = f"{samples:,} samples captured, {often} each"
    if dataset is None or dataset < samples:  # (where keys are no indices)
        return text
    return (
        f"{text}: all of the dataset" if dataset == samples else f"{text}; {dataset - samples:,} of the dataset never"
    )


def columns_of(labels: Mapping[str, Any] | None) -> dict[str, Callable[[Any], Any]]:
    """The columns of a user's `labels`, as functions of a sample's index."""
    return {str(name): _column(each) for name, each in (labels or {}).items()}


def _column(values: Any) -> Callable[[Any], Any]:
    """What a column of a user's `labels` has for an index; None where it has nothing."""

    def look_up(index: Any) -> Any:
        try:
            value = values(index) if callable(values) else values[index]
        except (LookupError, TypeError):
            return None
        except Exception as error:  # of the user's function, shown in place of the value
            return f"failed: {type(error).__name__}: {error}"
        if not hasattr(value, "item"):
            return value
        size = value.numel() if hasattr(value, "numel") else np.size(value)
        return value.item() if size == 1 else str(value)

    return look_up


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of a table, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def together(parts: Sequence[Any]) -> Any:
    """Arrays as one array; with lists among them, of keys that are no ints, as one list."""
    if all(isinstance(each, np.ndarray) for each in parts):
        return np.concatenate(parts)
    return [*chain(*(each.tolist() if isinstance(each, np.ndarray) else each for each in parts))]


class SampleTable:
    """Columns with a number for each sample that was asked for: 8 bytes for its index, and what the columns take."""

    def __init__(self, **dtypes: str) -> None:
        self._index = np.empty(0, np.int64)
        self._names: dict[Any, int] | None = None  # of keys that are no ints, by the number that stands for each
        self.columns: dict[str, NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> NDArray[np.int64] | list[Any]:
        """The samples: their indices, ascending; keys of other types in the order of their first row."""
        return self._index if self._names is None else list(self._names)

    def places(self, keys: NDArray[np.int64] | Sequence[Any]) -> NDArray[np.int64]:
        """Where each sample is in the columns. One that is new has zeros there; for new ones all columns are copied."""
        index = self._numbers(keys)
        first, last = (int(self._index[place]) for place in (0, -1)) if len(self) else (0, -1)
        has_no_gap = last - first == len(self) - 1
        if len(index) == 0 or (has_no_gap and first <= index.min() and index.max() <= last):
            return index - first
        order = np.argsort(index)
        ordered = index[order]  # a search for these is far faster
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        distinct = ordered[is_first]
        at = np.searchsorted(self._index, distinct)
        is_new = (at == len(self)) | (np.append(self._index, 0)[at] != distinct)
        if is_new.any():
            at += np.cumsum(is_new) - is_new  # each new one moves those behind it
            was_there = np.ones(len(self) + np.count_nonzero(is_new), np.bool_)
            was_there[at[is_new]] = False
            for name, column in self.columns.items():
                self.columns[name] = np.zeros(len(was_there), column.dtype)
                self.columns[name][was_there] = column
            previous, self._index = self._index, np.empty(len(was_there), np.int64)
            self._index[was_there], self._index[at] = previous, distinct
        places = np.empty_like(index)
        places[order] = at[np.cumsum(is_first) - 1]
        return places

    def _numbers(self, keys: NDArray[np.int64] | Sequence[Any]) -> NDArray[np.int64]:
        if isinstance(keys, np.ndarray) and self._names is None:
            return keys
        if self._names is None:  # ints so far
            self._names = {key: place for place, key in enumerate(self._index.tolist())}
            self._index = np.arange(len(self._index))
        names = self._names
        given = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return np.fromiter((names.setdefault(key, len(names)) for key in given), np.int64, len(given))
