"""Which samples of the dataset a captured batch holds.

Lightning asks its CombinedLoader for batches, and that one asks the DataLoaders. For the time of a fit the
CombinedLoader iterates over tagged loaders instead and notes what the rows of each batch are. Nobody else who iterates
over the same DataLoaders, in a callback or in validation, is seen here, and the DataLoaders stay as they are.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch.utils.data import default_collate

from lightning_persample.callbacks._consumer import Consumer
from lightning_persample.callbacks._observed_method import ObservedMethod
from lightning_persample.callbacks._tagged_loader import (
    LAST_KEYS,
    Drawn,
    TaggedLoader,
    as_drawn,
    is_followed,
    note_failures,
)
from lightning_persample.engine import PerSampleRecord, fault_of, guard, of_user
from lightning_persample.engine.batch import with_samples_at
from lightning_persample.errors import OptionError

__all__ = ["BatchIndices", "checked_index"]

_REMEDY = "pass sample_index=<function of the batch that returns the index of each sample> to the callback"
_LOG = "_drawn_batches"
_NOTED = 16  # batches: the current one, and those that Lightning fetches ahead


class BatchIndices:
    """Gives records the dataset's indices of their samples.

    Args:
        trainer: the Trainer, before it sets up its training data.
        callbacks: its per-sample callbacks.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[Consumer]) -> None:
        self._trainer = trainer
        self._of_batch = callbacks[0].sample_index
        self._followed: Any = None
        self._kind: Any = None
        self._observed: ObservedMethod | None = None
        self._has_warned = False
        self._why_not_followed = "the training data were made before the callbacks' setup"
        self.why_absent = ""
        self._is_asked = any(callback.receives_records() for callback in callbacks)
        if self._of_batch is None and self._is_asked:
            self._install()

    def attach(self, record: PerSampleRecord, batch: Any, warn: Callable[[str], None]) -> PerSampleRecord:
        """The record with its `sample_index`."""
        if self._of_batch is not None:
            index = checked_index(of_user(self._of_batch, batch), record.batch_size)
            return replace(record, sample_index=_of_samples(index, record))
        if not self._is_asked:
            return record
        drawn = self._of_current_batch() or [Drawn(None, self._why_not_followed)]
        found = [_of_samples(_index_of(each, record.batch_size), record) for each in drawn]
        if any(index is not None for index in found):
            return replace(record, sample_index=tree_unflatten(found, self._followed._spec))
        reasons = [self._why_absent(each, record.batch_size) for each in drawn]
        self.why_absent = "; ".join(dict.fromkeys(reasons))
        if not self._has_warned and not all(each.is_expected for each in drawn):
            self._has_warned = True
            warn(f"record.sample_index is None, because {self.why_absent}; {_REMEDY}")
        return record

    def rows_drawn(self) -> int | None:
        """How many rows the data loader drew for the current batch; None where that is not known."""
        counts = {each.rows for each in self._of_current_batch()}
        return next(iter(counts)) if len(counts) == 1 else None

    def arranged(self, batch: Any) -> Any:
        """The current batch with lists of one item per sample, and tuples of fields, where these are known."""
        combined: Any = self._trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        if all(getattr(loader, "collate_fn", None) is default_collate for loader in loaders):
            return with_samples_at(batch, ())
        drawn = self._of_current_batch() if any(combined.iterables is each for each in loaders) else []
        return with_samples_at(batch, drawn[0].places) if drawn and drawn[0].places is not None else batch

    def uninstall(self) -> None:
        """Leave Lightning's objects as they were. May be called twice."""
        if self._observed is not None:  # until all is put back, so that what an interrupt keeps from it is done again
            self._observed.restore()
            self._let_go()
            self._observed = None

    def _install(self) -> None:
        # Lightning calls it when the training data are complete, right before it makes their iterators.
        loop, name = self._trainer.fit_loop, "_load_combined_loader_states"
        if not hasattr(loop, name):
            self._why_not_followed = "this version of lightning makes its iterators in another way"
            return

        def follow(before_iterators: Callable[[], None]) -> None:
            before_iterators()
            self._follow(loop._combined_loader)

        self._observed = ObservedMethod(loop, name, follow, self._failed, lambda: self._observed is not None)
        self._observed.install()

    def _failed(self, error: Exception) -> None:
        self._why_not_followed = fault_of(error, "following the data loader")

    def _follow(self, combined: Any) -> None:
        self._let_go()
        if combined is not None and _LOG not in vars(combined):
            self._kind = type(combined)
            self._followed = combined
            vars(combined)[_LOG] = deque(maxlen=_NOTED)
            combined.__class__ = _following(self._kind)

    def _let_go(self) -> None:
        combined = self._followed
        if combined is not None:
            combined.__class__ = self._kind
            vars(combined).pop(_LOG, None)
            self._followed = None

    def _of_current_batch(self) -> list[Drawn]:
        if self._followed is None:
            return []
        noted = vars(self._followed)[_LOG]
        # A loader without a length is one batch ahead, because Lightning has to know which batch is the last.
        ahead = len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))
        return guard(_drawn, _not_known)(self._followed.flattened, noted[-1 - ahead]) if len(noted) > ahead else []

    def _why_absent(self, drawn: Drawn, batch_size: int) -> str:
        if drawn.why:
            return drawn.why
        count = len(drawn.keys or ())
        return (
            f"the sampler drew {count} row{'' if count == 1 else 's'} for a batch of {batch_size} samples (a collate "
            "function or a hook of the module adds or drops rows)"
        )


@functools.cache
def _following(kind: Any) -> Any:
    """The kind of CombinedLoader that iterates over tagged loaders, and notes what their batches hold."""

    class Following(kind):
        def __iter__(self) -> Any:
            attributes: dict[str, Any] = self.__dict__
            own = attributes["_flattened"]
            failures: list[Exception] = []
            attributes["_flattened"] = guard(_tagged, failures.append)(own) or own
            try:
                iterator = super().__iter__()
            finally:
                attributes["_flattened"] = own
            note_failures(self._iterator.iterators, failures)
            return iterator

        def __next__(self) -> Any:
            fetched = super().__next__()
            try:  # no `guard`: this runs at every batch
                keys: Any = [getattr(each, LAST_KEYS, None) for each in self._iterator.iterators]
            except Exception as error:
                keys = error
            self.__dict__[_LOG].append(keys)
            return fetched

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = kind.__new__(kind)
            vars(plain).update({name: value for name, value in vars(self).items() if name != _LOG})
            return _itself, (plain,)

    Following.__name__, Following.__qualname__, Following.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Following


def _tagged(loaders: list[Any]) -> list[Any]:
    return [TaggedLoader(each) if is_followed(each) else each for each in loaders]


def _drawn(loaders: list[Any], keys: list[Any] | Exception) -> list[Drawn]:
    if isinstance(keys, Exception):
        raise keys
    one_each = len(loaders) == len(keys)  # not so in mode "sequential", which Lightning refuses later
    return [as_drawn(each, loader) for loader, each in zip(loaders, keys, strict=True)] if one_each else []


def _not_known(error: Exception) -> list[Drawn]:
    return [Drawn(None, fault_of(error, "following the data loader"))]


def _itself(combined: Any) -> Any:
    return combined


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
    found = answer if isinstance(answer, Tensor) else _as_tensor(answer)
    got = type(answer).__name__
    if isinstance(found, Tensor):
        got += f" of shape {tuple(found.shape)} and dtype {found.dtype}"
        is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if is_integer and found.shape == (batch_size,):
            return found.detach().to("cpu", torch.int64)
    raise OptionError(
        f"sample_index returned {got}, but it must return the index of each sample of the batch: a tensor or a "
        f"sequence of {batch_size} ints"
    )


def _as_tensor(answer: Any) -> Tensor | None:
    try:
        return torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        return None
