"""Which samples of the dataset a batch holds: the keys that its sampler drew, or what a user's function says.

The keys are followed through dataset, worker and collate. While a `TaggedLoader` makes its iterator, a `_KeyedDataset`
stands in for the loader's dataset and gives each row with its key, and a `_KeyedCollate` for its collate function,
which puts what is known of the rows, a `Drawn`, beside the batch. The iterator takes it off again, and keeps that of
its last batch. `RowOrder` sees whether rows stay in their order, and `BatchIndices` gives the keys to records.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, default_collate, default_convert, get_worker_info

from lightning_persample.batch_axis.batch import (
    OfLoaders,
    batch_tensors,
    count_samples,
    places_of_rows,
    with_samples_at,
)
from lightning_persample.callbacks.lightning_internals import (
    BEFORE_ITERATORS,
    LOADERS,
    ObservedMethod,
    as_it_is,
    batches_ahead,
    changes_batches,
    combined_loader,
    iterators_of,
    structure_of,
)
from lightning_persample.capture.failure import Once, fault_of, guard
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import BatchSizeError, OptionError, of_user
from lightning_persample.torch_internals import (
    KEPT_ITERATOR,
    MAKE_ITERATORS,
    collate_of,
    collates_rows,
    pin_memory,
    tree_map_only,
    tree_unflatten,
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


@dataclass(eq=False, slots=True)
class _Tagged:
    """A batch on its way from a collate function to the iterator that takes the keys off."""

    batch: Any
    drawn: list[Any] | Drawn

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
    elif (array := _as_array(value)) is not None:
        yield place, array
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _leaves(part, (*place, number))


def _as_array(value: Any) -> NDArray[Any] | None:
    """A number, a text, a list of them, a tensor or an array as an array; None of what cannot be read, or has parts."""
    # A short tuple is a row rather than a sequence, and its parts are places.
    if type(value) in _PLAIN or (type(value) is list and value and all(type(each) in _PLAIN for each in value)):
        return np.array(value, dtype=object)  # which keeps what is in it as it is
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
        if not is_plain or value.is_complex():
            return None
        value = value.detach().resolve_neg()
        is_known = value.dtype in (torch.float16, torch.float32, torch.float64)  # numpy has no other ones
        value = (value.float() if value.is_floating_point() and not is_known else value).numpy()
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "iufb" else None


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


# The indices of a record's samples

PASS_INDEX = "pass sample_index=<function of the batch that returns the index of each sample>"
_NOTES = "_drawn_batches"  # the attribute of a followed CombinedLoader
_NOTED = 16  # batches: the current one, and those that Lightning fetches ahead


@dataclass(frozen=True, eq=False)
class _Notes:
    """How the samples of a fit's batches are changed and followed, and what its loaders gave last."""

    view: TrainingView | None
    order: RowOrder | None  # of the hooks that a batch goes through; None without any
    # Of each batch the keys by loader, or why there are none, and what to compare its order with
    drawn: deque[tuple[list[Any] | Exception, list[Column]]]


class BatchIndices:
    """Gives records the dataset's indices of their samples; made before the Trainer sets up its training data."""

    def __init__(
        self,
        trainer: Trainer,
        of_batch: Callable[[Any], Any] | None,
        *,
        is_asked: bool,
        view_of: Callable[[list[Any]], TrainingView | None],
    ) -> None:
        self._trainer = trainer
        self._of_batch = of_batch  # what the user has given as `sample_index`
        self._view_of = view_of  # of the training loaders
        self._is_asked = is_asked  # whether anything is done with records
        self._observed: ObservedMethod | None = None  # of the fit loop, right before it makes iterators
        self._followed: Any = None  # the CombinedLoader of the fit
        self._kind: Any = None  # its class
        self._notes: _Notes | None = None
        self._why_not_followed = "the training data were made before the callbacks' setup"
        self.why_absent, self._has_warned = "", False  # why the last record has no index
        self._are_apart: bool | None = None  # whether rows of several loaders are samples each, once that is decided
        self._apart: OfLoaders | None = None  # the current batch, where they are
        if of_batch is None and is_asked:
            self._install()

    def attach(self, record: PerSampleRecord, batch: Any, warn: Callable[[str], None]) -> PerSampleRecord:
        """The record with its `sample_index`."""
        if self._of_batch is not None:
            index = checked_index(of_user(self._of_batch, batch), record.batch_size)
            return replace(record, sample_index=_of_samples(index, record))
        if not self._is_asked:
            return record
        drawn, apart = self._of_current_batch(), self._apart
        drawn = drawn or [Drawn(None, self._why_not_followed)] * (1 if apart is None else len(apart.rows))
        why = guard(self._why_out_of_order, lambda error: not_known(error).why)(batch) if len(drawn) == 1 else ""
        if why:
            drawn = [drawn[0]._replace(keys=None, why=drawn[0].why or why)]
        sizes = [record.batch_size] * len(drawn) if apart is None else [*apart.rows.values()]
        found: list[Any] = [_index_of(each, rows) for each, rows in zip(drawn, sizes, strict=True)]
        if any(index is not None and len(index) for index in found):
            if apart is not None:
                return replace(record, sample_index=_of_samples(_named(apart.rows, found), record))
            found = [_of_samples(index, record) for index in found]
            return replace(record, sample_index=tree_unflatten(found, structure_of(self._followed)))
        reasons = [self._why_absent(each, rows) for each, rows in zip(drawn, sizes, strict=True)]
        self.why_absent = "; ".join(dict.fromkeys(reasons))
        if not self._has_warned and not all(each.is_expected for each in drawn):
            self._has_warned = True
            warn(f"record.sample_index is None, because {self.why_absent}; {PASS_INDEX} to the callback")
        return record

    def rows_drawn(self) -> int | None:
        """How many rows the data loader drew for the current batch; None where that is not known."""
        counts = {each.rows for each in self._of_current_batch()}
        return next(iter(counts)) if len(counts) == 1 else None

    def arranged(self, batch: Any, batch_dim: int, *, is_declared: bool) -> Any:
        """The current batch with lists of one item per sample, and tuples of fields, where these are known."""
        combined: Any = combined_loader(self._trainer)
        loaders = [] if combined is None else combined.flattened
        self._apart = None if is_declared or len(loaders) < 2 else self._of_loaders(combined, batch, batch_dim)
        if self._apart is not None:
            return self._apart
        if all(getattr(loader, "collate_fn", None) is default_collate for loader in loaders):
            return with_samples_at(batch, ())
        drawn = self._of_current_batch() if any(combined.iterables is each for each in loaders) else []
        return with_samples_at(batch, drawn[0].places) if drawn and drawn[0].places is not None else batch

    def _of_loaders(self, combined: Any, batch: Any, batch_dim: int) -> OfLoaders | None:
        """What each of several loaders gave, where their rows are samples each; None where a sample has one of each."""
        loaders, parts = combined.flattened, dict(_parts(combined.iterables, batch))
        if len(parts) != len(loaders):  # a hook of the module has made another batch of it
            return None
        drawn = self._of_current_batch() or [Drawn(None)] * len(loaders)
        sizes = [_batch_size_of(loader) for loader in loaders]
        if self._are_apart is None and None not in sizes:
            self._are_apart = len({*sizes}) > 1
        rows: dict[str, int] = {}
        for (name, part), loader, each in zip(parts.items(), loaders, drawn, strict=True):
            places = () if getattr(loader, "collate_fn", None) is default_collate else each.places
            parts[name] = part if places is None else with_samples_at(part, places)
            is_there = next(batch_tensors(part), None) is not None
            rows[name] = count_samples(parts[name], batch_dim, None, each.rows) if is_there and each.rows != 0 else 0
        counts = {count for count in rows.values() if count}
        if self._are_apart is None:
            self._are_apart = len(counts) > 1
        if self._are_apart:
            return OfLoaders(parts, rows)
        if len(counts) < 2:
            return None
        raise BatchSizeError(
            "several data loaders drew unequal numbers of rows for this batch, of which nothing is reported "
            f"({', '.join(f'{name}: {count}' for name, count in rows.items())}): as they have one batch size, a sample "
            "is made of a row of each; pass drop_last=True to them, or say by batch_layout whose each row is"
        )

    def uninstall(self) -> None:
        """Leave Lightning's objects as they were. May be called twice."""
        if self._observed is not None:  # until all is put back, so that what an interrupt keeps from it is done again
            self._observed.restore()
            self._let_go()
            self._observed = None

    def _install(self) -> None:
        # Lightning calls it when the training data are complete, right before it makes their iterators.
        loop = self._trainer.fit_loop
        if not hasattr(loop, BEFORE_ITERATORS):
            self._why_not_followed = "this version of lightning makes its iterators in another way"
            return

        def follow(before_iterators: Callable[[], None]) -> None:
            before_iterators()
            self._follow(combined_loader(self._trainer))

        self._observed = ObservedMethod(
            loop, BEFORE_ITERATORS, follow, self._failed, lambda: self._observed is not None
        )
        self._observed.install()

    def _failed(self, error: Exception) -> None:
        self._why_not_followed = not_known(error).why

    def _follow(self, combined: Any) -> None:
        self._let_go()
        if combined is not None and _NOTES not in vars(combined):
            self._followed, self._kind = combined, type(combined)
            order = RowOrder(None) if changes_batches(self._trainer) else None
            self._notes = _Notes(self._view_of(combined.flattened), order, deque(maxlen=_NOTED))
            vars(combined)[_NOTES] = self._notes
            combined.__class__ = _following(self._kind)

    def _let_go(self) -> None:
        combined = self._followed
        if combined is not None:
            combined.__class__ = self._kind
            vars(combined).pop(_NOTES, None)
            self._followed = self._notes = None

    def _of_current_batch(self) -> list[Drawn]:
        keys, _ = self._noted()
        return [] if keys is None else guard(_drawn, lambda error: [not_known(error)])(self._followed.flattened, keys)

    def _noted(self) -> tuple[Any, list[Column]]:
        """What was noted of the current batch as its loaders gave it; None of no such."""
        noted: Any = () if self._notes is None else self._notes.drawn
        # A loader without a length is one batch ahead, because Lightning has to know which batch is the last.
        ahead = batches_ahead(self._trainer) if noted else 0
        return noted[-1 - ahead] if len(noted) > ahead else (None, [])

    def _why_out_of_order(self, batch: Any) -> str:
        """Why the rows of the current batch are in another order than those that its loader gave."""
        order = None if self._notes is None else self._notes.order
        return "" if order is None else order.why_lost(self._noted()[1], batch)

    def _why_absent(self, drawn: Drawn, batch_size: int) -> str:
        if drawn.why:
            return drawn.why
        count = len(drawn.keys or ())
        return (
            f"the sampler drew {count} row{'' if count == 1 else 's'} for a batch of {batch_size} samples (a collate "
            "function or a hook of the module adds or drops rows)"
        )


def _parts(loaders: Any, batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What each loader of a collection gave for a batch, by its path in it; nothing where the batch is another."""
    if isinstance(loaders, Mapping):
        for key in loaders if isinstance(batch, Mapping) and batch.keys() == loaders.keys() else ():
            yield from _parts(loaders[key], batch[key], f"{name}/{key}" if name else str(key))
    elif isinstance(loaders, (list, tuple)):
        for place, loader in enumerate(
            loaders if isinstance(batch, (list, tuple)) and len(batch) == len(loaders) else ()
        ):
            yield from _parts(loader, batch[place], f"{name}/{place}" if name else str(place))
    else:
        yield name, batch


def _batch_size_of(loader: Any) -> int | None:
    """How many rows a loader draws for each batch but the last one; None where that is not known."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) if sampler is not None else getattr(loader, "batch_size", None)
    if type(size) is not int:
        return None
    rows = getattr(sampler, "sampler", None)
    return min(size, of_user(len, rows)) if isinstance(rows, Sized) else size


def _named(rows: Mapping[str, int], found: Iterable[Tensor | list[Any] | None]) -> list[str | None]:
    """The keys of the samples of several loaders, each with the name of its loader; None where a loader has none."""
    names: list[str | None] = []
    for (name, count), index in zip(rows.items(), found, strict=True):
        keys = index.tolist() if isinstance(index, Tensor) else index
        names += [None] * count if keys is None else [f"{name}/{key}" for key in keys]
    return names


@functools.cache
def _following(kind: Any) -> Any:
    """The kind of CombinedLoader that iterates over tagged loaders, and notes what their batches hold."""

    class Following(kind):
        def __iter__(self) -> Any:
            attributes: dict[str, Any] = self.__dict__
            own = attributes[LOADERS]
            failures: list[Exception] = []
            attributes[LOADERS] = guard(_tagged, failures.append)(own, attributes[_NOTES].view) or own
            try:
                iterator = super().__iter__()
            finally:
                attributes[LOADERS] = own
            note_failures(iterators_of(self), failures)
            return iterator

        def __next__(self) -> Any:
            fetched, columns = super().__next__(), list[Column]()
            notes: _Notes = self.__dict__[_NOTES]
            try:  # no `guard`: this runs at every batch
                keys: Any = [*map(getattr, iterators_of(self), repeat(LAST_KEYS), repeat(None))]
                if notes.order is not None and len(keys) == 1:
                    own = keys[0].keys if isinstance(keys[0], Drawn) else keys[0]
                    columns = notes.order.start_from(fetched[0], len(own or ()))
            except Exception as error:
                keys = error
            notes.drawn.append((keys, columns))
            return fetched

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = kind.__new__(kind)
            vars(plain).update({name: value for name, value in vars(self).items() if name != _NOTES})
            return as_it_is, (plain,)

    return functools.update_wrapper(Following, kind, updated=())


def _tagged(loaders: list[Any], view: TrainingView | None) -> list[Any]:
    return [TaggedLoader(each, view) if is_followed(each) else each for each in loaders]


def _drawn(loaders: list[Any], keys: list[Any] | Exception) -> list[Drawn]:
    if isinstance(keys, Exception):
        raise keys
    one_each = len(loaders) == len(keys)  # not so in mode "sequential", which Lightning refuses later
    return [as_drawn(each, loader) for loader, each in zip(loaders, keys, strict=True)] if one_each else []


def dataset_size(trainer: Trainer) -> int | None:
    """How many samples the training loaders' datasets have whose indices are those of the rows; None if unknown."""
    combined = combined_loader(trainer)
    loaders = [] if combined is None else combined.flattened
    if not loaders or any(why_no_keys(each) is not None or not isinstance(each.dataset, Sized) for each in loaders):
        return None
    return sum(len(each.dataset) for each in loaders)


def keys_of(record: PerSampleRecord) -> Tensor | list[Any] | None:
    """The samples' indices, (m,), or a list of m keys; None where they are unknown, or each has one of each loader."""
    index = record.sample_index
    is_list = isinstance(index, list) and not any(isinstance(each, (Tensor, list, dict)) for each in index)
    return index if is_list or isinstance(index, Tensor) else None  # type: ignore[return-value]


def _index_of(drawn: Drawn, batch_size: int) -> Tensor | list[Any] | None:
    keys = drawn.keys
    if keys is None or len(keys) != batch_size:
        return None
    fit = {*map(type, keys)} <= {int} and min(keys, default=0) >= -(2**63) and max(keys, default=0) < 2**63
    return torch.tensor(keys, dtype=torch.int64) if fit else list(keys)


def _of_samples(index: Tensor | list[Any] | None, record: PerSampleRecord) -> Tensor | list[Any] | None:
    """The index of the samples that the record has values for."""
    if record.samples is None or index is None:
        return index
    return index[record.samples] if isinstance(index, Tensor) else [index[place] for place in record.samples.tolist()]


def checked_index(answer: Any, batch_size: int) -> Tensor:
    """What a callable gave, as a tensor (B,), int64; anything but one int for each sample gives an `OptionError`."""
    got = type(answer).__name__
    try:
        found = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is not None:
        got += f" of shape {tuple(found.shape)} and dtype {found.dtype}"
        is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if is_integer and found.shape == (batch_size,):
            return found.detach().to("cpu", torch.int64, copy=True)  # a loader may use its memory again
    raise OptionError(
        f"sample_index returned {got}, but it must return the index of each sample of the batch: a tensor or a "
        f"sequence of {batch_size} ints"
    )
