"""A derived weight that has a row for every sample is pulled back row by row.

``u = f(v, w)`` may turn out to lie along the batch only when it meets it: a state that starts from zeros of the batch's
size, positions repeated for every sample, learned queries expanded and sent through layers before they see the data.
Its gradient is then a `Block`. If f keeps the rows apart, as the rules for following the batch tell, f is read as a
call on a batch: v gets a block again, and w the structure of its op. Otherwise the block is pulled back whole, at B
times the cost.

Rows that were looked up in a table, as position embeddings are, need none of this: a row of the gradient belongs to the
row of the table that its index names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from lightning_persample.engine.batch_axis import BatchAxis
from lightning_persample.engine.computation import computation
from lightning_persample.engine.failure import guard
from lightning_persample.engine.following import Followed, follow
from lightning_persample.engine.kinds import data_of
from lightning_persample.engine.observed import ObservedCall, Operand
from lightning_persample.engine.use import Use
from lightning_persample.gradients import Block, Dense, SampleGradient
from lightning_persample.rules import Call, find_rule

if TYPE_CHECKING:
    from lightning_persample.engine.weight import Derivation, Weight

__all__ = ["looked_up", "row_by_row"]


def looked_up(derivation: Derivation, gradient: SampleGradient) -> SampleGradient | None:
    """What the gradient of rows that were looked up in a table contributes to the table, by the rule for look-ups.

    Args:
        derivation: how the weight was computed.
        gradient: its gradient: a block along an axis of the index, or one that has been formed.

    Returns:
        The contribution, or None where the weight was computed in another way.
    """
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


def row_by_row(derivation: Derivation, gradient: Block) -> list[tuple[Weight, SampleGradient]] | None:
    """What a block contributes to the parents of a derived weight, if its computation keeps the rows apart.

    Args:
        derivation: how the weight was computed.
        gradient: its gradient, a block along the batch.

    Returns:
        Contributions to the parents, or None where the rows are not kept apart or the computation is random.
    """
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
