"""The pieces from which every family of ops is followed: the answer, the registry, and the two common answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, Note, laid_along, picked, row_owners
from lightning_persample.batch_axis.observed import ObservedCall, user_line
from lightning_persample.batch_axis.ops import OPS, having
from lightning_persample.torch_internals import is_wrapped_by_transform

_STRIDED = torch.strided

Alignment = Callable[[Tensor], BatchAxis | None]


@dataclass(frozen=True, eq=False)
class Entries:
    """What a call that gives one number has added up: the same call without its reduction gives these values.

    Attributes:
        args: positional arguments of the call that gives them.
        kwargs: its keyword arguments.
        shape: shape of the values.
        axis: where the batch lies in them.
        share: the number is `share` times their sum.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    axis: BatchAxis
    share: Tensor | float


@dataclass(frozen=True)
class Followed:
    """Where the batch lies in each output of a call.

    Attributes:
        outputs: one entry per output tensor; None where an output does not depend on the batch.
        aligned: gives, for an operand that does not hold the batch itself, the axis of it that the op lays along the
            batch, or None.
        mixing: where samples influence each other in this call, or None.
        weighting: where the loss gives samples weights that only the caller knows, or None.
        entries: what the one output adds up, where the call can give it.
        excused: what was said of calls before, and is not so of what goes through this one.
        by_values: whether values in the tensors had a part in it, so that it is not remembered.
        padding: the entries of the first output that belong to no sample, where there are any, see `Padding`.
        is_sure: the note on the call holds, whatever it would give for other values.
    """

    outputs: tuple[BatchAxis | Lost | None, ...]
    aligned: Alignment | None = None
    mixing: str | None = None
    weighting: str | None = None
    entries: Callable[[], Entries] | None = None
    by_values: bool = False
    excused: frozenset[tuple[str, str]] = frozenset()
    padding: Padding | None = None
    is_sure: bool = False

    def with_known(self, **known: Any) -> Followed:
        """The answer with more that is known of what has lost its axis."""
        outputs = (replace(mark, **known) if isinstance(mark, Lost) else mark for mark in self.outputs)
        return replace(self, outputs=tuple(outputs))


@dataclass(frozen=True, eq=False)
class Padding:
    """Entries beside those of the samples, of which there are as many as the batch has room for.

    Attributes:
        entries: which, of the shape of the tensor.
        text: what to say where the loss takes them in.
        axis: the axis along which they lie beside those of their sample, where a sum over it leaves them out, because
            they are zero; else None.
        is_by_sample: whether the first two axes are those of the samples and of their entries; else rows are in one.
    """

    entries: Tensor
    text: str
    axis: int | None
    is_by_sample: bool


PropagationRule = Callable[[ObservedCall], Followed]
PROPAGATION_RULES: dict[object, PropagationRule] = {}
BY_LAYOUT: set[object] = set()
_PLACES, _ADDS = having("places"), having("adds")
_LISTS_ENTRIES = frozenset(("argwhere", "nonzero", "where"))


def propagation_rule(family: str, *, by_layout: bool = False) -> Callable[[PropagationRule], PropagationRule]:
    """Register the decorated function for the ops of a family; `by_layout`: their values decide nothing."""

    def register(function: PropagationRule) -> PropagationRule:
        ops = [name for name, op in OPS.items() if op.family == family]
        if not ops or ops[0] in PROPAGATION_RULES:
            raise ValueError(f"the family {family} {'has a propagation rule already' if ops else 'has no op'}")
        PROPAGATION_RULES.update(dict.fromkeys(ops, function))
        BY_LAYOUT.update(ops if by_layout else ())
        return function

    return register


def keep(call: ObservedCall, axis: BatchAxis | Lost, aligned: Alignment | None = None) -> Followed:
    """All outputs hold the batch alike."""
    return Followed((axis,) * len(call.outputs), aligned)


def reason_of(call: ObservedCall, what: str) -> str:
    """Since where no axis holds the samples."""
    return f"`{call.name}` {what} (shapes {[tuple(o.tensor.shape) for o in call.operands]}{user_line()})"


_OF_OTHERS = "combines different samples"


def meeting(call: ObservedCall) -> str:
    """Where numbers of one sample meet those of another."""
    return f"`{call.name}` {_OF_OTHERS}{user_line()}"


def of_loss(call: ObservedCall, followed: Followed, note: str | None) -> Followed:
    """The samples are added up with a note on numbers of others in what they add: these mix them, or weigh them."""
    if note is None or not any(output.requires_grad for output in call.outputs):
        return followed
    is_of_others = _OF_OTHERS in note
    mixing, weighting = (note, None) if is_of_others else (None, note)
    return replace(followed, mixing=followed.mixing or mixing, weighting=followed.weighting or weighting)


def lost(call: ObservedCall, what: str, *, mixes: bool | None = False) -> Followed:
    """No output holds the batch along an axis any more; `mixes`: samples influence each other, None: not known."""
    reason = reason_of(call, what)
    mixing = reason if mixes is not False and any(o.requires_grad for o in call.outputs) else None
    return Followed((Lost(reason, crossed=bool(mixes)),) * len(call.outputs), mixing=mixing)


def crossed(call: ObservedCall, *indices: object) -> bool | None:
    """Whether an operand is known to be made of several samples, or one of these to hold them; None where it is not."""
    by_index = any(isinstance(axis, BatchAxis) for axis in indices)
    return by_index or any(mark.of_others for _, mark in call.lost) or None


def lists(call: ObservedCall) -> bool:
    """Whether the call gives places or the numbers that occur."""
    return call.op in _PLACES and (call.op != "where" or len(call.args) + len(call.kwargs) < 3)


def listed(call: ObservedCall) -> Followed:
    """Places of true entries, each of the sample whose entry it is, or the numbers that occur over the whole batch."""
    axis = call.located[0][1] if call.located else None
    reason = reason_of(call, "gives positions or numbers across the batch")
    # (samples that numbers of others pick are what they are; a sample of which these pick some entries is not)
    by_entry = axis is not None and (axis.mixing is None or call.located[0][0].numel() > call.batch_size)
    if axis is not None and by_entry and call.op in _LISTS_ENTRIES:
        table = call.outputs[0] if call.outputs[0].dim() > 1 else torch.stack(call.outputs, 1)
        owners = row_owners(axis, call.batch_size, table.device)[table[:, axis.dim]]
        places = [*keep(call, picked(0, owners, call.batch_size, axis.mixing)).outputs]
        if axis.owner is not None and axis.mixing is None:  # (at which of such rows an entry stands, others say)
            places[axis.dim % len(places)] = Lost(reason, listed=True)
        return Followed(tuple(places), by_values=True)
    # (how often numbers occur, and where among all each one stands, is of the whole batch)
    of_all = range(1, len(call.outputs)) if str(call.op).startswith("unique") else ()
    marks = []
    for place, output in enumerate(call.outputs):
        is_integer = not (output.is_floating_point() or output.is_complex())
        is_of_all = place in of_all
        marks.append(Lost(reason, listed=is_integer and not is_of_all, crossed=bool(call.mixing or is_of_all)))
    return Followed(tuple(marks))


def beside_lost(call: ObservedCall) -> Followed:
    """An operand of the call holds the batch along no axis: it is made of several samples, or that is not known."""
    if crossed(call):
        return lost(call, "combines samples with a value computed over the whole batch", mixes=True)
    reason = call.lost[0][1].reason
    noted = any(output.requires_grad for output in call.outputs)
    return Followed((Lost(reason),) * len(call.outputs), mixing=reason if noted else None)


def mixing_among(call: ObservedCall) -> str | None:
    """Where a value computed over the whole batch entered operands that hold samples, for an output with gradient."""
    return call.mixing if any(output.requires_grad for output in call.outputs) else None


def alone(call: ObservedCall, axis: BatchAxis, rows: Iterable[int]) -> Followed:
    """Each output is one row of the batch axis, and so belongs to one sample alone."""
    reason = reason_of(call, "takes single samples out of the batch; keep the axis, as x[i:i+1] does")
    if axis.mixing is not None:
        said = mixing_among(call)
        notes = frozenset[Note]() if said is None else frozenset({("mixing", said)})  # (which names it once)
        return Followed((Lost(reason, notes=notes),) * len(call.outputs), weighting=said)
    owners = row_owners(axis, call.batch_size).tolist()
    return Followed(tuple(Lost(reason, samples=frozenset({owners[row]}), parts=frozenset({1})) for row in rows))


def with_constant_rows(
    call: ObservedCall, owners: Tensor, rows: Tensor, dim: int, *, even: bool = False, beside: Tensor | None = None
) -> Tensor | None:
    """The sample of each row along `dim`: constant rows (-1) belong as in a layout of the batch of as many rows."""
    rest = owners < 0
    if not bool(rest.any()):
        return owners
    constant = rows.index_select(dim, rest.nonzero().flatten().to(rows.device))
    equal = has_equal_rows(constant, dim)
    if not equal and (rows.is_floating_point() or rows.is_complex()):
        return None  # (which one each sample alone would have is not known)
    known = [beside.to(owners.device)] if beside is not None and equal else []
    known += [row for owner in call.owners if (row := owner.sample.to(owners.device)).shape == owners.shape]
    if not any(bool((rest | (layout == owners)).all()) for layout in known):
        known += [row.to(owners.device) for row in call.known_rows(len(owners))]
    each, left = divmod(len(owners), call.batch_size)
    rows_of_each = [] if left else [torch.arange(call.batch_size, device=owners.device).repeat_interleave(each)]
    fit, rivals = (
        [layout for layout in layouts if bool((rest | (layout == owners)).all())]
        for layouts in (known + rows_of_each * even, rows_of_each * (each == 1))
    )
    counts = [layout[rest].bincount(minlength=call.batch_size) for layout in fit + rivals]
    if not fit or any(not torch.equal(count, counts[0]) for count in counts):  # (it may be either)
        return None
    return fit[0]


def padded(call: ObservedCall, place: BatchAxis | Lost, entries: Tensor, axis: int | None = None) -> Followed:
    """Entries beside those of the samples, as many as a batch has room for: no sample's, where the loss has them."""
    outputs = (place, *[None] * (len(call.outputs) - 1))
    if not bool(entries.any()):
        return Followed(outputs, by_values=True)
    text = (
        f"`{call.name}` leaves room for rows that a sample of the batch does not have{user_line()}, and the loss takes "
        "them in: leave them out, by a mask of the rows"
    )
    is_zero = not bool(call.outputs[0].detach().masked_select(entries).any())
    return Followed(
        outputs, by_values=True, padding=Padding(entries, text, axis if is_zero else None, axis is not None)
    )


def beyond(lengths: Tensor, output: Tensor, batch_axis: int) -> Tensor:
    """The entries of a padded tensor, samples along one of its first two axes, that are beyond their lengths (B,)."""
    steps = torch.arange(output.size(1 - batch_axis), device=output.device)
    rows = steps[None] >= lengths.to(output.device)[:, None]
    rows = rows if batch_axis == 0 else rows.T
    return rows.reshape(rows.shape + (1,) * (output.dim() - 2)).expand_as(output)


def into_own_rows(call: ObservedCall, target: Tensor, dim: int, index: Tensor, source: object) -> Followed | None:
    """Rows written or added along `dim` to rows of the same sample, by the values of `index`; None where not so."""
    # The index has the target's axes, as that of `scatter`, or one axis or none, as that of `index_add`.
    where, by, room = call.axis_of(target), call.axis_of(index), None
    found: Any = call.axis_of(source) if isinstance(source, Tensor) else None
    along = dim if index.dim() == target.dim() else 0
    if any(tensor is not index for tensor, _ in call.lost) or index.dim() not in (0, 1, target.dim()):
        return None
    if isinstance(source, Tensor) and found is None and source.requires_grad:
        return None
    lines = index.size(along) if index.dim() else 1
    before = target.dim() - source.dim() if isinstance(source, Tensor) else 0  # axes over which the source is laid
    incoming: Tensor | None = None
    for axis, own in ((found, dim - before), (by, along)):
        if not isinstance(axis, BatchAxis):
            continue
        owners = row_owners(axis, call.batch_size, index.device)[:lines]
        if axis.dim != own or not (incoming is None or torch.equal(owners, incoming)):
            return None
        incoming = owners
    if not index.numel():  # nothing is written
        return Followed((where,) * len(call.outputs)) if not isinstance(where, Lost) else None
    if incoming is None or len(incoming) != lines:
        return None
    rows = index.movedim(along, 0).reshape(lines, -1) if index.dim() else index.reshape(1, 1)
    written = incoming[:, None].expand_as(rows)
    constant = target is call.outputs[0] if call.inplace else not target.requires_grad
    if where is None and constant:  # each of its rows is of the sample that is written there
        owners = incoming.new_full((target.size(dim),), -1).index_put((rows,), written)
        known = with_constant_rows(call, owners, call.outputs[0], dim)
        rest = laid_along(owners, dim, target.shape) < 0
        if known is None:
            known = with_constant_rows(call, owners, call.outputs[0], dim, even=True)
            room = (rest if len(owners) > call.batch_size else None) if known is not None else None
        if known is None and torch.equal(owners[rows], written) and (found is None or found.mixing is None):
            mark = Lost(reason_of(call, "leaves rows of no sample"), entries=laid_along(owners, dim, target.shape))
            return padded(call, mark, rest)
        where = None if known is None else picked(dim, known, call.batch_size)
    if not isinstance(where, BatchAxis) or where.dim != dim:
        return None
    same = torch.equal(row_owners(where, call.batch_size, index.device)[rows], written)
    # Numbers of the whole batch may say which row of a sample's own is written, not what is written there.
    mixings = (where, found, None if constant else by)
    mixing = next((axis.mixing for axis in mixings if isinstance(axis, BatchAxis) and axis.mixing), None)
    if not same:
        return None
    return keep(call, where.mixed(mixing)) if room is None else padded(call, where.mixed(mixing), room)


def is_plain(tensor: Tensor) -> bool:
    """Whether this is an ordinary tensor: neither sparse, nested nor wrapped by a torch.func transform."""
    return tensor.layout is _STRIDED and not tensor.is_nested and not is_wrapped_by_transform(tensor)


def has_equal_rows(tensor: Tensor, dim: int) -> bool:
    """Whether all rows along an axis of one entry at least hold the same numbers."""
    return torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def memory_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for one that is not ordinary, or wraps others as a sharded parameter."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return 0 if is_wrapper or not is_plain(tensor) else tensor.untyped_storage().data_ptr()


def dims_argument(value: object, ndim: int) -> tuple[int, ...] | None:
    """A ``dim`` argument as non-negative axes; None where it names all axes."""
    if value is None or isinstance(value, bool):
        return None
    items: Iterable[object] = value if isinstance(value, (tuple, list)) else (value,)
    dims = tuple(int(item) % max(ndim, 1) for item in items if isinstance(item, (int, Tensor)))
    return dims or None


def meet(call: ObservedCall, places: Sequence[BatchAxis]) -> tuple[BatchAxis, str | None] | Followed:
    """The operands of the batch are laid over each other, and over those that hold it along no axis."""
    if not places:
        return lost(call, "meets the batch in an argument that lies over no row of the others", mixes=None)
    axis, *others = places
    mixing = next((place.mixing for place in places if place.mixing), None)
    event = None
    with_gradient = any(output.requires_grad for output in call.outputs)
    for other in others if call.batch_size > 1 else ():
        if (other.dim, other.outer, other.inner) != (axis.dim, axis.outer, axis.inner):
            return lost(call, "meets two tensors of the batch with their batch axes at different places", mixes=True)
        if not other.same_layout(axis):
            mixing = meeting(call)
            if call.op in _ADDS and not call.lost and _are_apart(axis, other):  # (a sum of what each of them gives)
                return Followed((Lost(mixing, reduced=True),) * len(call.outputs))
            event = mixing if with_gradient else event
            axis = other if other.owner is None else axis
    for tensor, mark in call.lost:
        reason = f"`{call.name}` combines samples with a value computed over the whole batch{user_line()}"
        reason = reason if mark.of_others else mark.reason
        mixing = mixing or reason
        event = reason if tensor.requires_grad and with_gradient else event
    return axis.mixed(mixing), event


def _are_apart(one: BatchAxis, other: BatchAxis) -> bool:
    """Whether no sample has rows along both axes."""
    if one.owner is None or other.owner is None or one.mixing or other.mixing:
        return False
    return not bool(torch.isin(one.owner.sample, other.owner.sample.to(one.owner.sample.device)).any())


def broadcast(call: ObservedCall) -> Followed:
    """Operands are laid over each other from the right."""
    first, axis = call.located[0]
    from_right = axis.dim - first.dim()
    met = meet(call, [other.moved(other.dim - tensor.dim()) for tensor, other in call.located])
    if isinstance(met, Followed):
        return met
    axis, event = met
    size = first.size(first.dim() + from_right)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        dim = tensor.dim() + from_right
        return axis.moved(dim) if call.batch_size > 1 and dim >= 0 and tensor.size(dim) == size else None

    outputs = tuple(axis.moved(output.dim() + from_right) for output in call.outputs)
    return Followed(outputs, aligned, event)
