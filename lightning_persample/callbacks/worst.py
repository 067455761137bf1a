"""Which samples of the dataset have the largest gradient norms, over all captured steps of a fit."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_persample.callbacks.loggers import log_table, save_table
from lightning_persample.callbacks.sample_index import PASS_INDEX, keys_of
from lightning_persample.capture.record import PerSampleRecord, warn_user
from lightning_persample.errors import UnsupportedError
from lightning_persample.influence.pictures import Render, rendered

_TOGETHER = 64  # captured batches whose norms leave the device in one go
_COLUMNS = ("index", "mean", "last", "seen", "nonfinite")


@dataclass(frozen=True)
class WorstSamples:
    """The samples with the largest mean gradient norm, largest first; ``print`` shows a table.

    >>> worst = WorstSamples(index=(7,), mean=(2.0,), last=(1.5,), seen=(3,), nonfinite={}, samples=10)
    >>> print(worst)
    index  mean  last  seen
        7     2   1.5     3
    1 of the 10 samples captured

    Attributes:
        index: the samples' indices in the dataset of the train dataloader.
        mean: the mean of each one's finite norms.
        last: the last of them.
        seen: in how many captured batches each one was, those with a norm that is not finite included.
        nonfinite: the indices of all samples that had a norm that is inf or nan, and how often; it is in no mean. A
            sample that never had another is only here.
        samples: how many different samples were captured.
    """

    index: tuple[Any, ...]
    mean: tuple[float, ...]
    last: tuple[float, ...]
    seen: tuple[int, ...]
    nonfinite: Mapping[Any, int]
    samples: int

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
        pandas: Any = importlib.import_module("pandas")
        return pandas.DataFrame(self.rows(), columns=list(self.columns))

    def __len__(self) -> int:
        return len(self.index)

    def __str__(self) -> str:
        shown = [_COLUMNS[:4]]
        shown += [(str(i), f"{mean:.4g}", f"{last:.4g}", str(seen)) for i, mean, last, seen, _ in self.rows()]
        widths = [max(len(row[column]) for row in shown) for column in range(4)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
        lines.append(f"{len(self)} of the {self.samples} samples captured")
        if self.nonfinite:
            named = list(self.nonfinite)
            more = f" and {len(named) - 10} more" if len(named) > 10 else ""
            lines.append(f"inf or nan: {', '.join(map(str, named[:10]))}{more}")
        return "\n".join(lines)


class SampleNorms:
    """Sums of the gradient norms of each sample that was captured: about 150 bytes for each different sample."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}
        self._sums = torch.zeros(0, 2, dtype=torch.float64)  # of the finite norms, and the last of them
        self._counts = torch.zeros(0, 3, dtype=torch.int64)  # finite norms, others, and when the last one came
        self._clock = 0
        self._waiting: list[tuple[object, Any, Tensor]] = []
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
        if isinstance(index, list) and not _are_hashable(index):
            self._why_absent = f"the sampler draws keys that cannot be counted ({type(index[0]).__name__})"
            return
        if batch is not None and self._waiting and self._waiting[-1][0] == batch:
            self._waiting.pop()
        elif len(self._waiting) >= _TOGETHER:
            self.settle()
        self._waiting.append((batch, index, record.norms()))

    def state(self) -> dict[str, Any]:
        """All of it in tensors and plain containers; empty if there is no sample."""
        self.settle()
        count = len(self._places)
        if count == 0:
            return {}
        keys = list(self._places)
        return {
            "index": torch.tensor(keys) if all(type(key) is int and abs(key) < 2**63 for key in keys) else keys,
            "sums": self._sums[:count].clone(),
            "counts": self._counts[:count].clone(),
            "clock": self._clock,
        }

    def absorb(self, state: dict[str, Any]) -> None:
        """Add what another one counted."""
        self.settle()
        if not state:
            return
        index = state["index"]
        places = self._places_of(index.tolist() if isinstance(index, Tensor) else index)
        sums, counts = state["sums"], state["counts"]
        is_later = (counts[:, 0] > 0) & (counts[:, 2] >= self._counts[places, 2])
        self._sums[places[is_later], 1] = sums[is_later, 1]
        self._counts[places[is_later], 2] = counts[is_later, 2]
        self._sums[places, 0] += sums[:, 0]
        self._counts[places, :2] += counts[:, :2]
        self._clock = max(self._clock, state["clock"])

    def of_all_processes(self, loaded: dict[str, Any], *, together: bool) -> SampleNorms:
        """What this process and all others counted, the same on each of them."""
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
        state = self.state()
        if not state and not self._why_absent:
            raise UnsupportedError(f"no step was captured: {why_nothing or 'no batch of a captured step had a record'}")
        if not state:
            raise UnsupportedError(
                f"no captured sample has an index in the dataset: {self._why_absent}; {PASS_INDEX} to the callback if "
                "the data carry it"
            )
        index, sums, counts = state["index"], state["sums"], state["counts"]
        if isinstance(index, Tensor):  # samples that tie come in the order of the dataset
            order = index.argsort()
            index, sums, counts = index[order].tolist(), sums[order], counts[order]
        means = torch.where(counts[:, 0] > 0, sums[:, 0] / counts[:, 0], -math.inf)
        ranked = means.argsort(descending=True, stable=True)[: min(k, int((counts[:, 0] > 0).sum()))]
        return WorstSamples(
            index=tuple(index[place] for place in ranked.tolist()),
            mean=tuple(means[ranked].tolist()),
            last=tuple(sums[ranked, 1].tolist()),
            seen=tuple(counts[ranked, :2].sum(1).tolist()),
            nonfinite={index[place]: int(counts[place, 1]) for place in counts[:, 1].nonzero().flatten().tolist()},
            samples=len(index),
        )

    def settle(self) -> None:
        """Take in what waits on the device; cheap where it was just waited for."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        together = torch.cat([norms.double() for _, _, norms in waiting]).cpu()
        for (_, index, _), norms in zip(waiting, together.split([len(each[2]) for each in waiting]), strict=True):
            self._clock += 1
            places = self._places_of(index.tolist() if isinstance(index, Tensor) else index)
            finite = norms.isfinite()
            if not finite.all():
                others = places[~finite]
                self._counts[:, 1].index_add_(0, others, torch.ones_like(others))
                places, norms = places[finite], norms[finite]
            self._sums[:, 0].index_add_(0, places, norms)
            self._counts[:, 0].index_add_(0, places, torch.ones_like(places))
            # A sample may be in a batch more than once: its last row counts, as it does in NumPy.
            self._sums.numpy()[places.numpy(), 1] = norms.numpy()
            self._counts[places, 2] = self._clock

    def _places_of(self, keys: Iterable[Any]) -> Tensor:
        places = [self._places.setdefault(key, len(self._places)) for key in keys]
        if len(self._places) > len(self._sums):
            room = max(2 * len(self._sums), len(self._places))
            self._sums, self._counts = _with_room(self._sums, room), _with_room(self._counts, room)
        return torch.tensor(places, dtype=torch.int64)


def write_worst_samples(
    trainer: Trainer,
    norms: SampleNorms,
    k: int,
    why_nothing: str = "",
    *,
    is_said: bool = False,
    render: Render | None = None,
) -> None:
    """Write ``worst_samples.csv`` to the Trainer's `log_dir`, and a table to loggers that have tables.

    With `render` its texts are a further column, and its images go to the loggers that have pictures.
    """
    # To be called on every process alike. A table without samples is not written. Below the samples with the largest
    # means are those that had a norm that is not finite and are not among them, k at most, without mean.
    folder = trainer.log_dir  # asks all processes
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
        shown = [] if render is None else [rendered(render, row[0]) for row in rows]
        columns, images = worst.columns, [None if isinstance(each, str) else each for each in shown]
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


def _with_room(numbers: Tensor, room: int) -> Tensor:
    return torch.cat([numbers, numbers.new_zeros(room - len(numbers), numbers.shape[1])])
