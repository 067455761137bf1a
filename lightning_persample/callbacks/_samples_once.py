"""Every sample of a dataset once, in order, in batches as its DataLoader makes them, with the samples' indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, SubsetRandomSampler, default_collate

from lightning_persample.callbacks._fingerprints import fingerprint_of_data
from lightning_persample.callbacks._tagged_loader import TaggedLoader, last_drawn, why_no_keys
from lightning_persample.errors import PerSampleError, UnsupportedError

__all__ = ["Fetched", "SamplesOnce"]

_NAMED = 8
_REMEDY = "pass sample_index=<function of the batch that returns the index of each sample>"


class Fetched(NamedTuple):
    """A batch on its way to the step.

    Attributes:
        place: which checkpoint it is for.
        number: which batch of the checkpoint it is, in this process.
        batch: the batch.
        keys: the index of each sample; None where the batch tells it.
        places: see `Drawn`.
    """

    place: int
    number: int
    batch: Any
    keys: list[int] | None
    places: tuple[Any, ...] | None


class SamplesOnce:
    """The samples of a loader, each once, split among processes.

    A DataLoader of a dataset with a length is made again: what its sampler would draw plays no part, so that shuffling,
    weights and ``drop_last`` change nothing; the sampler of a subset alone is asked for its indices. Other data are
    taken as they come, by one process, and have to tell the samples' indices themselves.

    Args:
        loader: the DataLoader, or whatever gives batches.
        has_index: whether the batch tells the index of its samples.

    Attributes:
        size: number of samples of the dataset, None where it has no length.

    Raises:
        UnsupportedError: the samples have no indices.
    """

    def __init__(self, loader: Iterable[Any], has_index: bool) -> None:
        self._loader = loader
        self._has_index = has_index
        unknown = why_no_keys(loader)
        why = "" if unknown is None else unknown.why
        if not why and isinstance(loader, DataLoader) and loader.batch_sampler is None:
            why = "the dataset gives whole batches (batch_size=None)"
        if not why and not isinstance(_batch_size(loader), int):
            why = f"{type(getattr(loader, 'batch_sampler', None)).__name__} has no batch_size"
        self._is_made_anew, self._why = not why, why
        if why and not has_index:
            raise UnsupportedError(f"the samples cannot be separated, because {why}; {_REMEDY}")
        self.size = len(loader.dataset) if isinstance(loader, DataLoader) and self._is_made_anew else None  # type: ignore[arg-type]

    def fingerprint(self) -> str | None:
        """The fingerprint of the data; None where it is unknown, or where the indices are not those of the dataset."""
        return None if self._has_index else fingerprint_of_data(getattr(self._loader, "dataset", None))

    def indices(self) -> np.ndarray[Any, Any] | None:
        """The index of each sample that is visited, in order; None where only the batches tell it."""
        return None if self._has_index else self._indices()

    def check_processes(self, processes: int) -> None:
        """Refuse what cannot be split."""
        if processes > 1 and not self._is_made_anew:
            raise UnsupportedError(
                f"the samples cannot be split among {processes} processes, because {self._why}: pass a DataLoader of a "
                "dataset with a length, or run in one process"
            )

    def batches(
        self, places: int, visited: Callable[[int], np.ndarray[Any, Any]], rank: int, processes: int
    ) -> Iterator[Fetched]:
        """The batches of one process, for one checkpoint after the other."""
        for place in range(places):
            done = np.empty(0, np.int64) if self._has_index else visited(place)
            for number, (batch, keys, of_rows) in enumerate(self._keyed(done, rank, processes)):
                yield Fetched(place, number, batch, keys, of_rows)

    def check_complete(self, rows: np.ndarray[Any, Any], places: int) -> None:
        """Refuse a store that lacks a sample."""
        expected = self.indices()
        if expected is None:
            return
        for place in range(places):
            missing = np.setdiff1d(expected, rows["sample_index"][rows["checkpoint"] == place]).tolist()
            if missing:
                more = ", ..." if missing[_NAMED:] else ""
                raise PerSampleError(
                    f"{len(missing)} samples have no row at checkpoint {place}: {str(missing[:_NAMED])[1:-1]}{more}. "
                    "The call can be repeated, and goes on with them"
                )

    def _keyed(self, done: np.ndarray[Any, Any], rank: int, processes: int) -> Iterator[tuple[Any, Any, Any]]:
        if not self._is_made_anew:
            holds_fields = getattr(self._loader, "collate_fn", None) is default_collate
            for batch in self._loader:
                yield batch, None, () if holds_fields else None
            return
        loader: Any = self._loader
        pending = np.setdiff1d(self._indices(), done)[rank::processes].tolist()
        size = _batch_size(loader)
        batches = [pending[k : k + size] for k in range(0, len(pending), size)]
        again = _like(loader, batches)
        iterator = iter(TaggedLoader(again))
        given = 0
        for batch in iterator:
            given += 1
            drawn = last_drawn(iterator, again)
            yield batch, None if self._has_index else _checked(drawn), drawn.places
        if given < len(batches):
            raise PerSampleError(
                f"the loader ended after {given} of {len(batches)} batches: one of the samples {batches[given]} gave a "
                "StopIteration, which a dataset must not raise. What was collected before is written"
            )

    def _indices(self) -> np.ndarray[Any, Any]:
        loader: Any = self._loader
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)  # a batch sampler of the user has its own
        if isinstance(sampler, SubsetRandomSampler):
            return np.unique(np.asarray(list(sampler.indices), np.int64))
        return np.arange(self.size or 0)


def _batch_size(loader: Any) -> Any:
    """The batch size of a DataLoader, or of its batch sampler."""
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None)


def _like(loader: DataLoader[Any], batches: list[list[int]]) -> DataLoader[Any]:
    """A DataLoader with the same rows and workers that makes these batches."""
    workers = loader.num_workers
    options: dict[str, Any] = {"multiprocessing_context": loader.multiprocessing_context} if workers else {}
    if workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "timeout": loader.timeout}
    sampler: Any = batches
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        **options,
    )


def _checked(drawn: Any) -> list[int]:
    if drawn.keys is None:
        raise UnsupportedError(f"the samples of a batch are unknown, because {drawn.why}; {_REMEDY}")
    keys: list[int] = drawn.keys
    return keys
