"""Rows at places that other samples say, as where a batch is sorted by its losses, or by length to be packed.

Whose each row is stays known, and what is computed from each row alone is exact. Which number of a constant meets it by
its place is up to the other samples, as in ``losses[losses.argsort()] * weights_by_rank``: that is noted. Rows that are
put back to the places of their samples are as before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner, entries_of
from lightning_persample.batch_axis.base import Followed, has_equal_rows
from lightning_persample.batch_axis.observed import ObservedCall, user_line
from lightning_persample.batch_axis.ops import OPS, POINTWISE, having

_BY_PLACES = frozenset(
    name for name, op in OPS.items() if op.family in ("select", "gather", "take", "getitem", "setitem", "index_put")
)
_PICKS, _CLEARS = having("picks"), ("mul", "masked_fill")


def by_rank(call: ObservedCall, followed: Followed) -> Followed:
    """The answer where other samples say at which places rows stand, or have said so before."""
    is_ranked = any(operand.axis is not None and operand.axis.ranked for operand in call.operands)
    if call.batch_size == 1 or not (is_ranked or (call.op in _BY_PLACES and len(call.located) + len(call.lost) > 1)):
        return followed
    outputs = list(followed.outputs)
    for place, mark in enumerate(outputs):
        if isinstance(mark, Lost) and is_ranked and not mark.reduced and (mark.entries is not None or mark.samples):
            outputs[place] = replace(mark, ranked=True)
        elif isinstance(mark, BatchAxis) and (not _is_back(call, mark) if is_ranked else _is_put(call, mark)):
            samples = torch.arange(call.batch_size, device=call.outputs[place].device)
            sample = samples if mark.owner is None else mark.owner.sample
            outputs[place] = mark if mark.ranked else replace(mark, owner=Owner(sample, ranked=True))
    followed = replace(followed, outputs=tuple(outputs))
    return _beside_constants(call, followed) if is_ranked else followed


def _is_put(call: ObservedCall, axis: BatchAxis) -> bool:
    """Whether an index that is made of other samples says at which places the rows stand."""
    indices = _indices(call)
    if any(isinstance(index, Lost) and index.crossed for index in indices):
        return True
    others = [index for index in indices if isinstance(index, BatchAxis)] if call.op in _PICKS else []
    return any(other.mixing is not None or not other.same_layout(axis) for other in others)


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
    differing = [tensor for tensor, dims in laid if not all(has_equal_rows(tensor, dim) for dim in dims)]
    if all(id(tensor) in call.made or _clears(call, tensor) for tensor in differing):
        return followed
    text = f"`{call.name}` meets samples by their places in an order of the whole batch{user_line()}"
    outputs = tuple(
        mark.mixed(mark.mixing or text) if isinstance(mark, BatchAxis) else mark for mark in followed.outputs
    )
    noted = any(isinstance(mark, Lost) for mark in outputs) and any(output.requires_grad for output in call.outputs)
    if not noted:
        return replace(followed, outputs=outputs)
    return replace(followed, outputs=outputs, weighting=followed.weighting or text, is_sure=True)


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
