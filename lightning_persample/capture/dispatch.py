"""What happens at each torch call: follow the batch, derive weights, attach the hooks that collect contributions.

`Dispatcher.call` is the way in. A call that has a plan (see `plan`) applies it. For any other `_decide` gives a
`_Decision`, for this call alone: which method notes the call after it has run. For one with samples that is
`_note_observed`, which goes by `_note` to `_with_batch`; there the batch is followed, the weights get their hooks, and
the plan for the next calls is kept.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from lightning_persample.batch_axis.added_up import UNKNOWN, scaled
from lightning_persample.batch_axis.after_reduction import COPIES, copied
from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner, row_owners
from lightning_persample.batch_axis.base import PROPAGATION_RULES, has_equal_rows, is_plain, memory_of
from lightning_persample.batch_axis.follow import follow
from lightning_persample.batch_axis.jagged import on_rows
from lightning_persample.batch_axis.observed import (
    ObservedCall,
    Operand,
    has_history,
    operands_of,
    tensors_in,
    user_line,
    user_place,
    version_of,
)
from lightning_persample.batch_axis.ops import OPS, having
from lightning_persample.batch_axis.sample_weights import why_others
from lightning_persample.capture.annotations import (
    CONSTANT,
    DATA_SOURCES,
    KINDS,
    KNOWN,
    REWRITTEN,
    Constant,
    Mark,
    adds_a_term,
    in_parts,
    kind_of,
)
from lightning_persample.capture.collector import Collector, Means, Part
from lightning_persample.capture.contributions import Use
from lightning_persample.capture.failure import guard
from lightning_persample.capture.fused import fused_form
from lightning_persample.capture.graph import (
    REENTRANT,
    Takers,
    boundary,
    nodes_below,
    on_arrival,
    on_gradient,
    reaches,
    unseen_text,
)
from lightning_persample.capture.observing import Answer, ObservingMode, decomposed
from lightning_persample.capture.plan import (
    PLANS,
    Plan,
    TorchCall,
    attach,
    can_be_made_again,
    derive,
    marks_of,
    note_term,
    refuse_where_used,
    remember,
    remember_as,
    remember_recipe,
    run_fused,
)
from lightning_persample.capture.record import outside_text
from lightning_persample.capture.transforms import (
    Inside,
    common_place,
    first_of_all,
    from_right,
    hidden_axes,
    innermost,
    innermost_axis,
    inside,
)
from lightning_persample.capture.weight import Weight, base_of, part_of, places_in, recipe_of, with_part
from lightning_persample.rules import rule_of
from lightning_persample.torch_internals import (
    innermost_transform,
    is_view,
    is_wrapped_by_transform,
    tree_map_only,
    view_base,
)

_OF_NO_SAMPLE = {type(None), Constant}
_OF_SAMPLES = {BatchAxis, Lost}
_TAKEN_APART = {"broadcast_tensors", "index_select"}  # see `in_parts` and `_is_of_copies`
_requires_grad = attrgetter("requires_grad")
_TENSORS = {Tensor, nn.Parameter}
_INDEXES, _SHAPES = having("indexes"), having("shapes")  # ops that read a number as `int` gives it
_OF_TANGENTS = {"_make_dual", "_unpack_dual"}  # what torch.func.jvp calls: each result is laid out as what it is given
_NOT_RUN, _RUNNING = object(), object()  # in place of the result of a call


class _Decision(NamedTuple):
    """What to do at one call, in place of a `Plan`, which is for all that are alike."""

    apply: Callable[[TorchCall, Any], None]
    run: Callable[[TorchCall], Any] | None = None
    in_the_open: Callable[..., Any] | None = None


class _Before(NamedTuple):
    """What was to be known of a call before it ran.

    Attributes:
        stop: nodes of its tensors, at which a walk down from the outputs ends; empty where it has no weight.
        args: positional arguments, the first a copy where it is written to and needed as it was.
        versions: how often each of its tensors was written to.
        random_state: state of the generator, where random numbers have to be drawn again.
    """

    stop: set[Node]
    args: tuple[Any, ...]
    versions: list[int]
    random_state: Tensor | None


class Dispatcher(Collector):
    """The state of one capture and the one place where a torch call changes it; it takes what a `Collector` takes.

    Attributes:
        of_no_sample: the present backward starts from numbers made of weights alone: a penalty.
        differentiated: where in the user's code a gradient was computed with ``create_graph=True``; "" where none was.
        part: which samples the loss of the present backward is made of; None where it is all of them, or unknown.
        is_scripted: whether the parameter of this name is in a TorchScript module.
        has_loaders: the batch holds the samples of several loaders, one after another.
        means: of what the loss of the present backward is a sum, where it is one of the means of several loaders.
        other_weights: how declared weights differ from those in the loss of the present backward; "" where they fit.
        owners: the samples of rows in tensors of the batch that have unequal numbers of them.
        padded: the numbers of rows of tensors that have room for more than the samples have.
        visible: the mode under which calls are seen.
        others: functions that somebody else answers, and who.
    """

    visible: ObservingMode
    others: Mapping[Callable[..., Any], Answer] = {}

    owners: tuple[Owner, ...] = ()
    padded: frozenset[int] = frozenset()
    part: Part | None = None
    has_loaders = False
    is_scripted: Callable[[str], bool] = staticmethod(lambda name: False)
    other_weights = ""
    means: Means | None = None
    of_no_sample = False
    differentiated = ""

    def mark_batch(self, tensor: Tensor, mark: BatchAxis | Lost) -> None:
        """Declare where the batch lies in a tensor of the batch."""
        if isinstance(mark, BatchAxis) and mark.owner is not None:
            known = next((owner for owner in self.owners if owner.same(mark.owner)), None)
            if known is None:
                self.owners = (*self.owners, mark.owner)
            else:  # what is found of one owner is found for all tensors that have it
                mark = replace(mark, owner=known)
        self.marks.entries[id(tensor)] = weakref.ref(tensor), mark

    def known_rows(self, count: int) -> list[Tensor]:
        """The sample of each of so many rows as tensors have that there are, but for those with room for more."""
        found: list[Tensor] = []
        for reference, mark in list(self.marks.entries.values()) if count not in self.padded else ():
            tensor = reference() if type(mark) is BatchAxis else None
            if tensor is None or not isinstance(mark, BatchAxis) or mark.rows * mark.entries(self.batch_size) != count:
                continue
            if mark.owner is not None or mark.rows > 1:
                found.append(row_owners(mark, self.batch_size))
        return found

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run ``torch.autograd.grad`` in the middle of a step, and note where the samples lie in what it gives."""
        with self.not_counting():
            gradients = function(*args, **kwargs)
        guard(self._note_gradients, self.fail)(gradients, args, kwargs)
        return gradients

    def _note_gradients(self, gradients: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        asked = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | dict(kwargs)
        outputs, inputs = ([*tensors_in((asked.get(name),))] for name in ("outputs", "inputs"))
        mixing = None
        for output, start in zip(outputs, tensors_in((asked.get("grad_outputs"),)), strict=False):
            mark, given = self.marks.of_operand(output), self.marks.of_operand(start)
            if start.requires_grad and isinstance(mark, BatchAxis) and type(given) in _OF_NO_SAMPLE:
                self.marks[start] = mark  # (a vector to be differentiated by, one row for each of the output)
            hidden = hidden_axes(output) or hidden_axes(start)
            if (
                isinstance(mark, BatchAxis)
                and isinstance(given, BatchAxis)
                and not hidden
                and not mark.same_place(given)
            ):
                mixing = f"`grad` is given other samples as `grad_outputs` than it differentiates{user_line()}"
        self.mark_gradients(gradients, outputs, inputs, mixing)

    def mark_gradients(
        self,
        found: Iterable[Tensor | None],
        outputs: list[Tensor],
        inputs: Sequence[Tensor],
        mixing: str | None = None,
    ) -> None:
        """A gradient computed in the step lies where its input lies; of what is no sample's, of the whole batch."""
        of_outputs = [self.marks.of_operand(output) for output in outputs]
        of_batch = any(isinstance(known, (BatchAxis, Lost)) for known in of_outputs)
        for known in of_outputs:
            if isinstance(known, Lost) and (known.crossed or known.noted):
                mixing = mixing or known.reason
        for tensor, gradient in zip(inputs, found, strict=False):
            if gradient is not None and gradient.requires_grad:
                self.differentiated = self.differentiated or user_line()
            mark = self.marks.of_operand(tensor)
            if gradient is None or (not of_batch and (mark is None or isinstance(mark, Constant))):
                continue
            # A sum over the samples, so that a function of it that is not linear mixes them.
            whole = Lost("it is a gradient of the whole batch, computed in the step", reduced=of_batch)
            of_weights = isinstance(mark, Weight) and not of_batch  # by whom `find_unseen` finds what it hides
            if isinstance(mark, BatchAxis) and is_wrapped_by_transform(gradient):
                mark = innermost_axis(gradient, inside(tensor, mark))
            known = mark.mixed(mark.mixing or mixing) if isinstance(mark, BatchAxis) else whole
            self.marks.set_innermost(gradient, CONSTANT if of_weights else known)

    def start_backward(self, losses: list[Tensor]) -> None:
        """Take note of what backward starts from."""
        self._note_function(losses)
        if self.nodes.padded:
            takers = Takers(losses)
            for node, padding in self.nodes.padded.items():
                self.notes.start_backward(padding, node, takers)
        if self.excuses:
            excused = (note for note, stop in self.excuses.items() if not reaches(losses, self.noted[note], stop))
            self.notes.excused = frozenset(excused)
        self.of_no_sample = bool(losses)
        for loss in losses:
            mark = self.marks.get(loss)
            if not isinstance(mark, Weight):
                self.of_no_sample = False
                self._read_part(mark)
                continue
            self.penalized |= mark.names
            if mark.outside:
                self.of_no_sample = False
                self.refuse([mark], self.outside())

    def _note_function(self, tensors: Iterable[Tensor]) -> None:
        """Note what the calls in a custom autograd function did to the samples, which ran without gradient."""
        for tensor in tensors:
            mark, node = self.marks.get(tensor), tensor.grad_fn
            if not isinstance(mark, Lost) or not mark.crossed or mark.noted or not isinstance(node, BackwardCFunction):
                continue
            self.marks[tensor] = replace(mark, notes=mark.notes | {("mixing", mark.reason)})
            if self.batch_size > 1 and node.name() != REENTRANT:  # (which runs again, with gradient)
                self.notes.add("mixing", mark.reason, (tensor,))

    def outside(self) -> str:
        """Why a weight has no values whose gradient no tensor of the batch has a part in."""
        return outside_text(self.marks.made)

    def is_by_sample(self, loss: Tensor) -> bool:
        """Whether a loss (B,) has one entry for each sample, in order."""
        mark = self.marks.get(loss)
        return isinstance(mark, BatchAxis) and mark.owner is None and mark.mixing is None

    def check_reduction(self, losses: list[Tensor], weights: list[Tensor | None], declared: object) -> None:
        """Note a loss that is a sum over the samples, times a number, where a mean was declared, or the reverse."""
        if isinstance(declared, Tensor):
            self._compare_weights(losses, weights, declared)
        if isinstance(declared, Tensor) or self.batch_size == 1:
            return
        for loss, weight in zip(losses, weights, strict=True):
            size, mark = self.batch_size, self.marks.get(loss)
            self._read_part(mark)
            self.means = (
                self._read_means(loss) if self.has_loaders and declared == "mean" and len(losses) == 1 else None
            )
            if self.means is not None:
                continue
            if isinstance(mark, BatchAxis) and mark.mixing is None and mark.owner is None:  # (of no one number)
                parts, counts = frozenset({1}), frozenset({loss.numel() // size})
                if weight is None or not bool((weight == weight.flatten()[0]).all()):
                    continue
            elif isinstance(mark, Lost) and mark.parts and (mark.alone is None or size in mark.parts - {1}):
                size, parts, counts = len(mark.samples) or size, mark.parts, mark.counts
            else:
                continue
            if weight is not None and weight.numel():
                factor = float(weight.flatten()[0])
                parts = scaled(parts, [factor], size, self.batch_size, counts, divides=True)
            kind = "sum" if max(parts) == 1 else "mean"
            if declared != kind and not (declared == "sum" and {1, UNKNOWN} <= parts):
                self.notes.add_of_loss(
                    f"the loss is a {kind} over the samples, but loss_reduction is {declared!r}: pass "
                    f"loss_reduction={kind!r}"
                )

    def _compare_weights(self, losses: list[Tensor], factors: list[Tensor | None], declared: Tensor) -> None:
        """Note declared weights of the samples that are not those in the loss, where these are known."""
        if not self.compares_weights or self.batch_size == 1 or len(losses) != 1 or factors != [None]:
            return
        mark = self.marks.get(losses[0])
        if isinstance(mark, Lost) and mark.weights is not None:
            self.other_weights = why_others(mark.weights, declared) or ""

    def _read_means(self, loss: Tensor) -> Means | None:
        """What each sample weighs in a loss that is the sum of means of several loaders, each times a number."""
        mark = self.marks.get(loss)
        if not isinstance(mark, Lost) or not mark.terms:
            return None
        if all(len(samples) == 1 and self.batch_size in parts for samples, parts, _ in mark.terms):
            self.notes.add_of_loss(
                "each data loader gave one row, so that the loss may be the mean over these rows as well as their sum "
                "times a number: give the weight of each sample in the loss as loss_reduction"
            )
            return None
        weights = torch.zeros(self.batch_size, dtype=torch.float64, device=loss.device)
        for samples, parts, _ in mark.terms:
            if len(samples) not in parts:
                return None
            weights[sorted(samples)] = 1 / len(samples)
        return Means(weights, mark.notes)

    def _read_part(self, mark: Mark | None) -> None:
        """Note that a loss is made of some of the samples alone, where that is known."""
        if isinstance(mark, Lost) and 0 < len(mark.samples) < self.batch_size:
            size = len(mark.samples)
            sizes = (self.batch_size, size) if size == 1 else (size, self.batch_size)  # (1 is the sum of one, too)
            mean_of = next((n for n in sizes if n in mark.parts), 1 if size == 1 else 0)
            self.part = Part(tuple(sorted(mark.samples)), mean_of, is_sum=1 in mark.parts)

    def forget_backward(self) -> None:
        """Drop what a backward left, also one that was broken off."""
        for weight in self.weights:
            if weight.received or weight.arrived is not None or weight.calls or weight.contributions:
                weight.forget()
            weight.taken = None
        self.refused.clear()
        self.penalized.clear()
        self.dtypes.clear()
        self.got_gradient = {}
        self.notes.forget()
        if self.corrections:
            self.corrections.clear()
        self.part = self.means = None
        self.other_weights = ""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch call and take note of it, as was decided of all that are alike, or else of this one."""
        other = self.others.get(function)
        if other is not None:
            return other(function, args, kwargs)
        result: Any = _NOT_RUN
        try:
            kind = KINDS.get(function) or kind_of(function)
            if kind.is_unnoted:
                result = _RUNNING
                return function(*args, **kwargs)
            if kind.composite and not kind.by_layout:
                in_the_open = decomposed(function)
                result = _RUNNING
                with self.visible:
                    return in_the_open(*args, **kwargs)
            call = TorchCall(function, args, kwargs, kind, self)
            known = PLANS.get(call.signature)
            if known is not None and known.rule is rule_of(kind.makes) and (known.is_sure or known.holds(call)):
                plan: Plan | _Decision = known
            else:
                plan = self._decide(call)
            if plan.run is not None:  # (if it fails, the call runs as it is written)
                result = plan.run(call)
            elif plan.in_the_open is None:
                result = _RUNNING
                result = call.function(*call.args, **call.kwargs)
            else:
                result = _RUNNING
                with self.visible:
                    result = plan.in_the_open(*call.args, **call.kwargs)
            if call.writes:
                self._note_write(call)
            plan.apply(call, result)
            return result
        except Exception as error:  # not by `guard`, which costs more than some calls
            if result is _RUNNING:  # what the user's call raises is the user's
                raise
            failure = error
        guard(self.fail_at, self.fail)(failure, function)
        del failure  # its traceback holds this frame
        return function(*args, **kwargs) if result is _NOT_RUN else result

    def _decide(self, call: TorchCall) -> _Decision:
        """What to do at a call that has no plan."""
        kind = call.kind
        if kind.op is None:
            return self._decide_of_memory(call)
        if kind.composite:
            self.last = ()  # (another's result may be gone, and its id be given again)
            return _Decision(self._note_open, in_the_open=decomposed(call.function))
        kinds = set(map(type, call.marks))
        if Lost in kinds:
            call.marks = [self._mark_of(tensor) for tensor in call.tensors]
            kinds = set(map(type, call.marks))
        if kinds <= _OF_NO_SAMPLE:
            return _Decision(self._note_constant)
        if kinds & _OF_SAMPLES and innermost_transform() is not None and _is_inside(kind.op, call.tensors):
            call.marks = [self.marks.of_inside(tensor) for tensor in call.tensors]
            return _Decision(self._note_inside)
        if not _TENSORS.issuperset(map(type, call.tensors)) and any(map(is_lazy, call.tensors)):
            return _Decision(_note_nothing)
        if kind.op in COPIES and len(call.marks) == 1 and self._plain_sum(call.tensors[0], call.marks[0]):
            return _Decision(self._note_copied)
        if kind.pointwise and BatchAxis in kinds and not call.writes:
            self.marks.note_variables(call.tensors, call.marks)
        return self._decide_with(call, kinds)

    def _decide_of_memory(self, call: TorchCall) -> _Decision:
        """The same of one that gives no tensor to follow: hooks, weak references, and what moves a tensor's memory."""
        if call.function is weakref.getweakrefs:
            self.marks.note_swapped(call.args[0])
            return _Decision(_note_nothing)
        if call.function is Tensor.register_hook:
            return _Decision(self._note_hook)
        return _Decision(partial(self._note_moved, self.marks.alias(call.args[0])))

    def _decide_with(self, call: TorchCall, kinds: set[type]) -> _Decision:
        """The same of one with weights or samples; `kinds` are the types of its marks."""
        op, args, tensors, with_samples = call.kind.op, call.args, call.tensors, bool(kinds & _OF_SAMPLES)
        with_weights = Weight in kinds and torch.is_grad_enabled()
        rule = rule_of(op) if with_weights else None
        draws = with_weights and (op in DATA_SOURCES or (rule is not None and rule.draws is not None))
        random_state = torch.get_rng_state() if draws else None
        if with_weights and not (with_samples or call.writes or op in _TAKEN_APART):
            return _Decision(partial(self._note_derived, random_state))
        if with_weights and call.kind.inplace:  # (what weights alone make is computed again where it is needed)
            replayed = args[0] is tensors[0] and can_be_made_again(call.marks[0]) and not with_samples
            args = (args[0].detach() if replayed else args[0].detach().clone(), *args[1:])
        versions = [*map(version_of, tensors)]
        arguments, form = rule.bind(args, call.kwargs) if self.fuse and rule is not None else None, None
        if arguments is not None:
            form = fused_form(op, arguments, tensors, call.marks, self.batch_size, self.keep_structures)
        stop = boundary(tensors) if with_weights else set()
        note = partial(self._note_observed, _Before(stop, args, versions, random_state))
        return _Decision(note, None if form is None else partial(run_fused, form))

    def _note_open(self, call: TorchCall, result: Any) -> None:
        """Keep the plan of the one call inside a composite function as that of the function, too."""
        inner, self.last = self.last, None
        if call.signature is not None and inner and inner[1] == id(result):
            remember_as(call, inner[0], inner[2])

    def _note_moved(self, alias: Tensor | None, call: TorchCall, result: Any) -> None:
        """A tensor lies elsewhere now; `alias`, which lives until here, shows the samples in its former memory."""
        has_source = not call.function.__name__.startswith("resize")
        source = (call.args[1] if len(call.args) > 1 else call.kwargs.get("source")) if has_source else None
        self.marks.note_moved(call.args[0], source)

    def _note_constant(self, call: TorchCall, result: Any) -> None:
        self.marks.note_constant(call.kind.op, call.tensors, result)
        for value in (*call.args, *call.kwargs.values()) if self.marks.has_left else ():
            number = self.marks.returned(value)
            if number is not None and isinstance(result, Tensor):
                self.marks.set_result(result, replace(number.axis, parts=frozenset(), shares=None, weights=None))

    def _note_copied(self, call: TorchCall, result: Tensor) -> None:
        """A number that is a sum over the samples was copied, as at every step where the loss is logged."""
        (mark,) = call.marks
        self._note_function(call.tensors)
        self.marks.set_result(result, copied(mark, result))  # type: ignore[arg-type]

    def _plain_sum(self, number: object, mark: Mark | None) -> Lost | None:
        """The mark of one number that is a sum over the samples, of which nothing further is known; else None."""
        is_number = type(number) is Tensor and not number.dim() and not self.compares_weights
        return mark if is_number and isinstance(mark, Lost) and mark.is_plain_sum else None

    def copying(self, number: object) -> Answer | None:
        """What answers calls that copy a plain sum and do nothing else; None where the number is none."""
        mark = self._plain_sum(number, self.marks.get(number) if isinstance(number, Tensor) else None)
        if mark is None:
            return None
        cut = mark if mark.crossed else replace(mark, crossed=True)
        note = guard(self.marks.__setitem__, self.fail)

        def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = function(*args, **kwargs)
            if type(result) is Tensor and not (args and result is args[0]):
                note(result, mark if result.requires_grad else cut)
            return result

        return answer

    def _note_derived(self, random_state: Tensor | None, call: TorchCall, result: Any) -> None:
        """A call on weights and numbers alone makes derived weights."""
        outputs = (result,) if type(result) is Tensor else (*tensors_in(result),)
        if not any(map(_requires_grad, outputs)):
            self.marks.note_constant(call.kind.op, call.tensors, _outputs_of(call, result))
            return
        is_kept = call.signature is not None and random_state is None
        recipe, leaves = recipe_of(call.kind.op, call.function, (call.args, dict(call.kwargs)), is_kept=is_kept)
        marks = {id(tensor): mark for tensor, mark in zip(call.tensors, call.marks, strict=True)}
        remember_recipe(call, recipe)
        self.nodes.watch_inside(outputs, boundary(call.tensors))
        derive(recipe, leaves, marks_of(leaves, call.tensors, marks), outputs, self, random_state)

    def _note_observed(self, before: _Before, call: TorchCall, result: Any) -> None:
        """A call with samples, or that writes: follow the batch through it, and attach what its weights contribute."""
        op, function, args, kwargs = call.kind.op, call.function, before.args, call.kwargs
        outputs, marked = _outputs_of(call, result), list(zip(call.tensors, call.marks, strict=True))
        if not outputs:
            for tensor, mark in marked[:1]:
                self.marks.note_left(result, tensor, mark)
            return
        kinds = set(map(type, call.marks))
        if op == "index_select" and BatchAxis not in kinds and _is_of_copies(args, kwargs, marked, outputs[0]):
            op, function, args, kwargs, marked = "clone", torch.clone, (call.tensors[0],), {}, marked[:1]
        replaced = {id(tensor) for tensor in tensors_in(kwargs.get("out"))}
        counted = op in _INDEXES and bool(kinds & {BatchAxis, Weight})
        operands, involved = [], {}
        for tensor, mark in marked:
            is_entry = counted and _is_entry(tensor, mark)
            is_shape = op in _SHAPES and tensor is not call.tensors[0]
            place = None if is_entry or is_shape else _place_of(tensor, mark, replaced, BatchAxis in kinds)
            operand = Operand(args[0] if call.kind.inplace and tensor is call.args[0] else tensor, place)
            operands.append(operand)
            if isinstance(mark, Weight):
                involved[id(operand.tensor)] = mark
        if self.marks.has_left:
            args, kwargs = self._with_returned(call, args, kwargs, operands)
        changed = (t for t, version in zip(call.tensors, before.versions, strict=True) if version_of(t) != version)
        observed = ObservedCall(
            op, function, args, kwargs, tuple(operands), outputs, self.batch_size, call.kind.inplace,
            frozenset(map(id, changed)), before.random_state, call.fused, call.signature, self.owners, self.known_rows,
            self.marks.row_sums, self.compares_weights,
            frozenset(id(tensor) for tensor, mark in marked if mark is CONSTANT),
        )  # fmt: skip
        has_gradient = torch.is_grad_enabled() and any(map(_requires_grad, outputs))
        live = involved if has_gradient else {}
        for part in in_parts(observed):
            own = live if part is observed else {key: live[key] for key in map(id, part.args) if key in live}
            self._note(part, own, before.stop)

    def _with_returned(
        self, call: TorchCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[Operand]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments with the tensors that numbers of samples were before they left torch, added to the operands."""

        def tensor_of(value: Any) -> Any:
            found = None
            if call.kind.pointwise:
                found = self.marks.returned(value)
            elif call.kind.op == "getitem" and type(value) is int:
                found = self.marks.place_of(value)
            if found is None:
                return value
            operands.append(Operand(*found))
            return found.tensor

        return tuple(map(tensor_of, args)), {name: tensor_of(value) for name, value in kwargs.items()}

    def _note_inside(self, seen: TorchCall, result: Any) -> None:
        """Mark what a call inside torch.vmap or torch.func made of the samples, under the tensors that wrap it."""
        kind, with_weight, operands = seen.kind, False, []
        for tensor, mark in zip(seen.tensors, seen.marks, strict=True):
            with_weight |= isinstance(mark, Weight)
            operands.append(Operand(tensor, mark if isinstance(mark, (BatchAxis, Lost)) else None))
        outputs = (*tensors_in(seen.args[0] if result is None else result),)
        call = ObservedCall(
            kind.op, seen.function, seen.args, seen.kwargs, tuple(operands), outputs, self.batch_size, kind.inplace,
            frozenset(), owners=self.owners, known_rows=self.known_rows, row_sums=self.marks.row_sums,
            compares_weights=self.compares_weights,
        )  # fmt: skip
        text = f"`{call.name}` inside a transform of torch.func{user_line()} could not be followed"
        lost = call.lost[0][1] if call.lost else Lost(text)
        place = None
        if not (torch.is_grad_enabled() and with_weight):
            tensors = [operand.tensor for operand in operands]
            if all(inside(*pair).level is None for pair in call.located) and _is_alike(kind.op, tensors):
                self._note_first(call)
                return
            if call.located and not call.lost:
                place = common_place(*zip(*call.located, strict=True))
        if place is not None and place.level is None and not (kind.pointwise or kind.op in _OF_TANGENTS):
            place = None
        for output in outputs:
            axis = None if place is None else innermost_axis(output, from_right(output, place))
            self.marks.set_innermost(output, axis or lost)

    def _note_first(self, call: ObservedCall) -> None:
        """Follow a call inside a transform as one on the first of what vmaps go over, who do the same to all."""
        firsts = {id(tensor): first_of_all(tensor) for tensor in operands_of(call.args, call.kwargs)}
        args, kwargs = tree_map_only(Tensor, lambda tensor: firsts[id(tensor)], (call.args, call.kwargs))
        given = []
        for operand in call.operands:
            place = operand.axis
            if isinstance(place, BatchAxis):
                place = inside(operand.tensor, place).axis
            given.append(Operand(firsts[id(operand.tensor)], place if isinstance(place, (BatchAxis, Lost)) else None))
        first = tuple(firsts[id(output)] if id(output) in firsts else first_of_all(output) for output in call.outputs)
        self._note(replace(call, args=args, kwargs=kwargs, operands=tuple(given), outputs=first), {}, set())
        for output, mark in zip(call.outputs, map(self.marks.get, first), strict=True):
            axis = innermost_axis(output, Inside(mark, None)) if isinstance(mark, BatchAxis) else mark
            if axis is not None:
                self.marks.set_innermost(output, axis)

    def fail(self, error: Exception, what: str = "the capture of the training step") -> None:
        """Note that this package itself has failed, and observe no more."""
        self.call = _as_it_is  # type: ignore[method-assign]
        self.visible.answer = self.visible.first
        super().fail(error, what)

    def fail_at(self, error: Exception, function: Callable[..., Any]) -> None:
        """Note that this package itself has failed at a call of the user's."""
        name = getattr(function, "__name__", str(function))
        self.fail(error, f"following `{name}`{guard(user_line, lambda error: '')()}")

    def _note_write(self, call: TorchCall) -> None:
        """Keep where in the user's code a tensor was changed in place, should a later reader need what it held."""
        for target in tensors_in(call.kwargs["out"]) if "out" in call.kwargs else call.args[:1]:
            if isinstance(target, Tensor) and type(target) in _TENSORS and is_plain(target):
                memory = memory_of(target)
                if memory:  # (tensors without entries all begin at 0)
                    self.writes[memory] = version_of(target), call.function.__name__, user_place()
                if memory in self.marks.of_weights and not _is_recorded(target):
                    sources = [tensor for tensor in operands_of(call.args, call.kwargs) if tensor is not target]
                    self._note_hidden(call.kind.op, target, sources)

    def _note_hidden(self, op: object, target: Tensor, sources: Sequence[Tensor]) -> None:
        """Without gradient, memory was written to that weights alone have made: it still holds what is made of them."""
        marks = [self.marks.of_operand(source) for source in sources]
        known = op not in DATA_SOURCES and all(self.marks.is_known(source) for source in sources)
        for tensor, weight in self.marks.weights_on_memory_of(target):
            if weight.derivation is None:
                continue
            if version_of(tensor) != weight.version:  # autograd knows that what it may have kept has changed
                weight.derivation = replace(weight.derivation, made=-1)  # its value is not what it computes
            weight.version, weight.hidden = version_of(tensor), True
            weight.outside |= not known
            base = view_base(tensor)
            if base is not None and has_history(tensor):  # (which autograd now takes for a part of its base)
                self.nodes.watch_inside((tensor,), boundary((base,)))
            if self.batch_size > 1 and any(isinstance(mark, (BatchAxis, Lost)) for mark in marks):
                text = f"a tensor made of weights alone is overwritten by values of the batch{user_line()}"
                self.notes.add("mixing", text, (tensor,))

    def _note(self, call: ObservedCall, involved: Mapping[int, Weight], stop: set[Node]) -> None:
        """Mark the outputs of a call and collect what its weights contribute; `involved` is empty without gradient."""
        if involved:
            self.nodes.watch_inside(call.outputs, stop)
        written = call.outputs if call.inplace or call.kwargs.get("out") is not None else ()
        known = [self.marks.get(output) for output in written]
        if call.located or call.lost:
            self._with_batch(call, involved)
        elif involved:
            recipe, leaves = recipe_of(call.op, call.function, (call.args, dict(call.kwargs)), call.inplace)
            marks = marks_of(leaves, [operand.tensor for operand in call.operands], involved)
            derive(recipe, leaves, marks, call.outputs, self, call.random_state)
        elif not (written and isinstance(known[0], Weight)):
            self.marks.note_constant(call.op, [operand.tensor for operand in call.operands], call.outputs)
        for output, mark in zip(written, known, strict=True):
            if memory_of(output) in self.marks.of_weights and not _is_recorded(output):
                continue
            if not (is_view(output) and self._derive_base(output)):
                self._refuse_rest(call, output)
                self.marks.note_rewritten(output, mark)
            if type(mark) in _OF_NO_SAMPLE and not involved and type(self.marks.get(output)) in _OF_SAMPLES:
                self.marks.note_written(output)

    def _note_hook(self, call: TorchCall, result: Any) -> None:
        """Keep the gradient that comes behind a hook of the user's on a derived weight, to be compared."""
        tensor = call.args[0]
        weight = self.marks.get(tensor)
        if not isinstance(weight, Weight) or weight.derivation is None:
            return
        weight.hooked = True
        self.kept |= weight.names

        def arrive(grad: Tensor) -> None:
            if self.accepting and grad.layout == torch.strided:
                weight.arrived = grad.detach().clone()

        on_arrival(tensor, arrive, self.fail)

    def _mark_of(self, tensor: Tensor) -> Mark | None:
        """What a tensor means as an argument; a view of weights that was overwritten is read from its base again."""
        mark = self.marks.of_operand(tensor)
        base = base_of(tensor) if mark is REWRITTEN else None
        known = None if base is None else self.marks.of_operand(base)
        if base is None or not isinstance(known, Weight):
            return mark
        places = places_in(base, tensor)
        if places is None:
            return mark
        self.nodes.watch_inside((tensor,), boundary((base,)))
        self._derive_from("as_strided", part_of, (base, places), tensor, {id(base): known})
        return self.marks.of_operand(tensor)

    def _derive_base(self, view: Tensor) -> bool:
        """After weights alone were written into a view, its base is made of them, too; False where it is not."""
        base, part = base_of(view), self.marks.of_operand(view)
        known = None if base is None else self.marks.get(base)
        if (
            base is None
            or not isinstance(part, Weight)
            or isinstance(known, (BatchAxis, Lost))
            or not base.requires_grad
        ):
            return False
        places = places_in(base, view)
        if places is None:
            return False
        before = base.detach() if can_be_made_again(known) else base.detach().clone()
        involved = {id(view): part} | ({id(before): known} if isinstance(known, Weight) else {})
        if not isinstance(known, Weight):
            self.marks[before] = KNOWN if self.marks.is_known(base) else CONSTANT
        self._derive_from("as_strided_scatter", with_part, (before, view, places), base, involved)
        return True

    def _refuse_rest(self, call: ObservedCall, view: Tensor) -> None:
        """After samples were written into a part of what weights alone have made, nobody follows the rest of it."""
        base = base_of(view)
        weight = None if base is None else self.marks.get(base)
        if base is None or not isinstance(weight, Weight) or not base.requires_grad:
            return
        places = places_in(base, view)
        reason = (
            f"{call.describe()} writes samples into a part of what weights alone have made; put the parts together by "
            "torch.cat, torch.stack or torch.where in place of it"
        )

        def hook(grad: Tensor) -> None:
            rest = grad.flatten().clone()
            if places is not None:
                rest[places.flatten()] = 0
            if self.accepting and bool(rest.any()):
                self.refuse([weight], reason)

        on_gradient(base, hook, self.fail)

    def _derive_from(
        self,
        op: str,
        function: Callable[..., Tensor],
        args: tuple[Tensor, ...],
        output: Tensor,
        involved: Mapping[int, Weight],
    ) -> None:
        """Note that a tensor is a function of weights; the last argument says where entries lie."""
        self.marks[args[-1]] = KNOWN
        recipe, leaves = recipe_of(op, function, (args, {}), inplace=op == "as_strided_scatter")
        derive(recipe, leaves, marks_of(leaves, args, involved), (output,), self)

    def _with_batch(self, call: ObservedCall, involved: Mapping[int, Weight]) -> None:
        self._note_function([tensor for tensor, _ in call.lost])
        rows = on_rows(call) if involved else None
        if rows is not None:
            self._with_jagged(call, rows, involved)
            return
        followed = follow(call)
        alone = self.batch_size == 1  # one sample mixes with none
        marks = (*followed.outputs, *(mark for _, mark in call.lost))
        self.notes.axis_lost |= {mark.reason for mark in marks if isinstance(mark, Lost) and not mark.of_others}
        if followed.mixing is not None and not alone:
            self.notes.add("mixing", followed.mixing, call.outputs)
            for node in nodes_below(tensor for tensor, _ in call.lost) if self.terms else ():
                if node in self.terms:
                    self.terms[node].setdefault(followed.mixing)
        if followed.weighting is not None and not alone:
            self.notes.add("weighting", followed.weighting, call.outputs)
        if followed.padding is not None:
            shape = call.outputs[0].shape
            self.padded |= {count for count in (shape[0], math.prod(shape[:2])) if count > self.batch_size}
        if followed.padding is not None and not alone and call.outputs[0].requires_grad:
            self.notes.add_of_padding(followed.padding, call.outputs[0])
            if call.outputs[0].grad_fn is not None:
                self.nodes.padded[call.outputs[0].grad_fn] = followed.padding
        rule = rule_of(call.op)
        for note in followed.excused:  # (not what the number is a view of, which others read, too)
            made_by = {output.grad_fn for output in call.outputs if output.grad_fn is not None}
            self.excuses.setdefault(note, set()).update(made_by)
        for output, mark in zip(call.outputs, followed.outputs, strict=False):
            if isinstance(mark, Lost) and mark.computed is not None:
                for note in mark.notes:
                    self.noted.setdefault(note, set()).update(boundary((output,)))
            if mark is not None or (output.requires_grad and not involved):  # (of rows that are none, as an empty pick)
                self.marks.set_result(output, mark or CONSTANT)
        if not involved and (rule is None or rule.mixes_samples is None):
            remember(call, followed, None)
            return
        use = Use(call, followed, involved, rule)
        if use.mixing is not None and not alone:
            self.notes.add("mixing", use.mixing, call.outputs)
            for output, mark in zip(call.outputs, followed.outputs, strict=False):
                if isinstance(mark, BatchAxis):
                    self.marks[output] = mark.mixed(use.mixing)
        if involved and adds_a_term(call):
            outside = [weight for weight in involved.values() if weight.outside]
            refuse_where_used(call.outputs, outside, f"{call.describe()}: {self.outside()}", self)
            note_term(call, involved.values(), self)
        elif involved:
            self._register(use, involved)
            remember(call, followed, use)

    def _with_jagged(self, call: ObservedCall, rows: ObservedCall, involved: Mapping[int, Weight]) -> None:
        """A layer on a jagged tensor is one on its rows; the results hold the samples as what it was given."""
        followed = follow(rows)
        for output, place in zip(call.outputs, followed.outputs, strict=True):
            if place is not None:
                jagged = BatchAxis(0, mixing=place.mixing) if isinstance(place, BatchAxis) else place
                self.marks.set_result(output, jagged)
        self._register(Use(replace(rows, outputs=call.outputs), followed, involved, rule_of(call.op)), involved)
        below = boundary(operand.tensor for operand in call.operands)  # (its rows have no history)
        for output in call.outputs:
            node = output.grad_fn
            if node is not None and node in self.nodes.calls:
                self.nodes.calls[node] = self.nodes.calls[node][0], below

    def _register(self, use: Use, involved: Mapping[int, Weight]) -> None:
        for operand in use.call.operands:  # one parameter may be given twice to one call
            weight = involved.get(id(operand.tensor))
            if weight is not None:
                weight.uses += 1
        for text in use.tainted if self.batch_size > 1 else ():
            self.notes.add("mixing", text, use.call.outputs)
        if use.not_additive is not None and self.batch_size > 1:
            self.notes.add("not_additive", use.not_additive, use.call.outputs)
        attach(use, self)

    def find_unseen(self, tops: list[Tensor]) -> list[Weight]:
        """Refuse the weights that a gradient reaches, from these tensors down, through a call that was not seen."""
        unseen, met = self.nodes.below(tops)
        for node, weights in unseen:
            is_scripted = any(self.is_scripted(name) for weight in weights for name in weight.names)
            self.refuse(weights, unseen_text(node, self.differentiated, is_scripted=is_scripted))
        return met

    def find_unseen_inside(self, tops: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """The same for a backward in the midst of another, whose gradients come from what runs after a checkpoint."""
        if not self.accepting:
            return
        self.find_unseen(tops)
        for top, gradient in zip(tops, gradients, strict=False):
            mark = self.marks.get(top)
            if isinstance(mark, Weight) and gradient is not None and bool(gradient.any()):
                self.refuse([mark], _handed_on(mark, top))

    def close(self) -> None:
        """Forget every mark, weight and node."""
        self.marks.clear()
        self.weights.clear()
        self.nodes.clear()
        self.writes.clear()
        self.noted.clear()
        self.terms.clear()
        self.excuses.clear()
        self.others = {}  # (who answers them holds this one)
        self.last = None


def _handed_on(weight: Weight, tensor: Tensor) -> str:
    """Why nothing is known of the gradient that a checkpoint gets for a tensor that it made of weights alone."""
    made = f"{weight.derivation.text} makes" if weight.derivation is not None else "its forward returns"
    return (
        f"{made} a tensor of shape {tuple(tensor.shape)} from weights alone inside an activation checkpoint that "
        "computes its forward again in the backward (use_reentrant=True), and what runs after the checkpoint uses it; "
        "use checkpoint(..., use_reentrant=False)"
    )


def _outputs_of(call: TorchCall, result: Any) -> tuple[Tensor, ...]:
    """The tensors that a call gave, but for weights and the like that `contiguous` and others return as they are."""
    outputs = (result,) if type(result) is Tensor else (*tensors_in(call.args[0] if result is None else result),)
    by_place, pairs = call.kind.pointwise, zip(call.tensors, call.marks, strict=True)
    given = {id(tensor) for tensor, mark in pairs if not (by_place and isinstance(mark, BatchAxis))}
    if call.writes or given.isdisjoint(map(id, outputs)):
        return outputs
    return tuple(output for output in outputs if id(output) not in given)


def _note_nothing(call: TorchCall, result: Any) -> None:
    """Of a call that has left all as it was."""


def _is_inside(op: object, tensors: Sequence[Tensor]) -> bool:
    """Whether a call inside a transform is one on tensors that this wraps, or wraps them."""
    return op in _OF_TANGENTS or any(map(is_wrapped_by_transform, tensors))


def _is_alike(op: object, tensors: Sequence[Tensor]) -> bool:
    """Whether a call does to samples in the first of what vmaps go over what it does in all; never with gradient."""
    if op in _OF_TANGENTS or (op not in PROPAGATION_RULES and op not in OPS):
        return False
    hidden = [tensor for tensor in tensors if hidden_axes(tensor)]
    return not hidden or not any(
        innermost(tensor).requires_grad or not innermost(tensor).numel() or not tensor.is_floating_point()
        for tensor in hidden
    )


def _as_it_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


def _place_of(tensor: Tensor, mark: Mark | None, replaced: set[int], beside: bool) -> BatchAxis | Lost | None:
    """Where the samples lie in an operand, if it is no ``out=`` (`replaced`), nor shared data `beside` samples."""
    if not isinstance(mark, (BatchAxis, Lost)) or id(tensor) in replaced:
        return None
    is_data = beside and isinstance(mark, Lost) and mark.unplaced and not tensor.requires_grad
    return None if is_data else mark


def _is_entry(tensor: Tensor, mark: Mark | None) -> bool:
    """Whether it is one of the numbers that occur in the batch, as in a loop of the user's over ``unique()``."""
    return isinstance(mark, Lost) and mark.listed and tensor.dim() == 0


def _is_of_copies(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], marked: Sequence[tuple[Tensor, Mark | None]], picked: Tensor
) -> bool:
    """Whether as many rows as there are were picked from copies of one row, as a state of packed sequences is."""
    source, mark = marked[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if picked.shape != source.shape or not picked.numel() or not isinstance(mark, (Weight, Constant, type(None))):
        return False
    if isinstance(mark, Weight):
        return not mark.hidden and (mark.tensor.stride(dim) == 0 or source.size(dim) == 1)
    return has_equal_rows(source, dim)


def _is_recorded(target: Tensor) -> bool:
    """Whether autograd records what is written to a tensor; that of a view made without gradient is not asked."""
    return torch.is_grad_enabled() and target.requires_grad
