"""What is decided of a call once, and replayed for the calls that are laid out alike; the hooks that report it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_persample.batch_axis.axis import BatchAxis, Lost
from lightning_persample.batch_axis.base import Followed
from lightning_persample.batch_axis.losses import (
    LEAVES_OUT,
    READ_BY_SAMPLE,
    depends_on_targets,
    every_target_counts,
    target_of,
    unequal_targets,
)
from lightning_persample.batch_axis.observed import (
    Description,
    ObservedCall,
    OwnBackward,
    is_own,
    tensors_in,
    user_place,
    without_data,
)
from lightning_persample.batch_axis.ops import LOSSES
from lightning_persample.capture.annotations import Mark, Marks
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
from lightning_persample.capture.failure import attempt, guard, in_smaller_chunks, is_of_package, raise_again
from lightning_persample.capture.graph import (
    boundary,
    detached,
    gradient_reader,
    hooked_tensor,
    on_arrival,
    on_gradient,
)
from lightning_persample.capture.pull_back import COMPARED, Made
from lightning_persample.capture.weight import Computation, Contributions, Recipe, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import kernel_options, sq_norms, sq_norms_and_sum
from lightning_persample.gradients.host import ASYNCHRONOUS, on_its_way
from lightning_persample.gradients.precision import Later, without_autocast
from lightning_persample.gradients.program import Program, record
from lightning_persample.rules import Rule, op_name, rule_of
from lightning_persample.torch_internals import (
    any_autocast_is_on,
    backward_keeps_graph,
    is_wrapped_by_transform,
    saved_results,
    version_counter,
    view_base,
    without_torch_function,
)

_MOST = 4096  # plans that are kept; a model has some hundreds
_MOST_PROGRAMS = 32  # ways in which the tensors of calls of one plan lie in memory
_INDEXING = frozenset({Tensor.__getitem__})  # an index that is a tensor counts by its values
_NESTED = (tuple, list, torch.Size)
_STRIDED = torch.strided


@dataclass(frozen=True, eq=False, slots=True)
class _Slots:
    """Where among the arguments of a call with weights its rule finds what it is given.

    Attributes:
        placement: what the rule is given, and where weights and batch are in it.
        names: of the tensors that are kept for it.
        values: the places of these among the tensors of the call, each with whether it is written down how often it was
            written to, and whether it is laid over the batch and not read.
        shapes_of: shape and dtype of the weights, by name, whose values it does not read, and which are not kept.
        owners: of those that are weights the name, and the place among the tensors of the call.
        others: the arguments that are no tensors, by name.
        has_lists: whether there are lists among these.
        op: its name in messages.
        shapes: of all tensors of the call.
        written: places of the tensors that the call writes to, such as running statistics.
        programs: what computes the norms of calls like this one, by how their tensors lie in memory; none are kept of
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
    programs: Programs | None


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What is known of a call before it runs.

    Attributes:
        rule: the op's rule when the plan was made.
        outputs: where the batch lies in each output.
        slots: where the rule finds weights and batch; None for a call without weights.
        mixes: whether the call computes with values of the whole batch, as its rule says.
        loss: the op, where it is a loss; None for any other call.
        place: the line of the user's on which that stands.
        name: of the op, where the values of its targets say how the samples weigh; "" for any other call.
        recipe: of a call with weights alone.
    """

    rule: Rule | None
    outputs: tuple[BatchAxis | Lost, ...]
    slots: _Slots | None
    mixes: bool = False
    loss: object | None = None
    place: tuple[str, int] | None = None
    name: str = ""
    recipe: Recipe | None = None

    def holds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether what was decided of a loss is so of this one, too."""
        if self.place in READ_BY_SAMPLE or self.place != user_place():
            return False
        if not self.name:
            return True
        target = target_of(args, kwargs)
        if target.device.type in ASYNCHRONOUS:  # its values are on their way to the host when they are needed
            return self.place not in LEAVES_OUT
        return every_target_counts(self.loss, args, kwargs)


Sums: TypeAlias = list[tuple[Weight, Tensor]]
Programs: TypeAlias = dict[Hashable, Program | Literal["none"]]

PLANS: dict[Hashable, Plan] = {}
"""What was decided, by the key of `read_call`."""


def read_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], marks: Marks, batch_size: int
) -> tuple[list[Tensor], list[Mark | None], Hashable | None]:
    """The tensors among the arguments with their marks, and the key under which what is decided may be remembered."""
    tensors: list[Tensor] = []
    found: list[Mark | None] = []
    key: list[Hashable] = [function, batch_size, torch.is_grad_enabled(), len(args)]
    is_key = "out" not in kwargs  # false where something among them may decide otherwise than by its layout
    values = [*args]
    for name, value in kwargs.items():
        values += (name, value)
    entries, place = marks.entries, 0
    while place < len(values):
        value = values[place]
        place += 1
        kind: type = type(value)
        key.append(kind)  # 1, 1.0 and True are equal, and not the same argument
        if kind is Tensor or kind is nn.Parameter:
            entry = entries.get(id(value))
            mark = entry[1] if entry is not None and entry[0]() is value else None
            is_parameter = type(mark) is Weight and mark.derivation is None and value.requires_grad
            if type(mark) is not BatchAxis and not is_parameter:
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
                is_key = mark.owner is None
                is_mixed = mark.mixing is not None
                key += (shape, dtype, value.requires_grad, mark.dim, mark.outer, mark.inner, is_mixed)
            else:
                is_key = not isinstance(mark, Lost)
                key += (shape, dtype, value.requires_grad, isinstance(mark, Weight))
            if not dtype.is_floating_point:  # can it stand for neither an axis nor a size?
                may_be_index = type(mark) is not BatchAxis and dtype is not torch.bool and not dtype.is_complex
                is_key = is_key and not may_be_index and value.numel() > 1
        elif kind in COMPARED:
            key.append(value or repr(value))  # (-0.0 is another number than 0.0)
        elif isinstance(value, (tuple, list)):
            key.append(len(value))
            values[place:place] = value
            is_key = is_key and kind in _NESTED
        elif kind is slice:
            bounds = value.start, value.stop, value.step
            is_key = is_key and COMPARED.issuperset(map(type, bounds))  # (a tensor in it is a number, and no operand)
            key += (*map(type, bounds), *bounds) if is_key else ()
        else:
            is_key = False
            for tensor in tensors_in(value):
                tensors.append(tensor)
                found.append(marks.of_operand(tensor))
    if not is_key or (len(tensors) > 1 and (function in _INDEXING or len(set(map(id, tensors))) < len(tensors))):
        return tensors, found, None
    return tensors, found, tuple(key)


def read_targets(
    plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor, collector: Collector
) -> None:
    """Let the targets of a loss say, before there is a record, whether they weigh the samples unequally."""
    target = target_of(args, kwargs)
    axis = collector.marks.of_operand(target)
    if isinstance(axis, BatchAxis) and target.device.type in ASYNCHRONOUS and collector.batch_size > 1:
        text = unequal_targets(args, kwargs, axis, collector.batch_size, plan.name)
        collector.notes.add_later("weighting", text, output)


def remember(call: ObservedCall, followed: Followed, use: Use | None) -> None:
    """Keep what was decided of a call, where its layout alone has decided it and there was nothing to say of it."""
    rule, is_loss = rule_of(call.op), call.op in LOSSES
    if call.layout is None or followed.mixing is not None or followed.weighting is not None:
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
    axes = tuple(replace(axis, shares=None, weights=None) if isinstance(axis, Lost) else axis for axis in axes)
    if any(axis.owner is not None or axis.mixing != mixing for axis in axes if isinstance(axis, BatchAxis)):
        return
    axes = tuple(axis.mixed(None) if isinstance(axis, BatchAxis) else axis for axis in axes)
    may_mix = rule is not None and rule.mixes_samples is not None
    if may_mix and (use is None or rule is None or not is_of_package(rule.function)):  # (another may look at values)
        return
    if call.written and not (may_mix and not call.inplace and _are_of_no_sample(call)):
        return
    if use is not None:
        plain = use.rule is rule is not None and not (rule.several_outputs or rule.reads_output or rule.draws)
        if not plain or len(axes) != 1 or use.not_additive is not None or use.reason_against() is not None:
            return
    slots = None
    if use is not None and rule is not None:
        tensors = [operand.tensor for operand in call.operands]
        slots = _slots_of(placement_of(use, rule), call.args, call.kwargs, tensors)
        if slots is None:
            return
        slots = replace(slots, written=tuple(n for n, tensor in enumerate(tensors) if id(tensor) in call.written))
    mixes = use is not None and use.mixing is not None and call.batch_size > 1
    name = call.name if is_loss and depends_on_targets(call) else ""
    keep_plan(call.layout, Plan(rule, axes, slots, mixes, *((call.op, user_place(), name) if is_loss else ())))


def _are_of_no_sample(call: ObservedCall) -> bool:
    """Whether what a call writes to holds neither samples nor is a weight: running statistics."""
    return all(
        operand.axis is None and not operand.tensor.requires_grad
        for operand in call.operands
        if id(operand.tensor) in call.written
    )


def remember_as(
    layout: Hashable, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> None:
    """Keep a plan under the key of a function that makes the call alone that the plan is of."""
    if plan.slots is not None:
        if plan.slots.written:
            return
        slots = _slots_of(plan.slots.placement, args, kwargs, tensors)
        if slots is None:
            return
        plan = replace(plan, slots=slots)
    keep_plan(layout, plan)


def keep_plan(layout: Hashable, plan: Plan) -> None:
    """Keep what was decided of a call."""
    if len(PLANS) >= _MOST:
        PLANS.clear()
    PLANS[layout] = plan


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
    op = op_name(placement.rule.op)
    return _Slots(placement, names, values, shapes_of, owners, others, has_lists, op, shapes, (), programs)


def replay(
    plan: Plan,
    result: Any,
    tensors: Sequence[Tensor],
    marks: Sequence[Mark | None],
    fused: OwnBackward | None,
    collector: Collector,
) -> None:
    """Mark the outputs, and let the backward report what the weights among the arguments get."""
    entries, outputs = collector.marks.entries, (result,) if type(result) is Tensor else result
    if type(outputs) is not tuple:
        outputs = tuple(tensors_in(outputs))
    mixings = []
    for mark in marks:
        if type(mark) is BatchAxis and mark.mixing is not None:
            mixings.append(mark.mixing)
    for output, axis in zip(outputs, plan.outputs, strict=True):
        if mixings and type(axis) is BatchAxis:
            axis = axis.mixed(mixings[0])
        entries[id(output)] = weakref.ref(output), axis
    slots = plan.slots
    if slots is None:
        return
    (output,) = outputs
    base, hooked, readers = view_base(output), output, _READERS
    if base is not None and base.requires_grad:  # see `hooked_tensor`
        hooked, readers = base, [gradient_reader(output, base)]
    report = PlannedReport(slots, output, readers, tensors, marks, collector)
    if plan.mixes:
        mixings.insert(0, mixing_text(Description(*report.text)))
        collector.marks[output] = plan.outputs[0].mixed(mixings[0])  # type: ignore[union-attr]
    for mixing in mixings if collector.batch_size > 1 else ():
        collector.notes.add("mixing", mixing, outputs)
    node, top = hooked.grad_fn, output.grad_fn
    if fused is not None:
        report_sums(report, {marks[place]: name for name, place in slots.owners}, fused)  # type: ignore[misc]
    elif node is None:
        report.attach((hooked,))
    else:
        report.place = hooked.output_nr
        node.register_prehook(report.contribute)
    if node is not None and top is not None:  # (last: no hook on the weights has to wait then)
        stop = set()  # as `boundary`, without a call of a Python function
        for tensor in tensors:
            if tensor.grad_fn is not None:
                stop.add(tensor.grad_fn)
                if (base := view_base(tensor)) is not None and base.grad_fn is not None:
                    stop.add(base.grad_fn)
        collector.nodes.calls[node] = top, stop


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
        text: as given.
        place: which of the gradients of a node is read, where its hook is called with all of them.
    """

    __slots__ = ("_collector", "_handle", "_keeps_values", "_needs", "_readers", "_weights", "place", "text")

    def __init__(
        self,
        collector: Collector,
        readers: Sequence[Callable[[Tensor], Tensor]],
        weights: list[Weight],
        compute: Computation,
        text: tuple[Any, ...],
        keeps_values: bool,
    ) -> None:
        self._collector, self._readers, self._weights, self.text = collector, readers, weights, text
        self._needs: Any = compute  # what contributions are computed from; None once it was let go
        self._keeps_values = keeps_values
        self.place: int | None = None

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

    def contribute(self, grads: Sequence[Tensor | None], wants_sums: bool = False) -> Sums | None:
        """Note what the samples contribute; -> the sums over the samples that were wanted and formed, if any."""
        collector, weights = self._collector, self._weights
        if self.place is not None:
            grads = (grads[self.place],)
            if grads[0] is None:
                return None
        if not collector.accepting:
            return None
        for weight in weights:
            if weight.reports:  # no hook on it has to wait for its gradient
                for name in weight.names:
                    collector.got_gradient[name] = None
        if collector.refused and all(weight.names <= collector.refused.keys() for weight in weights):
            if collector.frees:
                self._needs = None
            return None
        options = collector.kernel_options
        with without_torch_function():
            is_apart = torch.is_grad_enabled() or any_autocast_is_on()  # in a backward that creates a graph, say
            if not is_apart and options.max_memory is None:
                return self._collect(grads, wants_sums) or None
            # On CUDA this is another thread, in which no options are in force.
            kind = next(grad.device.type for grad in grads if grad is not None)
            with kernel_options(options), torch.no_grad(), without_autocast(kind):
                return self._collect(grads, wants_sums) or None

    def _collect(self, grads: Sequence[Tensor | None], wants_sums: bool) -> Sums:
        collector, compute = self._collector, self._computation()
        read = [None if g is None else reader(g) for g, reader in zip(grads, self._readers, strict=True)]
        sums = collector.collect(in_smaller_chunks(partial(compute, read)), wants_sums)
        if collector.kept:
            collector.note_call(self._weights, compute, read)
        if collector.frees and self._keeps_values:
            self._needs = None
        return sums

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
    """The same of a call whose plan was there: its norms are taken by a program of the plan, where there is one."""

    __slots__ = ("_owners", "_slots")

    def __init__(
        self,
        slots: _Slots,
        output: Tensor,
        readers: Sequence[Callable[[Tensor], Tensor]],
        tensors: Sequence[Tensor],
        marks: Sequence[Mark | None],
        collector: Collector,
    ) -> None:
        placement = slots.placement
        self._slots, self._collector, self._readers, self.place = slots, collector, readers, None
        self._keeps_values = bool(placement.rule.reads)
        self._owners: dict[str, Weight] = {}
        names: list[str] = []
        for name, place in slots.owners:
            weight: Any = marks[place]
            self._owners[name] = weight
            names += weight.names
            weight.uses += 1
        self._weights = [*self._owners.values()]
        if len(names) > 1:
            self._weights = list(dict.fromkeys(self._weights))  # (a sharded one may come in two tensors)
        written = {tensors[place].data_ptr() for place in slots.written} if slots.written else ()
        kept, versions = [], []
        for place, is_read, is_laid in slots.values:  # as `keep_value`, without a call
            tensor = without_data(tensors[place]) if is_laid else tensors[place].detach()
            kept.append(tensor)
            if is_read and not (written and tensor.data_ptr() in written) and not tensor.is_inference():
                versions.append((tensor, version_counter(tensor)))
        self._needs = kept, versions, saved_results(output, placement.saved) if placement.saved else {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_own(frame.f_code.co_filename):  # as `user_place`, without a call
            frame = frame.f_back
        user = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self.text = slots.op, slots.shapes, user, tuple(names)

    def _computation(self) -> Computation:
        if self._needs is None:
            return self._freed
        slots, (kept, versions, saved) = self._slots, self._needs
        tensors = dict(zip(slots.names, kept, strict=True))
        for name, (shape, dtype) in slots.shapes_of.items():
            one = torch.full((), torch.nan, dtype=dtype, device=self._owners[name].tensor.device)
            tensors[name] = one.expand(shape)
        others = not_tensors(slots.others) if slots.has_lists else slots.others  # (into a list a rule might write)
        return ByRule(slots.placement, tensors, others, self._owners, self.text, versions, saved)

    def contribute(self, grads: Sequence[Tensor | None], wants_sums: bool = False) -> Sums | None:
        """The same, guarded."""
        try:
            with without_torch_function():
                collector, weights, programs = self._collector, self._weights, self._slots.programs
                grad, needs, results = grads[self.place or 0], self._needs, None
                made: Made | None = None
                if (
                    type(grad) is Tensor
                    and needs is not None
                    and programs is not None
                    and grad.layout is _STRIDED
                    and collector.accepting
                    and not (collector.refused and all(each.names <= collector.refused.keys() for each in weights))
                    and collector.samples is None
                    and not (torch.is_grad_enabled() or any_autocast_is_on())
                    and (collector.takes_norms_of(weights) or (made := collector.made_for(weights)) is not None)
                ):
                    kept, versions, saved = needs
                    if grad.requires_grad:
                        grad = grad.detach()
                    given, kind = (*kept, *saved.values(), grad), None
                    are_unchanged = True
                    if made is not None:
                        of_weights, kind = made.tensors(), made.kind
                        are_unchanged, given = of_weights is not None, (*given, *(of_weights or ()))
                    limit = collector.kernel_options.max_memory
                    key = (wants_sums, limit, grad.dtype, grad.device, kind, *map(Tensor.stride, given))
                    for tensor, version in versions:
                        are_unchanged = are_unchanged and version_counter(tensor) == version
                    program = programs.get(key) if are_unchanged else "none"
                    try:
                        if program is None:
                            results = self._record(key, given, grad, wants_sums, made)
                        elif program != "none":
                            results, checks = program.run(given)
                            if checks:
                                results = self._checked(results, checks, given, grad, wants_sums, made)
                    except torch.OutOfMemoryError:  # smaller chunks take less
                        results = None
                    except UnsupportedError:  # how weights are made: the reason is found where each is pulled back
                        if made is None:
                            raise
                        results = None
                if results is None:
                    return super().contribute(grads, wants_sums)
                for weight in weights:
                    if weight.reports:  # as in `Report.contribute`
                        for name in weight.names:
                            collector.got_gradient[name] = None
                targets = weights if made is None else made.parameters
                for weight, sq_norm in zip(targets, results, strict=False):
                    weight.sq_norm = sq_norm
                if collector.frees and self._keeps_values:
                    self._needs = None  # autograd lets its saved tensors go now, too
                return [*zip(targets, results[len(targets) :], strict=False)] or None
        except Exception as error:  # not by `guard`, which takes another call
            failure = error
        try:
            return attempt(raise_again, self.failed, failure)
        finally:
            del failure  # its traceback holds this frame

    def _record(
        self, key: Hashable, given: tuple[Tensor, ...], grad: Tensor, wants_sums: bool, made: Made | None
    ) -> Sequence[Tensor]:
        """The squared norms (B,) for each weight, or parameter that it is made of, and the sums that are wanted."""
        programs = self._slots.programs
        compute = partial(self._compute_norms, self._computation(), grad, wants_sums, made)
        results, recorded = record(compute, given)
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
        grad: Tensor,
        wants_sums: bool,
        made: Made | None,
    ) -> Sequence[Tensor] | None:
        """What a program gave, where rounding errors do not show in it; None, or corrected later, where they do."""
        if grad.device.type not in ASYNCHRONOUS:
            for number, least in checks:
                if not float(number) >= least:
                    return None
            return results
        kept, versions, _ = self._needs
        later = Later([*(tensor for tensor, _ in versions), *given[len(kept) :]])
        numbers = [(on_its_way(number), least) for number, least in checks]
        compute = partial(self._compute_norms, self._computation(), grad, wants_sums, made)
        later.corrections.append(partial(_correct, later, numbers, results, compute))
        self._collector.correct_later(self._weights if made is None else made.parameters, later)
        return results

    def _compute_norms(self, compute: Computation, grad: Tensor, wants_sums: bool, made: Made | None) -> list[Tensor]:
        """What a program is made of."""
        with kernel_options(self._collector.kernel_options):
            contributions = compute((self._readers[0](grad),))
            gradients = [each for _, each in contributions] if made is None else made.pulled(contributions)
            if not wants_sums:
                return sq_norms(gradients)
            squares, sums = zip(*map(sq_norms_and_sum, gradients), strict=True)
            return [*squares, *sums]


def _correct(
    later: Later,
    checks: Sequence[tuple[Callable[[], Tensor], float]],
    results: Sequence[Tensor],
    compute: Callable[[], list[Tensor]],
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
    names = {use.weights[id(value)]: name for name, value in use.arguments.items() if id(value) in use.weights}
    if use.call.fused is None:
        report.attach(hooked)
    else:
        report_sums(report, names, use.call.fused)
    writes = use.call.inplace or bool(use.call.written)
    if use.rule is not None and len(outputs) == len(use.call.outputs) == 1 and not writes:
        node, top = hooked[0].grad_fn, outputs[0].grad_fn
        if node is not None and top is not None:
            collector.nodes.calls[node] = top, boundary(operand.tensor for operand in use.call.operands)


def report_sums(report: Report, names: Mapping[Weight, str], fused: OwnBackward) -> None:
    """Let the backward of a call that runs fused report, and take the sums that this forms."""

    def sums_by_name(grad: Tensor, wanted: bool) -> dict[str, Tensor]:
        return {names[weight]: total for weight, total in report.contribute((grad,), wanted and bool(names)) or ()}

    def none(error: Exception) -> dict[str, Tensor]:
        report.failed(error)
        return {}

    fused.sums = guard(sums_by_name, none)


def refuse_where_used(outputs: Iterable[Tensor], weights: list[Weight], reason: str, collector: Collector) -> None:
    """Refuse the weights of a call as soon as a gradient reaches one of its outputs."""
    _once_reached(outputs, partial(collector.refuse, weights, reason), collector)


def note_term(outputs: Iterable[Tensor], names: frozenset[str], collector: Collector) -> None:
    """Note, once a gradient reaches a call that adds a term of no sample to the loss, whose gradient has it."""
    _once_reached(outputs, partial(collector.penalized.update, names), collector)


def _once_reached(outputs: Iterable[Tensor], act: Callable[[], None], collector: Collector) -> None:
    def hook(grad: Tensor) -> None:
        if collector.accepting:
            act()

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook, collector.fail)
