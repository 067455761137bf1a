"""Whether a collate function keeps the order of the rows; one that sorts them by length does not."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate, default_convert

__all__ = ["Column", "RowOrder"]

_BATCHES = 3  # that are looked at: a function that sorts does so from the first
_ENTRIES = 16  # of each row that are compared
_PLAIN = (int, float, bool, str)


class Column(NamedTuple):
    """What each row has at one place.

    Attributes:
        leading: how many entries along a tensor's first axis are compared; 0 for numbers and texts.
        rows: the first entries of each row.
    """

    leading: int
    rows: list[tuple[Any, ...]]


class RowOrder:
    """Looks for the rows' numbers, texts and first tensor entries in the first batches that are made of them.

    The order is lost where all of one place are in the batch, and only in another order, or where the batch has nothing
    but rows of that place that differ, and not each at its own. It is kept where all of a place that tells every row
    from every other are found in order. Nothing is concluded from what is not found.

    Args:
        collate: the collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._left = 0 if collate in (default_collate, default_convert) else _BATCHES
        self._name = getattr(collate, "__qualname__", type(collate).__qualname__)
        self._is_lost = False

    def start(self, rows: Any) -> list[Column]:
        """Note the rows, before the collate function may change them."""
        if self._left == 0 or type(rows) is not list or len(rows) < 2:
            return []
        self._left -= 1
        by_place: dict[tuple[Any, ...], list[Any]] = {}
        for row in rows:
            for place, value in _leaves(row):
                by_place.setdefault(place, []).append(value)
        columns = [each for values in by_place.values() if len(values) == len(rows) for each in _columns(values)]
        return [column for column in columns if len(set(column.rows)) > 1]

    def why_lost(self, columns: list[Column], batch: Any) -> str:
        """Why the batch's rows are not in the order of the dataset's."""
        if columns and not self._is_lost:
            self._is_lost = _is_lost(columns, batch)
        return f"the collate function {self._name} changes the order of the rows" if self._is_lost else ""


def _is_lost(columns: list[Column], batch: Any) -> bool:
    missing, unexplained = list(columns), []
    for _, value in _leaves(batch):
        for parts in _by_sample(value, len(columns[0].rows)):
            found = [column for column in columns if _rows(parts, column.leading) == column.rows]
            missing = [column for column in missing if column not in found]
            if any(_tells_apart(column) for column in found):
                return False
            if not found:
                unexplained.append(parts)
    return any(
        Counter(_rows(parts, column.leading)) == Counter(column.rows)
        or (_tells_apart(column) and set(_rows(parts, column.leading)) <= set(column.rows))
        for column in missing
        for parts in unexplained
    )


def _tells_apart(column: Column) -> bool:
    return len(set(column.rows)) == len(column.rows)


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The numbers, texts, lists of them, tensors and arrays in nested containers, each with its place."""
    if isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name], (*place, name))
    elif isinstance(value, PackedSequence):
        yield from _leaves(pad_packed_sequence(value, batch_first=True), place)
    elif type(value) in _PLAIN or _is_plain_list(value) or _is_readable(value):
        yield place, value
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _leaves(part, (*place, number))


def _is_plain_list(value: Any) -> bool:
    # A short tuple is a row rather than a sequence, and its parts are places.
    return type(value) is list and len(value) > 0 and all(type(each) in _PLAIN for each in value)


def _is_readable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and value.device.type == "cpu" and not value.is_complex()
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "iufb"


def _columns(values: list[Any]) -> list[Column]:
    """What can be compared of the values of all rows at one place."""
    lengths = [_length(value) for value in values]
    if all(length is None for length in lengths):
        return [Column(0, _rows(values, 0))]
    if any(length is None for length in lengths):
        return []
    count = min(_ENTRIES, *(length for length in lengths if length is not None))
    columns = [Column(0, [(length,) for length in lengths])]
    return [Column(count, _rows(values, count)), *columns] if count else columns


def _by_sample(value: Any, samples: int) -> list[list[Any]]:
    """A part of the batch cut into samples, along its first and along its second axis where they have that size."""
    length = _length(value)
    if length is None:
        return []
    cut = [[value[sample] for sample in range(samples)]] if length == samples else []
    if not isinstance(value, list) and value.ndim > 1 and value.shape[1] == samples:
        cut.append([value[:, sample] for sample in range(samples)])
    return cut


def _rows(values: list[Any], count: int) -> list[tuple[Any, ...]]:
    return [_entries(value, count) for value in values]


def _length(value: Any) -> int | None:
    if type(value) in _PLAIN or (not isinstance(value, list) and value.ndim == 0):
        return None
    return len(value)


def _entries(value: Any, count: int) -> tuple[Any, ...]:
    if type(value) in _PLAIN:
        found = [value]
    elif isinstance(value, list):
        found = value[:count]
    else:
        found = (value if value.ndim == 0 else value[:count]).reshape(-1)[:_ENTRIES].tolist()
    # A batch in single precision has the numbers of rows in double precision.
    return tuple(ctypes.c_float(each).value if type(each) is float else each for each in found[:_ENTRIES])
