"""Which samples of the dataset a captured batch holds: the keys that its sampler drew, or a user's function."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import default_collate

from lightning_persample.batch_axis.batch import OfLoaders, batch_tensors, count_samples, with_samples_at
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
from lightning_persample.callbacks.tagged_loader import (
    LAST_KEYS,
    Column,
    Drawn,
    RowOrder,
    TaggedLoader,
    TrainingView,
    as_drawn,
    is_followed,
    not_known,
    note_failures,
    why_no_keys,
)
from lightning_persample.capture.failure import guard
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import BatchSizeError, OptionError, of_user
from lightning_persample.torch_internals import tree_unflatten

PASS_INDEX = "pass sample_index=<function of the batch that returns the index of each sample>"
_LOG, _VIEW, _ORDER = "_drawn_batches", "_training_view", "_row_order"
_NOTED = 16  # batches: the current one, and those that Lightning fetches ahead


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
        if combined is not None and _LOG not in vars(combined):
            self._followed, self._kind = combined, type(combined)
            vars(combined)[_VIEW] = self._view_of(combined.flattened)
            vars(combined)[_LOG] = deque(maxlen=_NOTED)
            vars(combined)[_ORDER] = RowOrder(None) if changes_batches(self._trainer) else None
            combined.__class__ = _following(self._kind)

    def _let_go(self) -> None:
        combined = self._followed
        if combined is not None:
            combined.__class__ = self._kind
            for name in (_LOG, _VIEW, _ORDER):
                vars(combined).pop(name, None)
            self._followed = None

    def _of_current_batch(self) -> list[Drawn]:
        keys, _ = self._noted()
        return [] if keys is None else guard(_drawn, lambda error: [not_known(error)])(self._followed.flattened, keys)

    def _noted(self) -> tuple[Any, list[Column]]:
        """What was noted of the current batch as its loaders gave it; None of no such."""
        noted = () if self._followed is None else vars(self._followed)[_LOG]
        # A loader without a length is one batch ahead, because Lightning has to know which batch is the last.
        ahead = batches_ahead(self._trainer) if noted else 0
        return noted[-1 - ahead] if len(noted) > ahead else (None, [])

    def _why_out_of_order(self, batch: Any) -> str:
        """Why the rows of the current batch are in another order than those that its loader gave."""
        order: RowOrder | None = None if self._followed is None else vars(self._followed)[_ORDER]
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
    return min(size, len(rows)) if isinstance(rows, Sized) else size


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
            attributes[LOADERS] = guard(_tagged, failures.append)(own, attributes[_VIEW]) or own
            try:
                iterator = super().__iter__()
            finally:
                attributes[LOADERS] = own
            note_failures(iterators_of(self), failures)
            return iterator

        def __next__(self) -> Any:
            fetched, columns = super().__next__(), list[Column]()
            try:  # no `guard`: this runs at every batch
                keys: Any = [getattr(each, LAST_KEYS, None) for each in iterators_of(self)]
                order: RowOrder | None = self.__dict__[_ORDER]
                if order is not None and len(keys) == 1:
                    own = keys[0].keys if isinstance(keys[0], Drawn) else keys[0]
                    columns = order.start_from(fetched[0], len(own or ()))
            except Exception as error:
                keys = error
            self.__dict__[_LOG].append((keys, columns))
            return fetched

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = kind.__new__(kind)
            vars(plain).update({name: value for name, value in vars(self).items() if name not in (_LOG, _VIEW, _ORDER)})
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
    fit = all(type(key) is int and -(2**63) <= key < 2**63 for key in keys)
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
            return found.detach().to("cpu", torch.int64)
    raise OptionError(
        f"sample_index returned {got}, but it must return the index of each sample of the batch: a tensor or a "
        f"sequence of {batch_size} ints"
    )
