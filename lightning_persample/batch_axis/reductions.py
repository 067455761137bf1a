"""Ops with a ``dim`` argument: reductions, and scans that keep the size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import added_up
from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner, laid_along, row_owners
from lightning_persample.batch_axis.base import (
    Followed,
    broadcast,
    dims_argument,
    into_own_rows,
    keep,
    listed,
    lost,
    propagation_rule,
)
from lightning_persample.batch_axis.observed import ObservedCall
from lightning_persample.batch_axis.ops import OPS, having
from lightning_persample.batch_axis.sample_weights import of_sum

_TOTALS = having("totals")
_BEHIND_ANOTHER = ("norm", "topk", "transform")  # families that take `dim` as third argument, not as second
_DEFAULTS = {"sort": -1, "topk": -1}  # of `dim`, where it is not all axes


@propagation_rule("dot")
def _follow_dot(call: ObservedCall) -> Followed:
    located = call.located
    if any(operand.tensor.dim() != 1 for operand in call.operands):
        return lost(call, "multiplies along an axis that may be the batch's", mixes=None)
    if any(not axis.same_layout(located[0][1]) for _, axis in located) or call.lost:
        return lost(call, "multiplies different samples", mixes=True)
    return added_up(call, weighs=len(located) == 1 and len(call.operands) > 1)


def _dims(call: ObservedCall) -> tuple[int, ...] | None:
    """The axes that the call works along, non-negative; None for all."""
    family, rank = str(OPS[call.op].family), call.located[0][0].dim()
    dim = call.argument(2 if family in _BEHIND_ANOTHER else 1, "dim", "dims", "axis", default=_DEFAULTS.get(family))
    if family == "transform" and dim is None:
        sizes = call.argument(1, "s")
        number = {"2": 2, "n": len(sizes) if isinstance(sizes, (tuple, list)) else 0}.get(str(call.op)[-1], 1)
        dim = tuple(range(-number, 0))
    return dims_argument(0 if call.op == "msort" else dim, rank)


@propagation_rule("norm", by_layout=True)
@propagation_rule("reduction", by_layout=True)
def _follow_reduction(call: ObservedCall) -> Followed:
    (tensor, axis), dims = call.located[0], _dims(call)
    if dims is None or axis.dim in dims:
        if call.op not in _TOTALS:
            return lost(call, "reduces over the batch axis", mixes=True)
        return added_up(call).with_known(weights=of_sum(call)) if call.compares_weights else added_up(call)
    behind = axis.moved(axis.dim - sum(dim < axis.dim for dim in dims))
    return Followed(tuple(axis if output.dim() == tensor.dim() else behind for output in call.outputs))


@propagation_rule("extremum", by_layout=True)
def _follow_extremum(call: ObservedCall) -> Followed:
    return broadcast(call) if isinstance(call.argument(1, "other"), Tensor) else _follow_reduction(call)


@propagation_rule("scan", by_layout=True)
@propagation_rule("sort", by_layout=True)
@propagation_rule("topk", by_layout=True)
@propagation_rule("transform", by_layout=True)
def _follow_scan(call: ObservedCall) -> Followed:
    (tensor, axis), dims = call.located[0], _dims(call)
    if dims is not None and axis.dim not in dims:
        return keep(call, axis)
    followed = lost(call, "works along the batch axis", mixes=True)
    if OPS[call.op].family not in ("sort", "topk"):
        return followed
    pairs = zip(followed.outputs, call.outputs, strict=True)
    places = [replace(mark, orders=not output.is_floating_point()) for mark, output in pairs if isinstance(mark, Lost)]
    if call.op == "sort" and tensor.dim() == 1:  # as of lengths, which stay those of their samples
        owners = row_owners(axis, call.batch_size, tensor.device)[call.outputs[1]]
        owners = owners if axis.mixing is None else torch.full_like(owners, -1)
        places[0] = replace(places[0], entries=owners)
    return replace(followed, outputs=tuple(places))


@propagation_rule("list")
def _follow_list(call: ObservedCall) -> Followed:
    followed = listed(call)
    return _of_entries(call, followed) if call.kwargs.get("return_inverse") and call.mixing is None else followed


def _of_entries(call: ObservedCall, followed: Followed) -> Followed:
    """The answer where each number that occurs does so in one sample alone: it is that sample's, as is its count."""
    (tensor, axis), dim, (numbers, inverse, *counts) = call.located[0], call.kwargs.get("dim"), call.outputs
    if dim is not None and int(dim) % tensor.dim() != axis.dim:
        return followed
    place = 0 if dim is None else axis.dim
    entries = row_owners(axis, call.batch_size, inverse.device)
    entries = entries if dim is not None else laid_along(entries, axis.dim, tensor.shape).flatten()
    owners = entries.new_zeros(numbers.size(place)).index_put((inverse.flatten(),), entries)
    if not torch.equal(owners[inverse.flatten()], entries):
        return followed
    ranked = not bool((owners[1:] >= owners[:-1]).all())
    found = [BatchAxis(each, owner=Owner(owners, ranked)) for each in (place, *[0] * len(counts))]
    return replace(followed, outputs=(found[0], followed.outputs[1], *found[1:]), by_values=True)


@propagation_rule("scattered")
def _follow_scattered(call: ObservedCall) -> Followed:
    """``bincount(owner)`` counts the rows of each sample; of the others nothing is known."""
    own = None
    if call.op == "bincount" and call.axis_of(call.args[0]) is not None:
        own = into_own_rows(call, call.outputs[0].detach(), 0, call.args[0], call.argument(1, "weights"))
    return own or lost(call, "gathers entries across the batch", mixes=None)


@propagation_rule("segments")
def _follow_segments(call: ObservedCall) -> Followed:
    """Neighbouring rows are brought together, as many as `lengths` says, as ``index_reduce`` brings them."""
    data, lengths, offsets = call.args[0], call.kwargs.get("lengths"), call.kwargs.get("offsets")
    lengths = offsets.diff() if lengths is None and isinstance(offsets, Tensor) else lengths
    own = None
    if isinstance(lengths, Tensor) and lengths.dim() == 1 and call.kwargs.get("axis", 0) == 0:
        index = torch.arange(len(lengths), device=data.device).repeat_interleave(lengths.to(data.device))
        own = into_own_rows(call, call.outputs[0].detach(), 0, index, data)
    return own or lost(call, "brings rows of several samples together", mixes=None)


@propagation_rule("take")
def _follow_take(call: ObservedCall) -> Followed:
    tensor, index = call.argument(0, "input", "self"), call.argument(1, "index")
    if call.axis_of(tensor) is not None and call.axis_of(index) is not None:
        return lost(call, "picks entries by indices that depend on the batch", mixes=None)
    return lost(call, "gathers entries across the batch")
