"""What the layout of a call decides, decided once and applied to the calls that are laid out alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import BatchAxis, Lost
from lightning_persample.batch_axis.base import Followed, is_plain
from lightning_persample.batch_axis.losses import READ_BY_SAMPLE, every_target_counts
from lightning_persample.batch_axis.observed import Description, ObservedCall, OwnBackward, tensors_in, user_place
from lightning_persample.batch_axis.ops import LOSSES
from lightning_persample.capture.annotations import Mark
from lightning_persample.capture.collector import Collector
from lightning_persample.capture.contributions import ByRule, Placement, Use, not_tensors, placement_of
from lightning_persample.capture.graph import hooked_tensor
from lightning_persample.capture.reporting import Report, wait
from lightning_persample.capture.weight import Weight
from lightning_persample.rules import Rule, op_name, rule_of

_MOST = 4096  # plans that are kept; a model has some hundreds
_COMPARED = frozenset({int, float, bool, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_INDEXING = frozenset({Tensor.__getitem__})  # an index that is a tensor counts by its values
_NESTED = (tuple, list, torch.Size)


@dataclass(frozen=True, eq=False, slots=True)
class _Slots:
    """Where among the arguments of a call with weights its rule finds what it is given.

    Attributes:
        placement: what the rule is given, and where weights and batch are in it.
        values: of each tensor that it is given its name, and its place among the tensors of the call.
        owners: the same of those that are weights.
        others: the arguments that are no tensors, by name.
        sizes: of all tensors of the call.
    """

    placement: Placement
    values: tuple[tuple[str, int], ...]
    owners: tuple[tuple[str, int], ...]
    others: Mapping[str, Any]
    sizes: tuple[torch.Size, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What is known of a call before it runs.

    Attributes:
        rule: the op's rule when the plan was made.
        outputs: where the batch lies in each output.
        slots: where the rule finds weights and batch; None for a call without weights.
        place: the line of the user's on which a loss stands; None for any other call.
    """

    rule: Rule | None
    outputs: tuple[BatchAxis | Lost, ...]
    slots: _Slots | None
    place: tuple[str, int] | None = None


_PLANS: dict[Hashable, Plan] = {}


def layout_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    marks: Sequence[Mark | None],
    batch_size: int,
) -> Hashable | None:
    """The key under which what is decided of a call may be remembered."""
    if len(tensors) > 1 and (function in _INDEXING or len(set(map(id, tensors))) < len(tensors)):
        return None
    key: list[Hashable] = [function, batch_size, torch.is_grad_enabled()]
    marks_left = iter(marks)
    if not _describe(args, marks_left, key):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if name == "out" or not _describe((value,), marks_left, key):
            return None
    return tuple(key)


def _describe(values: Iterable[Any], marks: Iterator[Mark | None], key: list[Hashable]) -> bool:
    """Add arguments to a key; false where something among them may decide otherwise than by its layout."""
    for value in values:
        kind: type = type(value)
        key.append(kind)  # 1, 1.0 and True are equal, and not the same argument
        if kind is Tensor or kind is nn.Parameter:
            mark = next(marks)
            if not is_plain(value):
                return False
            dtype, shape = value.dtype, value.shape
            if not (dtype.is_floating_point or _is_no_index(value, mark)):
                return False
            if type(mark) is BatchAxis:
                if mark.owner is not None or mark.mixing is not None:
                    return False
                key += (shape, dtype, value.requires_grad, mark.dim, mark.outer, mark.inner)
            elif isinstance(mark, Lost):
                return False
            else:
                key += (shape, dtype, value.requires_grad, isinstance(mark, Weight))
        elif kind in _COMPARED:
            key.append(value)
        elif kind in _NESTED:
            key.append(len(value))
            if not _describe(value, marks, key):
                return False
        elif kind is slice:
            bounds = value.start, value.stop, value.step
            if not _COMPARED.issuperset(map(type, bounds)):  # (a tensor in it is a number, and no operand)
                return False
            key += (*map(type, bounds), *bounds)
        else:
            return False
    return True


def _is_no_index(tensor: Tensor, mark: Mark | None) -> bool:
    """Whether a tensor that is no floating point number can stand for neither an axis nor a size."""
    return tensor.numel() > 1 and (type(mark) is BatchAxis or tensor.dtype is torch.bool or tensor.is_complex())


def recall(layout: Hashable, op: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan | None:
    """What was decided of a call with this layout."""
    plan = _PLANS.get(layout)
    if plan is None or plan.rule is not rule_of(op):
        return None
    if op in LOSSES and (
        plan.place in READ_BY_SAMPLE or not (plan.place == user_place() and every_target_counts(op, args, kwargs))
    ):
        return None
    return plan


def remember(call: ObservedCall, followed: Followed, use: Use | None) -> None:
    """Keep what was decided of a call, where its layout alone has decided it and there was nothing to say of it."""
    rule, is_loss = rule_of(call.op), call.op in LOSSES
    if call.layout is None or call.written or followed.mixing is not None or followed.weighting is not None:
        return
    if is_loss and (use is not None or len(call.operands) != 2):  # (a third one holds weights)
        return
    if followed.by_values or (followed.entries is not None and not is_loss):
        return
    axes = tuple(axis for axis in followed.outputs if isinstance(axis, (BatchAxis, Lost) if is_loss else BatchAxis))
    if len(axes) != len(call.outputs):
        return
    axes = tuple(replace(axis, shares=None) if isinstance(axis, Lost) else axis for axis in axes)
    if any(axis.owner is not None or axis.mixing is not None for axis in axes if isinstance(axis, BatchAxis)):
        return
    if rule is not None and rule.mixes_samples is not None:  # which may look at values
        return
    if use is not None:
        plain = use.rule is rule is not None and not (rule.several_outputs or rule.reads_output or rule.draws)
        if not plain or len(axes) != 1 or use.not_additive is not None or use.reason_against() is not None:
            return
    slots = None
    if use is not None and rule is not None:
        tensors = [operand.tensor for operand in call.operands]
        slots = _slots_of(placement_of(use, rule), call.args, call.kwargs, tensors)
        if slots is None:
            return
    _keep(call.layout, Plan(rule, axes, slots, user_place() if is_loss else None))


def remember_as(
    layout: Hashable, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> None:
    """Keep a plan under the key of a function that makes the call alone that the plan is of."""
    if plan.slots is not None:
        slots = _slots_of(plan.slots.placement, args, kwargs, tensors)
        if slots is None:
            return
        plan = replace(plan, slots=slots)
    _keep(layout, plan)


def _keep(layout: Hashable, plan: Plan) -> None:
    if len(_PLANS) >= _MOST:
        _PLANS.clear()
    _PLANS[layout] = plan


def _slots_of(
    placement: Placement, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> _Slots | None:
    """Where the rule finds what it is given; None where it has no names for the arguments."""
    given = placement.rule.bind(args, kwargs)
    if given is None or any(name not in given for name in placement.kept):
        return None
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    others = not_tensors(given)
    if next(tensors_in(list(others.values())), None) is not None:
        return None
    values = tuple((name, places[id(given[name])]) for name in placement.kept)
    owners = tuple((name, place) for name, place in values if name in placement.weights)
    return _Slots(placement, values, owners, others, tuple(tensor.shape for tensor in tensors))


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
    slots: _Slots,
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
