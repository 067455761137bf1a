"""From the gradients of a call's outputs to contributions by the rule of its op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost, batch_first
from lightning_persample.engine.failure import OverwrittenError, reason_of
from lightning_persample.engine.following import POINTWISE
from lightning_persample.engine.graph import boundary, edges_between
from lightning_persample.engine.observed import Description, ObservedCall, version_of, without_data
from lightning_persample.engine.torch_internals import saved_results
from lightning_persample.engine.use import Use
from lightning_persample.engine.weight import Contributions, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Block, SampleGradient
from lightning_persample.rules import Call, Rule, op_name

__all__ = [
    "ByRule",
    "Drawn",
    "Placement",
    "check_unchanged",
    "not_tensors",
    "placed",
    "placement_of",
    "versions_of",
    "wrong_answer",
]


@dataclass(frozen=True, eq=False)
class Placement:
    """Which arguments of a call its rule is given, and where the batch lies in them.

    Attributes:
        rule: the op's own rule.
        batch_size: number of samples B.
        owners: names of the arguments that are weights.
        kept: names of the tensors that the rule is given.
        axes: where the batch lies in those of them that hold it.
        output_axes: where it lies in each output that can get a gradient.
        weights: `owners` as a set.
        has_rows: whether results with an entry for every row of the first output hold those of a sample together.
        rank: number of axes that the op lays its operands out to, 0 where it does not.
        nested: see `rules.Call`.
    """

    rule: Rule
    batch_size: int
    owners: tuple[str, ...]
    kept: tuple[str, ...]
    axes: Mapping[str, BatchAxis]
    output_axes: tuple[BatchAxis, ...]
    weights: frozenset[str] = field(init=False)
    has_rows: bool = field(init=False)
    rank: int = 0
    nested: bool = False

    def __post_init__(self) -> None:
        first = self.output_axes[0] if self.output_axes else None
        object.__setattr__(self, "weights", frozenset(self.owners))
        object.__setattr__(self, "has_rows", first is not None and first.dim == 0 and first.owner is None)


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
        call.outputs[0].dim() if call.op in POINTWISE else 0,
        rule.several_outputs and _later_lies_below_earlier(call),
    )


def not_tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are no tensors, by name; lists are copied: who gave them may change them."""
    others = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    return others | {name: _copied(value) for name, value in others.items() if isinstance(value, list)}


def _copied(value: Any) -> Any:
    return [_copied(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a rule may ask for beside the arguments: the first output, and from where its random numbers were drawn.

    Attributes:
        output: the first output.
        axis: where the batch lies in it.
        random_state: state of the generator before the call.
        version: how often the output had been written to when the call was done.
    """

    output: Tensor
    axis: BatchAxis | Lost | None
    random_state: Tensor | None
    version: int


class ByRule:
    """What to do in backward with the gradients of the outputs of a call that a rule answers; a `Computation`.

    Args:
        placement: where the call has weights and batch.
        values: the tensors that the rule is given, by name.
        others: the arguments of the call that are no tensors.
        owners: the weights among the tensors, by the same names.
        text: the call in messages.
        first: the first output of the call.
        written: where memory begins that the call wrote into.

    Attributes:
        drawn: what the rule may ask for beside the arguments.
    """

    __slots__ = ("_others", "_owners", "_placement", "_saved", "_tensors", "_text", "_versions", "drawn")

    def __init__(
        self,
        placement: Placement,
        values: Mapping[str, Tensor],
        others: Mapping[str, Any],
        owners: Mapping[str, Weight],
        text: Description,
        first: Tensor,
        written: Collection[int] = (),
    ) -> None:
        self._placement, self._others, self._owners, self._text = placement, others, owners, text
        axes, is_read = placement.axes, placement.rule.is_read
        self._tensors = {  # (of a weight that is laid over the batch, as a rule by a view, no copy is kept alive)
            name: without_data(value) if name in axes and not is_read(name) else value.detach()
            for name, value in values.items()
        }
        read = (tensor for name, tensor in self._tensors.items() if placement.rule.is_read(name))
        self._versions = versions_of(read, written)
        self._saved = saved_results(first, placement.rule.saved) if placement.has_rows and placement.rule.saved else {}
        self.drawn: Drawn | None = None

    def __call__(self, grads: Sequence[Tensor | None]) -> Contributions:
        """What the weights get, by sample."""
        placement, owners, text = self._placement, self._owners, self._text
        check_unchanged(self._versions, text)
        rule, axes = placement.rule, placement.axes
        seen, by_sample = self._call(grads)
        try:
            found = rule.function(seen, by_sample)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a rule of the user's raises, which the reason names
            raise UnsupportedError(reason_of(error, text, rule.function)) from error
        given, batch = seen.arguments, (placement.batch_size,)
        sizes = {name: (*(() if name in axes else batch), *given[name].shape) for name in owners}
        reason = wrong_answer(found, sizes)
        if reason:
            raise UnsupportedError(f"{text}: the rule of {op_name(rule.op)} {reason}")
        return [(weight, placed(found[name], axes.get(name), text)) for name, weight in owners.items()]

    def _call(self, grads: Sequence[Tensor | None]) -> tuple[Call, Any]:
        """The call as the rule sees it, with the gradient of its output, or of all where the rule knows several."""
        placement, tensors, batch_size = self._placement, self._tensors, self._placement.batch_size
        rule = placement.rule
        arguments: dict[str, Any] = {**self._others, **tensors}
        counts: dict[str, Tensor] = {}
        for name, where in placement.axes.items():
            tensor = tensors[name]
            if placement.rank > tensor.dim() and name not in placement.weights:
                extra = placement.rank - tensor.dim()
                tensor, where = tensor.reshape(*(1,) * extra, *tensor.shape), where.moved(where.dim + extra)
            arguments[name] = batch_first(tensor, where, batch_size)
            if where.owner is not None:
                counts[name] = torch.bincount(where.owner.sample, minlength=batch_size) * where.rows
        rows = placement.weights & placement.axes.keys()
        if rows and placement.rank:  # beside them an operand may be shared by all samples
            shared = tensors.keys() - placement.axes.keys() - placement.weights
            arguments |= {name: tensors[name].unsqueeze(0) for name in shared}
        output: Tensor | None = None
        draws: tuple[Tensor, ...] = ()
        if self.drawn is not None:
            again, axis = _draw_again(rule, {**self._others, **tensors}, self.drawn), self.drawn.axis
            if again or rule.reads_output:
                check_unchanged(((self.drawn.output, self.drawn.version),), self._text)
            if isinstance(axis, BatchAxis) and version_of(self.drawn.output) == self.drawn.version:
                output = batch_first(self.drawn.output, axis, batch_size)
                draws = tuple(batch_first(tensor, axis, batch_size) for tensor in again)
        by_sample = tuple(
            None if grad is None else batch_first(grad, axis, batch_size, fill=False)
            for grad, axis in zip(grads, placement.output_axes, strict=True)
        )
        saved = {name: batch_first(r, placement.output_axes[0], batch_size) for name, r in self._saved.items()}
        seen = Call(batch_size, arguments, placement.weights, counts, draws, output, placement.nested, saved, rows)
        return seen, by_sample if placement.rule.several_outputs else by_sample[0]


def wrong_answer(given: object, asked: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong with what a rule gave, apart from its values; what it gives for other arguments does not matter."""
    if _answers(given, asked):
        return ""
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


def _answers(given: object, asked: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether nothing is wrong, as nearly always."""
    if type(given) is not dict:
        return False
    for name, sizes in asked.items():
        gradient = given.get(name)
        if not isinstance(gradient, SampleGradient) or (gradient.batch_size, *gradient.shape) != sizes:
            return False
    return True


def _later_lies_below_earlier(call: ObservedCall) -> bool:
    stop = boundary(operand.tensor for operand in call.operands)
    first, *later = call.outputs
    below = edges_between([first], stop)
    return any(output.grad_fn in below for output in later)


def _draw_again(rule: Rule, arguments: dict[str, Any], drawn: Drawn) -> list[Tensor]:
    if rule.draws is None or drawn.random_state is None:
        return []
    devices = [drawn.output.device] if drawn.output.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(drawn.random_state)
        return rule.draws(arguments, drawn.output)


def placed(gradient: SampleGradient, where: BatchAxis | None, description: Description) -> SampleGradient:
    """A weight with the batch along an axis of its own (a state of each sample) has zeros outside a sample's rows."""
    if where is None:
        return gradient
    if where.owner is not None:
        raise UnsupportedError(f"{description} lays a weight along rows that were picked from the batch")
    return Block(gradient.dense(), where.dim, where.outer, where.inner)


def versions_of(tensors: Iterable[Any], written: Collection[int]) -> list[tuple[Tensor, int]]:
    """How often each tensor was written to before the backward, but for those whose memory the call wrote into."""
    return [
        (tensor, tensor._version)
        for tensor in tensors
        if isinstance(tensor, Tensor)
        and not tensor.is_inference()  # which does not count how often it is written to
        and not (written and tensor.data_ptr() in written)
    ]


def check_unchanged(versions: Iterable[tuple[Tensor, int]], text: Description) -> None:
    """Guard the values that are read in backward against changes in place since the forward."""
    for tensor, version in versions:
        if tensor._version != version:
            raise OverwrittenError(
                f"{text}: a tensor of shape {tuple(tensor.shape)} that the per-sample gradient needs was changed in "
                "place",
                tensor,
                " between forward and backward; write the result to a new tensor instead",
            )
