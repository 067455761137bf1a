"""Numbers for each different sample of a dataset, in arrays by ascending index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        distinct = ordered[np.append(True, ordered[1:] != ordered[:-1])]
        at = np.searchsorted(self._index, distinct)
        is_new = (at == len(self)) | (np.append(self._index, 0)[at] != distinct)
        if is_new.any():
            for name, column in self.columns.items():
                self.columns[name] = np.insert(column, at[is_new], 0)
            self._index = np.insert(self._index, at[is_new], distinct[is_new])
        places = np.empty_like(index)
        places[order] = np.searchsorted(self._index, ordered)
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
