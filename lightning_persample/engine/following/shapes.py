"""How ops that only rearrange entries move the batch axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost, reshaped
from lightning_persample.engine.following.base import Followed, broadcast, dims_argument, follower, keep, lost
from lightning_persample.engine.observed import ObservedCall

__all__: list[str] = []


@follower("reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "_unsafe_view")
def _follow_reshape(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    moved = reshaped(axis, tensor.shape, call.outputs[0].shape, call.batch_size)
    return lost(call, "cuts the batch axis apart") if moved is None else keep(call, moved)


@follower("squeeze")
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


@follower("unsqueeze")
def _follow_unsqueeze(call: ObservedCall) -> Followed:
    _, axis = call.located[0]
    dim = int(call.argument(1, "dim")) % call.outputs[0].dim()
    return keep(call, axis.moved(axis.dim + (dim <= axis.dim)))


@follower("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "T", "mT", "H", "mH", "adjoint")
def _follow_permutation(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    sizes = range(2, 2 + tensor.dim())
    stand_in = torch.empty(tuple(sizes), device="meta", dtype=tensor.dtype)
    args = tuple(stand_in if arg is tensor else arg for arg in call.args)
    kwargs = {name: stand_in if value is tensor else value for name, value in call.kwargs.items()}
    moved: Tensor = call.function(*args, **kwargs)
    return keep(call, axis.moved(moved.shape.index(axis.dim + 2)))


@follower("expand", "expand_as", "broadcast_to", "broadcast_tensors")
def _follow_expand(call: ObservedCall) -> Followed:
    found: list[BatchAxis | Lost] = []
    for position, output in enumerate(call.outputs):
        operand = call.operands[position if call.op == "broadcast_tensors" else 0]
        if isinstance(operand.axis, BatchAxis):
            found.append(operand.axis.moved(operand.axis.dim + output.dim() - operand.tensor.dim()))
        elif operand.axis is None:
            return broadcast(call)
        else:
            found.append(operand.axis)
    return Followed(tuple(found))


@follower("repeat", "tile")
def _follow_repeat(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    output = call.outputs[0]
    dim = axis.dim + output.dim() - tensor.dim()
    times = output.size(dim) // max(tensor.size(axis.dim), 1)
    return keep(call, replace(axis, dim=dim, outer=axis.outer * times))


@follower("repeat_interleave")
def _follow_repeat_interleave(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if dim is None:
        flat = reshaped(axis, tensor.shape, (tensor.numel(),), call.batch_size)
        if flat is None:
            return lost(call, "cuts the batch axis apart")
        axis, dim = flat, 0
    dim = int(dim) % max(call.outputs[0].dim(), 1)
    if dim != axis.dim:
        return keep(call, axis)
    if not isinstance(repeats, int):
        return lost(call, "repeats samples unequally")
    return keep(call, replace(axis, inner=axis.inner * repeats))


@follower("cat", "concat", "concatenate", "stack")
def _follow_joined(call: ObservedCall) -> Followed:
    located = call.located
    if call.lost:
        return lost(call, "combines samples with a value computed over the whole batch", mixes=True)
    first, axis = located[0]
    output = call.outputs[0]
    dim = int(call.argument(1, "dim", "axis", default=0)) % output.dim()
    if any(other.dim != axis.dim for _, other in located) and call.batch_size > 1:
        return lost(call, "meets two tensors of the batch with their batch axes at different places", mixes=True)
    mixing = next((other.mixing for _, other in located if other.mixing), None)
    along = call.op != "stack" and dim == axis.dim
    if along:
        pieces = [operand.axis for operand in call.operands]
        whole = all(isinstance(piece, BatchAxis) and piece.inner == axis.inner for piece in pieces)
        if not whole:
            return lost(call, "puts rows of the batch beside rows that belong to no sample")
        outer = sum(piece.outer for piece in pieces if isinstance(piece, BatchAxis))
        return keep(call, replace(axis, outer=outer, mixing=mixing))
    if any(not other.same_layout(axis) for _, other in located):
        return lost(call, "meets two tensors of the batch that order their samples differently", mixes=True)
    size = first.size(axis.dim)

    def aligned(tensor: Tensor) -> int | None:
        return axis.dim if tensor.dim() > axis.dim and tensor.size(axis.dim) == size and call.batch_size > 1 else None

    moved = axis.dim + (call.op == "stack" and dim <= axis.dim)
    return keep(call, replace(axis, dim=moved, mixing=mixing), aligned)


@follower("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def _follow_split(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    dim = int(call.argument(2, "dim", default=0)) % tensor.dim()
    if dim != axis.dim:
        return keep(call, axis)
    pieces = [_leading_rows(axis, output.size(dim), call.batch_size) for output in call.outputs]
    if any(piece is None for piece in pieces):
        return lost(call, "takes some of the samples")
    return Followed(tuple(piece for piece in pieces if piece is not None))


def _leading_rows(axis: BatchAxis, size: int, batch_size: int) -> BatchAxis | None:
    """The layout of `size` neighbouring rows, where these are whole repetitions of the batch."""
    outer, rest = divmod(size, batch_size * axis.inner)
    return replace(axis, outer=outer) if rest == 0 and outer > 0 else None


@follower("unbind")
def _follow_unbind(call: ObservedCall) -> Followed:
    tensor, axis = call.located[0]
    dim = int(call.argument(1, "dim", default=0)) % tensor.dim()
    if dim == axis.dim:
        return lost(call, "takes single samples out of the batch")
    return keep(call, axis.moved(axis.dim - (dim < axis.dim)))


@follower("select", "narrow", "index_select", "gather", "take_along_dim", "unfold", "index_add", "scatter",
          "scatter_add", "index_copy", "index_fill")  # fmt: skip
def _follow_select(call: ObservedCall) -> Followed:
    dim_position, name = (2, "dim") if call.op == "take_along_dim" else (1, "dim")
    target = call.argument(0, "input", "self")
    dim = call.argument(dim_position, name, "dimension")
    if dim is None:
        return lost(call, "gathers entries across the batch")
    dim = int(dim) % max(target.dim(), 1)
    located = call.located
    if call.op in ("gather", "take_along_dim", "scatter", "scatter_add"):
        if any(other != located[0][1] for _, other in located) or call.lost or len(located) < 2:
            return lost(call, "picks entries by indices that do not belong to the same sample", mixes=True)
    elif call.axis_of(target) is None or len(located) > 1 or call.lost:
        return lost(call, "picks entries by indices that depend on the batch", mixes=True)
    _, axis = located[0]
    if dim == axis.dim:
        if call.op == "narrow":
            return _sliced(call, axis, int(call.argument(2, "start")), call.outputs[0].size(dim), axis.dim)
        return lost(call, "takes single samples out of the batch", mixes=call.op != "select")
    return keep(call, axis.moved(axis.dim - (dim < axis.dim)) if call.op == "select" else axis)


def _sliced(call: ObservedCall, axis: BatchAxis, start: int, length: int, dim: int) -> Followed:
    piece = _leading_rows(axis, length, call.batch_size)
    if piece is None or start % (call.batch_size * axis.inner):
        return lost(call, "takes some of the samples")
    return keep(call, piece.moved(dim))


@follower("getitem")
def _follow_getitem(call: ObservedCall) -> Followed:
    tensor: Tensor = call.args[0]
    items = _expanded_index(call.args[1], tensor.dim())
    if items is None:
        return lost(call, "picks entries by a mask that depends on the batch")
    source = call.axis_of(tensor)
    advanced = [item for item in items if isinstance(item, Tensor)]
    index_axes = [(item, call.axis_of(item)) for item in advanced if call.axis_of(item) is not None]
    if any(isinstance(where, Lost) for _, where in index_axes) or isinstance(source, Lost):
        return lost(call, "picks entries by indices computed over the whole batch", mixes=True)
    place = _Placed(items, tensor.dim(), advanced)
    if not isinstance(source, BatchAxis):
        return _by_index(call, place, [(i, w) for i, w in index_axes if isinstance(w, BatchAxis)])
    item, position = place.item_of(source.dim)
    if isinstance(item, Tensor):
        if source.rows != 1 or not _is_every_sample(item, call.batch_size):
            return lost(call, "takes single samples out of the batch", mixes=True)
        own = BatchAxis(max(range(item.dim()), key=item.size, default=0))
        located = [(i, w) for i, w in index_axes if isinstance(w, BatchAxis)]
        return _by_index(call, place, [(item, own), *located])
    if index_axes:
        return lost(call, "picks entries by indices that depend on another sample", mixes=True)
    if isinstance(item, slice):
        start, stop, step = item.indices(tensor.size(source.dim))
        if step == 1 and stop - start == tensor.size(source.dim):
            return keep(call, source.moved(position))
        if step == 1:
            return _sliced(call, source, start, stop - start, position)
    return lost(call, "takes single samples out of the batch")


def _by_index(call: ObservedCall, place: _Placed, located: list[tuple[Tensor, BatchAxis]]) -> Followed:
    """The batch comes in through the index tensors, which are laid over each other from the right."""
    index, axis = located[0]
    from_right = axis.dim - index.dim()
    if any(w.dim - i.dim() != from_right or not w.same_layout(axis) for i, w in located[1:]) and call.batch_size > 1:
        return lost(call, "picks entries by indices that order their samples differently", mixes=True)
    return keep(call, axis.moved(place.start + place.width + from_right))


def _is_every_sample(index: Tensor, batch_size: int) -> bool:
    """Whether an index names the samples 0, 1, ... B-1 in order along its one long axis."""
    flat = index.flatten()
    return index.numel() == batch_size and torch.equal(
        flat, torch.arange(batch_size, device=flat.device, dtype=flat.dtype)
    )


def _expanded_index(index: Any, ndim: int) -> list[Any] | None:
    """An index as one entry per axis (None adds an axis), lists as tensors; None where a boolean mask is among them."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(item) if isinstance(item, (list, range)) else item for item in items]
    if any(
        isinstance(item, bool) or (isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8))
        for item in items
    ):
        return None
    items = [int(i) if isinstance(i, Tensor) and i.dim() == 0 and not i.requires_grad else i for i in items]
    used = sum(item is not None and item is not Ellipsis for item in items)
    fill = [slice(None)] * (ndim - used)
    at = next((position for position, item in enumerate(items) if item is Ellipsis), None)
    return items + fill if at is None else items[:at] + fill + items[at + 1 :]


class _Placed:
    """Where each axis of the indexed tensor comes out, by torch's rules for mixed basic and advanced indexing."""

    def __init__(self, items: list[Any], ndim: int, advanced: list[Tensor]) -> None:
        self.width = max((item.dim() for item in advanced), default=0)
        places = [position for position, item in enumerate(items) if isinstance(item, Tensor)]
        together = not places or all(isinstance(items[p], Tensor) for p in range(places[0], places[-1] + 1))
        self._items = items
        self._together = together
        self.start = 0
        if places and together:
            self.start = sum(not isinstance(item, int) for item in items[: places[0]])

    def item_of(self, dim: int) -> tuple[Any, int]:
        """The index entry that meets axis `dim`, and the axis of the result that it becomes if it is a slice."""
        source = output = 0
        if not self._together:
            output = self.width
        counted = self._together
        for item in self._items:
            if item is None:
                output += 1
                continue
            if isinstance(item, Tensor) and self._together and counted:
                if source == dim:
                    return item, output
                output += self.width
                counted = False
                source += 1
                continue
            if source == dim:
                return item, output
            source += 1
            output += isinstance(item, slice)
        raise IndexError(f"axis {dim} is not indexed")


@follower("setitem")
def _follow_setitem(call: ObservedCall) -> Followed:
    """``target[index] = value``: the target keeps its shape; the value lies over the indexed part from the right."""
    target, index, value = call.args
    where, incoming = call.axis_of(target), call.axis_of(value) if isinstance(value, Tensor) else None
    items = _expanded_index(index, target.dim())
    basic = items is not None and not any(isinstance(item, Tensor) for item in items)
    if isinstance(where, Lost) or isinstance(incoming, Lost) or items is None or not basic:
        if isinstance(where, BatchAxis) and incoming is None and not call.lost and len(call.located) <= 2:
            return Followed((where,))
        return lost(call, "writes into places that depend on the batch", mixes=True)
    if not isinstance(incoming, BatchAxis):
        return (
            Followed((where,))
            if isinstance(where, BatchAxis)
            else lost(call, "writes into places that depend on the batch")
        )
    placed = _Placed(items, target.dim(), [])
    part_dims = sum(item is None or isinstance(item, slice) for item in items)
    for dim in range(target.dim()):
        item, position = placed.item_of(dim)
        if isinstance(item, slice) and position == part_dims - value.dim() + incoming.dim:
            whole = item.indices(target.size(dim)) == (0, target.size(dim), 1)
            if whole and (not isinstance(where, BatchAxis) or (where.dim == dim and where.same_layout(incoming))):
                return Followed((incoming.moved(dim),))
    return lost(call, "writes samples into places of other samples", mixes=True)
