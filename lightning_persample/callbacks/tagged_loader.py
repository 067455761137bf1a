"""What each batch of a DataLoader holds: the keys that its sampler drew, followed through dataset, worker and collate.

While a `TaggedLoader` makes its iterator, a `_KeyedDataset` stands in for the loader's dataset and gives each row with
its key, and a `_KeyedCollate` for its collate function, which puts what is known of the rows, a `Drawn`, beside the
batch. The iterator takes it off again, and keeps that of its last batch for `last_drawn`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, default_collate, default_convert, get_worker_info

from lightning_persample.batch_axis.batch import places_of_rows
from lightning_persample.capture.failure import Once, fault_of, guard
from lightning_persample.torch_internals import (
    KEPT_ITERATOR,
    MAKE_ITERATORS,
    collate_of,
    collates_rows,
    pin_memory,
    tree_map_only,
)

LAST_KEYS = "_last_drawn"  # an attribute of iterators, for `as_drawn`

_REPLACED = ("dataset", "collate_fn", "worker_init_fn")


class Drawn(NamedTuple):
    """What is known of the rows of a batch."""

    keys: list[Any] | None  # what the sampler drew for each row
    why: str = ""  # why the keys are missing, or why they may not be those of single rows
    is_expected: bool = False  # this is in the nature of the data, so that there is nothing to warn of
    rows: int | None = None  # how many the loader drew
    # The paths of what in the batch holds one item per row, none where each of its lists holds fields; None: unknown
    places: tuple[Any, ...] | None = None


_EXHAUSTED = Drawn(None, "the loader is exhausted", True)


def why_no_keys(loader: object) -> Drawn | None:
    """Why the rows of a loader have no keys, or None where they have."""
    if not isinstance(loader, DataLoader):
        return Drawn(None, f"the training data come from a {type(loader).__name__}, not from a DataLoader", True)
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        return _without_keys(loader.dataset)
    if is_followed(loader):
        return None
    return Drawn(None, f"{type(loader).__name__} makes its batches in an iterator of its own")


def _without_keys(dataset: object) -> Drawn:
    return Drawn(None, f"the rows of a {type(dataset).__name__} have no indices", True)


def is_followed(loader: object) -> bool:
    """Whether the batches of a loader can be followed from the rows on."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, MapDataPipe):
        return False
    kinds = [DataLoader]
    stateful = sys.modules.get("torchdata.stateful_dataloader")
    if stateful is not None:
        kinds.append(stateful.StatefulDataLoader)
    own = [
        name for name in MAKE_ITERATORS if all(getattr(type(loader), name) is not getattr(kind, name) for kind in kinds)
    ]
    return not own and all(name in vars(loader) for name in _REPLACED)


class TrainingView:
    """Samples of the training data as a callback changes them; the dataset is as it was to everybody else."""

    # `change` is given a list of items of the dataset and the list of their keys, and goes to worker processes.

    def __init__(self, change: Callable[[list[Any], list[Any]], list[Any]]) -> None:
        self.change = change
        self._iterators: dict[int, Any] = {}

    @contextmanager
    def iterators_kept(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Let a loader with persistent workers have those that see this view, and afterwards its own again."""
        attributes = vars(loader)
        if not loader.persistent_workers:
            yield
            return
        own, attributes[KEPT_ITERATOR] = attributes[KEPT_ITERATOR], self._iterators.get(id(loader))
        try:
            yield
        finally:
            self._iterators[id(loader)], attributes[KEPT_ITERATOR] = attributes[KEPT_ITERATOR], own


class TaggedLoader:
    """Iterates over a DataLoader as it does itself; the iterators know the keys of their last batch."""

    def __init__(self, loader: DataLoader[Any], view: TrainingView | None = None) -> None:
        self._loader, self._view = loader, view

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not setattr: a DataLoader refuses to change its dataset, and a subclass may do more than set it.
        attributes = vars(self._loader)
        own = {name: attributes[name] for name in _REPLACED}
        failures: list[Exception] = []
        try:
            attributes.update(guard(self._keyed, failures.append)(own) or own)
            with nullcontext() if self._view is None else self._view.iterators_kept(self._loader):
                iterator = iter(self._loader)
        finally:
            attributes.update(own)
        note_failures([iterator], failures)
        if isinstance(collate_of(iterator), _KeyedCollate) and "_last_drawn" not in vars(type(iterator)):
            kind: Any = type(iterator)
            iterator.__class__ = _untagging(kind)
        return iterator

    def _keyed(self, own: dict[str, Any]) -> dict[str, Any]:
        """What takes the place of the loader's own attributes while its iterator is made."""
        dataset, is_automatic = own["dataset"], collates_rows(self._loader)
        if isinstance(dataset, IterableDataset):
            return {**own, "collate_fn": _KeyedCollate(own["collate_fn"], is_automatic, _without_keys(dataset))}
        change = None if self._view is None else self._view.change
        keyed = {
            "dataset": _KeyedDataset(dataset, change),
            "collate_fn": _KeyedCollate(own["collate_fn"], is_automatic),
        }
        if self._loader.num_workers > 0:
            keyed["worker_init_fn"] = functools.partial(_start_worker, own["worker_init_fn"])
        return keyed


def last_drawn(iterator: object, loader: object) -> Drawn:
    """What is known of the rows of the batch that an iterator of a loader gave last."""
    return as_drawn(getattr(iterator, LAST_KEYS, None), loader)


def as_drawn(keys: list[Any] | Drawn | None, loader: object) -> Drawn:
    """What is known of the rows of a batch, from the `LAST_KEYS` that the iterator of its loader had."""
    if keys is None:
        return why_no_keys(loader) or Drawn(None, "its iterator was made before the fit")
    return keys if isinstance(keys, Drawn) else Drawn(keys, rows=len(keys), places=())


def note_failures(iterators: Iterable[Any], failures: list[Exception]) -> None:
    """Let iterators say why nothing is known of their batches, where this package has failed."""
    for iterator in iterators if failures else ():
        setattr(iterator, LAST_KEYS, not_known(failures[0]))


class _Tagged:
    """A batch on its way from a collate function to the iterator that takes the keys off."""

    __slots__ = ("batch", "drawn")

    def __init__(self, batch: Any, drawn: list[Any] | Drawn) -> None:
        self.batch = batch
        self.drawn = drawn

    def pin_memory(self) -> _Tagged:
        """The same with the batch's tensors in pinned memory."""
        return _Tagged(pin_memory(self.batch), self.drawn)


class _KeyedDataset:
    """A dataset that gives its rows with their keys, and is the dataset itself to whoever asks for anything else."""

    def __init__(self, dataset: Any, change: Callable[[list[Any], list[Any]], list[Any]] | None = None) -> None:
        self.__dict__.update({"_own_dataset": dataset, "_change": change})

    def __getitem__(self, key: Any) -> tuple[Any, Any]:
        item = self._own_dataset[key]
        return (item if self._change is None else self._change([item], [key])[0]), key

    def __getitems__(self, keys: Any) -> tuple[Any, list[Any] | Drawn]:
        if type(keys) is not list and isinstance(keys, Iterator):  # it can be walked through once
            keys = list(keys)
        drawn: list[Any] | Drawn
        try:  # no `guard`: this runs at every batch
            drawn = _plain(keys)
        except Exception as error:
            drawn = not_known(error)
        dataset = self._own_dataset
        has_several = hasattr(dataset, "__getitems__") and dataset.__getitems__  # as torch asks
        items = dataset.__getitems__(keys) if has_several else [dataset[key] for key in keys]
        return (items if self._change is None else self._change(items, list(keys))), drawn

    def __len__(self) -> int:
        return len(self._own_dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._own_dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own_dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _KeyedDataset, (self._own_dataset, self._change)


class _KeyedCollate:
    """A collate function that puts beside its batch the keys of the rows, or how many rows without keys there are."""

    def __init__(self, collate: Callable[[Any], Any], is_automatic: bool, without_keys: Drawn | None = None) -> None:
        self._collate = collate
        self._is_automatic = is_automatic  # it is given a list of rows
        self._without_keys = without_keys  # rows come alone, else with their keys
        self._order = RowOrder(collate)

    def __call__(self, given: Any) -> _Tagged:
        rows, keys = given if self._without_keys is None else (given, self._without_keys)
        if self._is_automatic and self._collate is default_collate and type(keys) is list:  # as nearly always
            return _Tagged(self._collate(rows), keys)
        collate = Once(self._collate)
        drawn = guard(self._drawn, not_known)(collate, rows, keys)
        return _Tagged(collate.result if collate.has_run else self._collate(rows), drawn)

    def _drawn(self, collate: Once, rows: Any, keys: Any) -> Drawn:
        """What is known of the rows that are collated."""
        if not self._is_automatic:
            if self._without_keys is None:
                return _of_one_item(keys)
            holds_fields = self._collate is default_convert and not _holds_list(rows)  # it makes lists of tuples, too
            return self._without_keys._replace(places=()) if holds_fields else self._without_keys
        columns, drawn = [] if isinstance(keys, Drawn) else self._order.start(rows), list(rows)
        batch = collate(rows)
        places = places_of_rows(batch, drawn) or None
        if isinstance(keys, Drawn):
            return keys._replace(rows=len(drawn), places=places)
        why = self._order.why_lost(columns, batch)
        return Drawn(None if why else keys, why, rows=len(keys), places=places)


def _holds_list(item: Any) -> bool:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, tuple) else ()
    return isinstance(item, list) or any(map(_holds_list, parts))


def _start_worker(init: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a worker process: whoever asks there for the dataset gets the user's own."""
    info = get_worker_info()
    keyed: Any = None if info is None else info.dataset
    if type(keyed) is _KeyedDataset:
        object.__setattr__(info, "dataset", keyed._own_dataset)  # its fields are read-only
    if init is not None:
        init(worker_id)


@functools.cache
def _untagging(kind: Any) -> Any:
    """The kind of iterator that takes the keys off the batches it gives."""

    class Untagging(kind):
        _last_drawn: list[Any] | Drawn | None = None

        def _next_data(self) -> Any:
            self._last_drawn = _EXHAUSTED
            tagged = super()._next_data()
            self._last_drawn = tagged.drawn
            return tagged.batch

    return functools.update_wrapper(Untagging, kind, updated=())


def _plain(keys: Any) -> list[Any]:
    """The keys in a list of its own: a sampler may change the one it gave."""
    found = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    if not set(map(type, found)) <= {int}:
        found = [key.item() if hasattr(key, "item") and not key.shape else key for key in found]
    return found


def not_known(error: Exception) -> Drawn:
    """Of a batch of which this package has failed to find out."""
    return Drawn(None, fault_of(error, "following the data loader"))


def _of_one_item(key: Any) -> Drawn:
    """Of an item of the dataset that is taken as a batch."""
    if isinstance(key, (list, range)) or (hasattr(key, "tolist") and key.ndim == 1):
        keys = _plain(key)
        return Drawn(keys, rows=len(keys))
    return Drawn(_plain([key]), "the dataset gives whole batches", True)


# Whether a collate function, and a hook that a batch goes through, keeps the rows in their order

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
