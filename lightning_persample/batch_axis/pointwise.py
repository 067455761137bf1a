"""Ops that compute each output entry from the entries at its place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.base import Followed, broadcast, is_plain, listed, lists, propagation_rule
from lightning_persample.batch_axis.observed import ObservedCall


def common_axis(tensors: Sequence[Tensor], marks: Sequence[object]) -> tuple[BatchAxis | None, int]:
    """The axis along which operands that are laid over each other all hold the samples, where it is the same."""
    found, rank = None, 0
    for tensor, mark in zip(tensors, marks, strict=True):
        if len(tensors) > 1 and not is_plain(tensor):
            return None, 0
        if not isinstance(mark, BatchAxis):
            continue
        if found is None:
            found, rank = mark, tensor.dim()
            continue
        same = (mark.outer, mark.inner, mark.dim - tensor.dim()) == (found.outer, found.inner, found.dim - rank)
        if not same or mark.owner is not found.owner or mark.mixing is not found.mixing:
            return None, 0
    return found, rank


@propagation_rule("pointwise", by_layout=True)
def _follow_pointwise(call: ObservedCall) -> Followed:
    return broadcast(call)


@propagation_rule("copy", by_layout=True)
def _follow_copy(call: ObservedCall) -> Followed:
    """``target.copy_(source)``: of the target nothing is left."""
    target, source = call.argument(0, "self", "input"), call.argument(1, "src", "other")
    axis = call.axis_of(source) if isinstance(source, Tensor) and source is not target else None
    if not call.inplace or not isinstance(axis, BatchAxis):
        return broadcast(call)
    return Followed((axis.moved(axis.dim + target.dim() - source.dim()),))


@propagation_rule("where", by_layout=True)
def _follow_where(call: ObservedCall) -> Followed:
    return listed(call) if lists(call) else broadcast(call)
