"""How ops that rearrange entries, or compute each from those at its place, move the batch axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import (
    BatchAxis,
    Lost,
    by_entries,
    entry_owners,
    picked,
    reshaped,
    row_owners,
)
from lightning_persample.batch_axis.base import (
    Followed,
    alone,
    beside_lost,
    beyond,
    broadcast,
    crossed,
    dims_argument,
    into_own_rows,
    keep,
    listed,
    lists,
    lost,
    padded,
    propagation_rule,
    with_constant_rows,
)
from lightning_persample.batch_axis.indexing import written_entries
from lightning_persample.batch_axis.observed import ObservedCall, tensors_in


@propagation_rule("reshape", by_layout=True)
def _follow_reshape(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    moved = reshaped(axis, tensor.shape, call.outputs[0].shape, call.batch_size)
    return lost(call, "cuts the batch axis apart") if moved is None else keep(call, moved)


@propagation_rule("squeeze", by_layout=True)
def _follow_squeeze(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    given = call.args[1:] if len(call.args) > 1 else call.argument(1, "dim")
    if isinstance(given, tuple) and len(given) == 1:
        given = given[0]
    dims = dims_argument(given, tensor.dim())
    gone = [d for d in range(tensor.dim()) if tensor.size(d) == 1 and (dims is None or d in dims)]
    if axis.dim in gone:
        return lost(call, "drops the batch axis")
    return keep(call, axis.moved(axis.dim - sum(d < axis.dim for d in gone)))


@propagation_rule("unsqueeze", by_layout=True)
@propagation_rule("permutation", by_layout=True)
def _follow_permutation(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    sizes = range(2, 2 + tensor.dim())
    stand_in = torch.empty(tuple(sizes), device="meta", dtype=tensor.dtype)
    args = tuple(stand_in if arg is tensor else arg for arg in call.args)
    kwargs = {name: stand_in if value is tensor else value for name, value in call.kwargs.items()}
    moved: Tensor = call.function(*args, **kwargs)
    return keep(call, axis.moved(moved.shape.index(axis.dim + 2)))


@propagation_rule("pointwise", by_layout=True)
@propagation_rule("expand", by_layout=True)
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


@propagation_rule("strided")
def _follow_strided(call: ObservedCall) -> Followed:
    """The same places are read of a tensor that holds, in the same memory, which sample each entry is of."""
    tensor, axis = call.located[0]
    size, stride, offset = (call.argument(*each) for each in ((1, "size"), (2, "stride"), (3, "storage_offset")))
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return lost(call, "reads a tensor that has gaps in memory", mixes=None)
    entries = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64, device=tensor.device)
    entries.copy_(entry_owners(axis, tensor.shape, call.batch_size, tensor.device))
    start = 0 if offset is None else offset - tensor.storage_offset()
    if start < 0 or start + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= tensor.numel():
        return lost(call, "reads beyond the tensor", mixes=None)
    place = by_entries(entries.as_strided(size, stride, start), call.batch_size, axis.mixing)
    if place is None:
        return lost(call, "puts entries of several samples side by side along every axis", mixes=None)
    return keep(call, place)


@propagation_rule("repeat", by_layout=True)
def _follow_repeat(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    output = call.outputs[0]
    dim = axis.dim + output.dim() - tensor.dim()
    times = output.size(dim) // max(tensor.size(axis.dim), 1)
    return keep(call, replace(axis, dim=dim, outer=axis.outer * times))


@propagation_rule("repeat_interleave")
def _follow_repeat_interleave(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0][0], call.located[0][1].mixed(call.mixing)
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if dim is None:
        flat = reshaped(axis, tensor.shape, (tensor.numel(),), call.batch_size)
        if flat is None:
            return lost(call, "cuts the batch axis apart")
        axis, dim = flat, 0
    dim = int(dim) % max(call.outputs[0].dim(), 1)
    counts = call.axis_of(repeats) if isinstance(repeats, Tensor) else None
    own = isinstance(counts, BatchAxis) and tensor is not repeats and dim == axis.dim and counts.same_layout(axis)
    source = call.axis_of(call.argument(0, "input", "self"))
    if isinstance(counts, BatchAxis) and isinstance(source, Lost) and call.outputs[0].dim() == 1:  # one for each sample
        owners = row_owners(axis, call.batch_size, repeats.device).repeat_interleave(repeats)
        return keep(call, picked(0, owners, call.batch_size, axis.mixing or source.reason))
    if counts is not None and not own:
        return lost(call, "repeats entries as often as numbers of the batch say", mixes=None)
    if dim != axis.dim:
        return keep(call, axis)
    if isinstance(repeats, int):
        return keep(call, replace(axis, inner=axis.inner * repeats))
    rows = _rows(call, axis, dim, row_owners(axis, call.batch_size, repeats.device).repeat_interleave(repeats))
    return replace(rows, aligned=lambda tensor: axis.moved(0) if tensor is repeats else None)


@propagation_rule("joined", by_layout=True)
def _follow_joined(call: ObservedCall) -> Followed:
    located = call.located
    if call.lost:
        return beside_lost(call)
    first, axis = located[0]
    output = call.outputs[0]
    dim = int(call.argument(1, "dim", "axis", default=0)) % output.dim()
    if any(other.dim != axis.dim for _, other in located) and call.batch_size > 1:
        return lost(call, "meets two tensors of the batch with their batch axes at different places", mixes=None)
    if call.op in ("vstack", "row_stack") and first.dim() < 2:
        return lost(call, "stacks tensors of one axis")
    if call.op != "stack" and dim == axis.dim:
        places = {id(o.tensor): _of_each(call, o.tensor, dim) for o in call.operands if o.axis is None}
        places |= {id(tensor): place for tensor, place in located}
        found = [place for o in call.operands if (place := places[id(o.tensor)]) is not None]
        if len(found) < len(call.operands):
            return lost(call, "puts rows of the batch beside rows that belong to no sample")
        owners = torch.cat([row_owners(place, call.batch_size, first.device) for place in found])
        laid = {key: place for key, place in places.items() if place is not None and place.entries(call.batch_size)}
        joined = keep(call, picked(dim, owners, call.batch_size, call.mixing), lambda tensor: laid.get(id(tensor)))
        return replace(joined, by_values=len(located) < len(found))
    if any(not other.same_layout(axis) for _, other in located):
        return lost(call, "meets two tensors of the batch that order their samples differently", mixes=None)
    size = first.size(axis.dim)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return axis if tensor.dim() > axis.dim and tensor.size(axis.dim) == size and call.batch_size > 1 else None

    moved = axis.dim + (call.op == "stack" and dim <= axis.dim)
    return keep(call, axis.moved(moved).mixed(call.mixing), aligned)


@propagation_rule("padded")
def _follow_pad_sequence(call: ObservedCall) -> Followed:
    """Rows of one sample each are padded to one length and stacked: the samples lie along the new axis."""
    samples = [_sample_of(operand.axis) for operand in call.operands]
    if len(samples) == call.batch_size and any(operand.tensor.size(0) == 0 for operand in call.operands):
        samples = [place if one is None else one for place, one in enumerate(samples)]  # (of no rows nobody is known)
        samples = samples if samples == [*range(call.batch_size)] else [None]
    known = [sample for sample in samples if sample is not None]
    if len(known) == len(samples):
        dim = 0 if call.argument(1, "batch_first", default=False) else 1
        output = call.outputs[0]
        place = picked(dim, torch.tensor(known, device=output.device), call.batch_size, call.mixing)
        ones = [operand.tensor.new_zeros(operand.tensor.shape[:1], dtype=torch.bool) for operand in call.operands]
        options = {
            **dict(zip(("batch_first", "padding_value", "padding_side"), call.args[1:], strict=False)),
            **call.kwargs,
        }
        fills = call.function(ones, **{**options, "padding_value": 1})
        entries = fills.reshape(fills.shape + (1,) * (output.dim() - 2)).expand_as(output)
        return padded(call, place, entries, 1 - dim)
    _, axis = call.located[0]
    if call.lost or axis.dim == 0 or any(not other.same_place(axis) for _, other in call.located):
        return lost(call, "stacks rows of which it is not known that each part is of one sample", mixes=crossed(call))
    return keep(call, replace(axis, dim=axis.dim + 1, mixing=call.mixing))


def _sample_of(axis: BatchAxis | Lost | None) -> int | None:
    """The one sample that a tensor holds rows of, or is made of."""
    if isinstance(axis, Lost):
        return axis.alone
    return axis.owner.only if axis is not None and axis.owner is not None and axis.dim == 0 else None


def _of_each(call: ObservedCall, tensor: Tensor, dim: int) -> BatchAxis | None:
    """Where each sample has its own of rows that are copies of one, as many as the rows of the batch beside them."""
    if tensor.numel() == 0 and (tensor.dim() <= dim or tensor.size(dim) == 0):
        return picked(dim, torch.empty(0, dtype=torch.int64, device=tensor.device), call.batch_size)
    beside = [axis for other, axis in call.located if other.size(dim) == tensor.size(dim)]
    layout = beside[0] if beside and all(axis.same_layout(beside[0]) for axis in beside) else None
    if tensor.requires_grad:  # (rows of a weight that are equal now may differ after a step, unless they are one)
        laid = tensor.stride(dim) == 0 and all(axis.owner is None for _, axis in call.located)
        return layout if laid else None
    unknown = torch.full((tensor.size(dim),), -1, dtype=torch.int64, device=tensor.device)
    owners = None if layout is None else row_owners(layout, call.batch_size)
    known = with_constant_rows(call, unknown, tensor, dim, beside=owners)
    return None if known is None else picked(dim, known, call.batch_size)


def _rows(call: ObservedCall, axis: BatchAxis, dim: int, owners: Tensor) -> Followed:
    """Rows of the batch axis were picked: `owners` is the sample of each row that is left, along axis `dim`."""
    return keep(call, picked(dim, owners, call.batch_size, axis.mixing))


@propagation_rule("flip", by_layout=True)
@propagation_rule("roll")
@propagation_rule("split", by_layout=True)
def _follow_rows(call: ObservedCall) -> Followed:
    """Rows change places along an axis, or are dealt out: the same call says it of the sample of each."""
    tensor, axis = call.located[0]
    if tensor is not call.argument(0, "input", "self") or len(call.located) + len(call.lost) > 1:
        return lost(call, "splits at places that numbers of the batch say", mixes=crossed(call))
    given = call.args[1:] if len(call.args) > 2 else call.argument(1, "dims")
    given = given if call.op == "flip" else call.argument(2, "dim", "dims", default=None if call.op == "roll" else 0)
    dims = dims_argument(given, tensor.dim())
    if dims is None and call.op == "roll":
        return lost(call, "moves entries from sample to sample", mixes=None)
    if dims is None or axis.dim not in dims:
        return keep(call, axis)
    owners = row_owners(axis, call.batch_size, tensor.device)
    laid = owners.view([-1 if dim == axis.dim else 1 for dim in range(tensor.dim())])
    moved = call.on(lambda each: replace(each, tensor=laid) if each.tensor is tensor else each)
    pieces = tensors_in(moved.function(*moved.args, **moved.kwargs))
    return Followed(tuple(picked(axis.dim, piece.flatten(), call.batch_size, axis.mixing) for piece in pieces))


@propagation_rule("unbind", by_layout=True)
def _follow_unbind(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    dim = int(call.argument(1, "dim", default=0)) % tensor.dim()
    if dim == axis.dim:
        return alone(call, axis, range(len(call.outputs)))
    return keep(call, axis.moved(axis.dim - (dim < axis.dim)))


@propagation_rule("nested")
def _follow_nested(call: ObservedCall) -> Followed:
    """Of a nested tensor with the samples along its first axis: the rows of all, one after the other, or padded."""
    tensor: Any = call.located[0][0]
    axis = call.located[0][1]
    is_jagged = tensor.layout is torch.jagged and tensor.lengths() is None
    if call.op != "_nested_get_values":
        output = call.outputs[0]
        if not is_jagged or axis.dim != 0 or output.dim() < 2 or output.size(0) != tensor.size(0):
            return keep(call, axis)
        return padded(call, axis, beyond(tensor.offsets().diff(), output, 0), 1)
    if not is_jagged:
        return lost(call, "gives entries that belong to no sample, or in an order of their own", mixes=None)
    owners = torch.arange(tensor.size(0), device=tensor.device).repeat_interleave(tensor.offsets().diff())
    return keep(call, picked(0, row_owners(axis, call.batch_size, tensor.device)[owners], call.batch_size, axis.mixing))


@propagation_rule("select")
def _follow_select(call: ObservedCall) -> Followed:
    target = call.argument(0, "input", "self")
    dim = int(call.argument(1, "dim", "dimension")) % max(target.dim(), 1)
    axis = call.axis_of(target)
    index = call.argument(2, "index", "start")
    if isinstance(axis, Lost):
        return beside_lost(call)
    if not isinstance(axis, BatchAxis):  # a weight or a constant, picked from by an index of the batch
        where = call.axis_of(index)
        if call.op == "index_select" and isinstance(where, BatchAxis):
            return keep(call, where.moved(dim))
        return lost(call, "picks entries by a number of the batch", mixes=crossed(call))
    if dim != axis.dim:
        by = call.axis_of(index) if isinstance(index, Tensor) else None
        if by is not None:
            return lost(call, "picks entries by indices that depend on the batch", mixes=crossed(call, by))
        return keep(call, axis.moved(axis.dim - (dim < axis.dim)) if call.op == "select" else axis)
    owners = row_owners(axis, call.batch_size, target.device)
    if call.op == "narrow":
        return _rows(call, axis, dim, owners.narrow(0, int(index), call.outputs[0].size(dim)))
    if call.op == "index_select":  # (rows in an order of the batch are found by places in that order)
        return _rows(call, axis if axis.ranked else axis.mixed(call.mixing), dim, owners[index])
    if call.op == "unfold":
        return lost(call, "puts several samples into one row")
    if isinstance(index, Tensor) and call.axis_of(index) is not None:
        return lost(call, "picks a sample by a number of the batch", mixes=crossed(call))
    return alone(call, axis, [int(index)])


@propagation_rule("gather")
def _follow_gather(call: ObservedCall) -> Followed:
    target = call.argument(0, "input", "self")
    dim = call.argument(2 if call.op == "take_along_dim" else 1, "dim")
    own = None
    if call.op in ("gather", "take_along_dim"):
        own = None if dim is None else _own_rows(call, target, int(dim) % max(target.dim(), 1))
    elif call.op != "index_fill":
        source = call.argument(3, "source", "tensor", "src", "value")
        dim = int(dim) % max(target.dim(), 1)
        own = into_own_rows(call, target, dim, call.argument(2, "index"), source)
    if own is not None:
        return own
    if dim is None or call.lost:
        return _written(call, "takes places that are not known to stay within a sample")
    dim = int(dim) % max(target.dim(), 1)
    located = call.located
    axis = located[0][1].mixed(call.mixing)
    index = call.argument(2, "index") if str(call.op).startswith("index_") else None  # of one axis, that of `dim`
    if index is not None and call.axis_of(index) is not None:
        return lost(call, "writes into places that depend on the batch", mixes=None)
    if any(not other.same_place(axis) for _, other in located) and call.batch_size > 1:
        return _written(call, "takes entries by indices that do not belong to the same sample")
    if call.op in ("gather", "take_along_dim") and call.axis_of(target) is None:
        return _from_table(call, target, dim, axis)
    size = located[0][0].size(axis.dim)
    others = [o.tensor for o in call.operands if o.axis is None and o.tensor is not index]
    if dim == axis.dim or any(other.dim() > axis.dim and other.size(axis.dim) != size for other in others):
        return _written(call, "takes places along the batch axis that are not known to stay within a sample")

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return axis if tensor is not index and tensor.dim() > axis.dim and call.batch_size > 1 else None

    return keep(call, axis, aligned)


def _written(call: ObservedCall, what: str) -> Followed:
    return written_entries(call) or lost(call, what, mixes=None)


def _own_rows(call: ObservedCall, target: Tensor, dim: int) -> Followed | None:
    """Rows of the batch axis gathered so that each is of one sample, as the values of the index show; None if not."""
    index, axis = call.argument(2 if call.op == "gather" else 1, "index", "indices"), call.axis_of(target)
    if not isinstance(axis, BatchAxis) or axis.dim != dim or index.dim() != target.dim():
        return None
    if not index.numel() or crossed(call):
        return None
    owners = row_owners(axis, call.batch_size, index.device)[index].movedim(dim, 0).reshape(index.size(dim), -1)
    by = call.axis_of(index)
    if not torch.equal(owners, owners[:, :1].expand_as(owners)):
        return None
    if isinstance(by, BatchAxis) and (
        by.dim != dim or by.mixing or not torch.equal(owners[:, 0], row_owners(by, call.batch_size, index.device))
    ):
        return None
    return keep(call, picked(dim, owners[:, 0], call.batch_size, axis.mixing))


def _from_table(call: ObservedCall, table: Tensor, dim: int, axis: BatchAxis) -> Followed:
    """Each index picks along `dim` from the row of the table at its place: its output lies where the index does."""
    rows = call.outputs[0].size(axis.dim)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        own = tensor is table and dim != axis.dim and table.size(axis.dim) == rows and call.batch_size > 1
        return axis if own else None

    if dim != axis.dim and table.size(axis.dim) not in (1, rows):
        return lost(call, "picks entries from more rows than the batch has", mixes=None)
    return keep(call, axis, aligned)
