"""Values that hold the samples along no axis, while each entry is still of one sample: which one is followed.

After ``x.view(2, 2, 3)`` of four rows no axis holds the samples. Whose each entry is stays known as long as entries are
only moved, picked, repeated or changed at their places. A tensor of which each row along an axis is of one sample has
its batch axis again, and a sum over all entries is one over rows of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import products_of, reduction_of
from lightning_persample.batch_axis.axis import BatchAxis, Lost, by_entries, entries_of, entry_owners, picked, together
from lightning_persample.batch_axis.base import PROPAGATION_RULES, Followed, dims_argument, is_plain
from lightning_persample.batch_axis.observed import ObservedCall, Operand
from lightning_persample.batch_axis.ops import POINTWISE, having

_JOINS, _TOTALS = having("joins"), frozenset(("sum", "mean", "nansum", "nanmean"))
_MOVES = having("moves", "picks", "joins", "passes") - POINTWISE - {"setitem"}
_AT_THEIR_PLACES = POINTWISE | having("entrywise")


def by_entries_moved(call: ObservedCall, followed: Followed) -> Followed:
    """The answer for a call after which no axis holds the samples, by the sample of each entry where that is known."""
    stays, moves = call.op in _AT_THEIR_PLACES and reduction_of(call) in (None, 0), call.op in _MOVES
    if not (call.lost or stays or moves):  # (whose the rows along an axis are that it adds up is known without)
        return followed
    if not call.located and all(mark.alone is not None and mark.entries is None for _, mark in call.lost):
        return followed
    of_batch = [operand for operand in call.operands if operand.axis is not None]
    tensors = [*call.outputs, *(operand.tensor for operand in call.operands)]
    if call.batch_size == 1 or call.op == "copy" or any(not is_plain(each) or each.is_meta for each in tensors):
        return followed
    entries = {id(operand.tensor): _entries_of(call, operand) for operand in of_batch}
    known = {key: each for key, each in entries.items() if each is not None}
    if len(known) < len(entries):
        return followed
    found: Sequence[Tensor | None] = ()
    if stays:
        found = [together(known.values(), call.outputs[0].shape)] * len(call.outputs)
    elif moves and _are_sources(call, of_batch):
        found = _moved(call, known)
    elif moves and id(call.args[0]) in known and not call.inplace:
        found = [_picked(call, known[id(call.args[0])])]
    elif call.op in _TOTALS and len(of_batch) == len(call.operands) == 1 and call.outputs[0].dim():
        return _added_up(call, followed, *known.values())
    elif call.op in _TOTALS | _AT_THEIR_PLACES:
        return _all_added_up(call, known) or followed
    if not found or any(each is None for each in found):
        return followed
    if followed.mixing is not None:  # each entry is of one sample after all
        if any(operand.axis is None and operand.tensor.requires_grad for operand in call.operands):
            return followed
        reason = next((mark.reason for _, mark in call.lost), followed.mixing)
        followed = replace(followed, outputs=(Lost(reason),) * len(call.outputs), mixing=None, weighting=None)
    places = zip(followed.outputs, call.outputs, found, strict=True)
    return replace(followed, outputs=tuple(_placed(*each, call.batch_size) for each in places))


def _are_sources(call: ObservedCall, of_batch: list[Operand]) -> bool:
    """Whether the operands of the batch are what a call moves, and do not say where to."""
    if call.kwargs.get("out") is not None or any(operand.tensor.is_complex() for operand in call.operands):
        return False
    if call.op in _JOINS:
        return True
    return not call.inplace and all(operand.tensor is call.args[0] for operand in of_batch)


def _entries_of(call: ObservedCall, operand: Operand) -> Tensor | None:
    """The sample of each entry of an operand of the batch, -1 where it is none's; None where that is not known."""
    place = operand.axis
    if place is None or (isinstance(place, BatchAxis) and place.mixing is not None):
        return None
    return entries_of(place, operand.tensor, call.batch_size)


def _moved(call: ObservedCall, entries: dict[int, Tensor]) -> list[Tensor | None]:
    """The sample of each entry of the outputs: the same call moves the numbers of the samples."""

    def numbers(operand: Operand, first: int) -> Tensor:
        """The numbers of the samples; a copy of what stands beside them, of the same dtype, unless it is an index."""
        tensor, own = operand.tensor, entries.get(id(operand.tensor))
        if own is not None:
            return (own.float() + first).masked_fill(own < 0, torch.nan).contiguous()
        return tensor.detach().to(torch.float32, copy=True) if tensor.is_floating_point() else tensor

    with torch.no_grad():  # (what stays as it is for other numbers is a constant)
        both = [call.again(partial(numbers, first=first)) for first in (1, 1 + call.batch_size)]
    pairs = list(zip(*both, strict=True))
    if [one.shape for one, _ in pairs] != [output.shape for output in call.outputs]:
        return [None] * len(call.outputs)
    return [torch.where((two - one).abs() == call.batch_size, one.abs() - 1, -1).long() for one, two in pairs]


def _picked(call: ObservedCall, entries: Tensor) -> Tensor | None:
    """The sample of each entry that numbers of the samples pick from entries of theirs, or of none's."""
    source, output = call.args[0], call.outputs[0]
    operands = tuple(Operand(each.tensor, None if each.tensor is source else each.axis) for each in call.operands)
    of_constants, rule = replace(call, operands=operands, signature=None), PROPAGATION_RULES.get(call.op)
    if rule is None or of_constants.lost or not of_constants.located or len(call.outputs) > 1:
        return None
    by, of = rule(of_constants).outputs[0], _moved(call, {id(source): entries})[0]
    if not isinstance(by, BatchAxis) or by.mixing is not None or of is None:
        return None
    return together([of, entry_owners(by, output.shape, call.batch_size, output.device)], output.shape)


def _placed(
    place: BatchAxis | Lost | None, output: Tensor, entries: Tensor | None, batch_size: int
) -> BatchAxis | Lost | None:
    """Where the samples lie in an output of whose entries the samples are known."""
    if entries is None or not isinstance(place, Lost) or place.noted or (place.of_others and place.alone is None):
        return place
    is_known = bool((entries >= 0).all())
    if is_known and not entries.dim():
        return replace(place, samples=frozenset({int(entries)}), parts=frozenset({1}))
    axis = by_entries(entries, batch_size, None) if is_known else _of_batch(entries, batch_size)
    return replace(place, entries=entries) if axis is None or place.alone is not None else axis


def _of_batch(entries: Tensor, batch_size: int) -> BatchAxis | None:
    """The axis of which row b holds entries of sample b, and others that are none's."""
    every = torch.arange(batch_size, device=entries.device)
    for dim in range(entries.dim()):
        rows = entries.movedim(dim, 0).reshape(entries.size(dim), -1)
        if torch.equal(rows.amax(1), every) and bool(((rows == every[:, None]) | (rows < 0)).all()):
            return BatchAxis(dim)
    return None


def _added_up(call: ObservedCall, followed: Followed, entries: Tensor) -> Followed:
    """The answer for a sum or mean over some axes of entries of one sample each."""
    tensor, output = call.operands[0].tensor, call.outputs[0]
    dims = dims_argument(call.argument(1, "dim", "axis"), tensor.dim()) or tuple(range(tensor.dim()))
    rest = [dim for dim in range(tensor.dim()) if dim not in dims]
    rows = entries.permute(*rest, *dims).reshape(*(tensor.size(dim) for dim in rest), -1)
    if followed.mixing is not None or not rows.size(-1) or not bool((rows == rows[..., :1]).all()):
        return followed
    own = rows[..., 0].reshape(output.shape)
    return replace(followed, outputs=(_placed(followed.outputs[0], output, own, call.batch_size),))


def _all_added_up(call: ObservedCall, entries: dict[int, Tensor]) -> Followed | None:
    """The answer for a sum or mean, or a loss, over all entries, each of one sample: as over rows of samples."""
    shape = torch.broadcast_shapes(*(operand.tensor.shape for operand in call.operands))
    laid = together(entries.values(), shape)
    if laid is None or not laid.numel() or bool((laid < 0).any()) or not call.lost:
        return None
    axis = picked(0, laid.flatten(), call.batch_size)
    flat = call.on(lambda each: Operand(each.tensor.expand(shape).flatten(), None if each.axis is None else axis))
    if call.op in _TOTALS:  # (it names no axes any more)
        flat = replace(flat, args=flat.args[:1], kwargs={})
    added = PROPAGATION_RULES[call.op](flat)
    counts = products_of(shape)
    marks = (replace(mark, counts=mark.counts | counts) if isinstance(mark, Lost) else mark for mark in added.outputs)
    return replace(added, outputs=tuple(marks))
