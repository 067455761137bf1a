"""An op of no known family is tried out on single samples alone."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, one_entry
from lightning_persample.batch_axis.base import Followed, beside_lost, keep, lost, propagation_rule
from lightning_persample.batch_axis.observed import ObservedCall, Operand
from lightning_persample.batch_axis.ops import having
from lightning_persample.rules import generators_kept

_UNSEEN = having("unseen")
_SHOWN: dict[Hashable, Followed] = {}  # by signature
_MOST = 4096
_ALL, _SOME = 16, 8  # samples tried: all of at most so many, else so many
_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float64: 1e-6}


@propagation_rule("by_rows", by_layout=True)
def try_on_one_sample(call: ObservedCall) -> Followed:
    """Run the op on a few samples alone (first, last, some between), without gradient, and compare with the call."""
    batch_size = call.batch_size
    axis = call.located[0][1].mixed(call.mixing)
    entries = axis.entries(batch_size)
    shown = _SHOWN.get(call.signature)  # where a weight goes in, there may be no plan
    if shown is not None:
        return shown
    if call.inplace:
        return _follow_inplace(call)
    if call.lost:
        return beside_lost(call)
    if any(not other.same_layout(axis) for _, other in call.located):
        return lost(call, "meets two tensors of the batch with their batch axes at different places", mixes=None)

    if any(output.is_meta for output in call.outputs):
        return lost(call, "has tensors without values (device meta), on which it cannot be tried out", mixes=True)
    if entries == 0:
        return lost(call, "works on no sample at all")
    if (
        call.op in _UNSEEN
        or call.written
        or any(isinstance(arg, torch.Generator) for arg in (*call.args, *call.kwargs.values()))
    ):
        return lost(call, "writes into its arguments or draws from a generator of its own", mixes=None)
    found: tuple[BatchAxis, ...] = ()
    laid = False  # what holds no samples and has a row for each is cut as the samples are: it was laid over the batch
    tried = min(entries, _ALL if entries <= _ALL else _SOME)
    for entry in dict.fromkeys(place * (entries - 1) // max(tried - 1, 1) for place in range(tried)):
        placed = _try_on(call, axis, entry, laid)
        if isinstance(placed, str) and not laid and not found:
            laid = any(_is_laid(operand.tensor, call, axis) for operand in call.operands)
            placed = _try_on(call, axis, entry, laid) if laid else placed
        if isinstance(placed, str):
            return lost(call, placed, mixes=None)
        found = placed
    aligned = (lambda tensor: axis if _is_laid(tensor, call, axis) else None) if laid else None
    followed = Followed(found, aligned, by_values=axis.dim != 0 or laid)
    if call.signature is not None and not followed.by_values:
        if len(_SHOWN) >= _MOST:
            _SHOWN.clear()
        _SHOWN[call.signature] = followed
    return followed


def _try_on(call: ObservedCall, axis: BatchAxis, entry: int, laid: bool) -> tuple[BatchAxis, ...] | str:
    """The axis of each output, found on one entry alone, or what speaks against it."""

    def alone(operand: Operand) -> Tensor:
        where = axis if laid and _is_laid(operand.tensor, call, axis) else operand.axis
        if not isinstance(where, BatchAxis):
            return operand.tensor
        return one_entry(operand.tensor, where, call.batch_size, entry).detach()

    try:
        with torch.no_grad(), generators_kept(operand.tensor for operand in call.operands):
            parts = call.again(alone)
    except Exception as error:  # whatever an op of the user's raises, which the reason names
        return f"cannot be followed ({type(error).__name__} on one sample alone)"
    if len(parts) != len(call.outputs):
        return "gives another number of outputs for one sample alone"
    placed = [_place(call, whole, part, axis, entry) for whole, part in zip(call.outputs, parts, strict=True)]
    if any(place is None for place in placed):
        return "gives a sample another value alone than in its batch"
    return tuple(place for place in placed if place is not None)


def _is_laid(tensor: Tensor, call: ObservedCall, axis: BatchAxis) -> bool:
    """Whether a tensor without samples has as many rows as the batch, where the batch has its own."""
    rows = call.located[0][0].size(axis.dim)
    return call.axis_of(tensor) is None and tensor.dim() > axis.dim and tensor.size(axis.dim) == rows > axis.rows


def _place(call: ObservedCall, whole: Tensor, part: Tensor, axis: BatchAxis, entry: int) -> BatchAxis | None:
    batch_size, entries = call.batch_size, axis.entries(call.batch_size)
    if entries == 1:
        dim = min(axis.dim, whole.dim() - 1)
        return axis.moved(dim) if dim >= 0 and whole.size(dim) == axis.rows else None
    if whole.dim() != part.dim():
        return None
    changed = [dim for dim in range(whole.dim()) if whole.size(dim) != part.size(dim)]
    if len(changed) != 1:
        return None
    (dim,) = changed
    if part.size(dim) != axis.rows or whole.size(dim) != axis.rows * entries:
        return None
    moved = axis.moved(dim)
    own = one_entry(whole.detach(), moved, batch_size, entry)
    if not (part.is_floating_point() or part.is_complex()):
        return moved if torch.equal(own, part) else None
    tolerance = _TOLERANCE.get(part.dtype, 1e-4)
    same = torch.allclose(own, part, rtol=tolerance, atol=tolerance * _scale(part), equal_nan=True)
    return moved if same else None


def _scale(tensor: Tensor) -> float:
    finite = tensor.abs()[torch.isfinite(tensor)]
    return float(finite.max()) if finite.numel() else 0.0


def _follow_inplace(call: ObservedCall) -> Followed:
    """An op that writes into its first argument keeps that argument's shape; no more is known of an unlisted one."""
    target = call.argument(0, "self", "input")
    where = call.axis_of(target) if isinstance(target, Tensor) else None
    alone = all(operand.tensor is target or operand.tensor.numel() <= 1 for operand in call.operands)
    if isinstance(where, BatchAxis) and alone:
        return keep(call, where)
    return lost(call, "writes in place in a way that cannot be followed", mixes=None)
