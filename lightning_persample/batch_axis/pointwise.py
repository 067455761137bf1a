"""Ops that compute each output entry from the entries at its place."""

from __future__ import annotations

from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.base import Followed, broadcast, listed, lists, propagation_rule
from lightning_persample.batch_axis.observed import ObservedCall


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
