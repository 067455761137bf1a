"""The learning rate that a sample's gradient met, from the groups of parameters that the optimizers have.

It is that of the optimizer step, which may be another one than at the backward: a hook before the step, a schedule by
hand in `optimizer_step` and one by batches that are accumulated change it in between. So rows wait for their step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_persample.engine import PerSampleRecord, guard

__all__ = ["LearningRates"]

_LATE = (
    "the learning rate changed between a backward and its optimizer step, after the rows of that backward were "
    "written: they have that of the backward"
)


@dataclass(eq=False)
class _Waiting:
    """Rows whose optimizer step is still to come: their rates by group, and the groups that have not stepped yet."""

    rows: object
    correct: Callable[[float | Tensor], None]
    sq_norms: Mapping[str, Tensor]
    rates: list[float]
    places: set[int]


class LearningRates:
    """Reads learning rates, cheaply where all parameters have the same.

    Args:
        pl_module: the module that is trained.
        optimizers: its optimizers; each tells of its steps until `close` is called.
        warn: takes where rows were written with another rate than that of their step.
        failed: takes what fails at an optimizer's step by a fault of this package.
    """

    def __init__(
        self,
        pl_module: LightningModule,
        optimizers: Sequence[torch.optim.Optimizer],
        warn: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._module, self._optimizers, self._warn = pl_module, optimizers, warn
        self._last: list[float] = []
        self._sizes: list[int] = []
        self._groups: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        self._written: dict[int, float] = {}
        self._handles: list[RemovableHandle] = []
        for place, optimizer in enumerate(optimizers):
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_post_hook(guard(partial(self._stepped, place), failed)))

    def close(self) -> None:
        """Leave the optimizers as they were. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def forget(self) -> None:
        """The optimizer step is over; rows that still wait are of one that was skipped."""
        self._waiting, self._written = [], {}

    def of_record(self, record: PerSampleRecord) -> float | Tensor:
        """The learning rate eta of each sample, now."""
        self._last = self._now()
        return self._of_norms(record.sq_norms, self._last)

    def wait(self, rows: object, record: PerSampleRecord, correct: Callable[[float | Tensor], None]) -> None:
        """Note if the rate turns out to be another one when the optimizer steps; to be called after `of_record`."""
        places = {self._groups[name] for name in record.sq_norms if name in self._groups}
        if places and self._handles:
            self._waiting.append(_Waiting(rows, correct, record.sq_norms, self._last, places))

    def wrote(self, others: Sequence[object]) -> None:
        """Rows have been written and cannot be corrected any more: all that wait but `others`."""
        kept = {id(rows) for rows in others}
        for each in self._waiting:
            for place in each.places if id(each.rows) not in kept else ():
                rate = each.rates[place]
                self._written[place] = rate if self._written.get(place, rate) == rate else math.nan
        self._waiting = [each for each in self._waiting if id(each.rows) in kept]

    def _now(self) -> list[float]:
        sizes: list[int] = []
        rates: list[float] = []
        for optimizer in self._optimizers:  # at every step: plain loops are the fastest
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                rates.append(float(group["lr"]))
        if sizes != self._sizes:  # a callback may add groups, or parameters to them, as layers thaw
            if len(sizes) != len(self._sizes):
                self.forget()
            self._sizes, self._groups = sizes, self._places()
        return rates

    def _of_norms(self, sq_norms: Mapping[str, Tensor], rates: Sequence[float]) -> float | Tensor:
        if rates and rates.count(rates[0]) == len(rates) and self._groups.keys() >= sq_norms.keys():
            return rates[0]
        places = {name: self._groups.get(name) for name in sq_norms}
        by_name = {name: 0.0 if place is None else rates[place] for name, place in places.items()}
        different = set(by_name.values())
        if len(different) <= 1:
            return different.pop() if different else max(rates, default=0.0)
        return _effective(sq_norms, by_name)

    def _stepped(self, optimizer: int, *args: Any) -> None:
        if not self._waiting and not self._written:
            return
        rates = self._now()
        first = sum(len(each.param_groups) for each in self._optimizers[:optimizer])
        own = range(first, first + len(self._optimizers[optimizer].param_groups))
        if any(place in self._written and self._written.pop(place) != rates[place] for place in own):
            self._warn(_LATE)
        for each in self._waiting:
            places = each.places.intersection(own)
            each.places -= places
            if any(each.rates[place] != rates[place] for place in places):
                each.rates = [rates[n] if n in places else rate for n, rate in enumerate(each.rates)]
                with torch.no_grad():
                    each.correct(self._of_norms(each.sq_norms, each.rates))
        self._waiting = [each for each in self._waiting if each.places]

    def _places(self) -> dict[str, int]:
        """The group of each parameter, by its place among those of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        places = {id(parameter): place for place, group in enumerate(groups) for parameter in group["params"]}
        named = self._module.named_parameters()
        return {name: places[id(parameter)] for name, parameter in named if id(parameter) in places}


def _effective(sq_norms: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensor:
    device = next(iter(sq_norms.values())).device
    squares = torch.stack([sq_norm.to(device).double() for sq_norm in sq_norms.values()])
    total = squares.sum(0)
    mean = (squares * squares.new_tensor([rates[name] for name in sq_norms])[:, None]).sum(0) / total
    return torch.where(total == 0, max(rates.values()), mean)
