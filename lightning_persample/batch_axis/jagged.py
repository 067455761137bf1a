"""Calls on jagged tensors: (B, j, *) with the rows of all samples, one after another, in `values()`, (N, *).

A layer computes each row from this row alone, whether it is given a jagged tensor or the rows, so that what it does to
the samples is what the same call on the rows does. Whatever else gives a jagged tensor of B samples keeps them apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, picked, row_owners
from lightning_persample.batch_axis.base import Followed, keep, lost
from lightning_persample.batch_axis.observed import ObservedCall, Operand
from lightning_persample.batch_axis.ops import OPS

_BY_ROW = ("pointwise", "linear", "layer_norm", "embedding")  # families that read of each row this row alone
_OVER_AXES = ("reduction", "extremum", "norm")


def rows_of(tensor: Any, batch_size: int, axis: BatchAxis) -> BatchAxis | None:
    """Where the samples lie in the rows of a jagged tensor that holds them along its first axis; None if elsewhere."""
    is_plain = tensor.layout is torch.jagged and tensor.lengths() is None and not isinstance(tensor.shape[1], int)
    if not is_plain or axis.dim != 0:
        return None
    owners = row_owners(axis, batch_size, tensor.device)
    lengths = tensor.offsets().diff()
    return (
        picked(0, owners.repeat_interleave(lengths), batch_size, axis.mixing) if len(lengths) == len(owners) else None
    )


@torch.no_grad()  # (a checkpoint counts what is kept for a backward)
def _values(tensor: Any) -> Tensor:
    return tensor.values()


def on_rows(call: ObservedCall) -> ObservedCall | None:
    """The same call on the rows of its jagged tensors; None where it is none, or reads more of them than each row."""
    op = OPS.get(call.op)
    jagged = [o for o in call.operands if o.tensor.is_nested]
    known = op is not None and op.family in _BY_ROW and not call.inplace and "out" not in call.kwargs
    if not known or not jagged or call.lost or any(not output.is_nested for output in call.outputs):
        return None
    changed: dict[int, Operand] = {}
    for operand in call.operands:
        tensor: Any = operand.tensor
        if not tensor.is_nested:
            if operand.axis is not None or (op is not None and op.family == "pointwise" and tensor.dim() > 1):
                return None  # (laid over samples or rows)
            changed[id(tensor)] = operand
            continue
        place = rows_of(tensor, call.batch_size, operand.axis) if isinstance(operand.axis, BatchAxis) else None
        if place is None or any(tensor.shape[1] != output.shape[1] for output in call.outputs):
            return None
        changed[id(tensor)] = Operand(_values(tensor), place)
    return replace(call.on(lambda operand: changed[id(operand.tensor)]), outputs=tuple(map(_values, call.outputs)))


def follow_jagged(call: ObservedCall) -> Followed:
    """Where the batch lies in the results of a call on jagged tensors alone, or of one that makes them of rows."""
    first: Any = call.operands[0].tensor
    output: Any = call.outputs[0]
    size = call.batch_size
    if call.op == "_nested_view_from_jagged" and not first.is_nested and output.is_nested:
        axis = call.axis_of(first)
        own = rows_of(output, size, BatchAxis(0))
        is_own = isinstance(axis, BatchAxis) and own is not None and own.same_place(axis)
        return keep(call, BatchAxis(0)) if is_own else lost(call, "cuts rows otherwise than they belong to samples")
    places = [operand.axis for operand in call.operands if operand.tensor.is_nested]
    plain = [operand for operand in call.operands if not operand.tensor.is_nested]
    others = [operand for operand in plain if operand.axis is not None or operand.tensor.requires_grad]
    apart = all(isinstance(axis, BatchAxis) and axis.same_place(BatchAxis(0)) for axis in places) and not others
    fit = all(each.dim() > 0 and each.size(0) == size for each in call.outputs)
    if apart and fit and (all(each.is_nested for each in call.outputs) or _is_over_axes(call)):
        return keep(call, BatchAxis(0, mixing=call.mixing))
    instead = "give it values() of a jagged one, or a padded one"
    return lost(call, f"works on tensors that are nested, sparse or wrapped; {instead}", mixes=None)


def _is_over_axes(call: ObservedCall) -> bool:
    """Whether the call reduces over axes behind the first."""
    op, dims = OPS.get(call.op), call.argument(1, "dim", "axis")
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    known = op is not None and op.family in _OVER_AXES and all(type(dim) is int for dim in listed)
    return known and 0 not in {dim % call.operands[0].tensor.dim() for dim in listed}
