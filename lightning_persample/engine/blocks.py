"""A derived weight that has a row for every sample is pulled back row by row.

``u = f(v, w)`` may turn out to lie along the batch only when it meets it: a state that starts from zeros of the batch's
size, positions repeated for every sample, learned queries expanded and sent through layers before they see the data.
Its gradient is then a `Block`. If f keeps the rows apart, as the rules for following the batch tell, f is read as a
call on a batch: v gets a block again, and w the structure of its op. Otherwise the block is pulled back whole, at B
times the cost.

Rows that were looked up in a table, as position embeddings are, need none of this: a row of the gradient belongs to the
row of the table that its index names. Nor do ops that only copy entries (repeat, stack, views): run on numbers that say
where each entry is, f tells where each came from, and a sample's own rows go back there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from lightning_persample.engine.batch_axis import BatchAxis, row_owners
from lightning_persample.engine.computation import computation
from lightning_persample.engine.failure import attempt, guard
from lightning_persample.engine.following import Followed, follow
from lightning_persample.engine.kinds import data_of
from lightning_persample.engine.observed import ObservedCall, Operand, tensors_in
from lightning_persample.engine.use import Use
from lightning_persample.engine.weight import Derivation, Weight
from lightning_persample.gradients import Block, Dense, Indexed, SampleGradient
from lightning_persample.rules import Call, find_rule

__all__ = ["copied", "looked_up", "row_by_row"]

_JOINS = frozenset({
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "row_stack", "column_stack", "dstack",
})  # fmt: skip
_COPIES = _JOINS | {
    "contiguous", "clone", "reshape", "reshape_as", "view", "view_as", "ravel", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave", "permute", "transpose",
    "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "flip", "roll", "diagonal", "getitem", "select",
    "unbind", "split", "split_with_sizes", "tensor_split", "chunk", "narrow", "index_select", "gather", "take",
    "take_along_dim", "masked_select",
}  # fmt: skip


def looked_up(derivation: Derivation, gradient: SampleGradient) -> SampleGradient | None:
    """What the gradient of rows that were looked up in a table contributes to the table, by the rule for look-ups."""
    if derivation.op != "embedding" or not isinstance(gradient, (Block, Dense)):
        return None
    rule, (args, kwargs) = find_rule(derivation.function), tree_unflatten(derivation.leaves, derivation.spec)
    named = rule.bind(args, kwargs) if rule is not None else None
    if rule is None or named is None or named.get("scale_grad_by_freq"):
        return None
    table, index = named["weight"], named["indices"]
    if gradient.grad.is_complex() or any(derivation.leaves[place] is not table for place in derivation.parents):
        return None
    if isinstance(gradient, Dense):
        own = index.expand(gradient.batch_size, *index.shape)
    elif gradient.dim < index.dim():
        sizes = gradient.outer_size, gradient.total, gradient.inner_size
        own = torch.unflatten(index, gradient.dim, sizes).movedim(gradient.dim + 1, 0)[gradient.position]
    else:
        return None
    rows = own.unsqueeze(-1).flatten(1)  # (the index of one row alone has no axis)
    call = Call(gradient.batch_size, {**named, "indices": rows}, frozenset({"weight"}))
    found = rule.function(call, gradient.grad.unsqueeze(1).flatten(1, -2))["weight"]
    smaller = isinstance(gradient, Dense) and len(table) <= index.numel()
    return Dense(found.dense()) if smaller else found


def copied(derivation: Derivation, gradient: Block) -> list[tuple[Weight, SampleGradient]] | None:
    """What a block contributes to the parents of a derived weight, each entry of which is an entry of one of them."""
    if derivation.op not in _COPIES or derivation.inplace or derivation.random_state is not None:
        return None
    places: dict[Weight, set[int]] = {}
    for place, parent in derivation.parents.items():
        places.setdefault(parent, set()).add(place)
    found: list[tuple[Weight, SampleGradient]] = []
    for parent, own in places.items():
        numbers = torch.arange(1, parent.tensor.numel() + 1, device=gradient.device).reshape(parent.shape)
        leaves = [
            numbers if place in own
            # What is joined with it comes from elsewhere; a tensor that is no data (an index, a mask) stays as it is.
            else torch.zeros_like(leaf, dtype=torch.int64)
            if isinstance(leaf, Tensor) and (place in derivation.parents or derivation.op in _JOINS)
            else leaf
            for place, leaf in enumerate(derivation.leaves)
        ]  # fmt: skip
        origin = attempt(_replayed, lambda error: None, derivation, leaves)
        if origin is None or origin.shape != gradient.shape:
            return None
        sizes = gradient.outer_size, gradient.total, gradient.inner_size
        rows = torch.unflatten(origin, gradient.dim, sizes).movedim(gradient.dim + 1, 0)
        found.append((parent, _brought_back(rows, parent.shape, gradient)))
    return found


def _replayed(derivation: Derivation, leaves: list[Any]) -> Tensor:
    args, kwargs = tree_unflatten(leaves, derivation.spec)
    return list(tensors_in(derivation.function(*args, **kwargs)))[derivation.output]


def _brought_back(rows: Tensor, shape: torch.Size, gradient: Block) -> SampleGradient:
    """A block at the entries of a weight that its rows (total, ...) came from, counted from 1 (0: from nowhere)."""
    grads, size = gradient.grad.flatten(1), shape.numel()
    if torch.equal(rows, rows[:1].expand_as(rows)):  # one row, laid over all samples
        return Dense(_sums(grads, rows[:1].flatten(1), size).reshape(len(grads), *shape))
    origin = rows[gradient.position].flatten(1)
    axis = _axis_of(origin, shape, gradient)
    if axis is None:
        index = _rows_of(origin, shape)
        if index is not None:
            return Indexed(index, grads.reshape((*index.shape, shape[1])), shape[0])
        return Dense(_sums(grads, origin, size).reshape(len(grads), *shape))
    sizes = list(shape)
    before, after = sizes[: axis.dim], sizes[axis.dim + 1 :]
    own, count = [*before, axis.outer, axis.inner, *after], size // gradient.total
    number = torch.arange(1, count + 1, device=origin.device).reshape(own).unsqueeze(axis.dim + 1)
    laid = number.expand(*before, axis.outer, gradient.total, axis.inner, *after)
    within = torch.cat([origin.new_zeros(1), laid.flatten()])
    found = _sums(grads, within[origin], count).reshape(len(grads), *own).flatten(axis.dim + 1, axis.dim + 2)
    return Block(found, axis.dim, axis.outer, axis.inner, gradient.position, gradient.total)


def _sums(grads: Tensor, place: Tensor, size: int) -> Tensor:
    """The sums of grads (B, n) over those with the same place (B or 1, n), counted from 1: (B, size)."""
    if place.shape[1] == size and torch.equal(place, torch.arange(1, size + 1, device=place.device).expand_as(place)):
        return grads
    sums = grads.new_zeros(len(grads), size + 1)
    return (sums.index_add_(1, place[0], grads) if len(place) == 1 else sums.scatter_add_(1, place, grads))[:, 1:]


def _rows_of(origin: Tensor, shape: torch.Size) -> Tensor | None:
    """The rows (B, t) of a table that a sample's entries are, if they are few and whole."""
    if len(shape) != 2 or origin.shape[1] >= shape.numel() or not shape[1] or origin.shape[1] % shape[1]:
        return None
    entries = origin.unflatten(1, (-1, shape[1])) - 1
    first = entries[..., :1]
    if not torch.equal(entries, first + torch.arange(shape[1], device=origin.device)):
        return None
    return None if bool(((first < 0) | (first % shape[1] != 0)).any()) else first.squeeze(-1) // shape[1]


def _axis_of(origin: Tensor, shape: torch.Size, gradient: Block) -> BatchAxis | None:
    """The axis of a weight along which no sample has an entry of another's; None: they share some, or it is no axis."""
    total = gradient.total
    if total == 1 or shape.numel() % total:
        return None
    owner = origin.new_full((shape.numel() + 1,), -1)
    position = gradient.position.unsqueeze(1).expand_as(origin)
    owner.scatter_(0, origin.flatten(), position.flatten())
    if not torch.equal(owner[origin].where(origin > 0, position), position):
        return None
    owner = owner[1:].reshape(shape)
    for dim, rows in enumerate(shape):
        for inner in range(1, rows // total + 1) if rows % total == 0 else ():
            axis = BatchAxis(dim, rows // total // inner, inner)
            if axis.outer * inner * total == rows:
                own = row_owners(axis, total, origin.device).reshape(-1, *(1,) * (len(shape) - dim - 1))
                if bool(((owner == own) | (owner < 0)).all()):
                    return axis
    return None


def row_by_row(derivation: Derivation, gradient: Block) -> list[tuple[Weight, SampleGradient]] | None:
    """What a block contributes to the parents of a derived weight, if its computation keeps the rows apart."""
    if derivation.inplace or derivation.random_state is not None:
        return None
    axis = BatchAxis(gradient.dim, gradient.outer_size, gradient.inner_size)
    given, leaves = _in_place(gradient), derivation.copied_leaves()
    parents = {id(leaves[position]): parent for position, parent in derivation.parents.items()}
    for call, followed in _readings(derivation, leaves, axis, gradient):
        aligned = followed.aligned
        rows = {id(tensor) for tensor, _ in call.located}
        if aligned is not None:
            rows |= {id(o.tensor) for o in call.operands if o.axis is None and aligned(o.tensor) is not None}
        contributions: list[tuple[Weight, SampleGradient]] = []
        for chosen in (True, False):  # those with rows of their own get blocks, the others what the op's rule says
            weights = {key: parent for key, parent in parents.items() if (key in rows) is chosen}
            use = Use(call, followed, weights, find_rule(call.function))
            if weights and use.reason_against() is not None:
                return None
            if weights:
                found = guard(computation(use), lambda error: None)([given])
                if found is None:
                    return None
                contributions += found
        return contributions
    return None


def _readings(
    derivation: Derivation, leaves: list[Any], axis: BatchAxis, gradient: Block
) -> Iterator[tuple[ObservedCall, Followed]]:
    """The derivation as a call on a batch: one operand lies along the batch, and the result where the block says."""
    args, kwargs = tree_unflatten(leaves, derivation.spec)
    tensors = data_of(derivation.op, args, kwargs)
    result = derivation.value.detach().requires_grad_()
    size = gradient.shape[gradient.dim]
    for tensor in tensors:
        for dim in range(tensor.dim()):
            if tensor.size(dim) != size:
                continue
            operands = tuple(Operand(other, axis.moved(dim) if other is tensor else None) for other in tensors)
            call = ObservedCall(
                derivation.op, derivation.function, args, kwargs, operands, (result,), gradient.batch_size, False,
                frozenset(),
            )  # fmt: skip
            followed = follow(call)
            (place,) = followed.outputs or (None,)
            if isinstance(place, BatchAxis) and place.same_place(axis) and followed.mixing is None:
                yield call, followed


def _in_place(gradient: Block) -> Tensor:
    """The rows of all samples put back along the batch axis."""
    grad, dim = gradient.grad, gradient.dim
    before, after = grad.shape[1 : 1 + dim], grad.shape[2 + dim :]
    split = grad.reshape(gradient.batch_size, *before, gradient.outer_size, gradient.inner_size, *after)
    total = torch.Size((*before, gradient.outer_size * gradient.batch_size * gradient.inner_size, *after))
    return split.movedim(0, 1 + dim).reshape(total)
