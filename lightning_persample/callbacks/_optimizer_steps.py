"""Which backward passes make up an optimizer step, for statistics over all samples that the step uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from lightning.pytorch import LightningModule

from lightning_persample.callbacks._gradient_origins import GradientOrigins
from lightning_persample.engine import PerSampleRecord

__all__ = ["ManualSteps", "names_by_optimizer"]

_Content: TypeAlias = Mapping[int, frozenset[str]] | str


def names_by_optimizer(
    pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[frozenset[str], ...]:
    """The names of the parameters that each optimizer holds."""
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    named = list(pl_module.named_parameters())
    return tuple(frozenset(name for name, parameter in named if id(parameter) in ids) for ids in held)


class ManualSteps:
    """What the optimizers step with in one training step in manual optimization.

    An optimizer steps with the backward passes that are in ``.grad`` of its parameters. Of several steps of one
    optimizer in a training step the last one counts. Where an optimizer takes no step (gradients are accumulated over
    training steps), the backward passes that are in ``.grad`` of its parameters alone count as its own.

    Args:
        pl_module: the module that is trained.
        optimizers: its optimizers.
        warn: takes why the statistics of a step are left out.
    """

    def __init__(
        self, pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer], warn: Callable[[str], None]
    ) -> None:
        named = list(pl_module.named_parameters())
        self._parameters = dict(named)
        self._names = names_by_optimizer(pl_module, optimizers)
        if len(self._names) == 1:  # of a single one, all parameters are reported
            self._names = (frozenset(self._parameters),)
        self._warn = warn
        self._origins = GradientOrigins(named)
        self._records: list[PerSampleRecord | None] = []
        self._steps: dict[int, _Content] = {}
        self._stepping: set[int] = set()
        self._decided: set[int] = set()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._steps)

    def before_backward(self) -> None:
        """A backward is about to run."""
        self._origins.look()

    def after_backward(self, record: PerSampleRecord | None, *, is_valid: bool = True) -> None:
        """A backward has run."""
        reached = () if record is None else (*record.sq_norms, *record.unsupported)
        self._origins.add(len(self._records), reached)
        if record is not None:
            self._records.append(record if is_valid else None)
        for place in self._stepping:  # in a closure
            self._steps[place] = self._content(place)

    def before_step(self, optimizer: int) -> None:
        """An optimizer is about to step, perhaps with a closure that runs backward passes."""
        self._steps[optimizer] = self._content(optimizer)
        self._stepping.add(optimizer)

    def at_step(self, optimizer: int) -> None:
        """An optimizer's closure has run, and it will now change weights."""
        self._steps[optimizer] = self._content(optimizer)
        self._decided.add(optimizer)

    def after_step(self, optimizer: int) -> None:
        """An optimizer has stepped, and may have dropped its gradients."""
        self._stepping.discard(optimizer)
        if optimizer not in self._decided:
            content = self._content(optimizer)
            if content:
                self._steps[optimizer] = content
        self._decided.discard(optimizer)

    def end(self) -> dict[int, list[PerSampleRecord]]:
        """The training step has ended."""
        taken = {number for content in self._steps.values() if not isinstance(content, str) for number in content}
        waiting: dict[int, dict[int, frozenset[str]]] = {}
        self._origins.look()
        for number in range(len(self._records)):
            owners = {
                place: names
                for place, own in enumerate(self._names)
                if number not in taken and (names := self._origins.holders(number, own)[0])
            }
            if len(owners) == 1:
                ((place, names),) = owners.items()
                waiting.setdefault(place, {})[number] = names
            elif owners and not any(isinstance(self._steps.get(place), str) for place in owners):
                self._warn(
                    f"backward {number} of a training step reached parameters of the optimizers {list(owners)}, and "
                    "none of them stepped after it: it is in no statistics. Toggle the optimizers "
                    "(self.toggle_optimizer), so that a backward reaches the parameters of one of them alone"
                )
        steps: dict[int, list[PerSampleRecord]] = {}
        for place, content in {**waiting, **self._steps}.items():
            if isinstance(content, str):
                self._warn(f"{content}; the statistics of that step are left out")
                continue
            records = [self._restricted(self._records[number], names) for number, names in content.items()]
            known = [record for record in records if record is not None]
            if known and len(known) == len(records):
                steps[place] = known
        return steps

    def _content(self, optimizer: int) -> _Content:
        """The backward passes in ``.grad`` of an optimizer, each with its parameters; or why they are unknown."""
        self._origins.look()
        names = self._names[optimizer]
        found: dict[int, frozenset[str]] = {}
        replaced = self._origins.replaced(names) if self._records else []
        if replaced:
            return (
                f"`.grad` of {_listed(replaced)} was replaced after a backward pass, or written to otherwise than by a "
                f"factor, so that it is not known with which samples optimizer {optimizer} stepped"
            )
        for number, record in enumerate(self._records):
            sure, doubtful = self._origins.holders(number, names)
            if doubtful and not self._makes_no_difference(record, doubtful, names, whole=bool(sure)):
                return (
                    f"`.grad` of {_listed(sorted(doubtful))} was zero after a backward pass and was then written to, "
                    f"so that it is not known whether optimizer {optimizer} stepped with it: let zero_grad set "
                    "gradients to None, as it does by default"
                )
            if sure:
                found[number] = sure | doubtful
        return found

    def _makes_no_difference(
        self, record: PerSampleRecord | None, doubtful: Collection[str], names: Collection[str], *, whole: bool
    ) -> bool:
        """Whether other parameters tell what became of a backward, and these add nothing to its samples' norms."""
        if record is None or any(name not in record.sq_norms or record.sq_norms[name].any() for name in doubtful):
            return False
        return whole or any(n in names and n not in doubtful for n in (*record.sq_norms, *record.unsupported))

    def _restricted(self, record: PerSampleRecord | None, names: Collection[str]) -> PerSampleRecord | None:
        """The record of some of the parameters alone, with norms and coverage over these."""
        if record is None or all(name in names for name in (*record.sq_norms, *record.unsupported)):
            return record
        kept = {name: sq_norm for name, sq_norm in record.sq_norms.items() if name in names}
        missing = {name: reason for name, reason in record.unsupported.items() if name in names}
        known, unknown = (sum(self._parameters[name].numel() for name in part) for part in (kept, missing))
        share = known / (known + unknown) if known + unknown else 1.0
        return replace(record, sq_norms=kept, unsupported=missing, coverage=share)


def _listed(names: Sequence[str]) -> str:
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
