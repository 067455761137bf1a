"""From derived weights to the parameters they are made of, at once or row by row."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Owner, row_owners
from lightning_persample.batch_axis.base import Followed, has_equal_rows
from lightning_persample.batch_axis.follow import follow
from lightning_persample.batch_axis.observed import (
    Description,
    ObservedCall,
    Operand,
    version_of,
)
from lightning_persample.batch_axis.ops import POINTWISE, having
from lightning_persample.capture.annotations import data_of
from lightning_persample.capture.contributions import Use, computation
from lightning_persample.capture.failure import OverwrittenError, attempt, guard
from lightning_persample.capture.weight import Contributions, Derivation, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import (
    Block,
    Deflated,
    Dense,
    Indexed,
    Outer,
    Patches,
    SampleGradient,
    add_up,
    in_order,
)
from lightning_persample.gradients.cost import current_options, halved
from lightning_persample.gradients.patches import MOST_SHIFT
from lightning_persample.gradients.program import Program, at_least, not_now, record, run_again
from lightning_persample.rules import (
    BATCHES,
    Call,
    agree,
    find_rule,
    generators_kept,
    is_of_torch,
    pull_each,
    vector_jacobian,
)
from lightning_persample.torch_internals import any_autocast_is_on

_JOINS, _COPIES = having("joins"), having("same", "moves", "picks", "joins")


def looked_up(derivation: Derivation, gradient: SampleGradient) -> SampleGradient | None:
    """What the gradient of rows that were looked up in a table contributes to the table, by the rule for look-ups."""
    if not isinstance(gradient, (Block, Dense)):
        return None
    rule = find_rule(derivation.recipe.function)
    named = rule.bind(*derivation.arguments()) if rule is not None else None
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
    if derivation.op not in _COPIES or derivation.recipe.inplace or derivation.random_state is not None:
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
        origin = attempt(derivation.called, lambda error: None, leaves)
        if origin is None or origin.shape != gradient.shape:
            return None
        sizes = gradient.outer_size, gradient.total, gradient.inner_size
        rows = torch.unflatten(origin, gradient.dim, sizes).movedim(gradient.dim + 1, 0)
        found.append((parent, _brought_back(rows, parent.shape, gradient)))
    return found


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
    if derivation.recipe.inplace or derivation.random_state is not None:
        return None
    ordered = gradient.position is in_order(gradient.batch_size, gradient.device)
    owner = None if ordered else Owner(gradient.position.argsort())  # the sample of each row
    axis = BatchAxis(gradient.dim, gradient.outer_size, gradient.inner_size, owner=owner)
    given, leaves = _in_place(gradient, owner), derivation.copied_leaves()
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
    args, kwargs = derivation.arguments(leaves)
    tensors = data_of(derivation.op, args, kwargs)
    result = derivation.value.detach().requires_grad_()
    size = gradient.shape[gradient.dim]
    for tensor in tensors:
        for dim in range(tensor.dim()):
            if tensor.size(dim) != size:
                continue
            operands = tuple(Operand(other, axis.moved(dim) if other is tensor else None) for other in tensors)
            call = ObservedCall(
                derivation.op, derivation.recipe.function, args, kwargs, operands, (result,), gradient.batch_size,
                False, frozenset(),
            )  # fmt: skip
            followed = follow(call)
            (place,) = followed.outputs or (None,)
            if isinstance(place, BatchAxis) and place.same_place(axis) and followed.mixing is None:
                yield call, followed


def _in_place(gradient: Block, owner: Owner | None) -> Tensor:
    """The rows of all samples put back along the batch axis."""
    grad, dim = gradient.grad if owner is None else gradient.grad[owner.sample], gradient.dim
    before, after = grad.shape[1 : 1 + dim], grad.shape[2 + dim :]
    split = grad.reshape(gradient.batch_size, *before, gradient.outer_size, gradient.inner_size, *after)
    total = torch.Size((*before, gradient.outer_size * gradient.batch_size * gradient.inner_size, *after))
    return split.movedim(0, 1 + dim).reshape(total)


_SAME_ENTRIES, _PERMUTES = having("same", "casts"), having("permutes")
_REPEATS = {torch.float32: 1e-5, torch.float64: 1e-10}
_BUDGET = 64 * 2**20
_SHAPED = frozenset({
    "_unsafe_view", "flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip
# By these rows are normalized: the axis of the rows, and what autograd keeps, a number for each.
NORMALIZED, _EPS = {"batch_norm": (1, ("result2",)), "_weight_norm": (0, ("result1",))}, 1e-5
OF_ROWS = _SHAPED | NORMALIZED.keys()  # by which a weight is derived whose rows are those of a parameter, normalized
_DRAWS = having("draws")
COMPARED = frozenset({int, float, bool, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_OF_LAYOUT = (torch.Size, torch.layout, torch.memory_format)
_PROGRAMS: dict[Hashable, Program | Literal["none", "not now"]] = {}  # by the op and the layout of its gradient
_MOST = 4096


def settle(
    weights: Sequence[Weight],
    failed: Callable[[Weight, Exception, Description], None],
    changed: Callable[[Weight, Tensor | None, SampleGradient | None], str | None] | None = None,
) -> None:
    """Move the contributions of all derived weights to the parameters."""

    def checked(weight: Weight) -> None:
        if weight.arrived is not None and changed is not None:
            total = add_up(weight.contributions) if weight.contributions else None
            reason = changed(weight, weight.arrived, total)
            if reason is not None:
                raise UnsupportedError(reason)
        pull_back(weight)

    for weight in reversed(weights):
        if weight.derivation is not None and (weight.contributions or weight.arrived is not None):
            settle_one(weight, failed, pull_back if weight.arrived is None else checked)


def settle_one(
    weight: Weight,
    failed: Callable[[Weight, Exception, Description], None],
    settled: Callable[[Weight], None] | None = None,
) -> None:
    """Move the contributions of one derived weight to what it was computed from."""
    derivation = weight.derivation
    assert derivation is not None

    def fail(error: Exception) -> None:
        failed(weight, error, derivation.text)

    if torch.is_grad_enabled() or any_autocast_is_on():
        with torch.no_grad(), torch.autocast(derivation.value.device.type, enabled=False):
            attempt(settled or pull_back, fail, weight)
    else:
        attempt(settled or pull_back, fail, weight)


def pull_back(weight: Weight) -> None:
    """Move the contributions of a derived weight to the weights it was computed from."""
    derivation, terms = weight.derivation, weight.contributions
    if derivation is None or not terms:
        return
    weight.contributions = ()
    for parent, gradient in _pulled(derivation, terms):
        parent.add(gradient)


RowDots: TypeAlias = Callable[[Tensor, float], tuple[Tensor, Tensor]]
"""Dots (B, O) of a gradient's rows with the weight's, and what is above 0 for rows (O,) of which these are to be
relied on, given the squared norms (O,) of the rows and a number times which they are those times the rows' length."""


@dataclass(frozen=True, eq=False)
class Made:
    """Weights that one call uses, with what they are made of, where nothing else uses any of it.

    Attributes:
        weights: each behind all that is made of it.
        kind: what tells how they are made from other ways.
    """

    weights: Sequence[Weight]
    kind: Hashable

    @property
    def parameters(self) -> list[Weight]:
        """Those that are made of nothing."""
        return [weight for weight in self.weights if weight.derivation is None]

    def tensors(self) -> list[Tensor] | None:
        """All that the others were computed from, and they themselves; None where one was written to since."""
        found: list[Tensor] = []
        for weight in self.weights:
            made = weight.derivation
            if made is not None:
                tensors = made.tensors()
                if tensors is None:
                    return None
                found += tensors if made.kept is None else (*tensors, made.kept)
        return found

    def reads_memory_of(self, places: Container[int]) -> bool:
        """Whether rows are normalized by what lies in memory that begins at one of these places."""
        found = [weight.derivation for weight in self.weights if weight.derivation is not None]
        return any(
            made.leaves[place].untyped_storage().data_ptr() in places
            for made in found
            if made.op in NORMALIZED
            for place in made.recipe.places
        )

    def pulled(self, contributions: Contributions, row_dots: RowDots | None) -> list[SampleGradient]:
        """What each of the parameters gets of what the call contributes; `row_dots` are those with the first weight."""
        terms: dict[Weight, list[SampleGradient]] = {}
        known = {self.weights[0]}  # has the same rows
        for weight, gradient in contributions:
            terms.setdefault(weight, []).append(gradient)
        for weight in self.weights:
            derivation = weight.derivation
            if derivation is not None and weight in terms:
                for parent, gradient in _pulled(derivation, terms[weight], row_dots if weight in known else None):
                    terms.setdefault(parent, []).append(gradient)
                if weight in known and derivation.op in _SHAPED:
                    known.update(derivation.parents.values())
        return [add_up(terms[weight]) for weight in self.parameters]


def made_for_one_call(weights: Sequence[Weight]) -> Made | None:
    """What the weights of a call are made of, where nothing else uses it and the derived ones tell how they are."""
    found, met = [*weights], dict[Weight, int]()
    if any(weight.uses != 1 or weight.children or weight.taken is not None for weight in found):
        return None
    for weight in found:  # (which grows)
        derivation = weight.derivation
        if derivation is None:
            continue
        if weight.hooked or weight.hidden or derivation.recipe.inplace or derivation.random_state is not None:
            return None
        for parent in derivation.parents.values():
            met[parent] = number = met.get(parent, 0) + 1
            if parent.uses or parent.taken is not None:
                return None
            if number == parent.children:
                found.append(parent)
    if not met or any(number != parent.children for parent, number in met.items()):
        return None
    places, kinds = {weight: place for place, weight in enumerate(found)}, list[Hashable]()
    for weight in found:
        derivation = weight.derivation
        if derivation is None:
            kinds.append(None)  # so that each place says what stands there
            continue
        kind = (derivation.recipe, derivation.output) if derivation.recipe.is_kept else _kind(derivation)
        if kind is None:
            return None
        kinds.append((kind, *[places[parent] for parent in derivation.parents.values()]))
    return Made(found, tuple(kinds))


def _pulled(derivation: Derivation, terms: Sequence[SampleGradient], row_dots: RowDots | None = None) -> Contributions:
    """What the parents of a derived weight get."""
    # A computation that gives another value when it is repeated (it is random, or its inputs were changed in place
    # since) gives an `UnsupportedError`.
    if len(terms) == 1:
        return _pull_back_one(derivation, terms[0], row_dots)
    blocks = [term for term in terms if isinstance(term, Block)]
    others = [term for term in terms if not isinstance(term, Block)]
    return [pair for same in (blocks, others) if same for pair in _pull_back_one(derivation, add_up(same))]


def _pull_back_one(derivation: Derivation, gradient: SampleGradient, row_dots: RowDots | None = None) -> Contributions:
    parents = list(derivation.parents.values())
    of_table = looked_up(derivation, gradient) if derivation.op == "embedding" else None
    if of_table is not None:
        _as_read(derivation, parents_too=False)
        return [(parents[0], of_table)]
    block = gradient if type(gradient) is Block else None
    entries = copied(derivation, block) if block is not None else None
    if entries is not None:
        _as_read(derivation, parents_too=False)
        return entries
    as_it_is = _keep_structure(derivation, gradient, row_dots) if block is None else None
    if as_it_is is not None:
        return as_it_is
    one = None
    if block is not None:
        with generators_kept([derivation.value], derivation.recipe.function):
            derivation = _as_read(derivation)
            one = _of_one_row(derivation, block)
            rows = row_by_row(derivation, block) if one is None else None
            if rows is not None:
                _check_repeats(derivation, derivation.compute(*derivation.inputs))
                return rows
    derivation, cotangents = one or derivation, gradient if block is None or one is None else Dense(block.grad)
    pulled, *more = [_pull(derivation, part) for part in _parts(derivation, cotangents)]
    if more:
        pulled = [torch.cat(column) for column in zip(pulled, *more, strict=True)]
    return [
        (parent, replace(block, grad=grads) if block is not None and one else Dense(grads))
        for parent, grads in zip(parents, pulled, strict=True)
    ]


def _parts(derivation: Derivation, gradient: SampleGradient) -> Iterator[Tensor]:
    """The gradients of a derived weight, (b, *shape) for parts of the batch that fit into the memory budget."""
    value, limit = derivation.value, halved(current_options().max_memory or _BUDGET)
    step, size = max(1, limit // (value.element_size() * max(1, value.numel()))), gradient.batch_size
    for start in range(0, size, step):
        part = gradient if step >= size else gradient.samples(start, start + step)
        yield part.grad if type(part) is Dense else part.dense()


def _pull(derivation: Derivation, cotangents: Tensor) -> Sequence[Tensor]:
    """The gradients of the parents, (b, *shape) each; from the third time on they are those of a program."""
    kind, tensors = _kind(derivation), derivation.tensors()
    layout = kind, cotangents.shape, cotangents.stride(), cotangents.dtype
    program = _PROGRAMS.get(layout)
    if isinstance(program, Program) and tensors is not None:  # none of which was written to since
        value, *pulled = run_again(program, [*tensors, cotangents])
        _check_repeats(derivation, value)
        return pulled
    derivation = _as_read(derivation)

    def compute() -> list[Tensor]:
        (value,), pull = vector_jacobian(lambda *inputs: [derivation.compute(*inputs)], derivation.inputs)
        if not may_note:
            _check_repeats(derivation, value)
            drawn()
        return [value, *pull_each(pull, cotangents.to(value.dtype), kind)]  # (autocast is off by now)

    may_note = bool(BATCHES.get(kind)) and layout not in _PROGRAMS and _may_be_noted(derivation)
    if may_note or (kind is not None and kind not in BATCHES):  # the next time it may be a program
        not_now()
    with generators_kept([derivation.value], derivation.recipe.function) as drawn:
        if may_note:
            leaves = [derivation.leaves[place] for place in derivation.recipe.places]
            (value, *pulled), program = record(compute, [derivation.value, *leaves, cotangents], by_kernels=True)
            _check_repeats(derivation, value)
            if len(_PROGRAMS) >= _MOST:
                _PROGRAMS.clear()
            _PROGRAMS[layout] = program
        else:
            _, *pulled = compute()
        has_drawn = drawn()
    if has_drawn:
        raise UnsupportedError(
            f"{derivation.text} computes a weight, and draws random numbers in its backward; keep such an op away "
            "from the weights"
        )
    return pulled


def _may_be_noted(derivation: Derivation) -> bool:
    """Whether nothing but the arguments, none of which says where entries lie, decides what a derivation computes."""
    is_fixed = is_of_torch(derivation.recipe.function) and derivation.op not in _DRAWS
    leaves = (derivation.leaves[place] for place in derivation.recipe.places)
    return (
        is_fixed
        and derivation.random_state is None
        and all(leaf.is_floating_point() or leaf.dtype is torch.bool for leaf in leaves)
    )


def _kind(derivation: Derivation) -> Hashable | None:
    """The op of a derived weight with its arguments, tensors by layout and dtype; None where one cannot be compared."""
    kind: list[Any] = [derivation.recipe.function, derivation.recipe.spec, *derivation.parents, derivation.output]
    for leaf in derivation.leaves:
        kind.append(type(leaf))
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                return None
            kind += leaf.shape, leaf.stride(), leaf.dtype, leaf.device
        elif isinstance(leaf, slice):
            kind += leaf.start, leaf.stop, leaf.step
            if not {type(leaf.start), type(leaf.stop), type(leaf.step)} <= {int, type(None)}:
                return None
        elif type(leaf) in COMPARED or isinstance(leaf, _OF_LAYOUT):
            kind.append(repr(leaf) if isinstance(leaf, (float, complex)) else leaf)  # (-0.0 is another number than 0.0)
        else:
            return None
    return tuple(kind)


def _keep_structure(derivation: Derivation, gradient: SampleGradient, row_dots: RowDots | None) -> Contributions | None:
    """What the parents get where it need not be formed to be known."""
    parent, *others = derivation.parents.values()
    if derivation.value.is_complex() or parent.tensor.is_complex():
        return None
    if others or derivation.op in NORMALIZED:
        return _by_rows(derivation, gradient, row_dots) if derivation.op in NORMALIZED else None
    if derivation.op in _SAME_ENTRIES and parent.shape == gradient.shape:
        return [(parent, gradient)]
    factor = next((leaf for leaf in derivation.leaves if type(leaf) in (int, float)), None)
    if derivation.op == "mul" and factor is not None and parent.shape == gradient.shape:
        return [(parent, gradient.scaled(factor))]
    if derivation.op in _PERMUTES and len(parent.shape) == 2 and isinstance(gradient, Outer):
        moved = derivation.compute(torch.empty(2, 3, device="meta"))
        return [(parent, gradient if moved.shape == (2, 3) else Outer(gradient.right, gradient.left))]
    if derivation.op in _SHAPED and derivation.value.dtype == parent.tensor.dtype:
        known = _rows_of_a_sum(gradient)
        if known is not None:
            return [(parent, replace(known, size=parent.shape))]
        return [(parent, Dense(gradient.dense().reshape(gradient.batch_size, *parent.shape)))]
    return None


def _rows_of_a_sum(gradient: SampleGradient) -> Deflated | None:
    """A sum of products as rows of a weight of any shape, where it costs less not to form it."""
    if isinstance(gradient, Deflated):
        return gradient
    if not isinstance(gradient, (Outer, Patches)) or gradient.dtype.is_complex or gradient._is_formed():
        return None
    return Deflated(gradient, gradient.shape)


def _by_rows(derivation: Derivation, gradient: SampleGradient, row_dots: RowDots | None) -> Contributions | None:
    """What the parents get of batch or weight normalization of each row of a weight: the Jacobian projects rows."""
    # A row is xhat * scale + shift, where |xhat|^2 is n less what eps takes, or 1. Its dots with the gradients G are
    # asked of what the call gave, where autograd has kept the factor of xhat: then nothing reads the rows.
    if derivation.value.dtype not in _REPEATS:
        return None
    derivation, centred = _as_read(derivation), derivation.op == "batch_norm"
    args, kwargs = derivation.arguments()
    shift: Tensor | None = None
    if centred:
        rule = find_rule(derivation.recipe.function)
        named = {} if rule is None else rule.bind(args, kwargs) or {}
        if not named.get("training") or len(named["input"]) != 1:
            return None
        weight, scale, shift = named["input"], named.get("weight"), named.get("bias")
        count, eps = weight.shape[1], named.get("eps", _EPS)
    else:
        weight, scale, *dim = args
        if kwargs or dim != [0]:
            return None
        count, eps = len(weight), 0.0
    known = _rows_of_a_sum(gradient)
    is_formed = known is None and isinstance(gradient, (Dense, Outer, Patches)) and weight.numel()
    if is_formed and not gradient.dtype.is_complex:
        known = Deflated(Dense(gradient.dense().reshape(gradient.batch_size, count, -1)), gradient.shape)
    if known is None or known.removed is not None or known.source.shape[0] != count:
        return None
    source, n = known.source, weight.numel() // max(count, 1)
    size, sums = n if centred else 1, source._row_sums() if centred else None  # |xhat|^2, and those of each row of G
    factors = None if scale is None else scale.reshape(-1)
    kept, dots = derivation.kept if row_dots is not None else None, None
    if kept is not None:
        factor = kept.reshape(-1) if centred else kept.reshape(-1).reciprocal()
        by = factor if factors is None else factor * factors
        squares, shares = by.square(), factor.square()
        of_factor = shares
        lengths = torch.ones_like(by) if factors is None else factors.square()
        if centred:  # (a row that is nearly constant counts for a row of zeros)
            lengths = torch.sub(lengths, squares, alpha=eps * 1.00001)
        if shift is not None:
            lengths = torch.addcmul(lengths, shift, shift, value=-1.0 / MOST_SHIFT**2)
        dots, sure = row_dots(lengths, size * n)  # type: ignore[misc]
        if dots.shape[1] != count or not at_least(sure.amin(), torch.finfo(sure.dtype).tiny):
            dots = None
    read = partial(_read_rows, derivation, weight.reshape(count, n), factors, shift, centred, eps)
    if dots is not None:
        dots = dots if sums is None or shift is None else torch.addcmul(dots, sums, shift, value=-1)
        along, dots = dots.square(), dots if factors is None else dots / factors
        direction: Callable[[], Tensor] = lambda: read()[0]  # noqa: E731
    else:
        rows, factor = read()
        by = factor if factors is None else factor * factors
        squares, of_factor, direction = by.square(), factor.square(), lambda: rows
        shares = squares * size
        along = source._row_dots(rows)
        along, dots = along.square(), along * size**0.5
    removed = along @ torch.addcmul(shares, shares, of_factor, value=eps)  # (2 less the direction's own square norm)
    if sums is not None:
        removed = torch.addmv(removed, sums.square(), squares, beta=1 / size, alpha=1 / n)
    found: Contributions = []
    for place, parent in derivation.parents.items():
        leaf = derivation.leaves[place]
        if leaf is weight:
            scaled = source._by_row(by)
            found.append((parent, Deflated(scaled, parent.shape, removed, direction, centred)))
        else:
            dot = sums if sums is not None and leaf is shift else dots
            found.append((parent, Dense(dot.reshape(gradient.batch_size, *parent.shape))))
    return found


def _read_rows(
    derivation: Derivation, rows: Tensor, scale: Tensor | None, shift: Tensor | None, centred: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Each row of a weight (O, n) normalized to norm 1, but for eps, and its factor (O,), where it gives the weight."""
    length = rows.shape[1] ** 0.5 if centred else 1.0
    if centred:
        rows = rows - rows.mean(1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=1)
    factor = ((norm / length).square_() + eps).rsqrt_() if centred else norm.reciprocal()
    by = factor if scale is None else factor * scale
    recorded = _recorded(derivation).view(rows.shape)
    centre = recorded if shift is None else recorded - shift.unsqueeze(1)
    off = torch.linalg.vector_norm(torch.addcmul(centre, rows, by.unsqueeze(1), value=-1), dim=1)
    if not at_least((norm * by.abs() * _REPEATS[recorded.dtype] - off).amin(), 0.0):  # hardly ever
        _check_repeats(derivation, derivation.compute(*derivation.inputs))
    return rows * (factor / length).unsqueeze(1), factor


def _as_read(derivation: Derivation, *, parents_too: bool = True, for_value: bool = False) -> Derivation:
    """The derivation with the values that the call read: derived weights that were overwritten are computed again."""
    leaves = list(derivation.leaves)
    for place, (leaf, version) in enumerate(zip(leaves, derivation.versions, strict=True)):
        parent = derivation.parents.get(place)
        if not isinstance(leaf, Tensor) or version_of(leaf) == version or not (parents_too or parent is None):
            continue
        is_hidden = parent is not None and parent.hidden and not for_value
        if is_hidden and not derivation.recipe.inplace and _is_on_memory_of(leaf, derivation.value):
            continue  # a view, whose derivative reads no value
        if parent is None or parent.derivation is None or parent.hidden:
            raise OverwrittenError(
                f"{derivation.text} computes a weight from a tensor of shape {tuple(leaf.shape)} that was changed in "
                "place",
                leaf,
                " before the backward ended; change it afterwards, or change a copy of it",
            )
        made = _as_read(parent.derivation, for_value=True)
        with generators_kept([leaf], made.recipe.function):
            leaves[place] = made.compute(*made.inputs)
    return replace(derivation, leaves=tuple(leaves))


def _is_on_memory_of(tensor: Tensor, other: Tensor) -> bool:
    plain = tensor.layout is other.layout is torch.strided
    return plain and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _of_one_row(derivation: Derivation, gradient: Block) -> Derivation | None:
    """A pointwise computation of rows that are all equal, one for each sample, for one of the rows."""
    value, leaves, dim = derivation.value, list(derivation.leaves), gradient.dim
    has_rows = gradient.total == value.size(dim) and not derivation.recipe.inplace
    if derivation.op not in POINTWISE or not has_rows or version_of(value) != derivation.made:
        return None
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or (leaf.numel() == 1 and place not in derivation.parents):
            continue
        if leaf.shape != value.shape or not _is_of_one_row(leaf, dim):
            return None
        leaves[place] = leaf.narrow(dim, 0, 1)
    if not _is_of_one_row(value, dim):
        return None
    return replace(derivation, leaves=tuple(leaves), value=value.narrow(dim, 0, 1))


def _is_of_one_row(tensor: Tensor, dim: int) -> bool:
    return tensor.stride(dim) == 0 or has_equal_rows(tensor, dim)


def _recorded(derivation: Derivation) -> Tensor:
    """A derived weight as it was made; where it was overwritten, what is random differs between two repetitions."""
    if version_of(derivation.value) == derivation.made:
        return derivation.value
    return derivation.compute(*derivation.inputs)


def _check_repeats(derivation: Derivation, value: Tensor) -> None:
    recorded = _recorded(derivation)
    if value.shape == recorded.shape:
        if not recorded.numel() or not recorded.is_floating_point():
            return
        exact = _REPEATS.get(recorded.dtype, 1e-2)  # (autocast, under which a call may have run, is off by now)
        rows = [each.view(1, -1) if each.dim() < 2 else each for each in (value - recorded, recorded)]
        off, sizes = (torch.linalg.vector_norm(each.flatten(1), dim=1) for each in rows)
        if at_least(torch.sub(sizes * exact, off).amin(), 0.0):
            return
        if torch.equal(value, recorded) or agree(value, recorded, exact):  # there are entries that are not finite
            return
    raise UnsupportedError(
        f"{derivation.text} computes a weight, but gives another value when it is repeated: it is random, or its "
        "inputs or its result were changed in place before the backward; keep such an op away from the weights"
    )
