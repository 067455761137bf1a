"""What is decided of a call once, and replayed for the calls that are laid out alike; the hooks that report it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook

from lightning_persample.batch_axis.axis import BatchAxis, Lost
from lightning_persample.batch_axis.base import Followed, memory_of
from lightning_persample.batch_axis.losses import (
    LEAVES_OUT,
    READ_BY_SAMPLE,
    depends_on_targets,
    every_target_counts,
    unequal_targets,
)
from lightning_persample.batch_axis.observed import (
    Description,
    ObservedCall,
    is_own,
    place_of,
    tensors_in,
    user_place,
    version_of,
    without_data,
)
from lightning_persample.batch_axis.ops import LOSSES, POINTWISE
from lightning_persample.capture.annotations import DATA_SOURCES, Kind, Mark, data_of, kind_of
from lightning_persample.capture.collector import Collector
from lightning_persample.capture.contributions import (
    ByRule,
    Placement,
    Use,
    computation,
    mixing_text,
    not_tensors,
    placement_of,
)
from lightning_persample.capture.failure import attempt, guard, in_smaller_chunks, raise_again
from lightning_persample.capture.fused import FusedCall, FusedForm
from lightning_persample.capture.graph import (
    boundary,
    detached,
    gradient_reader,
    hooked_tensor,
    on_arrival,
    on_gradient,
)
from lightning_persample.capture.pull_back import COMPARED, NORMALIZED, OF_ROWS, Made
from lightning_persample.capture.weight import (
    Computation,
    Contributions,
    Derivation,
    Recipe,
    Weight,
    in_one_row,
)
from lightning_persample.errors import UnsupportedError, is_of_package
from lightning_persample.gradients import kernel_options, sq_norms_and_sum
from lightning_persample.gradients.host import ASYNCHRONOUS, on_its_way
from lightning_persample.gradients.patches import row_dots_of_output
from lightning_persample.gradients.precision import Later, without_autocast
from lightning_persample.gradients.program import Program, record
from lightning_persample.rules import Rule, op_name, rule_of
from lightning_persample.torch_internals import (
    any_autocast_is_on,
    backward_keeps_graph,
    is_view,
    is_wrapped_by_transform,
    saved_results,
    version_counter,
    view_base,
    without_torch_function,
)

_MOST = 4096  # plans that are kept; a model has some hundreds
_MOST_PROGRAMS = 32  # ways in which the tensors of calls of one plan lie in memory
_INDEXING = frozenset({Tensor.__getitem__})  # an index that is a tensor counts by its values
# In place of calls that read of their second tensor nothing but the shape.
_BY_SHAPE: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.reshape_as: Tensor.reshape,
    Tensor.view_as: Tensor.view,
    Tensor.expand_as: Tensor.expand,
}
_PLAIN = frozenset({Tensor, nn.Parameter})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_NESTED, _INTEGERS = (tuple, list, torch.Size), frozenset({int})
_STRIDED = torch.strided


def _has_no_shape(tensor: Tensor) -> bool:
    """Whether torch does not say of a tensor how its entries lie: it is nested, sparse or wrapped by a transform."""
    return tensor.layout is not _STRIDED or tensor.is_nested or is_wrapped_by_transform(tensor)


@dataclass(frozen=True, eq=False, slots=True)
class _Slots:
    """Where among the arguments of a call with weights its rule finds what it is given.

    Attributes:
        placement: what the rule is given, and where weights and batch are in it.
        names: of the tensors that are kept for it.
        values: the places of these among the tensors of the call, each with whether the rule reads its values, which
            must not change before the backward, and whether it holds the batch and only its layout counts.
        shapes_of: shape and dtype of the weights, by name, whose values it does not read, and which are not kept.
        owners: of those that are weights the name, and the place among the tensors of the call.
        others: the arguments that are no tensors, by name.
        has_lists: whether there are lists among these.
        op: its name in messages.
        shapes: of all tensors of the call.
        written: places of the tensors that the call writes to, such as running statistics.
        product: places of weight and shift, if any, of a convolution along axis 0, whose output tells dots with its
            weight; empty of any other call.
        programs: what computes norms and dots of calls like this one, by how tensors lie in memory; none are kept of
            rules of the user's, which may do what a program cannot.
    """

    placement: Placement
    names: tuple[str, ...]
    values: tuple[tuple[int, bool, bool], ...]
    shapes_of: Mapping[str, tuple[torch.Size, torch.dtype]]
    owners: tuple[tuple[str, int], ...]
    others: Mapping[str, Any]
    has_lists: bool
    op: str
    shapes: tuple[torch.Size, ...]
    written: tuple[int, ...]
    product: tuple[int, ...]
    programs: Programs | None


class TorchCall:
    """A torch call before it runs.

    Attributes:
        function: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        kind: what is known of the function.
        collector: whose marks are read.
        tensors: those among the arguments whose values the results are made of, in order.
        marks: the mark of each of them.
        signature: what its plan is kept under: the function, annotations, shapes and other arguments, and the options
            that count; None where something else, such as values, may decide, and there is no plan.
        writes: whether the call writes into a tensor that it is given.
        fused: where it has run fused, what its backward takes the sums over the samples from.
        stop: nodes of its tensors, at which a walk down from the output ends, where it writes over one of them.
    """

    __slots__ = (
        "args", "collector", "function", "fused", "kind", "kwargs", "marks", "signature", "stop", "tensors", "writes",
    )  # fmt: skip
    stop: set[Node]

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        kind: Kind,
        collector: Collector,
    ) -> None:
        if kind.inplace and not args and kwargs:  # the functions of torch.nn.init name their tensor
            first, *names = kwargs
            args, kwargs = (kwargs[first],), {name: kwargs[name] for name in names}
        by_shape = None if kind.by_layout or len(args) != 2 or kwargs else _BY_SHAPE.get(function)
        if by_shape is not None and _PLAIN.issuperset(map(type, args)) and not any(map(_has_no_shape, args)):
            function, args, kind = by_shape, (args[0], args[1].shape), kind_of(by_shape)
        self.function, self.args, self.kwargs, self.kind, self.collector = function, args, kwargs, kind, collector
        self.writes = kind.inplace or kind.moves or "out" in kwargs
        self.signature: Hashable | None = None
        self.fused: FusedCall | None = None
        marks = collector.marks
        if not kind.by_layout:
            self.tensors = data_of(kind.op, args, kwargs)
            self.marks = [marks.of_operand(tensor) for tensor in self.tensors]
            return
        tensors: list[Tensor] = []
        found: list[Mark | None] = []
        self.tensors, self.marks = tensors, found
        fuse = collector.fuse and (collector.keep_structures,)
        key: list[Hashable] = [function, collector.batch_size, fuse, torch.is_grad_enabled(), len(args), *kwargs]
        numbers = [] if kind.pointwise else key  # (of a pointwise op no number decides where the samples lie)
        is_key = "out" not in kwargs  # false where something among them may decide otherwise than by its layout
        with_weights, owner = False, None
        values: list[Any] = data_of(kind.op, args, kwargs) if kind.converts else [*args, *kwargs.values()]
        entries, place = marks.entries, 0
        while place < len(values):
            value = values[place]
            place += 1
            cls: type = type(value)
            key.append(cls)  # 1, 1.0 and True are equal, and not the same argument
            if cls is Tensor or cls is nn.Parameter:
                entry = entries.get(id(value))
                mark = entry[1] if entry is not None and entry[0]() is value else None
                if type(mark) is not BatchAxis and not (
                    type(mark) is Weight and mark.derivation is None and value.requires_grad
                ):
                    mark = marks.of_operand(value)
                tensors.append(value)
                found.append(mark)
                # Others than ordinary tensors are sparse, nested or wrapped by a torch.func transform.
                is_plain = value.layout is _STRIDED and not value.is_nested and not is_wrapped_by_transform(value)
                if not (is_key and is_plain):
                    is_key = False
                    continue
                dtype, shape = value.dtype, value.shape
                if type(mark) is BatchAxis:
                    is_mixed, ranked = mark.mixing is not None, None if mark.owner is None else mark.owner.ranked
                    key += (shape, dtype, value.requires_grad, mark.dim, mark.outer, mark.inner, is_mixed, ranked)
                    if ranked is not None:
                        is_key, owner = kind.pointwise and (owner is None or owner is mark.owner), mark.owner
                else:
                    is_weight = type(mark) is Weight
                    key += (shape, dtype, value.requires_grad, is_weight)
                    with_weights = with_weights or is_weight
                    is_variable = kind.pointwise and value.requires_grad and not is_weight  # see `note_variables`
                    is_key = type(mark) is not Lost and not is_variable
                if not (kind.pointwise or dtype.is_floating_point):  # integers may say which axis, or which size
                    may_be_index = type(mark) is not BatchAxis and dtype is not torch.bool and not dtype.is_complex
                    is_key = is_key and not may_be_index and value.numel() > 1
            elif cls in COMPARED:
                numbers.append(value or repr(value))  # (-0.0 is another number than 0.0)
                is_key = is_key and not (marks.numbers and value in marks.numbers)
            elif isinstance(value, (tuple, list)):
                is_key = is_key and cls in _NESTED
                if _INTEGERS.issuperset(map(type, value)):  # at once
                    key.append(_INTEGERS)
                    numbers.append(tuple(value))
                else:
                    values[place:place] = value
                key.append(len(value))
            elif cls is slice:
                bounds = value.start, value.stop, value.step
                is_key = is_key and COMPARED.issuperset(map(type, bounds))  # (a tensor in it is a number, no operand)
                key += (*map(type, bounds), *bounds) if is_key else ()
            else:
                is_key = False
                for tensor in tensors_in(value):
                    tensors.append(tensor)
                    found.append(marks.of_operand(tensor))
        if kind.pointwise and not with_weights:
            self.signature = tuple(key) if is_key else None
            return
        is_key = is_key and not kind.converts and (function not in _INDEXING or len(tensors) == 1)
        if is_key and (len(tensors) == 1 or len(set(map(id, tensors))) == len(tensors)):
            self.signature = tuple(key) if numbers is key else (*key, *numbers)


@dataclass(frozen=True, eq=False)
class Plan:
    """What was decided of a call, for all that have its signature.

    Attributes:
        rule: the op's rule when the plan was made.
        outputs: where the batch lies in each output.
        slots: where the rule finds weights and batch; None for a call without weights.
        mixes: whether the call computes with values of the whole batch, as its rule says.
        run: runs the call, where that is not the function itself.
        in_the_open: a composite function, to be run so that the calls in it are seen.
        is_sure: whether the signature has decided all; else `holds` is asked.
    """

    rule: Rule | None
    outputs: tuple[BatchAxis | Lost, ...]
    slots: _Slots | None
    mixes: bool = False
    run: ClassVar[Callable[..., Any] | None] = None
    in_the_open: ClassVar[Callable[..., Any] | None] = None
    is_sure: ClassVar[bool] = True

    def holds(self, call: TorchCall) -> bool:
        """Whether what was decided is so of this call, too."""
        return True

    def apply(self, call: TorchCall, result: Any) -> None:
        """Mark the outputs, and let the backward report what the weights among the arguments get."""
        # This runs at nearly every call, so that short functions (`Marks.__setitem__`, `boundary`) are written out.
        collector = call.collector
        if collector.last is not None:
            collector.last = self, id(result), call
        outputs = (result,) if type(result) is Tensor else (*tensors_in(result),)
        mixings, owner = [], None
        for mark in call.marks:
            if type(mark) is BatchAxis:
                owner = mark.owner
                if mark.mixing is not None:
                    mixings.append(mark.mixing)
        for output, axis in zip(outputs, self.outputs, strict=True):
            if type(axis) is BatchAxis and (mixings or owner is not None):
                axis = replace(axis, mixing=mixings[0] if mixings else None, owner=owner)
            collector.marks.entries[id(output)] = weakref.ref(output), axis
        if self.slots is None:
            return
        (output,) = outputs
        base, hooked, readers = view_base(output), output, _READERS
        if base is not None and base.requires_grad:  # see `hooked_tensor`
            hooked, readers = base, [gradient_reader(output, base)]
        report = PlannedReport(self.slots, output, readers, call)
        if self.mixes:
            mixings.insert(0, mixing_text(Description(*report.text)))
            collector.marks[output] = self.outputs[0].mixed(mixings[0])  # type: ignore[union-attr]
        for mixing in mixings if collector.batch_size > 1 else ():
            collector.notes.add("mixing", mixing, outputs)
        node, top = hooked.grad_fn, output.grad_fn
        if node is None or top is None:
            report.attach((hooked,))
            return
        report.place = hooked.output_nr
        node.register_prehook(report.contribute)
        if call.writes and call.kind.inplace:
            collector.nodes.watch_inside(outputs, call.stop)
            return
        stop = set()  # (last: no hook on the weights has to wait then) as `boundary`, without a call of a function
        for tensor in call.tensors:
            if tensor.grad_fn is not None:
                stop.add(tensor.grad_fn)
                if (base := view_base(tensor)) is not None and base.grad_fn is not None:
                    stop.add(base.grad_fn)
        collector.nodes.calls[node] = top, stop


@dataclass(frozen=True, eq=False)
class FusedPlan(Plan):
    """The same of a call whose backward forms the weight's gradient from those of the samples."""

    form: FusedForm = field(kw_only=True)
    is_sure: ClassVar[bool] = False

    def holds(self, call: TorchCall) -> bool:
        """Whether what was decided is so of this call, too."""
        return self.form.fits(call.tensors)

    def run(self, call: TorchCall) -> Tensor:
        """Run the call."""
        return run_fused(self.form, call)


def run_fused(form: FusedForm, call: TorchCall) -> Tensor:
    """Run a call so that its backward takes the sums that its report forms."""
    result, call.fused = form.run(call.tensors)
    return result


@dataclass(frozen=True, eq=False)
class InPlacePlan(Plan):
    """The same of a call that writes over its first argument, of which its rule is given a copy."""

    is_sure: ClassVar[bool] = False

    def holds(self, call: TorchCall) -> bool:
        """Whether what was decided is so of this call, too."""
        return view_base(call.tensors[0]) is None

    def run(self, call: TorchCall) -> Any:
        """Run the call."""
        call.stop = boundary(call.tensors)
        call.tensors[0] = call.tensors[0].detach().clone()
        return call.function(*call.args, **call.kwargs)


@dataclass(frozen=True, eq=False)
class LossPlan(Plan):
    """The same of a loss.

    Attributes:
        op: canonical op.
        place: the line of the user's on which it stands.
        name: of the op, where the values of its targets say how the samples weigh; "" where they do not.
    """

    op: object = field(kw_only=True)
    place: tuple[str, int] | None = field(kw_only=True)
    name: str = field(kw_only=True)
    is_sure: ClassVar[bool] = False

    def holds(self, call: TorchCall) -> bool:
        """Whether what was decided is so of this call, too."""
        if call.collector.compares_weights or self.place in READ_BY_SAMPLE or self.place != user_place():
            return False
        if self.name and call.tensors[1].device.type in ASYNCHRONOUS:
            return self.place not in LEAVES_OUT  # the values are on their way to the host when they are needed
        return not self.name or every_target_counts(self.op, call.args, call.kwargs)

    def apply(self, call: TorchCall, result: Any) -> None:
        """The same, and let the targets say, before there is a record, whether they weigh the samples unequally."""
        super().apply(call, result)
        (_, target), (_, axis), collector = call.tensors, call.marks, call.collector
        is_asked = self.name and collector.corrections is not None and collector.batch_size > 1
        if is_asked and isinstance(axis, BatchAxis) and target.device.type in ASYNCHRONOUS:
            text = unequal_targets(call.args, call.kwargs, axis, collector.batch_size, self.name)
            collector.notes.add_later("weighting", text, result)


@dataclass(frozen=True, eq=False)
class DerivedPlan(Plan):
    """The same of a call with weights alone, which makes derived weights.

    Attributes:
        recipe: how it makes them.
        order: the places of its tensors in the order in which the recipe has them; None where that is their own.
    """

    recipe: Recipe = field(kw_only=True)
    order: tuple[int, ...] | None = field(kw_only=True)

    def apply(self, call: TorchCall, result: Any) -> None:
        """Note how the outputs were computed."""
        collector, tensors, marks = call.collector, call.tensors, call.marks
        if collector.last is not None:
            collector.last = self, id(result), call
        if self.order is not None:
            tensors, marks = [tensors[place] for place in self.order], [marks[place] for place in self.order]
        outputs = (result,) if type(result) is Tensor else (*tensors_in(result),)
        collector.nodes.watch_inside(outputs, boundary(tensors))
        derive(self.recipe, tensors, marks, outputs, collector)


Programs: TypeAlias = dict[Hashable, Program | Literal["none"]]

PLANS: dict[Hashable, Plan] = {}
"""What was decided, by the signature of a call."""


def remember(call: ObservedCall, followed: Followed, use: Use | None) -> None:
    """Keep what was decided of a call as a plan, if its layout alone has decided it and no warning came of it."""
    rule, is_loss = rule_of(call.op), call.op in LOSSES
    if call.signature is None or followed.mixing is not None or followed.weighting is not None:
        return
    mixed = [operand for operand in call.operands if isinstance(operand.axis, BatchAxis) and operand.axis.mixing]
    if mixed and (is_loss or not all(operand.tensor.is_floating_point() for operand in mixed)):
        return
    mixing = mixed[0].axis.mixing if mixed else None  # type: ignore[union-attr]
    if is_loss and (use is not None or len(call.operands) != 2):  # (a third one holds weights)
        return
    if followed.by_values or (followed.entries is not None and not is_loss):
        return
    axes = tuple(axis for axis in followed.outputs if isinstance(axis, (BatchAxis, Lost) if is_loss else BatchAxis))
    if len(axes) != len(call.outputs):
        return
    owner = call.located[0][1].owner if call.located else None
    if any(axis.owner is not owner for _, axis in call.located):
        return
    if any(axis.owner is not owner or axis.mixing != mixing for axis in axes if isinstance(axis, BatchAxis)):
        return
    axes = tuple(
        replace(axis, mixing=None, owner=None)
        if isinstance(axis, BatchAxis)
        else replace(axis, shares=None, weights=None)
        for axis in axes
    )
    may_mix = rule is not None and rule.mixes_samples is not None
    if may_mix and (use is None or rule is None or not is_of_package(rule.function)):  # (another may look at values)
        return
    if call.inplace:
        before, after = call.operands[0].axis, followed.outputs[0]
        if not (isinstance(before, BatchAxis) and isinstance(after, BatchAxis)):
            return
        if use is not None and (call.op not in POINTWISE or is_view(call.outputs[0])):
            return
        if not after.is_same(before):  # (other tensors on its memory have other samples now, too)
            return
    elif call.written and not (may_mix and _are_of_no_sample(call)):
        return
    if use is not None:
        plain = use.rule is rule is not None and not (rule.several_outputs or rule.reads_output or rule.draws)
        if (
            not plain
            or owner is not None
            or len(axes) != 1
            or use.not_additive is not None
            or use.reason_against() is not None
        ):
            return
    slots = None
    if use is not None and rule is not None:
        tensors = [operand.tensor for operand in call.operands]
        slots = _slots_of(placement_of(use, rule), call.args, call.kwargs, tensors)
        if slots is None:
            return
        slots = replace(slots, written=tuple(n for n, tensor in enumerate(tensors) if id(tensor) in call.written))
    mixes = use is not None and use.mixing is not None and call.batch_size > 1
    if is_loss:
        name = call.name if depends_on_targets(call) else ""
        plan: Plan = LossPlan(rule, axes, slots, mixes, op=call.op, place=user_place(), name=name)
    elif call.fused is not None:
        plan = FusedPlan(rule, axes, slots, mixes, form=call.fused.form)
    elif call.inplace and slots is not None:
        plan = InPlacePlan(rule, axes, slots, mixes)
    else:
        plan = Plan(rule, axes, slots, mixes)
    _keep(call.signature, plan)


def _are_of_no_sample(call: ObservedCall) -> bool:
    """Whether what a call writes to holds neither samples nor is a weight: running statistics."""
    return all(
        operand.axis is None and not operand.tensor.requires_grad
        for operand in call.operands
        if id(operand.tensor) in call.written
    )


def remember_as(call: TorchCall, plan: Plan, inner: TorchCall) -> None:
    """Keep the plan of an inner call under the signature of the composite function around it."""
    rule, places = rule_of(call.kind.makes), {id(tensor): place for place, tensor in enumerate(call.tensors)}
    if any(id(tensor) not in places for tensor in inner.tensors):
        return
    order = tuple(places[id(tensor)] for tensor in inner.tensors)
    if isinstance(plan, DerivedPlan):
        of_recipe = order if plan.order is None else tuple(order[place] for place in plan.order)
        _keep(call.signature, replace(plan, rule=rule, order=of_recipe))
    elif plan.slots is None:  # (of several calls that compute entry by entry the last one says it of all)
        _keep(call.signature, replace(plan, rule=rule))
    elif not call.kind.pointwise:
        slots = _slots_of(plan.slots.placement, inner.args, inner.kwargs, call.tensors)
        if slots is not None:
            slots = replace(slots, written=tuple(order[place] for place in plan.slots.written))
            _keep(call.signature, replace(plan, slots=slots))


def remember_recipe(call: TorchCall, recipe: Recipe) -> None:
    """Keep how a call with weights alone makes derived ones, where all that are alike do so."""
    if recipe.is_kept:
        _keep(call.signature, DerivedPlan(rule_of(call.kind.makes), (), None, recipe=recipe, order=None))


def _keep(signature: Hashable, plan: Plan) -> None:
    if len(PLANS) >= _MOST:
        PLANS.clear()
    PLANS[signature] = plan


def _slots_of(
    placement: Placement, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> _Slots | None:
    """Where the rule finds what it is given; None where it has no names for the arguments."""
    given = placement.rule.bind(args, kwargs)
    if given is None or any(name not in given for name in placement.kept):
        return None
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    others = not_tensors(given)
    if next(tensors_in(list(others.values())), None) is not None:
        return None
    read, axes = placement.read, placement.axes
    own = is_of_package(placement.rule.function)
    unread = [name for name in placement.owners if own and name not in read and name not in axes]
    shapes_of = {name: (given[name].shape, given[name].dtype) for name in unread}
    names = tuple(name for name in placement.kept if name not in shapes_of)
    values = tuple((places[id(given[name])], name in read, name in axes and name not in read) for name in names)
    owners = tuple((name, places[id(given[name])]) for name in placement.kept if name in placement.weights)
    has_lists = any(isinstance(value, list) for value in others.values())
    shapes = tuple(tensor.shape for tensor in tensors)
    programs: Programs | None = {} if own else None
    op, (axis, *_) = op_name(placement.rule.op), placement.output_axes
    product = [given["weight"], given.get("bias")] if op in _CONVOLUTIONS and own and is_along_first(axis) else []
    numbers = tuple(places[id(tensor)] for tensor in product if tensor is not None)
    return _Slots(placement, names, values, shapes_of, owners, others, has_lists, op, shapes, (), numbers, programs)


def is_along_first(axis: BatchAxis) -> bool:
    """Whether row b of a tensor is sample b."""
    return axis.dim == 0 and axis.rows == 1 and axis.owner is None


def derive(
    recipe: Recipe,
    leaves: Sequence[Tensor],
    marks: Sequence[Mark | None],
    outputs: Sequence[Tensor],
    collector: Collector,
    random_state: Tensor | None = None,
) -> None:
    """Note how the outputs, but for those that are arguments, were computed from weights alone."""
    values: list[Any] = [*recipe.leaves]
    versions: list[int | None] = [None] * len(values)
    operands, names, outside = [], frozenset[str](), recipe.op in DATA_SOURCES
    parents: dict[int, Weight] = {}
    for place, leaf, mark in zip(recipe.places, leaves, marks, strict=True):
        values[place] = without_data(leaf) if mark is _NOT_READ else collector.keep(leaf)
        versions[place] = version_of(values[place])
        if type(mark) is Weight:
            parents[place] = mark
            names, outside = (names | mark.names if names else mark.names), outside or mark.outside
            operands.append(leaf if mark.hidden else mark.tensor)  # (where it is one row)
        elif mark is not _NOT_READ:
            outside = outside or not collector.marks.is_known(leaf)
            operands.append(leaf)
    where, given = user_place(), {*map(id, leaves)}
    if recipe.inplace and 0 in parents and can_be_made_again(parents[0]):
        versions[0] = None
    for position, output in enumerate(outputs):
        if not output.requires_grad or (id(output) in given and not recipe.inplace):
            continue
        laid, version = in_one_row(output, None if recipe.inplace else recipe.op, operands), version_of(output)
        value = collector.keep(laid)
        made = version if laid is output and collector.keep is Tensor.detach else version_of(value)
        derivation = Derivation(recipe, values, parents, position, value, made, where, versions, random_state)
        if recipe.op in NORMALIZED:
            axis, results = NORMALIZED[recipe.op]
            derivation.kept = saved_results(output, results, axis).get(results[0])
        weight = Weight(names, value, derivation, outside=outside, version=version)
        for parent in parents.values():
            parent.children += 1
        collector.weights.append(weight)
        collector.marks.entries[id(output)] = weakref.ref(output), weight
        if memory := memory_of(output):
            collector.marks.of_weights.add(memory)
        if output.grad_fn is not None:
            collector.nodes.watch(output.grad_fn, weight)


def marks_of(leaves: Iterable[Tensor], data: Iterable[Tensor], marks: Mapping[int, Mark | None]) -> list[Any]:
    """The mark of each leaf; `_NOT_READ` for one that is not among `data`: only its layout counts."""
    read = {*map(id, data)}
    return [marks.get(id(leaf)) if id(leaf) in read else _NOT_READ for leaf in leaves]


def can_be_made_again(mark: Mark | None) -> bool:
    """Whether the value of a derived weight is computed again where it is needed."""
    return isinstance(mark, Weight) and mark.derivation is not None and not mark.hidden


_NOT_READ: Any = object()  # in place of the mark of a tensor of which only the layout counts
_Asked: TypeAlias = Callable[[Computation], Sequence[Tensor]]
_READERS: list[Callable[[Tensor], Tensor]] = [detached]
_FREED = (
    "a second backward goes through it, but the first one was to free the graph; pass retain_graph=True to the first"
)


class Report:
    """Lets backward report what each sample contributes as soon as the gradients of a call's outputs are there.

    Args:
        collector: receives contributions, or the reason why there are none.
        readers: how to read the gradient of each output from that of the tensor that is hooked.
        weights: the weights among the call's operands.
        compute: gives the contributions.
        text: the call in messages, as the parts of a `Description`.
        keeps_values: whether `compute` holds what autograd holds, too, and lets go with it.

    Attributes:
        place: which of the gradients of a node is read, where its hook is called with all of them.
        fused: takes the sums over the samples, where the call's backward does not form them itself.
    """

    __slots__ = (
        "_collector", "_handle", "_keeps_values", "_needs", "_readers", "_text", "_weights", "fused", "place",
    )  # fmt: skip

    def __init__(
        self,
        collector: Collector,
        readers: Sequence[Callable[[Tensor], Tensor]],
        weights: list[Weight],
        compute: Computation,
        text: tuple[Any, ...],
        keeps_values: bool,
    ) -> None:
        self._collector, self._readers, self._weights, self._text = collector, readers, weights, text
        self._needs: Any = compute  # what contributions are computed from; None once it was let go
        self._keeps_values = keeps_values
        self.place: int | None = None
        self.fused: FusedCall | None = None

    @property
    def text(self) -> tuple[Any, ...]:
        """The call in messages, as given."""
        return self._text

    def attach(self, hooked: Sequence[Tensor]) -> None:
        """Wait for the gradients of the outputs, given the tensors whose hooks report them."""
        if len(hooked) > 1:
            self._handle = register_multi_grad_hook(hooked, guard(self._after_all, self.failed))
            self._collector.nodes.release_later(self._handle)
            return
        node = hooked[0].grad_fn
        if node is None:
            on_arrival(hooked[0], lambda grad: self.contribute((grad,)), self.failed)
        else:  # after all hooks of the user's that may change the gradient
            self.place = hooked[0].output_nr
            node.register_prehook(guard(self.contribute, self.failed))

    def _after_all(self, grads: Sequence[Tensor | None]) -> None:
        self.contribute(grads)
        if not backward_keeps_graph():
            self._handle.remove()  # it holds nodes that hold it, a circle that no collector sees

    def _computation(self) -> Computation:
        return self._needs or self._freed

    def _freed(self, grads: Sequence[Tensor | None]) -> Contributions:
        raise UnsupportedError(f"{Description(*self.text)}: {_FREED}")

    def contribute(self, grads: Sequence[Tensor | None]) -> None:
        """Note what the samples contribute."""
        collector, weights = self._collector, self._weights
        if self.place is not None:
            grads = (grads[self.place],)
            if grads[0] is None:
                return
        if not collector.accepting:
            return
        for weight in weights:
            if weight.reports:  # no hook on it has to wait for its gradient
                for name in weight.names:
                    collector.got_gradient[name] = None
        if collector.refused and all(weight.names <= collector.refused.keys() for weight in weights):
            if collector.frees:
                self._needs = None
            return
        options = collector.kernel_options
        with without_torch_function():
            is_apart = torch.is_grad_enabled() or any_autocast_is_on()  # in a backward that creates a graph, say
            if not is_apart and options.max_memory is None:
                self._collect(grads, self.fused)
                return
            # On CUDA this is another thread, in which no options are in force.
            kind = next(grad.device.type for grad in grads if grad is not None)
            fused = None if torch.is_grad_enabled() else self.fused
            with kernel_options(options), torch.no_grad(), without_autocast(kind):
                self._collect(grads, fused)

    def _collect(self, grads: Sequence[Tensor | None], fused: FusedCall | None) -> None:
        collector, compute = self._collector, self._computation()
        read = [None if g is None else reader(g) for g, reader in zip(grads, self._readers, strict=True)]
        sums = collector.collect(in_smaller_chunks(partial(compute, read)), fused is not None)
        if fused is not None:
            fused.put(grads[0], sums)
        if collector.kept:
            collector.note_call(self._weights, compute, read)
        if collector.frees and self._keeps_values:
            self._needs = None

    def failed(self, error: Exception) -> None:
        """Say why there are no contributions."""
        collector = self._collector
        reason = collector.why(error, Description(*self.text))
        for weight in self._weights:
            for name in weight.names:
                collector.got_gradient.setdefault(name, None)
        if isinstance(error, torch.OutOfMemoryError):  # the training needs all that this backward has gathered
            self._needs = None
            for weight in collector.weights:
                weight.forget()
            collector.refuse(collector.weights, reason)
        else:
            collector.refuse(self._weights, reason)


class PlannedReport(Report):
    """The same of a call whose plan was there: what is asked for is taken by a program of the plan, if there is one."""

    __slots__ = ("_owners", "_slots", "_where")

    def __init__(
        self,
        slots: _Slots,
        output: Tensor,
        readers: Sequence[Callable[[Tensor], Tensor]],
        call: TorchCall,
    ) -> None:
        placement, tensors, self.fused = slots.placement, call.tensors, call.fused
        self._slots, self._collector, self._readers, self.place = slots, call.collector, readers, None
        self._keeps_values = bool(placement.rule.reads)
        marks: Sequence[Any] = call.marks
        owners: dict[str, Weight] = {}
        for name, place in slots.owners:
            owners[name] = weight = marks[place]
            weight.uses += 1
        self._owners = owners
        self._weights = [*owners.values()] if len(owners) == 1 else [*dict.fromkeys(owners.values())]  # (see `adopt`)
        if self.fused is not None:
            self.fused.names = {weight: name for name, weight in owners.items()}
        written = {tensors[place].data_ptr() for place in slots.written} if slots.written else ()
        kept, versions = [], []
        # As `keep_value`, without a call. Data without a history stays as it is, as in autograd's own nodes.
        for place, is_read, is_laid in slots.values:
            tensor = tensors[place]
            if is_laid:
                tensor = without_data(tensor)
            elif tensor.requires_grad or not is_read or type(tensor) is not Tensor:
                tensor = tensor.detach()
            kept.append(tensor)
            if is_read and not (written and tensor.data_ptr() in written) and not tensor.is_inference():
                versions.append((tensor, version_counter(tensor)))
        product: Sequence[tuple[Tensor, object]] = ()
        made = marks[slots.product[0]] if slots.product else None
        if type(made) is Weight and made.derivation is not None and made.derivation.op in OF_ROWS:
            product = self._product(output, call)
        self._needs = kept, versions, saved_results(output, placement.saved) if placement.saved else {}, product
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_own(frame.f_code.co_filename):  # as `user_place`, without a call
            frame = frame.f_back
        self._where = None if frame is None else (frame.f_code, frame.f_lasti)

    @property
    def text(self) -> tuple[Any, ...]:
        """The call in messages, found when it is asked for."""
        names = [name for weight in self._owners.values() for name in weight.names]
        return self._slots.op, self._slots.shapes, None if self._where is None else place_of(*self._where), tuple(names)

    def _product(self, output: Tensor, call: TorchCall) -> list[tuple[Tensor, object]]:
        """Output and shift of a convolution by a weight made of a parameter's rows, and what was written to them."""
        place, *others = self._slots.product
        # Elsewhere than on a CPU a convolution may round more than the kernels here do.
        if output.dtype is not call.tensors[place].dtype or output.device.type != "cpu":
            return []
        return [(each.detach(), self._written(each)) for each in (output, *(call.tensors[place] for place in others))]

    def _written(self, tensor: Tensor) -> object:
        memory = tensor.untyped_storage().data_ptr()
        return version_of(tensor), self._collector.writes.get(memory)  # (no version counts what is written to `.data`)

    def _computation(self) -> Computation:
        if self._needs is None:
            return self._freed
        slots, (kept, versions, saved, _) = self._slots, self._needs
        tensors = dict(zip(slots.names, kept, strict=True))
        for name, (shape, dtype) in slots.shapes_of.items():
            one = torch.full((), torch.nan, dtype=dtype, device=self._owners[name].tensor.device)
            tensors[name] = one.expand(shape)
        others = not_tensors(slots.others) if slots.has_lists else slots.others  # (into a list a rule might write)
        return ByRule(slots.placement, tensors, others, self._owners, self.text, versions, saved)

    def contribute(self, grads: Sequence[Tensor | None]) -> None:
        """The same, by a program where there is one, and guarded."""
        collector, weights, programs, needs = self._collector, self._weights, self._slots.programs, self._needs
        grad, made, results = grads[self.place or 0], None, None
        dots_of: list[Tensor] = []
        try:
            with without_torch_function():
                if (
                    type(grad) is Tensor
                    and needs is not None
                    and programs is not None
                    and grad.layout is _STRIDED
                    and collector.accepting
                    and not (collector.refused and all(each.names <= collector.refused.keys() for each in weights))
                    and collector.samples is None
                    and not (torch.is_grad_enabled() or any_autocast_is_on())
                    and (collector.takes_at_once(weights) or (made := collector.made_for(weights)) is not None)
                ):
                    kept, versions, saved, product = needs
                    grad = grad.detach() if grad.requires_grad else grad
                    given, kind, are_unchanged = (*kept, *saved.values(), grad), None, True
                    if made is not None:
                        of_weights = made.tensors()
                        if (
                            product
                            and not collector.vectors
                            and "product" not in programs
                            and all(self._written(each) == then for each, then in product)
                            and not made.reads_memory_of(collector.writes)
                        ):
                            dots_of = [tensor for tensor, _ in product]
                        are_unchanged, given = of_weights is not None, (*given, *(of_weights or ()), *dots_of)
                        kind = made.kind, len(dots_of)
                    for tensor, version in versions:
                        are_unchanged = are_unchanged and version_counter(tensor) == version
                    limit, is_fused = collector.kernel_options.max_memory, self.fused is not None
                    targets = weights if made is None else made.parameters
                    vectors = collector.vectors_of(targets) if collector.vectors else ()
                    given, asked = (*given, *vectors), (is_fused, collector.takes_norms, len(vectors))
                    key = (*asked, limit, grad.dtype, grad.device, kind, *map(Tensor.stride, given))
                    program = programs.get(key) if are_unchanged else "none"
                    compute = partial(self._asked, grad, made, dots_of, vectors)
                    try:
                        if program is None:
                            results = self._record(key, given, compute)
                        elif program != "none":
                            results, checks = program.run(given)
                            if checks:
                                results = self._checked(results, checks, given, compute, targets)
                        if dots_of and (results is None or key not in programs):  # the shift is large, say
                            programs["product"] = "none"
                    except torch.OutOfMemoryError:  # smaller chunks take less
                        results = None
                    except UnsupportedError:  # how weights are made: the reason is found where each is pulled back
                        if made is None:
                            raise
                        results = None
                if results is None:
                    super().contribute(grads)
                    return
                for weight in weights:
                    if weight.reports:  # as in `Report.contribute`
                        for name in weight.names:
                            collector.got_gradient[name] = None
                if collector.vectors:
                    collector.take(targets, results)
                else:
                    for weight, sq_norm in zip(targets, results, strict=False):  # as `take`, without a call
                        weight.taken = sq_norm, None
                if self.fused is not None:
                    self.fused.put(grad, zip(targets, results[len(targets) :], strict=True))
                if collector.frees and self._keeps_values:
                    self._needs = None  # autograd lets its saved tensors go now, too
                return
        except Exception as error:  # not by `guard`, which takes another call
            failure = error
        try:
            attempt(raise_again, self.failed, failure)
        finally:
            del failure  # its traceback holds this frame

    def _record(self, key: Hashable, given: tuple[Tensor, ...], asked: _Asked) -> Sequence[Tensor]:
        """What `_asked` gives, and the program that gives it for tensors laid out alike."""
        programs = self._slots.programs
        results, recorded = record(partial(asked, self._computation()), given)
        if programs is not None and recorded != "not now":
            if len(programs) >= _MOST_PROGRAMS:
                programs.clear()
            programs[key] = recorded
        return results

    def _checked(
        self,
        results: Sequence[Tensor],
        checks: Sequence[tuple[Tensor, float]],
        given: tuple[Tensor, ...],
        asked: _Asked,
        targets: Sequence[Weight],
    ) -> Sequence[Tensor] | None:
        """What a program gave, where rounding errors do not show in it; None, or corrected later, where they do."""
        if checks[0][0].device.type not in ASYNCHRONOUS:
            for number, least in checks:
                if not float(number) >= least:
                    return None
            return results
        kept, versions, *_ = self._needs
        later = Later([*(tensor for tensor, _ in versions), *given[len(kept) :]])
        numbers = [(on_its_way(number), least) for number, least in checks]
        later.corrections.append(partial(_correct, later, numbers, results, partial(asked, self._computation())))
        self._collector.correct_later([*targets], later)
        return results

    def _asked(
        self,
        grad: Tensor,
        made: Made | None,
        dots_of: Sequence[Tensor],
        vectors: Sequence[Tensor],
        compute: Computation,
    ) -> list[Tensor]:
        """What is asked for of each weight, or parameter that it is made of, and the sums if these are taken."""
        with kernel_options(self._collector.kernel_options):
            contributions = compute((self._readers[0](grad),))
            row_dots = None
            if dots_of:
                output, *shift = dots_of
                inputs = self._needs[0][self._slots.names.index("input")]
                bias = self._owners.get("bias")
                of_bias = next((each.tensors()[0] for weight, each in contributions if weight is bias), None)
                row_dots = partial(row_dots_of_output, grad, output, inputs, shift[0] if shift else None, of_bias)
            gradients = [each for _, each in contributions] if made is None else made.pulled(contributions, row_dots)
            if self.fused is None:
                return self._collector.asked(gradients, vectors)
            squares, sums = zip(*map(sq_norms_and_sum, gradients), strict=True)
            return [*squares, *sums]


def _correct(
    later: Later,
    checks: Sequence[tuple[Callable[[], Tensor], float]],
    results: Sequence[Tensor],
    compute: Callable[[], Sequence[Tensor]],
) -> None:
    """Compute norms in another way where rounding errors may show in those of a program."""
    if not all(float(number()) >= least for number, least in checks):
        later.check()
        for result, right in zip(results, compute(), strict=True):
            result.copy_(right)


def attach(use: Use, collector: Collector) -> None:
    """Hook the gradients of the call's outputs, so that backward reports what each sample contributes."""
    weights = list(dict.fromkeys(use.weights.values()))
    reason = use.reason_against()
    if reason is not None:
        refuse_where_used(use.call.outputs, weights, reason, collector)
        return
    outputs = [output for output, _ in use.outputs]
    hooked = [hooked_tensor(output) for output in outputs]
    readers = [gradient_reader(output, base) for output, base in zip(outputs, hooked, strict=True)]
    keeps_values = use.rule is None or bool(use.rule.reads)
    report = Report(collector, readers, weights, computation(use), use.description, keeps_values)
    fused = use.call.fused
    if fused is not None and use.rule is not None:
        fused.names = {use.weights[id(each)]: name for name, each in use.arguments.items() if id(each) in use.weights}
        report.fused = fused
    report.attach(hooked)
    writes = use.call.inplace or bool(use.call.written)
    if use.rule is not None and len(outputs) == len(use.call.outputs) == 1 and not writes:
        node, top = hooked[0].grad_fn, outputs[0].grad_fn
        if node is not None and top is not None:
            collector.nodes.calls[node] = top, boundary(operand.tensor for operand in use.call.operands)


def refuse_where_used(outputs: Iterable[Tensor], weights: list[Weight], reason: str, collector: Collector) -> None:
    """Refuse the weights of a call as soon as a gradient reaches one of its outputs."""
    _once_reached(outputs, partial(collector.refuse, weights, reason), collector)


def note_term(call: ObservedCall, weights: Collection[Weight], collector: Collector) -> None:
    """Note, once a gradient reaches a call that adds a term of no sample, whose it is; where samples mix, refuse it."""
    names, text = frozenset[str]().union(*(weight.names for weight in weights)), call.describe()
    mixings: dict[str, None] = {}
    collector.terms.update({output.grad_fn: mixings for output in call.outputs if output.grad_fn is not None})

    def act() -> None:
        mixing = collector.notes.mixing_of(mixings)
        if mixing is None:
            collector.penalized.update(names)
        else:
            collector.refuse(list(weights), f"{text}: {mixing}")

    _once_reached(call.outputs, act, collector)


def _once_reached(outputs: Iterable[Tensor], act: Callable[[], None], collector: Collector) -> None:
    def hook(grad: Tensor) -> None:
        if collector.accepting:
            act()

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook, collector.fail)
