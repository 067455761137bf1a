"""How indexing moves the batch axis: slices, integers, index tensors and masks, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import (
    BatchAxis,
    Lost,
    by_entries,
    entries_of,
    entry_owners,
    picked,
    row_owners,
    together,
)
from lightning_persample.batch_axis.base import (
    Followed,
    alone,
    beside_lost,
    crossed,
    has_equal_rows,
    into_own_rows,
    is_plain,
    keep,
    lost,
    meeting,
    padded,
    propagation_rule,
    reason_of,
    with_constant_rows,
)
from lightning_persample.batch_axis.observed import ObservedCall, user_line

_WHOLE = slice(None)
Mark: TypeAlias = BatchAxis | Lost | None


@propagation_rule("getitem", by_layout=True)
def _follow_getitem(call: ObservedCall) -> Followed:
    tensor: Tensor = call.args[0]
    items = _per_axis(call.args[1], tensor.dim())
    source = call.axis_of(tensor)
    marks = [call.axis_of(item) if isinstance(item, Tensor) else None for item in items]
    if isinstance(source, Lost):
        indices = [(i, mark) for i, mark in zip(items, marks, strict=True) if isinstance(mark, BatchAxis)]
        counts = not (tensor.is_floating_point() or tensor.is_complex()) and not any(map(_is_mask, items))
        if len(call.lost) > 1 or len(indices) != 1 or not counts:
            return beside_lost(call)
        index, axis = indices[0]
        return _through_indices(call, _Place(items), [(index, axis.mixed(axis.mixing or source.reason))])
    chosen: str | None = None  # why numbers of others say which rows are taken
    if any(map(_is_mask, items)):
        rest = [item for item in items if item is not None and not (isinstance(item, slice) and item == _WHOLE)]
        if len(rest) == 1:
            return _by_mask(call, tensor, items, source)
        if any(isinstance(mark, Lost) for mark in marks) or any(_is_mask(item) and not item.dim() for item in items):
            return lost(call, "picks entries by a mask together with other indices", mixes=crossed(call))
        chosen = next((mark.mixing for mark in marks if isinstance(mark, BatchAxis) and mark.mixing), None)
        items, marks = _as_places(items, marks, call.batch_size)
    indices = [(i, mark) for i, mark in zip(items, marks, strict=True) if isinstance(mark, BatchAxis)]
    place = _Place(items)
    if source is None:
        if not indices or call.lost:
            return lost(call, "picks entries by indices computed over the whole batch", mixes=crossed(call))
        return _through_indices(call, place, indices)
    item, position = place.item_of(source.dim)
    numbers = [o for o in call.operands[1:] if o.axis is not None and o.tensor.dim() == 0 and not _is_mask(o.tensor)]
    if isinstance(item, slice):
        if numbers or any(mark is not None for mark in marks):
            what = "picks entries by indices that depend on another sample"
            return lost(call, what, mixes=crossed(call, *[mark for _, mark in indices]))
        if item.indices(tensor.size(source.dim)) == (0, tensor.size(source.dim), 1):
            return keep(call, source.moved(position))
    if isinstance(item, int) or (isinstance(item, Tensor) and item.dim() == 0):
        return _one_row(call, source, int(item))
    owners = row_owners(source, call.batch_size, tensor.device)
    if isinstance(item, slice):
        return keep(call, picked(position, owners[item], call.batch_size, source.mixing))
    samples = owners[item]
    lines = [axis for axis in range(item.dim()) if item.size(axis) > 1] or [0]
    if not item.numel():
        lines = [item.shape.index(0)]
    if len(lines) > 1:
        lines = [axis for axis in lines if bool((samples != samples.narrow(axis, 0, 1)).any())] or lines[:1]
    if len(lines) > 1:
        return lost(call, "picks samples along two axes", mixes=None)
    rows = samples.movedim(lines[0], 0).flatten(1)[:, 0] if samples.dim() > 1 and samples.numel() else samples.flatten()
    is_listed = any(_is_list(mark) for index, mark in call.lost if index is item)
    for index, mark in call.lost:  # (beside the one that says which rows are taken)
        one = _alone(call, index)
        if index is not item and not (mark.listed and is_listed) and (one is None or bool((rows != one).any())):
            return lost(call, "picks entries by indices computed over the whole batch", mixes=crossed(call))
    chosen = chosen or next((mark.mixing for index, mark in indices if index is item), None)
    from_right = lines[0] - item.dim()
    is_picked = any(o.tensor is item or _is_mask(o.tensor) for o in call.operands[1:] if o.axis is not None)
    constants = [i for i, mark in zip(items, marks, strict=True) if mark is None and isinstance(i, Tensor)]
    beside = [index for index in constants if index is not item and index.dim() >= -from_right]
    if len(rows) and is_picked and not all(has_equal_rows(index, from_right) for index in beside):
        chosen = chosen or meeting(call)  # (at which of these a row stands, others say)
    own = picked(lines[0], rows, call.batch_size, source.mixing or chosen)
    others = [(i, mark) for i, mark in indices if i is not item]
    return _through_indices(call, place, [(item, own), *others])


def _as_places(items: list[Any], marks: list[Mark], batch_size: int) -> tuple[list[Any], list[Mark]]:
    """An index with the places of a mask's true entries for each axis that it covers, which torch picks by as well."""
    places: list[Any] = []
    whose: list[Mark] = []
    for item, mark in zip(items, marks, strict=True):
        if not _is_mask(item):
            places.append(item)
            whose.append(mark)
            continue
        lines = item.nonzero(as_tuple=True)
        if isinstance(mark, BatchAxis):
            rows = row_owners(mark, batch_size, item.device)[lines[mark.dim]]
            mark = picked(0, rows, batch_size, mark.mixing)
        places += lines
        whose += [mark] * len(lines)
    return places, whose


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
    """One row of the batch; what else says where to pick must be of the same sample, or be its place in an order."""
    answer = alone(call, source, [row])
    own = answer.outputs[0]
    places = [operand.axis for operand in call.operands[1:] if operand.axis is not None]
    for mark in places:
        same = isinstance(mark, Lost) and isinstance(own, Lost) and mark.samples == own.samples != set()
        is_place = isinstance(mark, Lost) and mark.orders and len(places) == 1 and isinstance(call.args[1], Tensor)
        if not same and not is_place:
            return lost(call, "picks from a sample by numbers of the batch", mixes=crossed(call))
    return answer


def _through_indices(call: ObservedCall, place: _Place, indices: list[tuple[Tensor, BatchAxis]]) -> Followed:
    """The batch comes in through the index tensors, which are laid over each other from the right."""
    index, axis = indices[0]
    from_right = axis.dim - index.dim()
    if any(w.dim - i.dim() != from_right or not w.same_layout(axis) for i, w in indices[1:]) and call.batch_size > 1:
        return lost(call, "picks entries by indices that order their samples differently", mixes=True)
    mixing = next((where.mixing for _, where in indices if where.mixing), None)
    return keep(call, axis.moved(place.start + place.width + from_right).mixed(mixing))


def _by_mask(call: ObservedCall, tensor: Tensor, items: list[Any], source: BatchAxis | None) -> Followed:
    """One boolean mask among slices: the axes it covers become one, in the order of its true entries."""
    mask = next(item for item in items if _is_mask(item))
    start = _position_of([item for item in items if item is not None], mask)
    covered = range(start, start + mask.dim())
    where = call.axis_of(mask)
    axis = source
    if axis is None and isinstance(where, BatchAxis):
        axis = where.moved(where.dim + start)
    if axis is None:
        return lost(call, "picks entries by a mask computed over the whole batch", mixes=crossed(call))
    own = isinstance(where, BatchAxis) and axis.dim in covered and axis.same_place(where.moved(where.dim + start))
    if where is not None and not own and (axis.dim not in covered or call.batch_size > 1):
        return lost(call, "picks entries by a mask that depends on other samples", mixes=crossed(call, where))
    if axis.dim not in covered:
        place = [dim for dim, item in enumerate(items) if item is not None]  # that of each axis in the result
        return keep(call, axis.moved(place[axis.dim - (mask.dim() - 1) * (axis.dim > start)]))
    rows = mask.nonzero()[:, axis.dim - start]
    owners = row_owners(axis, call.batch_size, rows.device)[rows]
    mixing = axis.mixing or (where.mixing if isinstance(where, BatchAxis) else None)
    return keep(call, picked(_position_of(items, mask), owners, call.batch_size, mixing))


def _position_of(items: list[Any], mask: Tensor) -> int:
    return next(position for position, item in enumerate(items) if item is mask)


@propagation_rule("masked_select")
def _follow_masked_select(call: ObservedCall) -> Followed:
    tensor, mask = call.argument(0, "input", "self"), call.argument(1, "mask")
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    owners = (entry_owners(axis, each.shape, call.batch_size, mask.device) for each, axis in call.located)
    laid = None if call.lost else together(owners, shape)
    if laid is None:
        return lost(call, "picks entries by a mask that depends on other samples", mixes=crossed(call))
    return keep(call, picked(0, laid.masked_select(mask), call.batch_size, call.mixing))


@propagation_rule("masked_scatter")
def _follow_masked_scatter(call: ObservedCall) -> Followed:
    """The entries of the source go, in order, to the true places of the mask: each to one of its own sample."""
    target, mask, source = (call.argument(*each) for each in ((0, "self", "input"), (1, "mask"), (2, "source")))
    by, incoming = call.axis_of(mask), call.axis_of(source)
    if call.lost:
        return beside_lost(call)
    if not isinstance(incoming, BatchAxis):
        return lost(call, "writes entries in the order of places in the whole batch", mixes=None)
    own: Mark = by.moved(by.dim + target.dim() - mask.dim()) if isinstance(by, BatchAxis) else None
    places = mask.expand(target.shape)
    given = entry_owners(incoming, source.shape, call.batch_size, mask.device).flatten()[: int(places.sum())]
    placed = _by_entries(call, target, [places], [own], given, False)
    return placed or lost(call, "writes samples into places of other samples", mixes=None)


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


def _write_of(call: ObservedCall) -> tuple[Tensor, Any, Any, bool] | None:
    """Target, index and value of ``target[index] = value``, and whether it is added there; None of other calls."""
    if call.op == "setitem":
        return (*call.args, False)
    target = call.argument(0, "input", "self")
    if call.op == "index_put":
        indices, adds = tuple(call.argument(1, "indices")), call.argument(3, "accumulate", default=False)
        return target, indices, call.argument(2, "values"), adds
    if call.op in ("index_add", "index_copy", "index_fill"):
        place = (*[_WHOLE] * (int(call.argument(1, "dim")) % max(target.dim(), 1)), call.argument(2, "index"))
        return target, place, call.argument(3, "source", "tensor", "value"), call.op == "index_add"
    return None


@propagation_rule("index_put")
@propagation_rule("setitem")
def _follow_write(call: ObservedCall) -> Followed:
    """The target keeps its shape; the value lies over the indexed part from the right."""
    target, index, value, _ = _write_of(call) or call.args
    where, incoming = call.axis_of(target), call.axis_of(value) if isinstance(value, Tensor) else None
    items = _per_axis(index, target.dim())
    is_empty = any(isinstance(item, Tensor) and not _is_mask(item) and not item.numel() for item in items)
    if is_empty and not isinstance(where, Lost):  # nothing is written
        return Followed((where,), by_values=True)
    by_rows = _into_rows(call, target, items, value)
    if by_rows is not None:
        return by_rows
    weighs = isinstance(value, Tensor) and value.requires_grad and incoming is None
    if isinstance(where, BatchAxis) and weighs and call.batch_size > 1 and _cuts(items, where.dim):
        return lost(call, "writes a weight into rows of some samples; use torch.where with a mask of the rows")
    marks = [call.axis_of(item) for item in items]
    masked = _along_mask(items, marks)
    own = masked if where is None else where
    is_own = not any(marks) or (masked is not None and isinstance(own, BatchAxis) and masked.same_place(own))
    if isinstance(own, BatchAxis) and incoming is None and (is_own or call.batch_size == 1):
        own = own.mixed(_mixing_of_places(call, target, index))
        return keep(call, own, partial(_along_target, target, items, own))
    found = None if where is not None or any(marks) else _laid_whole(target, items, value, incoming)
    if found is not None:
        return keep(call, found, partial(_along_target, target, items, found))
    by_entries = written_entries(call)
    if by_entries is not None:
        return by_entries
    if isinstance(where, BatchAxis) and (any(marks) or incoming is None):
        return lost(call, "writes into places that depend on other samples", mixes=None)
    if isinstance(where, Lost) or not isinstance(incoming, BatchAxis):
        return lost(call, "writes into places that depend on the batch", mixes=None)
    return lost(call, "writes samples into places of other samples", mixes=None)


def _mixing_of_places(call: ObservedCall, target: Tensor, index: Any) -> str | None:
    """Why numbers of other samples say where is written in the rows of a sample; None where they do not."""
    for item in index if isinstance(index, (tuple, list)) else (index,):
        mark = call.axis_of(item) if call.batch_size > 1 else None
        if isinstance(mark, BatchAxis) and mark.mixing:
            return mark.mixing
        if isinstance(mark, Lost) and (mark.crossed or not mark.listed) and target.requires_grad:
            return f"`{call.name}` writes where a value computed over the whole batch says{user_line()}"
    return None


def written_entries(call: ObservedCall) -> Followed | None:
    """The answer for a call that writes rows or entries, by the sample of each entry; None where that is not known."""
    write = _write_of(call)
    if write is None:
        return None
    target, index, value, adds = write
    items = _per_axis(index, target.dim())
    given = _owners_in(call, value) if isinstance(value, Tensor) else torch.tensor(-1, device=target.device)
    others = [o.axis for o in call.operands if all(o.tensor is not each for each in (target, value, *items))]
    is_weight = isinstance(value, Tensor) and value.requires_grad and call.axis_of(value) is None
    if given is None or is_weight:
        return None
    if any(_alone(call, item) is not None for item in _items(index)):
        return _where_one_says(call, target, _items(index), given)
    if any(mark is not None and not _is_list(mark) for mark in others):
        return None
    return _by_entries(call, target, items, [call.axis_of(item) for item in items], given, adds)


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _alone(call: ObservedCall, item: object) -> int | None:
    """The one sample that an index was made of, or None."""
    mark = call.axis_of(item) if isinstance(item, Tensor) else None
    if not isinstance(mark, Lost) or mark.listed or mark.noted or mark.crossed or mark.unplaced:
        return None
    return mark.alone


def _where_one_says(call: ObservedCall, target: Tensor, items: list[Any], given: Tensor) -> Followed | None:
    """After a write where numbers of one sample say: all that they could pick is that sample's."""
    said, before = [_alone(call, item) for item in items], _owners_in(call, target)
    pairs = zip(items, said, strict=True)
    is_other = any(own is None and isinstance(item, Tensor) and call.axis_of(item) is not None for item, own in pairs)
    samples = {*said, *given.unique().tolist()} - {None, -1}
    if len(samples) > 1 or is_other or before is None or not is_plain(target):
        return None
    (sample,) = samples
    reached: list[Any] = []
    for item, own in zip(items, said, strict=True):
        reached += [item] if own is None else [_WHOLE] * (item.dim() if _is_mask(item) else 1)
    there = torch.zeros(before.shape, dtype=torch.bool, device=before.device)
    there[tuple(reached)] = True
    if bool((there & (before >= 0) & (before != sample)).any()):
        return None
    after = before.masked_fill(there, sample)
    if bool((after == sample).all()):
        reason = call.lost[0][1].reason
        return replace(keep(call, Lost(reason, samples=frozenset({sample}), parts=frozenset({1}))), by_values=True)
    reason = reason_of(call, "writes samples into places of other samples, or of none")
    where = by_entries(after, call.batch_size, call.mixing)
    return replace(keep(call, where or Lost(reason, entries=after)), by_values=True)


def _by_entries(
    call: ObservedCall, target: Tensor, items: list[Any], marks: Sequence[Mark], given: Tensor, adds: bool
) -> Followed | None:
    """After a write, by the sample of each entry: that of what is written (-1: none's), or that which says where."""
    indices: list[Any] = []
    says: list[Tensor] = []
    for item, mark in zip(items, marks, strict=True):
        if isinstance(mark, Lost) and not mark.listed:
            return None
        own = None if mark is None or _is_list(mark) else entries_of(mark, item, call.batch_size)
        says += [] if own is None else [(own[item] if _is_mask(item) else own).to(target.device)]
        indices += item.nonzero(as_tuple=True) if _is_mask(item) else [item]
    where = call.axis_of(target) or _along_mask(items, marks)
    before = _owners_in(call, target) if where is None else entries_of(where, target, call.batch_size)
    if before is None or not target.numel() or not is_plain(target):
        return None
    place, index = _Place(indices), tuple(indices)
    of_constants = place.width > 0 and not says  # (which may leave room for a batch's largest sample)
    rank = place.width + sum(item is None or isinstance(item, slice) for item in indices)
    given = given[(0,) * max(given.dim() - rank, 0)].to(target.device)
    for dim in range(target.dim()):  # an axis along which all is alike counts once
        item, position = place.item_of(dim)
        along = position - rank + given.dim()
        if not isinstance(item, slice) or item != _WHOLE:
            continue
        if _is_alike(before, dim) and (along < 0 or _is_alike(given, along)):
            before, given = before.narrow(dim, 0, 1), given if along < 0 else given.narrow(along, 0, 1)
    region, behind = before[index], (1,) * (rank - place.start - place.width)
    written = together([given, *(own.reshape(own.shape + behind) for own in says), *[region] * adds], region.shape)
    if written is None:
        return None
    after = before.clone()
    after[index] = written
    if not torch.equal(after[index], written):  # (of two samples)
        return None
    if isinstance(where, BatchAxis):  # (a constant in the row of a sample is the sample's)
        after = torch.where(after < 0, before, after)
        if torch.equal(after, before):
            kept = where.mixed(_mixing_of_places(call, target, items) or call.mixing)
            return keep(call, kept, partial(_along_target, target, items, kept))
    for dim in range(target.dim()):
        rows = after.movedim(dim, 0).reshape(after.size(dim), -1)
        most, there = rows.amax(1), rows >= 0
        if len(most) < target.size(dim) or not bool(((rows == most[:, None]) | ~there).all()):
            continue
        replaced = before.movedim(dim, 0).reshape(rows.shape)
        if bool((~there & there.any(1, keepdim=True) & (replaced >= 0) & (replaced != most[:, None])).any()):
            continue  # (a constant in the place of one sample is not another's)
        if not place.width and not bool(there.all()):  # (which is not the axis where these are all of one sample)
            samples = len(most.unique())
            if samples == 1 or samples not in (len(most), call.batch_size):
                continue
        owners: Tensor | None = most
        if place.width > 0:
            owners = with_constant_rows(call, most, call.outputs[0], dim, even=len(most) == call.batch_size)
        if owners is None or bool((owners < 0).any()):
            continue
        axis = picked(dim, owners, call.batch_size, call.mixing)
        if of_constants and bool(there.all(1).any()) and not bool(there.all()):
            beside = 1 - dim if dim < 2 <= target.dim() else None
            return padded(call, axis, (after < 0).expand(target.shape), beside)
        return replace(keep(call, axis, partial(_along_target, target, items, axis)), by_values=True)
    if isinstance(where, BatchAxis) and not says and not call.outputs[0].requires_grad:  # data, as `where` gives them
        kept = where.mixed(call.mixing or meeting(call))
        return replace(keep(call, kept, partial(_along_target, target, items, kept)), by_values=True)
    if call.mixing is not None:
        return None
    reason = reason_of(call, "writes samples into places of other samples, or of none")
    return Followed((Lost(reason, entries=after.expand(target.shape)),), by_values=True)


def _is_list(mark: BatchAxis | Lost) -> bool:
    return isinstance(mark, Lost) and mark.listed


def _is_alike(owners: Tensor, dim: int) -> bool:
    """Whether the rows along an axis were laid out from one."""
    return owners.size(dim) == 1 or owners.stride(dim) == 0


def _owners_in(call: ObservedCall, tensor: Tensor) -> Tensor | None:
    """The sample of each entry of a tensor, -1 for those of a constant; None where that is not known."""
    where = call.axis_of(tensor)
    if where is None:
        return torch.full((), -1, device=tensor.device).expand(tensor.shape)
    return entries_of(where, tensor, call.batch_size)


def _into_rows(call: ObservedCall, target: Tensor, items: list[Any], value: object) -> Followed | None:
    """``target[:, index] = rows``, each of the sample that the row of the target belongs to; None where not so."""
    found = [dim for dim, item in enumerate(items) if not isinstance(item, slice) or item != _WHOLE]
    index = items[found[0]] if len(found) == 1 else None
    if not isinstance(index, Tensor) or _is_mask(index) or index.dim() != 1:
        return None
    return into_own_rows(call, target, found[0], index, value)


def _at(items: list[Any], dim: int) -> tuple[Any, int]:
    """The item of an index that says what is meant of an axis, and the first axis that it is for."""
    start = 0
    for item in items:
        width = item.dim() if _is_mask(item) else int(item is not None)
        if start <= dim < start + width:
            return item, start
        start += width
    return None, start


def _cuts(items: list[Any], dim: int) -> bool:
    """Whether an index picks rows of an axis by their numbers; a mask goes through the rows of each sample."""
    item, _ = _at(items, dim)
    return item is not None and not _is_mask(item) and not (isinstance(item, slice) and item == _WHOLE)


def _along_target(target: Tensor, items: list[Any], where: BatchAxis, tensor: Tensor) -> BatchAxis | None:
    """The axis of a target along which it holds the samples, or that of a mask that lies over it; else None."""
    item, start = _at(items, where.dim)
    if tensor is target:
        return where
    return where.moved(where.dim - start) if item is tensor and _is_mask(item) else None


def _along_mask(items: list[Any], marks: Sequence[Mark]) -> BatchAxis | None:
    """The axis of a target of which ``target[mask] = 1`` writes in the rows of each sample, by its mask."""
    tensors = [(item, mark) for item, mark in zip(items, marks, strict=True) if isinstance(item, Tensor)]
    item, axis = tensors[0] if len(tensors) == 1 else (None, None)
    if item is None or not _is_mask(item) or not isinstance(axis, BatchAxis):
        return None
    return axis.moved(axis.dim + sum(each is not None for each in items[: _position_of(items, item)]))


def _laid_whole(target: Tensor, items: list[Any], value: Any, incoming: BatchAxis | Lost | None) -> BatchAxis | None:
    """The axis of a target along all of which a value of the batch is laid."""
    if not isinstance(incoming, BatchAxis) or any(_is_mask(item) for item in items):
        return None
    place = _Place(items)
    part_dims = place.width + sum(item is None or isinstance(item, slice) for item in items)
    for dim in range(target.dim()):
        item, position = place.item_of(dim)
        if isinstance(item, slice) and position == part_dims - value.dim() + incoming.dim:
            whole = item.indices(target.size(dim)) == (0, target.size(dim), 1)
            return incoming.moved(dim) if whole else None
    return None
