"""Which samples of the dataset have the largest gradient norms, over all captured steps of a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.callbacks.loggers import log_table, save_table
from lightning_persample.callbacks.sample_index import PASS_INDEX, keys_of
from lightning_persample.capture.record import PerSampleRecord, warn_user
from lightning_persample.errors import UnsupportedError, of_user
from lightning_persample.influence.by_sample import (
    AT_DIFFERENT_TIMES,
    SampleTable,
    aligned,
    columns_of,
    how_often,
    together,
)
from lightning_persample.influence.optional_packages import pandas
from lightning_persample.influence.pictures import Render, rendered

_TOGETHER = 64  # captured batches whose norms leave the device in one go
_ROWS_TOGETHER = 1 << 14  # that are added to the table in one go, at least
_COLUMNS = ("index", "mean", "last", "seen", "nonfinite")


@dataclass(frozen=True)
class WorstSamples:
    """The samples with the largest mean gradient norm, largest first; ``print`` shows a table.

    Norms change in a training. Means are comparable where every step was captured (`is_complete`), so that each sample
    is in every epoch; else a sample that was captured early, or once, stands beside one that was captured late, and the
    table says so.

    >>> worst = WorstSamples((7,), (2.0,), (1.5,), (3,), {}, samples=10, times=(3, 3), dataset=10, is_complete=True)
    >>> print(worst)
    index  mean  last  seen
        7     2   1.5     3
    1 of 10 samples captured, 3 times each: all of the dataset

    Attributes:
        index: the samples' indices in the dataset of the train dataloader.
        mean: the mean of each one's finite norms.
        last: the last of them.
        seen: in how many captured batches each one was, those with a norm that is not finite included.
        nonfinite: the indices of all samples that had a norm that is inf or nan, and how often; it is in no mean. A
            sample that never had another is only here.
        samples: how many different samples were captured.
        times: in how many captured batches a sample was, of those that were captured: the fewest and the most.
        dataset: how many samples the dataset has; None where that is not known.
        is_complete: whether every step of the fit was captured, with all of its samples.
    """

    index: tuple[Any, ...]
    mean: tuple[float, ...]
    last: tuple[float, ...]
    seen: tuple[int, ...]
    nonfinite: Mapping[Any, int]
    samples: int
    times: tuple[int, int]
    dataset: int | None
    is_complete: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `rows`."""
        return _COLUMNS

    def rows(self) -> list[tuple[Any, ...]]:
        """The table: a row for each sample, with the number of its norms that are not finite."""
        counts = [self.nonfinite.get(index, 0) for index in self.index]
        return list(zip(self.index, self.mean, self.last, self.seen, counts, strict=True))

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        return pandas().DataFrame(self.rows(), columns=list(self.columns))

    def __len__(self) -> int:
        return len(self.index)

    def __str__(self) -> str:
        shown = [_COLUMNS[:4]]
        shown += [(str(i), f"{mean:.4g}", f"{last:.4g}", str(seen)) for i, mean, last, seen, _ in self.rows()]
        lines = [*aligned(shown), f"{len(self)} of {how_often(self.samples, self.times, self.dataset)}"]
        if not self.is_complete:
            lines.append(AT_DIFFERENT_TIMES)
        if self.nonfinite:
            named = list(self.nonfinite)
            more = f" and {len(named) - 10} more" if len(named) > 10 else ""
            lines.append(f"inf or nan: {', '.join(map(str, named[:10]))}{more}")
        return "\n".join(lines)


class SampleNorms:
    """Sums of the gradient norms of each sample that was captured: 32 bytes for each, 36 for norms in float64."""

    def __init__(self) -> None:
        self.dataset: int | None = None  # its number of samples, where that is known
        self.is_complete = True  # whether every step is captured, with all of its samples
        # Of the finite norms their sum, the last and how many, of the others how many, and when the last one came.
        self._table = SampleTable(sums="<f8", last="<f4", finite="<i4", others="<i4", when="<i4")
        self._clock = 0
        self._waiting: list[tuple[object, Any, Tensor]] = []  # on the device
        # On the host, not in the table yet: keys, norms and the number of the captured batch of some rows, each (rows,)
        self._rows: list[tuple[Any, NDArray[Any], NDArray[np.int32]]] = []
        self._why_absent = ""

    def add(self, record: PerSampleRecord, batch: object, why_absent: str) -> None:
        """Take the norms of a captured backward."""
        if not record.names:
            self._why_absent = "no parameter has a per-sample gradient"
            return
        index = keys_of(record)
        if index is None:
            several = "there are several train dataloaders, and a sample is made of a row of each"
            self._why_absent = why_absent if record.sample_index is None else several
            return
        norms = record.norms()
        if isinstance(index, list) and None in index:  # of a loader whose rows have no keys
            known = [place for place, key in enumerate(index) if key is not None]
            index, norms = [index[place] for place in known], norms[known]
        if isinstance(index, list) and not _are_hashable(index):
            self._why_absent = f"the sampler draws keys that cannot be counted ({type(index[0]).__name__})"
            return
        if batch is not None and self._waiting and self._waiting[-1][0] == batch:
            self._waiting.pop()
        elif len(self._waiting) >= _TOGETHER:
            self.settle()
        self._waiting.append((batch, index, norms))

    def state(self) -> dict[str, Any]:
        """All of it in tensors and plain containers; empty if there is no sample."""
        self._add_rows()
        if len(self._table) == 0:
            return {}
        keys = self._table.keys()
        columns = {name: torch.from_numpy(column.copy()) for name, column in self._table.columns.items()}
        index = torch.from_numpy(keys.copy()) if isinstance(keys, np.ndarray) else keys
        about = {"dataset": self.dataset, "is_complete": self.is_complete}
        return {"index": index, "columns": columns, "clock": self._clock, **about}

    def absorb(self, state: dict[str, Any]) -> None:
        """Add what another one counted."""
        self._add_rows()
        if not state:
            return
        index, given = state["index"], {name: column.numpy() for name, column in state["columns"].items()}
        places = self._table.places(index.numpy() if isinstance(index, Tensor) else index)
        self._hold(given["last"].dtype)
        there = self._table.columns
        is_later = (given["finite"] > 0) & (given["when"] >= there["when"][places])
        for name in ("last", "when"):
            there[name][places[is_later]] = given[name][is_later]
        for name in ("sums", "finite", "others"):
            there[name][places] += given[name]  # each place once
        self._clock = max(self._clock, state["clock"])
        self.dataset, self.is_complete = state["dataset"], self.is_complete and state["is_complete"]

    def of_all_processes(self, loaded: dict[str, Any], *, together: bool) -> SampleNorms:
        """What this process and all others counted, the same on each of them."""
        if not together and not loaded:
            return self
        parts: list[Any] = [(self.state(), self._why_absent)]
        if together:
            parts = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, (self.state(), self._why_absent))
        joined = SampleNorms()
        joined.absorb(loaded)
        for state, _ in parts:
            joined.absorb(state)
        joined._why_absent = next((why for _, why in parts if why), "")
        return joined

    def start_after(self, loaded: dict[str, Any]) -> None:
        """Count on from a state: what comes now is later than what it holds."""
        self._clock = max(self._clock, loaded.get("clock", 0))

    def worst(self, k: int, why_nothing: str = "") -> WorstSamples:
        """The samples with the largest mean of their finite norms."""
        self._add_rows()
        if len(self._table) == 0 and not self._why_absent:
            raise UnsupportedError(f"no step was captured: {why_nothing or 'no batch of a captured step had a record'}")
        if len(self._table) == 0:
            raise UnsupportedError(
                f"no captured sample has an index in the dataset: {self._why_absent}; {PASS_INDEX} to the callback if "
                "the data carry it"
            )
        keys, columns = self._table.keys(), self._table.columns
        ranked = _largest(columns["sums"], columns["finite"], k)
        others, seen = columns["others"].nonzero()[0], columns["finite"] + columns["others"]
        return WorstSamples(
            index=tuple(_taken(keys, ranked)),
            mean=tuple((columns["sums"][ranked] / columns["finite"][ranked]).tolist()),
            last=tuple(columns["last"][ranked].tolist()),
            seen=tuple(seen[ranked].tolist()),
            nonfinite=dict(zip(_taken(keys, others), columns["others"][others].tolist(), strict=True)),
            samples=len(self._table),
            times=(int(seen.min()), int(seen.max())),
            dataset=self.dataset,
            is_complete=self.is_complete,
        )

    def settle(self) -> None:
        """Take in what waits on the device; cheap where it was just waited for."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        norms = torch.cat([norms for _, _, norms in waiting])
        norms = norms if norms.dtype == torch.float64 else norms.float()  # NumPy has no bfloat16
        keys = [index.cpu().numpy() if isinstance(index, Tensor) else index for _, index, _ in waiting]
        when = np.repeat(np.arange(1, len(waiting) + 1, dtype=np.int32) + self._clock, [len(each) for each in keys])
        self._clock += len(waiting)
        self._rows.append((together(keys), norms.cpu().numpy(), when))
        # Many at a time, as the table may be copied; few beside it, as they take room, too.
        if sum(len(norms) for _, norms, _ in self._rows) >= max(_ROWS_TOGETHER, len(self._table) // 16):
            self._add_rows()

    def _add_rows(self) -> None:
        """Add to the table what waits on the device and on the host."""
        self.settle()
        rows, self._rows = self._rows, []
        if rows:
            keys, norms, when = (together(parts) for parts in zip(*rows, strict=True))
            places, finite = self._table.places(keys), np.isfinite(norms)
            self._hold(norms.dtype)
            columns = {name: torch.from_numpy(column) for name, column in self._table.columns.items()}
            for name, chosen in (("finite", finite), ("others", ~finite)):
                at = torch.from_numpy(places[chosen])
                columns[name].index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
            places, norms, when = places[finite], norms[finite], when[finite]
            columns["sums"].index_add_(0, torch.from_numpy(places), torch.from_numpy(norms).double())
            # A sample may be there more than once: its last row counts, as it does in NumPy.
            self._table.columns["last"][places] = norms
            self._table.columns["when"][places] = when

    def _hold(self, dtype: np.dtype[Any]) -> None:
        """Let the last norms be of this type, if they are not of a wider one."""
        last = self._table.columns["last"]
        self._table.columns["last"] = last.astype(np.promote_types(last.dtype, dtype), copy=False)


def write_worst_samples(
    trainer: Trainer,
    norms: SampleNorms,
    k: int,
    why_nothing: str = "",
    *,
    is_said: bool = False,
    render: Render | None = None,
    labels: Mapping[str, Any] | None = None,
) -> None:
    """Write ``worst_samples.csv`` to the Trainer's `log_dir`, and a table to loggers that have tables.

    The `labels` are further columns. With `render` its texts are one, and its images go to the loggers that have
    pictures.
    """
    # To be called on every process alike. A table without samples is not written. Below the samples with the largest
    # means are those that had a norm that is not finite and are not among them, k at most, without mean.
    folder = of_user(getattr, trainer, "log_dir")  # asks all processes, and the logger
    try:
        worst = norms.worst(k, why_nothing)
    except UnsupportedError as error:
        if not is_said:
            warn_user(f"worst_samples.csv is not written: {error}")
        return
    if folder is not None and trainer.is_global_zero:
        others = [
            (index, None, None, None, count) for index, count in worst.nonfinite.items() if index not in worst.index
        ]
        rows: list[tuple[Any, ...]] = [*worst.rows(), *others[:k]]
        if not worst.is_complete:
            warn_user(
                f"worst_samples.csv has {len(worst)} of {how_often(worst.samples, worst.times, worst.dataset)}; "
                f"{AT_DIFFERENT_TIMES}"
            )
        shown = [] if render is None else [rendered(render, row[0]) for row in rows]
        look_ups = columns_of(labels)
        rows = [(*row, *(look_up(row[0]) for look_up in look_ups.values())) for row in rows]
        columns, images = (*worst.columns, *look_ups), [None if isinstance(each, str) else each for each in shown]
        if any(isinstance(each, str) for each in shown):
            columns = (*columns, "sample")
            rows = [(*row, each if isinstance(each, str) else "") for row, each in zip(rows, shown, strict=True)]
        save_table(f"{folder}/worst_samples.csv", columns, rows)
        images = images if any(each is not None for each in images) else []
        log_table(trainer.loggers, "worst_samples", columns, rows, trainer.global_step, images)


def _are_hashable(keys: list[Any]) -> bool:
    try:
        hash(tuple(keys))
    except TypeError:
        return False
    return True


def _largest(sums: NDArray[np.float64], counts: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    """The places of the k largest means, largest first; those that tie in their order."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, -math.inf)
    k = min(k, int((counts > 0).sum()))
    if k == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(means >= np.partition(means, -k)[-k])
    return candidates[np.argsort(-means[candidates], kind="stable")][:k]


def _taken(keys: NDArray[np.int64] | list[Any], places: NDArray[np.int64]) -> list[Any]:
    """Some of the keys."""
    return keys[places].tolist() if isinstance(keys, np.ndarray) else [keys[place] for place in places.tolist()]
