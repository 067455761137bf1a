"""Which backward passes make up an optimizer step, for statistics over all samples that the step uses."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule

from lightning_persample.engine import PerSampleRecord
from lightning_persample.errors import PerSampleWarning

__all__ = ["ManualSteps", "names_by_optimizer", "restricted"]


def names_by_optimizer(
    pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[frozenset[str], ...]:
    """The names of the parameters that each optimizer holds."""
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    named = list(pl_module.named_parameters())
    return tuple(frozenset(name for name, parameter in named if id(parameter) in ids) for ids in held)


def restricted(record: PerSampleRecord, names: Collection[str], pl_module: LightningModule) -> PerSampleRecord:
    """The record of some of the parameters alone.

    Args:
        record: the record of all parameters that the backward reached.
        names: the parameters to keep.
        pl_module: the module, for the number of entries of each parameter.

    Returns:
        A record whose norms and coverage are over these parameters.
    """
    kept = {name: sq_norm for name, sq_norm in record.sq_norms.items() if name in names}
    missing = {name: reason for name, reason in record.unsupported.items() if name in names}
    sizes = {name: parameter.numel() for name, parameter in pl_module.named_parameters()}
    known, unknown = (sum(sizes[name] for name in part) for part in (kept, missing))
    share = known / (known + unknown) if known + unknown else 1.0
    return replace(record, sq_norms=kept, unsupported=missing, coverage=share)


class ManualSteps:
    """Assigns the backward passes of a training step in manual optimization to the steps of its optimizers.

    A backward belongs to the first step after it of an optimizer that holds a parameter it reached. Of several steps of
    one optimizer in a training step the last one counts. Where an optimizer takes no step (gradients are accumulated
    over training steps), the backward passes that reach parameters of it alone count as its own.

    Args:
        names: the names of the parameters that each optimizer holds.
    """

    def __init__(self, names: Sequence[frozenset[str]]) -> None:
        self._names = names
        self._open: list[PerSampleRecord] = []
        self._steps: dict[int, list[PerSampleRecord]] = {}
        self._has_warned = False

    def add(self, record: PerSampleRecord) -> None:
        """Take the record of a backward."""
        self._open.append(record)

    def step(self, optimizer: int) -> None:
        """An optimizer is about to step."""
        taken = [record for record in self._open if self._reaches(record, optimizer)]
        if taken:
            self._steps[optimizer] = taken
            self._open = [record for record in self._open if all(record is not other for other in taken)]

    def end(self) -> dict[int, list[PerSampleRecord]]:
        """The training step has ended.

        Returns:
            The records of each optimizer's step, by the place of the optimizer; those without a backward are left out.
        """
        steps, left = self._steps, self._open
        self._steps, self._open = {}, []
        waiting: dict[int, list[PerSampleRecord]] = {}
        for record in left:
            owners = [place for place in range(len(self._names)) if self._reaches(record, place)]
            if len(owners) == 1:
                waiting.setdefault(owners[0], []).append(record)
            elif not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"backward {record.backward_index} of a training step reached parameters of the optimizers "
                    f"{owners}, and none of them stepped after it: it is in no statistics. Toggle the optimizers "
                    "(self.toggle_optimizer), so that a backward reaches the parameters of one of them alone",
                    PerSampleWarning,
                    stacklevel=2,
                )
        return {**waiting, **steps}

    def _reaches(self, record: PerSampleRecord, optimizer: int) -> bool:
        reached = (*record.sq_norms, *record.unsupported)
        return len(self._names) == 1 or any(name in self._names[optimizer] for name in reached)
