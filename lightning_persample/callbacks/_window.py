"""The captured batches of one optimizer step in automatic optimization."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_persample.callbacks._mean_gradient import (
    DEVICES_DIFFER,
    NOTHING,
    UNEQUAL,
    MeanGradient,
    is_known,
    without_mean,
)
from lightning_persample.callbacks._step_norms import CapturedBatch, StepNorms
from lightning_persample.engine import PerSampleRecord
from lightning_persample.errors import UnsupportedError

__all__ = ["Window", "captured"]

_MANUAL = "optimization is manual"
_MAY_PASS = (UNEQUAL, DEVICES_DIFFER, NOTHING)  # reasons that the last batch of an epoch has, and that alone


def captured(record: PerSampleRecord, depth: int | None) -> CapturedBatch:
    """What is kept of a record."""
    groups = {} if depth is None else record.group_norms(depth)
    norms = record.norms() if record.names else None
    return CapturedBatch(record.num_values, norms, groups, record.coverage, record._relative_weights)


class Window:
    """Gathers the batches whose gradients are accumulated for one optimizer step.

    Args:
        depth: how many leading parts of a parameter's module path name its group; None makes no groups.
        groups: the names of the groups.
        mean: follows the mean gradient, where a statistic needs it.
        statistics: the statistics that are chosen.
    """

    def __init__(
        self, depth: int | None, groups: Sequence[str], mean: MeanGradient | None, statistics: Sequence[str]
    ) -> None:
        self._depth, self._groups, self._mean = depth, tuple(groups), mean
        self._keeps = bool({"cosine_to_mean", "signal_to_noise"} & set(statistics)) and mean is not None
        self._has_said, self._unknown_steps, self._cosines_absent = False, 0, ""
        self._cosines = "cosine_to_mean" in statistics
        self._ratios = "signal_to_noise" in statistics and mean is not None and mean.processes == 1
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        self._batches: dict[int, CapturedBatch] = {}
        self._seen: set[int] = set()
        self._empty: set[int] = set()
        self._found_cosines: list[Tensor] = []
        self._is_whole = True
        self.signal_to_noise: Tensor | None = None
        self._numbers: Tensor | None = None
        if self._mean is not None:
            self._mean.start()

    @property
    def has_mean(self) -> bool:
        """Whether statistics of the mean gradient are chosen."""
        return self._mean is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing has happened since `start`."""
        return self._is_whole and not (self._seen or self._batches)

    def miss_batch(self) -> None:
        """A batch of the step was not captured."""
        self._is_whole = False

    @property
    def is_empty(self) -> bool:
        """Whether no batch of the step has a record."""
        return not self._batches

    def why_unknown(self, step: StepNorms) -> str:
        """Why the mean gradient of a logged step is not known, once in a fit, or "" where there is nothing to say."""
        if self._mean is None or self._has_said or step.coverage == 0:  # then no norms either: a warning says so
            return ""
        if not step.gradient.shape[1]:  # the module has gone over to it in the middle of the fit
            reason = _MANUAL
        else:
            reason = "" if is_known(step.gradient) else self._mean.reason or DEVICES_DIFFER
        if reason == NOTHING and len(step.gradient) > 1:
            reason = DEVICES_DIFFER
        if self._cosines_absent and not reason:
            reason = self._cosines_absent
        self._unknown_steps = self._unknown_steps + 1 if reason else 0
        # The last batch of an epoch is often a smaller one, which alone is nothing to warn of.
        self._has_said = bool(reason) and (reason not in _MAY_PASS or self._unknown_steps > 1)
        return reason if self._has_said else ""

    def before_backward(self, batch_idx: int) -> None:
        """A backward of a batch that is captured begins."""
        if self._mean is not None:
            others = bool(self._seen - {batch_idx})
            self._mean.before_backward(first=not others, again=batch_idx in self._seen)

    def after_backward(self, batch_idx: int, record: PerSampleRecord | None, *, is_last: bool) -> None:
        """That backward has run, and nothing else since."""
        mean = self._mean
        self._seen.add(batch_idx)
        if record is None:
            self._empty.add(batch_idx)
        if mean is None:
            return
        mean.after_backward(record, keep=self._keeps, is_last=is_last)
        if not is_last:
            return
        self._numbers, self.signal_to_noise, self._found_cosines = mean.numbers(), None, []
        if mean.reason:
            return
        if self._cosines:
            try:
                self._found_cosines = mean.cosines()
            except UnsupportedError as error:
                self._cosines_absent = str(error)
        if self._ratios:
            self.signal_to_noise = mean.signal_to_noise()

    def add(self, batch_idx: int, record: PerSampleRecord) -> None:
        """Take the record of a batch; of several (a closure that runs again) the last one counts."""
        self._batches[batch_idx] = captured(record, self._depth)
        if self._mean is not None and record._mean_factor is None:  # that of another engine, perhaps
            self._mean.refuse_record(record)
            self._numbers = None if self._numbers is None else without_mean(self._numbers)

    def end_batch(self, batch_idx: int | None) -> None:
        """A batch has ended; None for one that has no part in the gradient."""
        if not self._holds(batch_idx):
            self.miss_batch()

    def norms(self, last: int | None) -> StepNorms:
        """The norms of the step; of none, unless every batch of it was captured, the last one included."""
        whole = self._is_whole and self._holds(last)
        batches = list(self._batches.values()) if whole else []
        if self._mean is None:
            return StepNorms.of_window(batches, self._groups)
        numbers = self._numbers if whole and self._numbers is not None else self._mean.nothing()
        return StepNorms.of_window(batches, self._groups, numbers, self._found_cosines if whole else ())

    def _holds(self, batch_idx: int | None) -> bool:
        return batch_idx is None or batch_idx in self._batches or batch_idx in self._empty
