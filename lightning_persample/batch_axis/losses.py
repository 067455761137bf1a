"""How losses move the batch axis: one value per entry, or all of them added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import MEAN, MOST_KEPT, absent, added_up, reduction_of
from lightning_persample.batch_axis.axis import BatchAxis, SampleWeights, batch_first
from lightning_persample.batch_axis.base import (
    Entries,
    Followed,
    broadcast,
    keep,
    lost,
    meet,
    of_loss,
    propagation_rule,
)
from lightning_persample.batch_axis.observed import ObservedCall, line_of, user_line, user_place, version_of
from lightning_persample.batch_axis.ops import OPS, having
from lightning_persample.batch_axis.sample_weights import of_class_loss, of_sum
from lightning_persample.gradients.host import on_its_way

_CLASS_LOSSES, _ROW_LOSSES = having("classes"), having("rows")
_MOST_LINES = 4096
# Lines of losses of which it is asked what each sample adds, so that each of their calls keeps it.
READ_BY_SAMPLE: set[tuple[str, int] | None] = set()
# Lines of losses that have left out unequal numbers of targets, so that those of each of their calls are read first.
LEAVES_OUT: set[tuple[str, int] | None] = set()


@propagation_rule("loss")
def _follow_loss(call: ObservedCall) -> Followed:
    """A loss over the whole batch, or with reduction="none" one value per entry."""
    weights = _class_weights(call)
    if weights is not None and call.axis_of(weights) is not None:
        return _weighed_by_the_batch(call, weights)
    by_entry = _by_entry(call)
    (place,) = by_entry.outputs[:1]
    if not isinstance(place, BatchAxis) or any(output.dim() > 0 for output in call.outputs):
        return by_entry
    added = _added_up(call, by_entry, place)
    weighting = _unequal_weights(call) if any(output.requires_grad for output in call.outputs) else None
    weighting = weighting or added.weighting
    known = _weights_in(call) if call.compares_weights else None
    added = added.with_known(shares=_shares_of_samples(call, place), weights=known)
    return replace(added, weighting=weighting, entries=lambda: _entries(call, place))


def _weights_in(call: ObservedCall) -> SampleWeights | None:
    """What the samples weigh in a loss with a reduction."""
    target = call.argument(1, "target")
    axis, shares = call.axis_of(target), _shares_of_entries(call)
    if shares is None or not isinstance(axis, BatchAxis):
        return of_sum(call)
    return of_class_loss(call, axis, target != call.argument(4, "ignore_index", default=-100), shares)


def _weighed_by_the_batch(call: ObservedCall, weights: Tensor) -> Followed:
    """Class weights that come with the batch, or are made of it, (C,): samples stay apart, and weigh as these say."""
    if weights.requires_grad:
        return lost(call, "has class weights that depend on the batch", mixes=None)
    followed = _follow_loss(replace(call, operands=tuple(o for o in call.operands if o.tensor is not weights)))
    text = f"`{call.name}` has class weights that depend on the batch{user_line()}"
    if any(output.dim() > 0 for output in call.outputs):
        places = tuple(each.mixed(text) if isinstance(each, BatchAxis) else each for each in followed.outputs)
        return replace(followed, outputs=places, by_values=True)
    differs = any(output.requires_grad for output in call.outputs)
    return replace(followed, weighting=text if differs else followed.weighting, by_values=True)


def target_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The targets among the arguments of a loss, which every loss of torch takes second."""
    return args[1] if len(args) > 1 else kwargs["target"]


def every_target_counts(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether no target of a loss is ignored, which is all that its values say where it has no weights."""
    target = target_of(args, kwargs)
    if op not in _CLASS_LOSSES or target.is_floating_point() or target.is_meta:  # (which has no values)
        return True
    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    if ignored < 0 < target.numel():  # (a class is never negative)
        return int(target.min()) >= 0
    return bool((target != ignored).all())


def depends_on_targets(call: ObservedCall) -> bool:
    """Whether the values of the targets say how the samples weigh in a loss that has no weights."""
    if call.op not in _CLASS_LOSSES or reduction_of(call) != MEAN:
        return False
    target = call.argument(1, "target")
    return isinstance(call.axis_of(target), BatchAxis) and not target.is_floating_point()


def unequal_targets(
    args: Sequence[Any], kwargs: Mapping[str, Any], axis: BatchAxis, batch_size: int, name: str
) -> Callable[[], str | None]:
    """Start to read how many targets of each sample count; what is returned says whether they differ, and how."""
    target, place = target_of(args, kwargs), user_place()
    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    totals = on_its_way(batch_first(target != ignored, axis, batch_size, fill=False).flatten(1).sum(1))

    def text() -> str | None:
        counts = totals()
        if bool((counts == counts[0]).all()):
            return None
        if len(LEAVES_OUT) >= _MOST_LINES:
            LEAVES_OUT.clear()
        LEAVES_OUT.add(place)
        return _weigh_unequally(name, counts, line_of(place))

    return text


def _weigh_unequally(name: str, totals: Tensor, line: str) -> str:
    return f"`{name}` averages over targets that weigh unequally from sample to sample{absent(totals)}{line}"


def _added_up(call: ObservedCall, by_entry: Followed, place: BatchAxis) -> Followed:
    """The values of a loss without reduction, added up."""
    added = added_up(call)
    known = Followed(added.outputs, by_entry.aligned, by_entry.mixing or added.mixing, added.weighting)
    return of_loss(call, known, place.mixing)


def _class_weights(call: ObservedCall) -> Tensor | None:
    place = OPS[call.op].class_weights
    weights = None if place is None else call.argument(place, "weight")
    return weights if isinstance(weights, Tensor) else None


def _by_entry(call: ObservedCall) -> Followed:
    """One value for each entry of the operands, without the axis over which classes lie, where they have one."""
    if call.op not in _CLASS_LOSSES | _ROW_LOSSES:
        return broadcast(call)
    if any(axis.dim == _axis_of_classes(call, tensor) for tensor, axis in call.located):
        return lost(call, "compares entries along the batch axis", mixes=True)
    met = meet(call, [axis.moved(axis.dim - (axis.dim > _axis_of_classes(call, t))) for t, axis in call.located])
    if isinstance(met, Followed):
        return met
    place, event = met
    sizes, weights = {tensor.size(axis.dim) for tensor, axis in call.located}, _class_weights(call)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        dim = place.dim + (place.dim >= _axis_of_classes(call, tensor))
        along = tensor is not weights and call.batch_size > 1 and tensor.dim() > dim and tensor.size(dim) in sizes
        return place.moved(dim) if along else None

    return Followed((place,) * len(call.outputs), aligned, event)


def _axis_of_classes(call: ObservedCall, tensor: Tensor) -> int:
    """The axis of an operand over which classes lie: the second of scores (N, C, ...), the last of rows."""
    scores, target = call.argument(0, "input", "self"), call.argument(1, "target")
    if call.op in _ROW_LOSSES:
        rank = max(operand.tensor.dim() for operand in call.operands)
        return rank - 1 if tensor.dim() == rank else rank
    has_classes = tensor is scores or (tensor is target and target.is_floating_point())
    return min(1, tensor.dim() - 1) if has_classes else tensor.dim()


def _entries(call: ObservedCall, place: BatchAxis) -> Entries:
    """The loss of each entry, and what share of their sum the loss is."""
    position = OPS[call.op].reduction
    if position is not None and len(call.args) > position:
        args, kwargs = (*call.args[:position], 0, *call.args[position + 1 :]), dict(call.kwargs)
    else:
        args, kwargs = call.args, {**call.kwargs, "reduction": 0}
    shape = _shape_of_entries(call)
    share: Tensor | float = 1.0
    if reduction_of(call) == MEAN:
        shares = _shares_of_entries(call)
        share = 1 / max(math.prod(shape), 1) if shares is None else 1 / shares.sum()
    return Entries(args, kwargs, shape, place.moved(place.dim % max(len(shape), 1)), share)


def _shares_of_samples(call: ObservedCall, place: BatchAxis) -> Callable[[], Tensor | None] | None:
    """What each sample adds to a loss, (B,), where nothing of other samples is in its terms."""
    if place.mixing is not None or any(output.dim() > 0 for output in call.outputs):
        return None
    line = user_place()
    if line in READ_BY_SAMPLE:
        found = _added_by_sample(call.detached(), place)
        return lambda: found
    is_small = sum(operand.tensor.numel() for operand in call.operands) <= MOST_KEPT
    kept = call.detached() if is_small else None  # nothing large is kept before somebody has asked
    versions = [version_of(operand.tensor) for operand in call.operands]

    def shares() -> Tensor | None:
        if len(READ_BY_SAMPLE) >= _MOST_LINES:
            READ_BY_SAMPLE.clear()
        READ_BY_SAMPLE.add(line)
        if kept is None or [version_of(operand.tensor) for operand in kept.operands] != versions:
            return None
        return _added_by_sample(kept, place)

    return shares


def _added_by_sample(call: ObservedCall, place: BatchAxis) -> Tensor:
    entries = _entries(call, place)
    with torch.no_grad():
        values = call.function(*entries.args, **entries.kwargs) * entries.share
    return batch_first(values, entries.axis, call.batch_size, fill=False).flatten(1).sum(1)


def _shape_of_entries(call: ObservedCall) -> torch.Size:
    weights = _class_weights(call)
    shapes = [operand.tensor.shape for operand in call.operands if operand.tensor is not weights]
    if call.op in _CLASS_LOSSES:
        return torch.Size((*shapes[0][:1], *shapes[0][2:])) if len(shapes[0]) > 1 else torch.Size(())
    if call.op in _ROW_LOSSES:
        rank = max(map(len, shapes))
        return torch.broadcast_shapes(*[shape for shape in shapes if len(shape) == rank])[:-1]
    return torch.broadcast_shapes(*shapes)


def _shares_of_entries(call: ObservedCall) -> Tensor | None:
    """What each target counts in a mean over targets that are classes: their weights, zero where ignored."""
    target = call.argument(1, "target")
    if call.op not in _CLASS_LOSSES or target.is_floating_point():
        return None
    counted = target != call.argument(4, "ignore_index", default=-100)
    shares = counted.to(torch.float64)
    weights = _class_weights(call)
    return shares if weights is None else shares * weights.detach().double()[torch.where(counted, target, 0)]


def _unequal_weights(call: ObservedCall) -> str | None:
    """A mean over classes weighted unequally, or over unequal numbers of targets that count, weights the samples."""
    target = call.argument(1, "target")
    axis = call.axis_of(target)
    if call.op not in _CLASS_LOSSES or reduction_of(call) != MEAN or not isinstance(axis, BatchAxis):
        return None
    plain = _class_weights(call) is None and axis.owner is None
    if plain and every_target_counts(call.op, call.args, call.kwargs):
        return None
    shares = _shares_of_entries(call)
    if shares is None:
        return None
    totals = batch_first(shares, axis, call.batch_size, fill=False).flatten(1).sum(1)
    if axis.owner is not None:  # samples without a row have no part in the loss
        totals = totals[axis.owner.counts(call.batch_size).to(totals.device) > 0]
    if bool((totals == totals[:1]).all()):
        return None
    return _weigh_unequally(call.name, totals, user_line())


@propagation_rule("ctc")
def _follow_ctc(call: ObservedCall) -> Followed:
    """Log-probabilities (T, N, C); targets (N, S), or all of them one after another; lengths (N,)."""
    scores, targets = call.argument(0, "log_probs"), call.argument(1, "targets")
    axis = call.axis_of(scores)
    if scores.dim() != 3 or not isinstance(axis, BatchAxis) or axis.dim != 1:
        return lost(call, "needs the samples along the second axis of its log-probabilities", mixes=None)
    joined = targets.dim() == 1
    met = meet(
        call, [axis.moved(0), *[a for t, a in call.located if t is not scores and not (joined and t is targets)]]
    )
    if isinstance(met, Followed):
        return met
    place, event = met
    by_sample = replace(keep(call, place), mixing=event)
    return by_sample if any(output.dim() > 0 for output in call.outputs) else _added_up(call, by_sample, place)
