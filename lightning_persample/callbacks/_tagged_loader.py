"""Batches of a DataLoader together with the keys that its sampler drew for their rows.

Counting what a sampler draws goes wrong with workers that prefetch, answer in another order or resume. So the keys
travel with the rows: the iterator is made with a dataset that gives rows and keys, and with a collate function that
puts the keys beside the batch; the iterator takes them off again before anyone sees the batch. The DataLoader has its
own dataset and collate function back as soon as its iterator exists, and a worker process shows the user's dataset.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    MapDataPipe,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_persample.callbacks._row_order import RowOrder
from lightning_persample.engine import Once, fault_of, guard
from lightning_persample.engine.batch import places_of_rows

__all__ = [
    "LAST_KEYS",
    "Drawn",
    "TaggedLoader",
    "as_drawn",
    "is_followed",
    "last_drawn",
    "note_failures",
    "why_no_keys",
]

LAST_KEYS = "_last_drawn"  # an attribute of iterators, for `as_drawn`

_REPLACED = ("dataset", "collate_fn", "worker_init_fn")


class Drawn(NamedTuple):
    """What is known of the rows of a batch.

    Attributes:
        keys: what the sampler drew for each row, or None.
        why: why the keys are missing, or why they may not be those of single rows.
        is_expected: whether this is in the nature of the data, so that there is nothing to warn of.
        rows: how many rows the loader drew, or None.
        places: the paths of what in the batch holds one item per row, none where each of its lists holds fields; None
            where that is not known.
    """

    keys: list[Any] | None
    why: str = ""
    is_expected: bool = False
    rows: int | None = None
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
        name
        for name in ("__iter__", "_get_iterator")
        if all(getattr(type(loader), name) is not getattr(kind, name) for kind in kinds)
    ]
    return not own and all(name in vars(loader) for name in _REPLACED)


class TaggedLoader:
    """Iterates over a DataLoader as it does itself; the iterators know the keys of their last batch.

    Args:
        loader: a DataLoader that can be followed.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not setattr: a DataLoader refuses to change its dataset, and a subclass may do more than set it.
        attributes = vars(self._loader)
        own = {name: attributes[name] for name in _REPLACED}
        failures: list[Exception] = []
        try:
            attributes.update(guard(self._keyed, failures.append)(own) or own)
            iterator = iter(self._loader)
        finally:
            attributes.update(own)
        note_failures([iterator], failures)
        is_tagged = isinstance(getattr(iterator, "_collate_fn", None), (_KeyedCollate, _CountingCollate))
        if is_tagged and "_last_drawn" not in vars(type(iterator)):
            kind: Any = type(iterator)
            iterator.__class__ = _untagging(kind)
        return iterator

    def _keyed(self, own: dict[str, Any]) -> dict[str, Any]:
        """What takes the place of the loader's own attributes while its iterator is made."""
        dataset, is_automatic = own["dataset"], self._loader._auto_collation
        if isinstance(dataset, IterableDataset):
            return {**own, "collate_fn": _CountingCollate(own["collate_fn"], is_automatic, _without_keys(dataset))}
        keyed: dict[str, Any] = {"dataset": _KeyedDataset(dataset)}
        keyed["collate_fn"] = _KeyedCollate(own["collate_fn"], is_automatic)
        if self._loader.num_workers > 0:
            keyed["worker_init_fn"] = _ShowsOwnDataset(own["worker_init_fn"])
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
        setattr(iterator, LAST_KEYS, Drawn(None, _why(failures[0])))


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

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_own_dataset"] = dataset

    def __getitem__(self, key: Any) -> tuple[Any, Any]:
        return self._own_dataset[key], key

    def __getitems__(self, keys: Any) -> tuple[Any, list[Any] | str]:
        if type(keys) is not list and isinstance(keys, Iterator):  # it can be walked through once
            keys = list(keys)
        drawn: list[Any] | str
        try:  # no `guard`: this runs at every batch
            drawn = _plain(keys)
        except Exception as error:
            drawn = _why(error)
        dataset = self._own_dataset
        if hasattr(dataset, "__getitems__") and dataset.__getitems__:  # as torch asks
            return dataset.__getitems__(keys), drawn
        return [dataset[key] for key in keys], drawn

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
        return _KeyedDataset, (self._own_dataset,)


class _KeyedCollate:
    """A collate function that puts the keys of the rows beside the batch it makes of them.

    Args:
        collate: the user's collate function.
        is_automatic: whether it is given a list of rows, one for each key.
    """

    def __init__(self, collate: Callable[[Any], Any], is_automatic: bool) -> None:
        self._collate = collate
        self._is_automatic = is_automatic
        self._order = RowOrder(collate)

    def __call__(self, keyed: tuple[Any, Any]) -> _Tagged:
        rows, keys = keyed
        if self._is_automatic and self._collate is default_collate and type(keys) is list:  # as nearly always
            return _Tagged(self._collate(rows), keys)
        collate = Once(self._collate)
        drawn = guard(self._drawn, _not_known)(collate, rows, keys)
        return _Tagged(collate.result if collate.has_run else self._collate(rows), drawn)

    def _drawn(self, collate: Once, rows: Any, keys: Any) -> Drawn:
        """What is known of the rows that are collated."""
        if not self._is_automatic:
            return _of_one_item(keys)
        if isinstance(keys, str):
            return Drawn(None, keys)
        columns, drawn = self._order.start(rows), list(rows)
        batch = collate(rows)
        why = self._order.why_lost(columns, batch)
        return Drawn(None if why else keys, why, rows=len(keys), places=places_of_rows(batch, drawn) or None)


class _CountingCollate:
    """A collate function that puts beside the batch how many rows it is made of.

    Args:
        collate: the user's collate function.
        is_automatic: whether it is given a list of rows.
        drawn: why the rows have no keys.
    """

    def __init__(self, collate: Callable[[Any], Any], is_automatic: bool, drawn: Drawn) -> None:
        self._collate = collate
        self._is_automatic = is_automatic
        self._drawn = drawn

    def __call__(self, rows: Any) -> _Tagged:
        collate = Once(self._collate)
        drawn = guard(self._counted, _not_known)(collate, rows)
        return _Tagged(collate.result if collate.has_run else self._collate(rows), drawn)

    def _counted(self, collate: Once, rows: Any) -> Drawn:
        if not self._is_automatic:
            makes_lists = self._collate is default_convert  # of tuples, too
            return self._drawn._replace(places=()) if makes_lists and not _holds_list(rows) else self._drawn
        drawn = list(rows)
        return self._drawn._replace(rows=len(drawn), places=places_of_rows(collate(rows), drawn) or None)


def _holds_list(item: Any) -> bool:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, tuple) else ()
    return isinstance(item, list) or any(map(_holds_list, parts))


class _ShowsOwnDataset:
    """Starts a worker process: whoever asks there for the dataset gets the user's own.

    Args:
        init: the user's own ``worker_init_fn``.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        keyed: Any = None if info is None else info.dataset
        if type(keyed) is _KeyedDataset:
            object.__setattr__(info, "dataset", keyed._own_dataset)  # its fields are read-only
        if self._init is not None:
            self._init(worker_id)


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

    Untagging.__name__, Untagging.__qualname__, Untagging.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Untagging


def _plain(keys: Any) -> list[Any]:
    """The keys in a list of its own: a sampler may change the one it gave."""
    found = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    if not set(map(type, found)) <= {int}:
        found = [key.item() if hasattr(key, "item") and not key.shape else key for key in found]
    return found


def _why(error: Exception) -> str:
    return fault_of(error, "following the data loader")


def _not_known(error: Exception) -> Drawn:
    return Drawn(None, _why(error))


def _of_one_item(key: Any) -> Drawn:
    """Of an item of the dataset that is taken as a batch."""
    if isinstance(key, (list, range)) or (hasattr(key, "tolist") and key.ndim == 1):
        keys = _plain(key)
        return Drawn(keys, rows=len(keys))
    return Drawn(_plain([key]), "the dataset gives whole batches", True)
