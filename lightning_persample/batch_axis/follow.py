"""Follow the batch axis through torch calls.

`follow` answers, for one call that has run, along which axis of each output the samples lie. Ops are grouped into
families that move an axis alike. An op of no family is tried out on a single sample: its output must shrink along
exactly one axis and hold the values that the whole call gave that sample. What cannot be followed is `Lost`, with the
reason.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_persample.batch_axis import indexing, layers, losses, recurrence, reductions, shapes
from lightning_persample.batch_axis.after_reduction import after_reduction
from lightning_persample.batch_axis.apart import by_entries_moved
from lightning_persample.batch_axis.axis import BatchAxis, Lost, Note, Owner, laid_along, row_owners
from lightning_persample.batch_axis.base import PROPAGATION_RULES, Followed, is_plain, keep, lost, mixing_among
from lightning_persample.batch_axis.jagged import follow_jagged
from lightning_persample.batch_axis.observed import ObservedCall, user_line
from lightning_persample.batch_axis.ops import OPS, POINTWISE
from lightning_persample.batch_axis.ranked import by_rank, weighed_by_rank
from lightning_persample.batch_axis.separable import by_what_samples_give
from lightning_persample.batch_axis.trial import try_on_one_sample

_FAMILIES = (
    indexing,
    layers,
    losses,
    recurrence,
    reductions,
    shapes,
)  # imported for the rules that they register


_OF_NESTED = frozenset(name for name, op in OPS.items() if op.family == "nested")


def follow(call: ObservedCall) -> Followed:
    """Where the batch lies in the outputs of a call that has at least one operand depending on the batch."""
    followed = _follow(call)
    sample = call.sample if call.located and call.batch_size > 1 else None
    is_lost = call.lost or any(isinstance(place, Lost) for place in followed.outputs)
    if sample is not None and is_lost and not any(_has_room(place, call.batch_size) for place in followed.outputs):
        reason, mixing = f"`{call.name}` is of one sample alone{user_line()}", mixing_among(call)
        of_one = Lost(reason, samples=frozenset({sample}), parts=frozenset({1}))
        mark = of_one if mixing is None else Lost(reason, notes=frozenset({("mixing", mixing)}))
        return Followed((mark,) * len(call.outputs), weighting=mixing)
    if any(isinstance(place, Lost) for place in followed.outputs):
        followed = by_entries_moved(call, followed)
    followed = by_rank(call, followed)
    if not any(isinstance(place, Lost) for place in followed.outputs):
        return weighed_by_rank(call, _numbered(call, followed))
    notes = frozenset[Note]().union(*(mark.notes for _, mark in call.lost))
    notes |= {(kind, text) for kind in ("mixing", "weighting") if (text := getattr(followed, kind))}
    if notes:
        followed = followed.with_known(notes=notes)
    return weighed_by_rank(call, by_what_samples_give(call, followed))


def _numbered(call: ObservedCall, followed: Followed) -> Followed:
    """The answer where a result numbers the rows of each sample from 0: the same as for that sample alone."""
    place, numbers = followed.outputs[0], call.outputs[0]
    if not isinstance(place, BatchAxis) or place.mixing is None or numbers.dtype != torch.int64 or numbers.dim() != 1:
        return followed
    owner = Owner(row_owners(place, call.batch_size, numbers.device))
    counts = owner.counts(call.batch_size)
    expected = torch.arange(len(numbers), device=numbers.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    if int(counts.max()) < 2 or not torch.equal(numbers[owner.order], expected):
        return followed
    return replace(keep(call, place.mixed(None), followed.aligned), by_values=True)


def _has_room(place: BatchAxis | Lost | None, batch_size: int) -> bool:
    """Whether entries of a sample lie in its row of B beside entries of none, which may be the other samples' rows."""
    entries = place.entries if isinstance(place, Lost) else None
    if entries is None:
        return False
    own, none = torch.arange(batch_size, device=entries.device), entries < 0
    return any(
        size == batch_size and torch.equal(entries, laid_along(own, dim, entries.shape).masked_fill(none, -1))
        for dim, size in enumerate(entries.shape)
    )


def _follow(call: ObservedCall) -> Followed:
    if not call.located:
        return indexing.picked_of_copies(call) or after_reduction(call)
    if call.operands[0].tensor.is_nested and call.op in (*_OF_NESTED, "unbind"):
        return PROPAGATION_RULES[call.op](call)
    if call.op in POINTWISE and len(call.operands) == 1 and call.operands[0].tensor.dim() == call.outputs[0].dim():
        return keep(call, call.located[0][1])  # of a sparse or nested tensor, too
    if any(not is_plain(tensor) for tensor in (*call.outputs, *(o.tensor for o in call.operands))):
        if any(tensor.is_nested for tensor in (*call.outputs, *(o.tensor for o in call.operands))):
            return follow_jagged(call)
        return lost(call, "works on tensors that are nested, sparse or wrapped", mixes=None)
    known = PROPAGATION_RULES.get(call.op)
    if known is not None:
        return _laid_over(known(call), call)
    if all(output.dim() == 0 for output in call.outputs):
        if call.op in ("inner", "tensordot", "linalg_vecdot"):
            return PROPAGATION_RULES["dot"](call)
        return lost(call, "reduces over the batch axis", mixes=True)
    return try_on_one_sample(call)


def _laid_over(followed: Followed, call: ObservedCall) -> Followed:
    """The answer of a propagation rule, where the rows of one sample alone may have been repeated by broadcasting."""
    outputs = tuple(
        place.laid_over(output.size(place.dim), call.batch_size)
        if isinstance(place, BatchAxis) and place.dim < output.dim()
        else place
        for place, output in zip(followed.outputs, call.outputs, strict=False)
    )
    return followed if outputs == followed.outputs else replace(followed, outputs=outputs)
