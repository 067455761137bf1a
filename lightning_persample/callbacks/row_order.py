"""Whether a collate function, and a hook that a batch goes through, keeps the rows in their order."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate, default_convert

from lightning_persample.torch_internals import tree_map_only

_BATCHES = 3  # that are looked at: a function that sorts does so from the first
_ENTRIES = 16  # of each row that are compared
_PLAIN = (int, float, bool, str)


class Column(NamedTuple):
    """What each row has at one place: its first entries, `leading` along a tensor's first axis, 0 for a number."""

    leading: int
    rows: list[tuple[Any, ...]]


class RowOrder:
    """Looks for the rows' numbers, texts and first tensor entries in the first batches that are made of them."""

    # The order is lost where all of one place are in the batch, and only in another order, or where the batch has
    # nothing but rows of that place that differ, and not each at its own. It is kept where all of a place that tells
    # every row from every other are found in order. Nothing is concluded from what is not found.

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._left = 0 if collate in (default_collate, default_convert) else _BATCHES
        self._is_of_hooks = collate is None
        self._who = "a hook that a batch goes through on its way to the device"
        if collate is not None:
            self._who = f"the collate function {getattr(collate, '__qualname__', type(collate).__qualname__)}"
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
        return _telling(values for values in by_place.values() if len(values) == len(rows))

    def start_from(self, batch: Any, samples: int) -> list[Column]:
        """Note the rows of a batch, before a hook may change them."""
        if self._left == 0 or samples < 2:
            return []
        return _telling(parts for _, value in _leaves(batch) for parts in _by_sample(value, samples))

    def why_lost(self, columns: list[Column], batch: Any) -> str:
        """Why the batch's rows are not in the order of the dataset's."""
        if columns and not self._is_lost:
            self._left -= self._is_of_hooks  # (of a batch that nobody asks for, nothing is compared)
            self._is_lost = _is_lost(columns, tree_map_only(Tensor, Tensor.cpu, batch))
        return f"{self._who} changes the order of the rows" if self._is_lost else ""


def _telling(places: Iterable[list[NDArray[Any]]]) -> list[Column]:
    """What can be compared of the values of all rows at each place, where rows differ."""
    return [column for values in places for column in _columns(values) if len(set(column.rows)) > 1]


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


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], NDArray[Any]]]:
    """The numbers, texts, lists of them, tensors and arrays in nested containers, as arrays, each with its place."""
    if isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name], (*place, name))
    elif isinstance(value, PackedSequence):
        yield from _leaves(pad_packed_sequence(value, batch_first=True), place)
    elif type(value) in _PLAIN or _is_plain_list(value):
        yield place, np.array(value, dtype=object)  # which keeps what is in it as it is
    elif _is_readable(value):
        yield place, _as_array(value)
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _leaves(part, (*place, number))


def _is_plain_list(value: Any) -> bool:
    # A short tuple is a row rather than a sequence, and its parts are places.
    return type(value) is list and len(value) > 0 and all(type(each) in _PLAIN for each in value)


def _is_readable(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        return is_plain and not (value.is_complex() or value.is_quantized)
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "iufb"


def _as_array(value: Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().resolve_neg()
    is_known = value.dtype in (torch.float16, torch.float32, torch.float64)  # numpy has no other ones
    array: NDArray[Any] = (value.float() if value.is_floating_point() and not is_known else value).numpy()
    return array


def _columns(values: list[NDArray[Any]]) -> list[Column]:
    """What can be compared of the values of all rows at one place."""
    have_lengths = {value.ndim > 0 for value in values}
    if have_lengths != {True}:
        return [] if True in have_lengths else [Column(0, _rows(values, 0))]
    count = min(_ENTRIES, *map(len, values))
    columns = [Column(0, [(len(value),) for value in values])]
    return [Column(count, _rows(values, count)), *columns] if count else columns


def _by_sample(value: NDArray[Any], samples: int) -> list[list[NDArray[Any]]]:
    """A part of the batch cut into samples, along its first and along its second axis where they have that size."""
    axes = [axis for axis in range(min(value.ndim, 2)) if value.shape[axis] == samples]
    return [[np.asarray(each, value.dtype) for each in np.moveaxis(value, axis, 0)] for axis in axes]


def _rows(values: list[NDArray[Any]], count: int) -> list[tuple[Any, ...]]:
    """The first entries of each value, `count` of them along its first axis."""
    cut = [(value[:count] if value.ndim else value).reshape(-1)[:_ENTRIES].tolist() for value in values]
    # A batch in single precision has the numbers of rows in double precision.
    return [tuple(ctypes.c_float(each).value if type(each) is float else each for each in entries) for entries in cut]
