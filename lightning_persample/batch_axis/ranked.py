"""Rows at places that other samples say, as where a batch is sorted by its losses, or by length to be packed.

Whose each row is stays known, and what is computed from each row alone is exact. Which number of a constant meets it by
its place is up to the other samples, as in ``losses[losses.argsort()] * weights_by_rank``: that is noted, as it is
where numbers meet the rows one by one, or parts of them (``2 * ranked[:k].sum() + ranked[k:].sum()``), and differ. Rows
that are put back to the places of their samples are as before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import averages, factors_beside, factors_of, nodes_that_multiply
from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner, entries_of
from lightning_persample.batch_axis.base import Followed, has_equal_rows
from lightning_persample.batch_axis.observed import ObservedCall, Operand, user_line
from lightning_persample.batch_axis.ops import OPS, POINTWISE, having
from lightning_persample.torch_internals import view_base

_BY_PLACES = frozenset(
    name for name, op in OPS.items() if op.family in ("select", "gather", "take", "getitem", "setitem", "index_put")
)
_PICKS, _CLEARS, _JOINS = having("picks"), ("mul", "masked_fill"), having("joins")
_MOVES = having("same", "casts", "moves", "picks") | {"detach"}
_MULTIPLIES = ("mul", "rmul", "div", "pow")  # (a power tells rows apart as a factor does)
_SAME = 1e-5


def by_rank(call: ObservedCall, followed: Followed) -> Followed:
    """The answer where other samples say at which places rows stand, or have said so before."""
    is_ranked = any(operand.axis is not None and operand.axis.ranked for operand in call.operands)
    if call.batch_size == 1 or not (is_ranked or (call.op in _BY_PLACES and len(call.located) + len(call.lost) > 1)):
        return followed
    outputs, chosen = list(followed.outputs), _chooses(call)
    for place, mark in enumerate(outputs):
        if isinstance(mark, BatchAxis) and (not _is_back(call, mark) if is_ranked else _is_put(call, mark)):
            samples = torch.arange(call.batch_size, device=call.outputs[place].device)
            sample = samples if mark.owner is None else mark.owner.sample
            outputs[place] = mark if mark.ranked else replace(mark, owner=Owner(sample, ranked=True, chosen=chosen))
    followed = replace(followed, outputs=tuple(outputs), by_values=followed.by_values or (is_ranked and call.inplace))
    if is_ranked and call.inplace and _scales_some(call, outputs[0]):
        return _noted(call, followed)
    return _beside_constants(call, followed) if is_ranked else followed


def _scales_some(call: ObservedCall, mark: BatchAxis | Lost | None) -> bool:
    """Whether a call multiplies in place some rows of the batch axis alone, as ``ranked[:k] *= 2``."""
    rows, is_set = call.args[-1] if call.op == "setitem" else call.outputs[0], call.op == "setitem"
    place, base = (call.axis_of(rows), call.outputs[0]) if is_set else (mark, view_base(rows))
    if base is None or not isinstance(place, BatchAxis) or not isinstance(call.operands[0].axis, BatchAxis):
        return False
    is_part = base.dim() == rows.dim() and rows.size(place.dim) < base.size(place.dim)
    return is_part and (_factor_within(rows) if is_set else _factor(call, call.operands[0].tensor, mark)) != 1


def _is_put(call: ObservedCall, axis: BatchAxis) -> bool:
    """Whether an index that is made of other samples says at which places the rows stand."""
    indices = _indices(call)
    if any(isinstance(index, Lost) and index.crossed for index in indices):
        return True
    others = [index for index in indices if isinstance(index, BatchAxis)] if call.op in _PICKS else []
    return any(other.mixing is not None or not other.same_layout(axis) for other in others)


def _chooses(call: ObservedCall) -> bool:
    """Whether other samples say which samples have a part in the result, or have said so before."""
    rows = call.located[0][1].entries(call.batch_size) if call.op in _PICKS and call.located else 0
    some = any(mark.crossed and index.numel() < rows for index, mark in call.lost)
    return some or any(operand.axis is not None and operand.axis.chosen for operand in call.operands)


def _is_back(call: ObservedCall, axis: BatchAxis) -> bool:
    """Whether an index has put each row to the place of its sample."""
    return axis.owner is None and call.op in _BY_PLACES and len(_indices(call)) > 0


def _indices(call: ObservedCall) -> list[BatchAxis | Lost]:
    """Where the batch lies in the places that a call takes or writes, as far as they are made of it."""
    integers = [operand for operand in call.operands[1:] if operand.tensor.dtype in (torch.int32, torch.int64)]
    return [operand.axis for operand in integers if operand.axis is not None]


def _beside_constants(call: ObservedCall, followed: Followed) -> Followed:
    """The answer with a note where such rows meet numbers that differ from place to place."""
    constants = [operand.tensor for operand in call.operands if operand.axis is None and operand.tensor.numel() > 1]
    laid = [(tensor, dims) for tensor in constants if (dims := _laid_along(call, followed, tensor))]
    if not laid:
        return followed
    followed = replace(followed, by_values=True)
    differing = [tensor for tensor, dims in laid if not all(has_equal_rows(_rest(call, tensor), dim) for dim in dims)]
    if all(id(tensor) in call.made or _clears(call, tensor) for tensor in differing):
        return followed
    return _noted(call, followed)


def _rest(call: ObservedCall, tensor: Tensor) -> Tensor:
    """A constant, zero where the call has written over it."""
    if call.op != "setitem" or tensor is not call.outputs[0]:
        return tensor
    rest = tensor.detach().clone()
    rest[call.args[1]] = 0
    return rest


def _noted(call: ObservedCall, followed: Followed) -> Followed:
    text = f"`{call.name}` meets samples by their places in an order of the whole batch{user_line()}"
    outputs = tuple(
        mark.mixed(mark.mixing or text) if isinstance(mark, BatchAxis) else mark for mark in followed.outputs
    )
    noted = any(isinstance(mark, Lost) for mark in outputs) and any(output.requires_grad for output in call.outputs)
    if not noted:
        return replace(followed, outputs=outputs)
    return replace(followed, outputs=outputs, weighting=followed.weighting or text, is_sure=True)


def weighed_by_rank(call: ObservedCall, followed: Followed) -> Followed:
    """The answer with what such samples were multiplied by; noted where they are brought together and that differs."""
    followed = _with_places(call, followed)
    of_places = (isinstance(operand.axis, Lost) and operand.axis.orders for operand in call.operands[1:])
    is_ranked = any(operand.axis is not None and operand.axis.ranked for operand in call.operands)
    is_ranked = is_ranked or (call.op == "getitem" and any(of_places))
    places = [place for place, mark in enumerate(followed.outputs) if isinstance(mark, Lost) or call.op in _JOINS]
    if call.batch_size == 1 or not is_ranked or not places or followed.mixing is not None:
        return followed
    owners = [axis.owner for _, axis in call.located if axis.owner is not None]
    in_parts = any(int(owner.counts(call.batch_size).max()) > 1 for owner in owners)  # (a part has some rows of each)
    unknown = any(mark.samples and not mark.ranked for tensor, mark in call.lost if tensor.requires_grad)
    outputs, differs = list(followed.outputs), False
    for place in places:
        mark = outputs[place]
        found = None if in_parts or unknown else _weights_after(call, mark)
        weights = torch.zeros(call.batch_size, device="cpu") if found is None else found
        known = weights[weights != 0]
        is_even = bool((known - known.mean()).abs().max() <= _SAME * known.abs().max()) if len(known) else True
        differs |= not is_even or (found is None and call.op in _JOINS and not (in_parts or unknown) and _chooses(call))
        if isinstance(mark, Lost):
            is_whole = mark.reduced is True and is_even and len(known) in (0, call.batch_size)
            is_open = mark.noted or (found is None and bool(mark.reduced or mark.samples))
            outputs[place] = replace(mark, by_rank=None if is_whole or is_open else weights)
    followed = replace(followed, outputs=tuple(outputs))
    if not differs or any(kind == "weighting" for _, mark in call.lost for kind, _ in mark.notes):
        return followed
    noted = _noted(call, followed)
    notes = frozenset({("weighting", noted.weighting)} if noted.weighting else ())
    marks = (replace(mark, notes=mark.notes | notes) if isinstance(mark, Lost) else mark for mark in noted.outputs)
    return replace(noted, outputs=tuple(marks))


def _with_places(call: ObservedCall, followed: Followed) -> Followed:
    """The answer, where what was moved or picked of places in an order are such places, and nothing else is."""
    stays = call.op in _MOVES or not any(mark.orders for _, mark in call.lost)
    return followed if stays else followed.with_known(orders=False)


def _weights_after(call: ObservedCall, mark: BatchAxis | Lost | None) -> Tensor | None:
    """By what each sample was multiplied in a result, (B,), 0 where it has no part; None where it is not one number."""
    of_batch = [operand for operand in call.operands if operand.axis is not None]
    differs = [operand for operand in of_batch if operand.tensor.requires_grad]
    total = torch.zeros(call.batch_size, dtype=torch.float64, device="cpu")
    for operand in differs or of_batch:
        own = _weights_of(call, operand) * _factor(call, operand.tensor, mark)
        if bool(((total != 0) & (own != 0)).any()):  # (a sample may have more terms than others, as more steps)
            return None
        total = total + own
    if isinstance(mark, Lost) and mark.samples:
        is_in = torch.zeros(call.batch_size, dtype=torch.bool, device="cpu")
        is_in[sorted(mark.samples)] = True
        total = total * is_in
    return total


def _weights_of(call: ObservedCall, operand: Operand) -> Tensor:
    """By what each sample was multiplied in an operand, (B,)."""
    axis = operand.axis
    if isinstance(axis, Lost) and axis.by_rank is not None:
        return axis.by_rank
    weights = torch.ones(call.batch_size, dtype=torch.float64, device="cpu")
    if isinstance(axis, BatchAxis) and axis.owner is not None:
        weights = (axis.owner.counts(call.batch_size) > 0).double().cpu()
    return weights * _factor_within(operand.tensor) if isinstance(axis, BatchAxis) else weights


def _factor_within(tensor: Tensor) -> float:
    """By what one number the entries of a tensor were multiplied, as far as its nodes show it."""
    number = 1.0
    try:
        for node, factor, _ in nodes_that_multiply(tensor):
            if node.name() == "PowBackward0":
                factor = torch.as_tensor(node._saved_exponent)
            if factor is None or not factor.numel() or bool((factor != factor.flatten()[0]).any()):
                break
            number *= float(factor.detach().flatten()[0])
    except RuntimeError:  # it was written to since
        return 1.0
    return number


def _factor(call: ObservedCall, tensor: Tensor, mark: BatchAxis | Lost | None) -> float:
    """By what number a call multiplies the samples in an operand."""
    if call.op in ("add", "sub"):
        number = 1.0 if tensor is call.args[0] else float(call.kwargs.get("alpha", 1))
        return -number if call.op == "sub" and tensor is not call.args[0] else number
    if call.op == "neg":
        return -1.0
    if call.op in ("lerp", "addcmul", "addcdiv"):
        return next(iter(factors_of(call, tensor) or ()), 1.0)
    if averages(call) and isinstance(mark, Lost) and mark.alone is None:
        return 1 / max(tensor.numel(), 1)
    is_number = call.op == "div" and not isinstance(mark, BatchAxis)
    is_count = is_number and any(isinstance(other, int) for other in call.args)  # (such as a sample's length)
    beside = factors_beside(call, 1) if call.op in _MULTIPLIES and not call.made and not is_count else None
    factor = beside[0] if beside else 1.0
    return factor if call.op != "div" or not factor else 1 / factor


def _laid_along(call: ObservedCall, followed: Followed, tensor: Tensor) -> list[int]:
    """The axes of a constant that lie along rows of different samples."""
    axis = followed.aligned(tensor) if followed.aligned is not None and not tensor.is_meta else None
    if axis is not None:
        return [axis.dim]
    found = [mark.entries for _, mark in call.lost if mark.ranked] if call.op in POINTWISE else []
    place = call.axis_of(call.args[0]) if call.op == "setitem" and tensor is call.args[2] else None
    if place is not None and (entries := entries_of(place, call.args[0], call.batch_size)) is not None:
        found = [entries[call.args[1]]]
    known = [each for each in found if each is not None and each.numel() and not tensor.is_meta]
    dims = range(-tensor.dim(), 0)
    return [dim for each in known for dim in dims if -dim <= each.dim() and not has_equal_rows(each, dim)]


def _clears(call: ObservedCall, tensor: Tensor) -> bool:
    """Whether a constant but leaves rows out, as picking some does, by zeros beside one number."""
    return call.op in _CLEARS and len(tensor.detach().unique()) == 2 and not bool(tensor.all())
