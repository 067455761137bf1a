"""What is noted of a call of which all was decided before, at one that was laid out alike (see `layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_persample.engine.attach import wait
from lightning_persample.engine.by_rule import ByRule, not_tensors
from lightning_persample.engine.collector import Collector
from lightning_persample.engine.hooks import hooked_tensor
from lightning_persample.engine.layout import Plan, Slots
from lightning_persample.engine.marks import Mark
from lightning_persample.engine.observed import Description, OwnBackward, tensors_in, user_place
from lightning_persample.engine.reporting import Report
from lightning_persample.engine.weight import Weight
from lightning_persample.rules import op_name

__all__ = ["note_as_planned"]


def note_as_planned(
    collector: Collector,
    plan: Plan,
    result: Any,
    tensors: Sequence[Tensor],
    marks: Sequence[Mark | None],
    fused: OwnBackward | None,
) -> None:
    """Mark the outputs, and let the backward report what the weights among the arguments get."""
    if type(result) is Tensor:
        collector.marks[result] = plan.outputs[0]
    else:
        for output, axis in zip(tensors_in(result), plan.outputs, strict=True):
            collector.marks[output] = axis
    if plan.slots is not None:
        (output,) = tensors_in(result)  # a call with weights has one
        _wait_for_gradient(collector, plan.slots, output, tensors, marks, fused)


def _wait_for_gradient(
    collector: Collector,
    slots: Slots,
    output: Tensor,
    tensors: Sequence[Tensor],
    marks: Sequence[Mark | None],
    fused: OwnBackward | None,
) -> None:
    rule = slots.placement.rule
    owners = {name: mark for name, place in slots.owners if isinstance(mark := marks[place], Weight)}
    weights = list(owners.values())
    names = tuple([name for weight in weights for name in weight.names])
    text = Description(op_name(rule.op), slots.sizes, user_place(), names)
    collector.nodes.watch_call(output, hooked_tensor(output).grad_fn, tensors)
    for weight in weights:
        weight.uses += 1
    values = {name: tensors[place] for name, place in slots.values}
    compute = ByRule(slots.placement, values, not_tensors(slots.others), owners, text, output)
    once = weights if len(weights) == 1 else list(dict.fromkeys(weights))  # (a sharded one may come in two tensors)
    report = Report(collector, (output,), once, compute, text, bool(rule.reads))
    wait(report, (output,), {} if fused is None else {weight: name for name, weight in owners.items()}, fused)
