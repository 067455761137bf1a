"""What each batch of a DataLoader holds: the keys that its sampler drew, followed through dataset, worker and collate.

While a `TaggedLoader` makes its iterator, a `_KeyedDataset` stands in for the loader's dataset and gives each row with
its key, and a `_KeyedCollate` for its collate function, which puts what is known of the rows, a `Drawn`, beside the
batch. The iterator takes it off again, and keeps that of its last batch for `last_drawn`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, default_collate, default_convert, get_worker_info

from lightning_persample.batch_axis.batch import places_of_rows
from lightning_persample.callbacks.row_order import RowOrder
from lightning_persample.capture.failure import Once, fault_of, guard
from lightning_persample.torch_internals import KEPT_ITERATOR, MAKE_ITERATORS, collate_of, collates_rows, pin_memory

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
