"""From the gradients of a call's outputs to contributions: by the rule of its op, or by the generic one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner, batch_first, groups_of
from lightning_persample.batch_axis.base import Followed
from lightning_persample.batch_axis.observed import Description, ObservedCall, version_of, without_data
from lightning_persample.batch_axis.ops import POINTWISE, having
from lightning_persample.capture.failure import OverwrittenError, reason_of
from lightning_persample.capture.graph import boundary, edges_between
from lightning_persample.capture.weight import Computation, Contributions, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import (
    Block,
    Dense,
    Indexed,
    Outer,
    Patches,
    Ragged,
    SampleGradient,
    at_samples,
)
from lightning_persample.gradients.cost import samples_at_once
from lightning_persample.rules import Call, Rule, generic_rule, op_name
from lightning_persample.rules.elementwise import widen
from lightning_persample.torch_internals import saved_results, tree_flatten, tree_unflatten, version_counter

Samples: TypeAlias = tuple[int, ...] | None
"""Those of a group; None is all."""

_ANYWHERE = BatchAxis(0)  # one sample alone needs no axis


class Use:
    """A call that mixes weights with the batch."""

    # `call`: the call, after it has run; `followed`: where the batch lies in its outputs; `weights`: the weights among
    # its operands, by the id of their tensor; `rule`: the op's own rule, if it has one.

    def __init__(
        self, call: ObservedCall, followed: Followed, weights: Mapping[int, Weight], rule: Rule | None
    ) -> None:
        self.call = call
        self.followed = followed
        self.weights = weights
        self.rule: Rule | None = None
        self.arguments: dict[str, Any] = {}
        self.mixing: str | None = None
        self._description: Description | None = None
        # why what the samples alone give does not add up to the gradient of the batch, or None
        self.not_additive: str | None = None
        uncertain = bool(call.lost) or any(isinstance(axis, Lost) for axis in followed.outputs)
        # the one sample that all tensors of the batch in the call belong to as a whole; None where they do not
        self.sample = 0 if call.batch_size == 1 and uncertain else _one_sample(call, followed)
        # there is no axis that holds the samples: every tensor of the batch is one sample's as a whole
        self.whole = self.sample is not None
        # what the call has added up, where its one output is a number
        self.entries = followed.entries() if followed.entries is not None and weights and not self.whole else None
        arguments = rule.bind(call.args, call.kwargs) if rule is not None else None
        if rule is None or arguments is None or self.whole or self.entries is not None:
            return
        if rule.mixes_samples is not None and call.sample is None and rule.mixes_samples(arguments):
            self.mixing = mixing_text(self.description)
        if self._answered_by(rule, arguments):
            self.rule, self.arguments = rule, arguments
            if call.op == "embedding" and arguments.get("scale_grad_by_freq"):
                self.not_additive = (
                    f"{self.description} divides by how often an index occurs in the whole batch (scale_grad_by_freq), "
                    "a sample alone by how often it occurs in that sample"
                )

    def _answered_by(self, rule: Rule, arguments: Mapping[str, Any]) -> bool:
        """Whether weights and batch stand only where the rule expects them."""
        weights, batched, states = set(), set(), set()
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                if rule.is_weight(name):
                    weights.add(id(value))
                if rule.is_batched(name):
                    batched.add(id(value))
                if rule.is_per_sample(name):
                    states.add(id(value))
        if any(key not in weights for key in self.weights):
            return False
        if any(id(tensor) not in batched for tensor, _ in self.call.located):
            return False
        if any(id(tensor) in self.weights and id(tensor) not in states for tensor, _ in self.call.located):
            return False  # (a derived weight that has rows of its own for each sample)
        aligned = self.followed.aligned
        return aligned is None or not any(
            operand.axis is None and id(operand.tensor) not in states and aligned(operand.tensor) is not None
            for operand in self.call.operands
        )

    @property
    def tainted(self) -> list[str]:
        """Where values computed over the whole batch entered the operands."""
        rule = self.rule
        unread = {
            id(value) for name, value in self.arguments.items() if rule is not None and not rule.is_read(name)
        }  # numbers that only say where things lie
        return [
            axis.mixing
            for tensor, axis in self.call.located
            if axis.mixing is not None and (id(tensor) not in unread or tensor.is_floating_point())
        ]

    @property
    def description(self) -> Description:
        """Op, sizes, line and parameters, for messages; first asked for while the call's line runs."""
        if self._description is None:
            self._description = self.call.describe({n for weight in self.weights.values() for n in weight.names})
        return self._description

    @property
    def outputs(self) -> list[tuple[Tensor, BatchAxis]]:
        """The outputs that can get a gradient and hold the batch along an axis."""
        if self.whole:
            return [(output, _ANYWHERE) for output in self.call.outputs if output.requires_grad]
        if self.entries is not None:
            return [(output, self.entries.axis) for output in self.call.outputs if output.requires_grad]
        pairs = zip(self.call.outputs, self.followed.outputs, strict=False)
        return [(output, axis) for output, axis in pairs if output.requires_grad and isinstance(axis, BatchAxis)]

    def reason_against(self) -> str | None:
        """Why the contributions of this call cannot be separated by sample, or None."""
        pairs = zip(self.call.outputs, self.followed.outputs, strict=False)
        lost = next((axis for output, axis in pairs if output.requires_grad and isinstance(axis, Lost)), None)
        if lost is not None and not self.whole and self.entries is None:
            plain = lost.alone is not None or lost.reason.startswith("batch") or "batch_first=" in lost.reason
            remedy = "" if plain else "; keep the samples apart, along one axis, up to here"
            if lost.crossed:
                remedy = (
                    "; each entry there is of several samples, so that none has a gradient of its own: let the weight "
                    "meet the samples before, as in (weight * x) @ y.T"
                )
            return f"{self.description}: the batch axis cannot be followed here: {lost.reason}{remedy}"
        several = self.rule is not None and self.rule.several_outputs
        if len(self.outputs) != 1 and not several:
            number = len(self.outputs)
            return f"{self.description} has {number} outputs; give it a rule with register_rule, or use its parts"
        return None


def _one_sample(call: ObservedCall, followed: Followed) -> int | None:
    """The one sample that operands and outputs of the batch belong to as a whole, or None."""
    sample, pairs = call.sample, zip(call.outputs, followed.outputs, strict=False)
    of_outputs = [place.alone if isinstance(place, Lost) else None for output, place in pairs if output.requires_grad]
    return sample if all(each == sample for each in of_outputs) else None


def mixing_text(description: Description) -> str:
    """The text on a call in which samples influence each other, as the rule of its op tells."""
    return f"{description} normalises with the statistics of the whole batch"


@dataclass(frozen=True, eq=False)
class Placement:
    """Which arguments of a call its rule is given, and where the batch lies in them."""

    rule: Rule  # the op's own rule
    batch_size: int  # number of samples B
    owners: tuple[str, ...]  # names of the arguments that are weights
    kept: tuple[str, ...]  # names of the tensors that the rule is given
    axes: Mapping[str, BatchAxis]  # where the batch lies in those of them that hold it
    output_axes: tuple[BatchAxis, ...]  # where it lies in each output that can get a gradient
    weights: frozenset[str] = field(init=False)  # `owners` as a set
    per_sample: frozenset[str] = field(init=False)  # names of those of them that hold a row for every sample
    read: frozenset[str] = field(init=False)  # names of the tensors whose values the rule reads
    # names of the results that autograd keeps, where their entries, one for every row of the first output, hold those
    # of a sample together
    saved: tuple[str, ...] = field(init=False)
    rank: int = 0  # number of axes that the op lays its operands out to, 0 where it does not
    nested: bool = False  # see `rules.Call`

    def __post_init__(self) -> None:
        first = self.output_axes[0] if self.output_axes else None
        object.__setattr__(self, "weights", frozenset(self.owners))
        object.__setattr__(self, "per_sample", self.weights & self.axes.keys())
        object.__setattr__(self, "read", frozenset(filter(self.rule.is_read, self.kept)))
        has_rows = first is not None and first.dim == 0 and first.owner is None
        object.__setattr__(self, "saved", self.rule.saved if has_rows else ())


def placement_of(use: Use, rule: Rule) -> Placement:
    """Where a call that its rule answers has weights and batch."""
    call, aligned = use.call, use.followed.aligned
    owners = tuple(name for name, value in use.arguments.items() if id(value) in use.weights)
    kept: list[str] = []
    axes: dict[str, BatchAxis] = {}
    for name, value in use.arguments.items():
        if isinstance(value, Tensor) and (rule.is_read(name) or name in owners or not rule.is_batched(name)):
            kept.append(name)
            where = call.axis_of(value)
            if aligned is not None and rule.is_per_sample(name) and not isinstance(where, BatchAxis):
                where = aligned(value)
            if isinstance(where, BatchAxis):
                axes[name] = where
    return Placement(
        rule,
        call.batch_size,
        owners,
        tuple(kept),
        axes,
        tuple(axis for _, axis in use.outputs),
        call.outputs[0].dim() - call.outputs[0].is_nested if call.op in POINTWISE else 0,  # (its rows have one less)
        rule.several_outputs and _later_lies_below_earlier(call),
    )


def not_tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are no tensors, by name; lists are copied: who gave them may change them."""
    others = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    return others | {name: _copied(value) for name, value in others.items() if isinstance(value, list)}


def _copied(value: Any) -> Any:
    return [_copied(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What a rule may ask for beside the arguments: the first output, and from where its random numbers were drawn."""

    output: Tensor  # the first output
    axis: BatchAxis | Lost | None  # where the batch lies in it
    random_state: Tensor | None  # state of the generator before the call
    version: int  # how often the output had been written to when the call was done


class ByRule:
    """What to do in backward with the gradients of the outputs of a call that a rule answers; a `Computation`."""

    # `versions`: how often those of the tensors whose values are read had been written to.

    __slots__ = ("_drawn", "_others", "_owners", "_placement", "_saved", "_tensors", "_text", "_versions")

    def __init__(
        self,
        placement: Placement,  # where the call has weights and batch
        tensors: Mapping[str, Tensor],  # what the rule is given, by name, without history
        others: Mapping[str, Any],  # the arguments of the call that are no tensors
        owners: Mapping[str, Weight],  # the weights among the tensors, by the same names
        text: tuple[Any, ...],  # the call in messages, as the parts of a `Description`
        versions: Sequence[tuple[Tensor, int]],
        saved: Mapping[str, Tensor],  # what autograd keeps of the results, by the names that the rule has for it
        drawn: _Drawn | None = None,  # what the rule may ask for beside the arguments
    ) -> None:
        self._placement, self._tensors, self._others, self._owners = placement, tensors, others, owners
        self._text, self._versions, self._saved, self._drawn = text, versions, saved, drawn

    def __call__(self, grads: Sequence[Tensor | None]) -> Contributions:
        """What the weights get, by sample."""
        placement, tensors = self._placement, self._tensors
        check_unchanged(self._versions, Description(*self._text))
        if placement.per_sample:
            return self._of_group(grads, None)
        owner, rule, batch_size = placement.output_axes[0].owner, placement.rule, placement.batch_size
        axes = (*placement.axes.values(), *placement.output_axes)
        operands = [tensors[name] for name in placement.axes], [tensors[name] for name in self._owners]
        if owner is not None:
            mixes = rule.mixes_samples is not None and owner.only is None
            apart = rule.adds_rows is not None and rule.adds_rows({**self._others, **tensors})
            if mixes or apart:
                return self._of_rows(grads, owner, _groups(axes, batch_size, grads, *operands, alone=True))
        return in_groups(partial(self._of_group, grads), _groups(axes, batch_size, grads, *operands), batch_size)

    def _of_rows(
        self, grads: Sequence[Tensor | None], owner: Owner, groups: Sequence[Sequence[int]] | None
    ) -> Contributions:
        """The same where the rule sees every row as a sample: what each row gives, added up by sample."""
        placement, by_row = self._placement, copy(self)
        by_row._placement = replace(
            placement,
            batch_size=owner.sample.numel(),
            axes={name: replace(axis, owner=None) for name, axis in placement.axes.items()},
            output_axes=tuple(replace(axis, owner=None) for axis in placement.output_axes),
        )
        return [
            (weight, _added_up(gradient, owner, groups, placement.batch_size))
            for weight, gradient in by_row._of_group(grads, None)
        ]

    def _of_group(self, grads: Sequence[Tensor | None], samples: Samples) -> Contributions:
        """What the weights get from all samples, or from some (m,) of them."""
        placement, owners, text = self._placement, self._owners, Description(*self._text)
        rule, axes = placement.rule, placement.axes
        seen, by_sample = self._call(grads, samples)
        try:
            found = rule.function(seen, by_sample)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a rule of the user's raises, which the reason names
            raise UnsupportedError(reason_of(error, text, rule.function)) from error
        given, batch = seen.arguments, (seen.batch_size,)
        shapes = {}
        for name in owners:
            shape = given[name].shape
            shapes[name] = (*shape,) if name in axes else (*batch, *shape)
        reason = wrong_answer(found, shapes)
        if reason:
            raise UnsupportedError(f"{text}: the rule of {op_name(rule.op)} {reason}")
        contributions = []
        for name, weight in owners.items():
            gradient = found[name]
            contributions.append((weight, _placed(gradient, weight, axes[name], text) if name in axes else gradient))
        return contributions

    def uncentred(self) -> ByRule | None:
        """The same of a normalization that takes no mean away, from which nothing cancels; None of any other call."""
        if not self._saved:
            return None
        other = copy(self)
        mean, *rest = self._saved
        other._saved = {mean: torch.zeros_like(self._saved[mean]), **{name: self._saved[name] for name in rest}}
        return other

    def _call(self, grads: Sequence[Tensor | None], samples: Samples) -> tuple[Call, Any]:
        """The call as the rule sees it, with the gradient of its output, or of all where the rule knows several."""
        placement, tensors, batch_size = self._placement, self._tensors, self._placement.batch_size
        rule, first = placement.rule, batch_first if samples is None else partial(batch_first, samples=samples)
        arguments: dict[str, Any] = {**self._others, **tensors}
        counts: dict[str, Tensor] = {}
        for name, where in placement.axes.items():
            tensor = tensors[name]
            if placement.rank > tensor.dim() and name not in placement.weights:
                extra = placement.rank - tensor.dim()
                tensor, where = tensor.reshape(*(1,) * extra, *tensor.shape), where.moved(where.dim + extra)
            arguments[name] = first(tensor, where, batch_size)
            if where.owner is not None:
                rows_of_each = where.owner.counts(batch_size) * where.rows
                counts[name] = rows_of_each if samples is None else rows_of_each[list(samples)]
        rows = placement.per_sample
        if rows and placement.rank:  # beside them an operand may be shared by all samples
            shared = tensors.keys() - placement.axes.keys() - placement.weights
            arguments |= {name: tensors[name].unsqueeze(0) for name in shared}
        output: Tensor | None = None
        draws: tuple[Tensor, ...] = ()
        if self._drawn is not None:
            again, axis = _draw_again(rule, {**self._others, **tensors}, self._drawn), self._drawn.axis
            if again or rule.reads_output:
                check_unchanged(((self._drawn.output, self._drawn.version),), Description(*self._text))
            if isinstance(axis, BatchAxis) and version_of(self._drawn.output) == self._drawn.version:
                output = first(self._drawn.output, axis, batch_size)
                draws = tuple(first(tensor, axis, batch_size) for tensor in again)
        saved = self._saved
        if saved:
            saved = {name: first(r, placement.output_axes[0], batch_size) for name, r in saved.items()}
        count = batch_size if samples is None else len(samples)
        seen = Call(count, arguments, placement.weights, counts, draws, output, placement.nested, saved, rows)
        by_sample: list[Tensor | None] = []
        for grad, axis in zip(grads, placement.output_axes, strict=True):
            by_sample.append(None if grad is None else first(grad, axis, batch_size, fill=False))
        return seen, tuple(by_sample) if rule.several_outputs else by_sample[0]


def _groups(
    axes: Collection[BatchAxis],
    batch_size: int,
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    alone: bool = False,
) -> list[list[int]] | None:
    """The samples whose rows are taken together, as the multiply-adds that a row takes say; None where all are."""
    rows = next((axis.entries(batch_size) for axis in axes if axis.owner is not None), 0)
    if not rows:
        return groups_of(axes, batch_size, 0)
    given = sum(tensor.numel() for tensor in inputs) // rows
    computed = sum(grad.numel() for grad in grads if grad is not None) // rows
    cost = 0
    for weight in weights:
        positions = computed // weight.shape[0] if weight.dim() and weight.shape[0] else 1
        cost += min(weight.numel() * max(positions, 1), computed * max(given, 1))
    return groups_of(axes, batch_size, cost, alone=alone and computed > 0)


def wrong_answer(given: object, asked: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong with what a rule gave, apart from its values; what it gives for other arguments does not matter."""
    if type(given) is dict:
        for name, shape in asked.items():
            gradient: Any = given.get(name)
            is_structure = SampleGradient in type(gradient).__mro__  # (to ask an abstract class takes a call of Python)
            if not is_structure or (gradient.batch_size, *gradient.shape) != shape:
                break
        else:
            return ""  # as nearly always
    expected = "a rule returns a dict with a structure (Dense, Outer, Indexed or Patches) for each argument asked for"
    if not isinstance(given, Mapping):
        return f"gave a {type(given).__name__}; {expected}"
    missing = [name for name in asked if name not in given]
    if missing:
        others = f", only for {', '.join(map(str, given))}" if given else ""
        return f"gave nothing for {', '.join(missing)}{others}; {expected}"
    for name, sizes in asked.items():
        if not isinstance(given[name], SampleGradient):
            kind = type(given[name]).__name__
            remedy = ": Dense(...) around a tensor (samples, *shape of the weight) is one" if kind == "Tensor" else ""
            return f"gave a {kind} for {name}; {expected}{remedy}"
        found = (given[name].batch_size, *given[name].shape)
        if found != sizes:
            remedy = ": sum over the rows and positions of each sample" if len(found) > len(sizes) else ""
            return f"gave shape {found} for {name}, but (samples, *shape of the weight) is {sizes}{remedy}"
    return ""


def _later_lies_below_earlier(call: ObservedCall) -> bool:
    stop = boundary(operand.tensor for operand in call.operands)
    first, *later = call.outputs
    below = edges_between([first.grad_fn], stop)
    return any(output.grad_fn in below for output in later)


def _draw_again(rule: Rule, arguments: dict[str, Any], drawn: _Drawn) -> list[Tensor]:
    if rule.draws is None or drawn.random_state is None:
        return []
    devices = [drawn.output.device] if drawn.output.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(drawn.random_state)
        return rule.draws(arguments, drawn.output)


def in_groups(
    compute: Callable[[Samples], Contributions], groups: Sequence[Sequence[int]] | None, batch_size: int
) -> Contributions:
    """What the weights get, computed for groups of samples one after the other."""
    if groups is None:
        return compute(None)
    found = [compute(tuple(group)) for group in groups]
    return [
        (weight, Ragged([given[place][1] for given in found], groups, batch_size))
        for place, (weight, _) in enumerate(found[0])
    ]


def _added_up(
    gradient: SampleGradient, owner: Owner, groups: Sequence[Sequence[int]] | None, batch_size: int
) -> SampleGradient:
    """What the samples get, in groups or all together, of what each row gives as a sample."""
    samples = [range(batch_size)] if groups is None else groups
    if not isinstance(gradient, (Outer, Indexed, Patches)):
        parts = owner.split(gradient.dense(), batch_size, samples, fill=False)
        return Dense(at_samples(samples, torch.cat([rows.sum(1) for rows in parts]), batch_size))
    first, second, *rest = vars(gradient).values()
    is_index = isinstance(gradient, Indexed)  # (what else comes first is filled up with zeros)
    sides = [
        owner.split(side.squeeze(1) if side.shape[1] == 1 else side, batch_size, samples, fill=fill)
        for side, fill in ((first, is_index), (second, not is_index))
    ]
    if first.shape[1] != 1:
        sides = [[rows.flatten(1, 2) for rows in side] for side in sides]
    terms = [type(gradient)(*pair, *rest) for pair in zip(*sides, strict=True)]
    return terms[0] if groups is None else Ragged(terms, groups, batch_size)


def _placed(gradient: SampleGradient, weight: Weight, where: BatchAxis, description: Description) -> SampleGradient:
    """A weight with the batch along an axis of its own (a state of each sample) has zeros outside a sample's rows."""
    if where.owner is None:
        return Block(gradient.dense(), where.dim, where.outer, where.inner)
    samples = torch.arange(gradient.batch_size, device=where.owner.sample.device)
    if not torch.equal(where.owner.sample[where.owner.order], samples):
        raise UnsupportedError(f"{description} lays a weight along rows that were picked from the batch")
    return Block(gradient.dense(), where.dim, where.outer, where.inner, where.owner.order)  # (its row of each sample)


def _versions_of(tensors: Iterable[Any], written: Collection[int]) -> list[tuple[Tensor, int]]:
    """How often each tensor was written to before the backward, but for those whose memory the call wrote into."""
    return [
        (tensor, version_counter(tensor))
        for tensor in tensors
        if isinstance(tensor, Tensor)
        and not tensor.is_inference()  # which does not count how often it is written to
        and not (written and tensor.data_ptr() in written)
    ]


def check_unchanged(versions: Iterable[tuple[Tensor, int]], text: Description) -> None:
    """Guard the values that are read in backward against changes in place since the forward."""
    for tensor, version in versions:
        if version_counter(tensor) != version:
            raise OverwrittenError(
                f"{text}: a tensor of shape {tuple(tensor.shape)} that the per-sample gradient needs was changed in "
                "place",
                tensor,
                " between forward and backward; write the result to a new tensor instead",
            )


def computation(use: Use) -> Computation:
    """What to do in backward with the gradients of the outputs that can have one."""
    return _by_rule(use, use.rule) if use.rule is not None else _by_generic_rule(use)


def _by_rule(use: Use, rule: Rule) -> Computation:
    call = use.call
    owners = {name: use.weights[id(value)] for name, value in use.arguments.items() if id(value) in use.weights}
    placement, output = placement_of(use, rule), call.outputs[0]
    written = {t.data_ptr() for t in use.arguments.values() if isinstance(t, Tensor) and id(t) in call.written}
    tensors: dict[str, Tensor] = {}
    versions: list[tuple[Tensor, int]] = []
    for name in placement.kept:
        tensors[name] = keep_value(placement, name, use.arguments[name], written, versions)
    drawn = None
    if rule.reads_output or rule.draws is not None:
        drawn = _Drawn(output.detach(), use.followed.outputs[0], call.random_state, version_of(output))
    saved, others = saved_results(output, placement.saved), not_tensors(use.arguments)
    return ByRule(placement, tensors, others, owners, use.description, versions, saved, drawn)


def keep_value(
    placement: Placement, name: str, value: Tensor, written: Collection[int], versions: list[tuple[Tensor, int]]
) -> Tensor:
    """An argument of a call as its rule is given it; its version is added where it is read and was not `written` to."""
    if name in placement.axes and name not in placement.read:  # laid over the batch: no copy is kept alive
        return without_data(value)
    tensor = value.detach()
    if name in placement.read and tensor.data_ptr() not in written and not tensor.is_inference():
        versions.append((tensor, version_counter(tensor)))
    return tensor


def _by_generic_rule(use: Use) -> Computation:
    call, batch_size = use.call, use.call.batch_size
    axis = _UNSPLIT if use.whole else use.outputs[0][1]
    sample = use.sample if batch_size > 1 else None
    aligned, entries = use.followed.aligned, use.entries
    given = (call.args, dict(call.kwargs)) if entries is None else (entries.args, entries.kwargs)
    leaves, spec = tree_flatten(given)
    owners = {position: use.weights[id(leaf)] for position, leaf in enumerate(leaves) if id(leaf) in use.weights}
    axes: dict[int, BatchAxis | None] = {}
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        where = call.axis_of(leaf)
        if where is None and aligned is not None:
            where = aligned(leaf)
        if where is not None and use.whole:
            axes[position] = _UNSPLIT
        elif isinstance(where, BatchAxis):
            axes[position] = where
    of_use = without_data if call.op in _ADDS and not call.inplace else Tensor.detach
    kept = [of_use(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    memory = {leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) in call.written}
    versions = _versions_of(kept, memory)
    function, description = call.function, use.description

    def compute(grads: Sequence[Tensor | None]) -> Contributions:
        check_unchanged(versions, description)
        (grad,) = grads
        if grad is None:
            return []
        if entries is not None:
            grad = (widen(grad) * entries.share).expand(entries.shape)
        known = [each for each in (axis, *axes.values()) if each is not None]
        if sample is not None:
            groups: list[list[int]] | None = [[sample]]
        elif any(place in axes for place in owners):
            groups = None
        else:
            inputs, weights = [kept[place] for place in axes], [kept[place] for place in owners]
            groups = _groups(known, batch_size, grads, inputs, weights)
        return in_groups(partial(of_group, grad), groups, batch_size)

    def of_group(grad: Tensor, samples: Samples) -> Contributions:
        args, kwargs = tree_unflatten(kept, spec)
        first = partial(_first, batch_size=batch_size, samples=samples)
        batched = {position: first(kept[position], where) for position, where in axes.items()}
        by_sample = first(grad, axis, fill=False)
        bytes_each = sum(kept[place].numel() * kept[place].element_size() for place in owners)
        at_once = samples_at_once(len(by_sample), bytes_each, by_sample.device)
        weights = frozenset(owners)
        found = generic_rule(
            function, args, kwargs, batched, weights, by_sample, chunk_size=at_once, description=description
        )
        contributions: Contributions = []
        for place, gradient in found.items():
            dense, weight, where = Dense(gradient), owners[place], axes.get(place)
            contributions.append((weight, dense if where is None else _placed(dense, weight, where, description)))
        return contributions

    return compute


_ADDS = having("adds")  # the gradient of a sum reads no values: only shapes are kept
_UNSPLIT = None  # one sample alone, which has no axis


def _first(
    tensor: Tensor, axis: BatchAxis | None, batch_size: int, *, fill: bool = True, samples: Samples = None
) -> Tensor:
    return tensor[None] if axis is None else batch_first(tensor, axis, batch_size, fill=fill, samples=samples)
