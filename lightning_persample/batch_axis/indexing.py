"""How indexing moves the batch axis: slices, integers, index tensors and masks, read and written."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, entry_owners, picked, row_owners
from lightning_persample.batch_axis.base import (
    Alignment,
    Followed,
    alone,
    beside_lost,
    crossed,
    has_equal_rows,
    into_own_rows,
    is_plain,
    keep,
    lost,
    padded,
    propagation_rule,
    with_constant_rows,
)
from lightning_persample.batch_axis.observed import ObservedCall, user_line

_WHOLE = slice(None)


@propagation_rule("getitem", by_layout=True)
def _follow_getitem(call: ObservedCall) -> Followed:
    tensor: Tensor = call.args[0]
    items = _per_axis(call.args[1], tensor.dim())
    source = call.axis_of(tensor)
    indices = [(i, w) for i in items if isinstance(i, Tensor) and isinstance(w := call.axis_of(i), BatchAxis)]
    if isinstance(source, Lost):
        counts = not (tensor.is_floating_point() or tensor.is_complex()) and not any(map(_is_mask, items))
        if len(call.lost) > 1 or len(indices) != 1 or not counts:
            return beside_lost(call)
        index, axis = indices[0]
        return _through_indices(call, _Place(items), [(index, axis.mixed(axis.mixing or source.reason))])
    if any(_is_mask(item) for item in items):
        return _by_mask(call, tensor, items, source)
    place = _Place(items)
    if source is None:
        if not indices or call.lost:
            return lost(call, "picks entries by indices computed over the whole batch", mixes=crossed(call))
        return _through_indices(call, place, indices)
    item, position = place.item_of(source.dim)
    numbers = [o for o in call.operands[1:] if o.axis is not None and o.tensor.dim() == 0 and not _is_mask(o.tensor)]
    if isinstance(item, slice):
        if indices or numbers or any(isinstance(i, Tensor) and call.axis_of(i) is not None for i in items):
            return lost(
                call,
                "picks entries by indices that depend on another sample",
                mixes=crossed(call, *[w for _, w in indices]),
            )
        if item.indices(tensor.size(source.dim)) == (0, tensor.size(source.dim), 1):
            return keep(call, source.moved(position))
    if isinstance(item, int) or (isinstance(item, Tensor) and item.dim() == 0):
        return _one_row(call, source, int(item))
    owners = row_owners(source, call.batch_size, tensor.device)
    if isinstance(item, slice):
        return keep(call, picked(position, owners[item], call.batch_size, source.mixing))
    long_axis = [axis for axis in range(item.dim()) if item.size(axis) > 1] or [0]
    if len(long_axis) > 1:
        return lost(call, "picks samples along two axes", mixes=None)
    own = picked(long_axis[0], owners[item.flatten()], call.batch_size, source.mixing)
    others = [(i, w) for i, w in indices if i is not item]
    return _through_indices(call, place, [(item, own), *others])


def picked_of_copies(call: ObservedCall) -> Followed | None:
    """The answer where rows of a constant are picked that are all alike: whichever they are, it is a constant."""
    tensor, index = call.args[:2] if call.op == "getitem" else (None, None)
    if tensor is None or call.axis_of(tensor) is not None or tensor.requires_grad or not tensor.numel():
        return None
    items = _per_axis(index, tensor.dim())
    places = [dim for dim, item in enumerate(items) if isinstance(item, Tensor)]
    if any(not isinstance(item, (slice, Tensor)) or _is_mask(item) for item in items):
        return None
    alike = all(has_equal_rows(tensor, dim) for dim in places)
    return Followed((None,) * len(call.outputs), by_values=True) if alike else None


def _one_row(call: ObservedCall, source: BatchAxis, row: int) -> Followed:
    """One row of the batch; what else says where to pick must be of the same sample."""
    answer = alone(call, source, [row])
    own = answer.outputs[0]
    for operand in call.operands[1:]:
        same = isinstance(operand.axis, Lost) and isinstance(own, Lost) and operand.axis.samples == own.samples != set()
        if operand.axis is not None and not same:
            return lost(call, "picks from a sample by numbers of the batch", mixes=crossed(call))
    return answer


def _through_indices(call: ObservedCall, place: _Place, indices: list[tuple[Tensor, BatchAxis]]) -> Followed:
    """The batch comes in through the index tensors, which are laid over each other from the right."""
    index, axis = indices[0]
    from_right = axis.dim - index.dim()
    if any(w.dim - i.dim() != from_right or not w.same_layout(axis) for i, w in indices[1:]) and call.batch_size > 1:
        return lost(call, "picks entries by indices that order their samples differently", mixes=True)
    return keep(call, axis.moved(place.start + place.width + from_right))


def _by_mask(call: ObservedCall, tensor: Tensor, items: list[Any], source: BatchAxis | None) -> Followed:
    """One boolean mask among slices: the axes it covers become one, in the order of its true entries."""
    masks = [item for item in items if _is_mask(item)]
    rest = [item for item in items if not _is_mask(item) and item is not None]
    if len(masks) > 1 or any(not isinstance(item, slice) or item != _WHOLE for item in rest):
        return lost(call, "picks entries by a mask together with other indices", mixes=None)
    mask = masks[0]
    start = _position_of([item for item in items if item is not None], mask)
    covered = range(start, start + mask.dim())
    where = call.axis_of(mask)
    axis = source
    if axis is None and isinstance(where, BatchAxis):
        axis = where.moved(where.dim + start)
    if axis is None:
        return lost(call, "picks entries by a mask computed over the whole batch", mixes=crossed(call))
    if axis.dim not in covered:
        if where is not None:
            return lost(
                call,
                "picks entries by a mask that depends on other samples",
                mixes=crossed(call, where),
            )
        place = [dim for dim, item in enumerate(items) if item is not None]  # that of each axis in the result
        return keep(call, axis.moved(place[axis.dim - (mask.dim() - 1) * (axis.dim > start)]))
    if where is not None and source is not None:
        own = isinstance(where, BatchAxis) and source.same_place(where.moved(where.dim + start))
        if not own and call.batch_size > 1:
            return lost(
                call,
                "picks entries by a mask that depends on other samples",
                mixes=crossed(call, where),
            )
    rows = mask.nonzero()[:, axis.dim - start]
    owners = row_owners(axis, call.batch_size, rows.device)[rows]
    mixing = axis.mixing or (where.mixing if isinstance(where, BatchAxis) else None)
    return keep(call, picked(_position_of(items, mask), owners, call.batch_size, mixing))


def _position_of(items: list[Any], mask: Tensor) -> int:
    return next(position for position, item in enumerate(items) if item is mask)


@propagation_rule("masked_select")
def _follow_masked_select(call: ObservedCall) -> Followed:
    tensor, mask = call.argument(0, "input", "self"), call.argument(1, "mask")
    source = call.axis_of(tensor)
    if not isinstance(source, BatchAxis) or tensor.shape != mask.shape:
        return lost(call, "picks by a mask that does not lie entry by entry over a tensor of the batch", mixes=None)
    return _by_mask(call, tensor, [mask], source)


@propagation_rule("masked_scatter")
def _follow_masked_scatter(call: ObservedCall) -> Followed:
    """The entries of the source go, in order, to the true places of the mask: each to one of its own sample."""
    target, mask, source = (call.argument(*each) for each in ((0, "self", "input"), (1, "mask"), (2, "source")))
    where, by, incoming = map(call.axis_of, (target, mask, source))
    if call.lost:
        return beside_lost(call)
    own = by.moved(by.dim + target.dim() - mask.dim()) if isinstance(by, BatchAxis) else None
    if by is None and isinstance(incoming, BatchAxis):
        before, mask = _owners_in(call, target), mask.expand(target.shape)
        if before is not None:
            given = entry_owners(incoming, source.shape, call.batch_size, mask.device).reshape(-1)
            after = before.masked_scatter(mask, given)
            placed = _in_rows_of_their_own(call, target, before, after, incoming)
            return placed or lost(call, "writes samples into places of other samples", mixes=None)
    place = where if isinstance(where, BatchAxis) else own
    if not isinstance(place, BatchAxis) or not isinstance(incoming, BatchAxis):
        return lost(call, "writes entries in the order of places in the whole batch", mixes=None)
    owners, given = (
        entry_owners(axis, tensor.shape, call.batch_size, mask.device)
        for tensor, axis in ((target, place), (source, incoming))
    )
    written = owners[mask.expand(target.shape)]
    same = torch.equal(written, given.flatten()[: written.numel()])
    if not same or (own is not None and not own.same_place(place)):
        return lost(call, "writes samples into places of other samples", mixes=None)
    place = place.mixed(call.mixing)
    return keep(call, place, _only(target, place))


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_array(item: Any) -> bool:
    """Whether torch takes an index as an array of numbers: lists, ranges, numpy's arrays and numbers."""
    return not isinstance(item, Tensor) and (isinstance(item, (list, range, bool)) or hasattr(item, "__array__"))


def _per_axis(index: Any, ndim: int) -> list[Any]:
    """An index as one entry per axis (None adds one, a mask stands for all it covers), lists as tensors."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(item) if _is_array(item) else item for item in items]
    numbers = [isinstance(item, Tensor) and item.dim() == 0 and not _is_mask(item) for item in items]
    items = [int(item) if number else item for item, number in zip(items, numbers, strict=True)]
    used = sum(item.dim() if _is_mask(item) else item is not None and item is not Ellipsis for item in items)
    fill = [_WHOLE] * (ndim - used)
    at = next((position for position, item in enumerate(items) if item is Ellipsis), None)
    return items + fill if at is None else items[:at] + fill + items[at + 1 :]


class _Place:
    """Where each axis of the indexed tensor comes out, by torch's rules for mixed basic and advanced indexing."""

    def __init__(self, items: list[Any]) -> None:
        places = [position for position, item in enumerate(items) if isinstance(item, (Tensor, int))]
        tensors = [item for item in items if isinstance(item, Tensor)]
        self.width = max((item.dim() for item in tensors), default=0)
        self._items = items
        # torch counts an integer beside an index tensor as an index tensor of no axes
        between = range(places[0], places[-1] + 1) if tensors else range(0)
        self._together = all(isinstance(items[place], (Tensor, int)) for place in between)
        first = next((position for position, item in enumerate(items) if isinstance(item, Tensor)), 0)
        self.start = sum(not isinstance(item, int) for item in items[:first]) if tensors and self._together else 0
        self._first = first if tensors and self._together else None

    def item_of(self, dim: int) -> tuple[Any, int]:
        """The index entry that meets axis `dim`, and the axis of the result that it becomes if it is a slice."""
        source, output = 0, 0 if self._together else self.width
        for position, item in enumerate(self._items):
            if position == self._first:
                output += self.width
            if item is None:
                output += 1
                continue
            if source == dim:
                return item, output
            source += 1
            output += isinstance(item, slice)
        raise IndexError(f"axis {dim} is not indexed")


@propagation_rule("index_put")
def _follow_index_put(call: ObservedCall) -> Followed:
    """``target.index_put(indices, values)`` is ``target[indices] = values`` on a copy, or adds the values there."""
    target, index = call.argument(0, "input", "self"), tuple(call.argument(1, "indices"))
    return _written(call, target, index, call.argument(2, "values"), adds=call.argument(3, "accumulate", default=False))


@propagation_rule("setitem")
def _follow_setitem(call: ObservedCall) -> Followed:
    """``target[index] = value``: the target keeps its shape; the value lies over the indexed part from the right."""
    return _written(call, *call.args)


def _written(call: ObservedCall, target: Tensor, index: Any, value: Any, adds: bool = False) -> Followed:
    where, incoming = call.axis_of(target), call.axis_of(value) if isinstance(value, Tensor) else None
    items = _per_axis(index, target.dim())
    is_empty = any(isinstance(item, Tensor) and not _is_mask(item) and not item.numel() for item in items)
    if is_empty and not isinstance(where, Lost):  # nothing is written
        return Followed((where,), by_values=True)
    by_rows = _into_rows(call, target, items, value)
    if by_rows is not None:
        return by_rows
    if where is None and incoming is None and (placed := _along_mask(call, items)) is not None:
        return keep(call, placed, lambda each: placed if each is target else _along_target(items, each, placed))
    if isinstance(where, BatchAxis) and _into_listed(call, items, value, where):
        mixing = where.mixing or (incoming.mixing if isinstance(incoming, BatchAxis) else None)
        return Followed((where.mixed(mixing),), by_values=True)
    own = _row_by_row(call, target, items, value, incoming)
    is_own = own is not None and isinstance(where, BatchAxis) and where.same_place(own)
    if isinstance(where, BatchAxis) and call.batch_size > 1 and not is_own and not _places_are_own(call, items, where):
        return lost(call, "writes into places that depend on other samples", mixes=None)
    weighs = isinstance(value, Tensor) and value.requires_grad and incoming is None
    if isinstance(where, BatchAxis) and weighs and call.batch_size > 1 and _cuts(items, where.dim):
        return lost(call, "writes a weight into rows of some samples; use torch.where with a mask of the rows")
    if isinstance(where, BatchAxis) and incoming is None:
        return Followed((where,), lambda tensor: _along_target(items, tensor, where))
    if own is not None and where is None:
        return Followed((own,))
    if own is not None and isinstance(where, BatchAxis) and is_own:
        return Followed((where.mixed(where.mixing or own.mixing),))
    rows = rows_filled(call, target, index, value, adds)
    if rows is not None:
        return rows
    if isinstance(where, Lost) or not isinstance(incoming, BatchAxis):
        return lost(call, "writes into places that depend on the batch", mixes=None)
    by_places = _at_places(call, target, index, value)
    if by_places is not None:
        return by_places
    found = _filled(call, target, items, value, incoming)
    if found is None or (isinstance(where, BatchAxis) and not where.same_place(found)):
        return lost(call, "writes samples into places of other samples", mixes=None)
    return Followed((found,), _only(target, found))


def _at_places(call: ObservedCall, target: Tensor, index: Any, value: Tensor) -> Followed | None:
    """Rows written at places that constants or lists name, each among those of its own sample; None where not so."""
    incoming, indices = call.axis_of(value), index if isinstance(index, tuple) else (index,)
    tensors = [item for item in indices if isinstance(item, Tensor)]
    if not tensors or any(item is None for item in indices) or any(map(_says_where, map(call.axis_of, tensors))):
        return None
    if not isinstance(incoming, BatchAxis) or not all(map(is_plain, (target, value, *tensors))):
        return None
    before, written = _owners_in(call, target), entry_owners(incoming, value.shape, call.batch_size, target.device)
    if before is None:
        return None
    after = before.clone()
    after[index] = written
    of_two = not torch.equal(after[index], written.expand_as(after[index]))
    return None if of_two else _in_rows_of_their_own(call, target, before, after, incoming)


def _says_where(mark: BatchAxis | Lost | None) -> bool:
    """Whether numbers of the samples are an index, beside lists of the places where something is true."""
    return mark is not None and not (isinstance(mark, Lost) and mark.listed)


def _owners_in(call: ObservedCall, target: Tensor) -> Tensor | None:
    """The sample of each entry of a tensor that is written into, -1 for those of a constant."""
    where = call.axis_of(target)
    if where is None:
        return torch.full(target.shape, -1, device=target.device)
    if not isinstance(where, BatchAxis):
        return None
    return entry_owners(where, target.shape, call.batch_size, target.device)


def _in_rows_of_their_own(
    call: ObservedCall, target: Tensor, before: Tensor, after: Tensor, incoming: BatchAxis
) -> Followed | None:
    """Where the samples lie in a tensor with these samples of its entries, -1 for constants; None where nowhere."""
    where = call.axis_of(target)
    if isinstance(where, BatchAxis):
        return keep(call, where.mixed(where.mixing or incoming.mixing)) if torch.equal(before, after) else None
    for dim in range(target.dim()):
        rows = after.movedim(dim, 0).reshape(after.size(dim), -1)
        most = rows.amax(1)
        if not bool(((rows == most[:, None]) | (rows < 0)).all()):
            continue
        owners = with_constant_rows(call, most, call.outputs[0], dim, even=len(most) == call.batch_size)
        if owners is None:
            continue
        place, there = picked(dim, owners, call.batch_size, incoming.mixing), rows >= 0
        is_full = bool(there.all(1).any()) and not bool(there.all())  # (there may be room for the longest of a batch)
        if is_full:
            return padded(call, place, after < 0, 1 - dim if dim < 2 <= target.dim() else None)
        return Followed((place,), _only(target, place), by_values=True)
    return None


def _only(target: Tensor, place: BatchAxis) -> Alignment:
    """Of the operands this one alone is laid along the samples."""
    return lambda tensor: place if tensor is target else None


def _into_listed(call: ObservedCall, items: list[Any], value: object, where: BatchAxis) -> bool:
    """Whether ``i, j = torch.where(mask); target[i, j] = rows`` writes constants or rows of each place's sample."""
    tensors = [item for item in items if isinstance(item, Tensor)]
    marks = [call.axis_of(item) for item in tensors]
    leading, rest = items[: len(tensors)], items[len(tensors) :]
    if not all(map(operator.is_, leading, tensors)) or not all(isinstance(item, slice) for item in rest):
        return False
    if where.dim != 0 or len(tensors) < 2:
        return False
    listed = any(isinstance(mark, Lost) for mark in marks) and all(
        mark is None or (isinstance(mark, Lost) and mark.listed) for mark in marks
    )
    if not listed or any(_is_mask(item) or item.shape != tensors[0].shape or item.dim() != 1 for item in tensors):
        return False
    if not isinstance(value, Tensor):
        return True
    incoming = call.axis_of(value)
    if incoming is None:
        return not value.requires_grad
    owners = row_owners(where, call.batch_size, tensors[0].device)[tensors[0]]
    along = value.dim() - len(rest) - 1
    if not isinstance(incoming, BatchAxis) or incoming.dim != along:
        return False
    return torch.equal(row_owners(incoming, call.batch_size, owners.device), owners)


def _into_rows(call: ObservedCall, target: Tensor, items: list[Any], value: object) -> Followed | None:
    """``target[:, index] = rows``, each of the sample that the row of the target belongs to; None where not so."""
    found = [dim for dim, item in enumerate(items) if not isinstance(item, slice) or item != _WHOLE]
    index = items[found[0]] if len(found) == 1 else None
    if not isinstance(index, Tensor) or _is_mask(index) or index.dim() != 1:
        return None
    return into_own_rows(call, target, found[0], index, value)


def rows_filled(call: ObservedCall, target: Tensor, index: Any, value: Any, adds: bool = False) -> Followed | None:
    """After ``target[i] = row`` of one sample, or ``target[i:j] = rows``: the sample of each row, where it is known."""
    where, incoming = call.axis_of(target), call.axis_of(value) if isinstance(value, Tensor) else None
    items = _per_axis(index, target.dim())
    if call.batch_size == 1 or any(isinstance(item, Tensor) or item is None for item in items):
        return None
    if any(o.axis is not None and o.tensor is not target and o.tensor is not value for o in call.operands):
        return None
    if isinstance(incoming, BatchAxis):
        dim = _axis_laid_along(items, target, value, incoming)
        written = row_owners(incoming, call.batch_size).cpu()
        reason, of_batch = f"`{call.name}` writes rows of some samples{user_line()}", incoming.mixing is None
    elif incoming is not None and incoming.alone is not None and not incoming.noted:
        dim = next((dim for dim, item in enumerate(items) if item != _WHOLE), None)
        written, reason, of_batch = torch.tensor(incoming.alone), incoming.reason, True
    else:
        return None
    if dim is None or not of_batch:
        return None
    if isinstance(where, BatchAxis):
        known = (where.dim, row_owners(where, call.batch_size).cpu()) if where.mixing is None else None
    else:
        known = (dim, torch.full(target.shape[dim : dim + 1], -1)) if where is None else where.filled
    if known is None or known[0] != dim:
        return None
    owners = known[1].clone()
    owners[items[dim]] = written
    is_replaced = not adds and all(item == _WHOLE for position, item in enumerate(items) if position != dim)
    if not is_replaced and not bool(((known[1] < 0) | (known[1] == owners)).all()):
        return None  # (a row of two samples)
    if bool((owners >= 0).all()):
        place: BatchAxis | Lost = picked(dim, owners.to(target.device), call.batch_size)
    else:
        place = Lost(reason, apart=True, filled=(dim, owners))
    return Followed((place,), by_values=True)


def _cuts(items: list[Any], dim: int) -> bool:
    """Whether an index picks rows of an axis by their numbers; a mask goes through the rows of each sample."""
    start = 0
    for item in items:
        width = item.dim() if _is_mask(item) else int(item is not None)
        if start <= dim < start + width:
            return not _is_mask(item) and not (isinstance(item, slice) and item == _WHOLE)
        start += width
    return False


def _axis_laid_along(items: list[Any], target: Tensor, value: Tensor, incoming: BatchAxis) -> int | None:
    """The axis of a target along which the samples of a value are laid, one row to a row."""
    kept = [dim for dim, item in enumerate(items) if isinstance(item, slice)]
    place = value.dim() - incoming.dim  # counted from the right
    dim = kept[-place] if place <= len(kept) else None
    rows = value.size(incoming.dim)
    return dim if dim is not None and len(range(target.size(dim))[items[dim]]) == rows else None


def _along_target(items: list[Any], tensor: Tensor, where: BatchAxis) -> BatchAxis | None:
    """The axis of a mask that lies over the batch axis of the target, for any other tensor None."""
    start = 0
    for item in items:
        width = item.dim() if _is_mask(item) else int(item is not None)
        if item is tensor and _is_mask(item) and start <= where.dim < start + width:
            return where.moved(where.dim - start)
        start += width
    return None


def _along_mask(call: ObservedCall, items: list[Any]) -> BatchAxis | None:
    """The axis of a constant target of which ``target[mask] = 1`` writes in the rows of each sample, by its mask."""
    masks = [item for item in items if isinstance(item, Tensor)]
    axis = call.axis_of(masks[0]) if len(masks) == 1 and _is_mask(masks[0]) else None
    if not isinstance(axis, BatchAxis):
        return None
    return axis.moved(axis.dim + sum(each is not None for each in items[: _position_of(items, masks[0])]))


def _row_by_row(
    call: ObservedCall, target: Tensor, items: list[Any], value: object, incoming: BatchAxis | Lost | None
) -> BatchAxis | None:
    """The axis of a target without samples of which row i is written at places of sample i: ``t[arange(B), y] = v``."""
    indexed = enumerate(item for item in items if item is not None)
    tensors = [(dim, item, call.axis_of(item)) for dim, item in indexed if isinstance(item, Tensor)]
    of_batch = [(item, axis) for _, item, axis in tensors if axis is not None]
    rows = [(dim, item) for dim, item, axis in tensors if axis is None]
    if len(rows) != 1 or not of_batch or any(_is_mask(item) for item in items):
        return None
    dim, index = rows[0]
    laid = {
        axis.dim - item.dim() if _has_one_row_each(axis) else 0 for item, axis in of_batch
    }  # counted from the right
    along = laid.pop()
    if laid or along == 0 or index.dim() + along < 0 or target.size(dim) != call.batch_size:
        return None
    of_each = index.movedim(along, 0)
    every = torch.arange(call.batch_size, device=index.device).reshape(-1, *[1] * (index.dim() - 1))
    if len(of_each) != call.batch_size or not torch.equal(of_each, every.expand_as(of_each)):
        return None
    if isinstance(value, Tensor) and incoming is not None:
        place = _Place(items)
        from_right = place.start + along - sum(item is None or isinstance(item, slice) for item in items)
        if not _has_one_row_each(incoming) or incoming.dim - value.dim() != from_right:
            return None
    return BatchAxis(dim, mixing=call.mixing)


def _has_one_row_each(axis: BatchAxis | Lost | None) -> TypeGuard[BatchAxis]:
    """Whether row b of the axis is that of sample b."""
    return isinstance(axis, BatchAxis) and axis.rows == 1 and axis.owner is None


def _places_are_own(call: ObservedCall, items: list[Any], where: BatchAxis) -> bool:
    """Whether index tensors that depend on the batch say where to write in the rows of their own samples alone."""
    start = 0
    rows: Tensor | None = None  # the index of the batch axis
    found: list[tuple[Tensor, BatchAxis | Lost, int]] = []
    for item in items:
        width = item.dim() if _is_mask(item) else int(item is not None)
        if isinstance(item, Tensor):
            own = call.axis_of(item)
            rows = item if start == where.dim and own is None else rows
            found += [(item, own, start)] if own is not None else []
        start += width
    every = rows is not None and torch.equal(rows.flatten(), torch.arange(rows.numel(), device=rows.device))

    def is_own(item: Tensor, own: BatchAxis | Lost, start: int) -> bool:
        if _is_mask(item):
            return isinstance(own, BatchAxis) and own.moved(own.dim + start).same_place(where)
        return every and isinstance(own, BatchAxis) and own.same_layout(where)

    return all(is_own(*each) for each in found)


def _filled(
    call: ObservedCall, target: Tensor, items: list[Any], value: Tensor, incoming: BatchAxis
) -> BatchAxis | None:
    """The axis of the target that a value of the batch was laid along, where it is laid along all of it."""
    if len(items) and _is_mask(items[0]) and all(item == _WHOLE for item in items[1:]) and incoming.dim == 0:
        mask = items[0]
        own = call.axis_of(target) or call.axis_of(mask)
        if not isinstance(own, BatchAxis) or own.dim >= mask.dim() or value.dim() != target.dim() - mask.dim() + 1:
            return None
        owners = row_owners(own, call.batch_size, mask.device)[mask.nonzero()[:, own.dim]]
        return own if torch.equal(owners, row_owners(incoming, call.batch_size, mask.device)) else None
    if any(_is_mask(item) or (isinstance(item, Tensor) and call.axis_of(item) is not None) for item in items):
        return None
    place = _Place(items)
    part_dims = place.width + sum(item is None or isinstance(item, slice) for item in items)
    for dim in range(target.dim()):
        item, position = place.item_of(dim)
        if isinstance(item, slice) and position == part_dims - value.dim() + incoming.dim:
            whole = item.indices(target.size(dim)) == (0, target.size(dim), 1)
            return incoming.moved(dim) if whole else None
    return None
