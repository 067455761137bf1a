"""One use of weights together with the batch: the hook that turns the output's gradient into contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from lightning_persample.engine.batch_axis import BatchAxis, Lost
from lightning_persample.engine.computation import Computation, Placement, by_rule, computation
from lightning_persample.engine.failure import FAILURES, in_smaller_chunks, reason_of
from lightning_persample.engine.following import Followed
from lightning_persample.engine.fused import FusedCall
from lightning_persample.engine.observed import Description, ObservedCall
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import kernel_options
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.rules import Rule

if TYPE_CHECKING:
    from lightning_persample.engine.dispatch import Dispatcher
    from lightning_persample.engine.weight import Weight

__all__ = ["Use", "attach", "attach_as_planned", "note_term", "on_gradient", "refuse_where_used", "report_to"]


_FREED = (
    "a second backward goes through it, but the first one was to free the graph; pass retain_graph=True to the first"
)
_ANYWHERE = BatchAxis(0)  # one sample alone needs no axis


class Use:
    """A call that mixes weights with the batch.

    Args:
        call: the call, after it has run.
        followed: where the batch lies in its outputs.
        weights: the weights among its operands, by the id of their tensor.
        rule: the op's own rule, if it has one.

    Attributes:
        whole: there is one sample, and no axis that holds it: every tensor of the batch is the sample's as a whole.
        not_additive: why what the samples alone give does not add up to the gradient of the batch, or None.
        entries: what the call has added up, where its one output is a number.
    """

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
        self.not_additive: str | None = None
        uncertain = bool(call.lost) or any(isinstance(axis, Lost) for axis in followed.outputs)
        self.whole = call.batch_size == 1 and uncertain
        self.entries = followed.entries() if followed.entries is not None and weights and not self.whole else None
        arguments = rule.bind(call.args, call.kwargs) if rule is not None else None
        if rule is None or arguments is None or self.whole or self.entries is not None:
            return
        if rule.mixes_samples is not None and rule.mixes_samples(arguments):
            self.mixing = f"{self.description} normalises with the statistics of the whole batch"
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
        """Why the contributions of this call cannot be told apart by sample, or None."""
        pairs = zip(self.call.outputs, self.followed.outputs, strict=False)
        lost = next((axis for output, axis in pairs if output.requires_grad and isinstance(axis, Lost)), None)
        if lost is not None and not self.whole and self.entries is None:
            return (
                f"{self.description}: the batch axis cannot be followed here: {lost.reason}; the samples must stay "
                "along one axis (see `batch_dim` for where the batch has it, and `batch_size` where sizes differ)"
            )
        several = self.rule is not None and self.rule.several_outputs
        if len(self.outputs) != 1 and not several:
            number = len(self.outputs)
            return f"{self.description} has {number} outputs; give it a rule with register_rule, or use its parts"
        return None


def attach(use: Use, dispatcher: Dispatcher) -> None:
    """Hook the gradients of the call's outputs, so that backward reports what each sample contributes.

    Args:
        use: the call.
        dispatcher: receives contributions, or the reason why there are none.
    """
    weights = list(dict.fromkeys(use.weights.values()))
    reason = use.reason_against()
    if reason is not None:
        refuse_where_used(use.call.outputs, weights, reason, dispatcher)
        return
    outputs = [output for output, _ in use.outputs]
    keeps_values = use.rule is None or bool(use.rule.reads)
    fused = use.call.fused
    names: dict[Weight, str] = {}
    if fused is not None:
        names = {use.weights[id(value)]: name for name, value in use.arguments.items() if id(value) in use.weights}
    report_to(dispatcher, outputs, weights, computation(use), use.description, keeps_values, fused, names)


def attach_as_planned(
    placement: Placement,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Tensor],
    weights: Mapping[int, Weight],
    description: Description,
    dispatcher: Dispatcher,
) -> None:
    """Hook the gradient of the output of a call that its rule is known to answer.

    Args:
        placement: where the call has weights and batch.
        args: positional arguments.
        kwargs: keyword arguments.
        outputs: the one output.
        weights: the weights among its operands, by the id of their tensor.
        description: the call in messages.
        dispatcher: receives contributions, or the reason why there are none.

    Raises:
        LookupError: the arguments are not those that the placement was made for.
    """
    rule = placement.rule
    given = rule.bind(args, kwargs)
    if given is None:
        raise LookupError(f"the arguments of {description} have no names")
    owners = {name: weights[id(given[name])] for name in placement.owners}
    compute = by_rule(placement, given, owners, description, outputs[0])
    report_to(dispatcher, outputs, list(dict.fromkeys(owners.values())), compute, description, bool(rule.reads))


def report_to(
    dispatcher: Dispatcher,
    outputs: Sequence[Tensor],
    weights: list[Weight],
    compute: Computation,
    description: Description,
    keeps_values: bool,
    fused: FusedCall | None = None,
    names: Mapping[Weight, str] | None = None,
) -> None:
    """Let backward report what each sample contributes as soon as the gradients of a call's outputs are there.

    Args:
        dispatcher: receives contributions, or the reason why there are none.
        outputs: the outputs that can get a gradient.
        weights: the weights among the call's operands.
        compute: gives the contributions.
        description: the call in messages.
        keeps_values: whether `compute` holds what autograd holds, too, and lets go with it.
        fused: the call, where its own backward asks for what there is to report.
        names: the arguments that its weights are.
    """
    held, readers = [compute], [_gradient_reader(output) for output in outputs]
    kind = outputs[0].device.type

    def contribute(grads: Sequence[Tensor | None], wants_sums: bool = False) -> list[tuple[Weight, Tensor]]:
        """Note what the samples contribute; gives the sums over them that were formed on the way."""
        sums: list[tuple[Weight, Tensor]] = []
        if not dispatcher.accepting:
            return sums
        if _is_refused(weights, dispatcher):
            if dispatcher.frees:
                held.clear()
            return sums
        options = kernel_options(dispatcher.kernel_options)  # entered here: on CUDA this is another thread
        with torch._C.DisableTorchFunction(), _without_gradient(), without_autocast(kind), options:
            try:
                read = [None if grad is None else reader(grad) for grad, reader in zip(grads, readers, strict=True)]
                if not held:
                    raise UnsupportedError(f"{description}: {_FREED}")
                contributions = in_smaller_chunks(lambda: held[0](read))
                sums = dispatcher.collect(contributions, wants_sums)
                if dispatcher.frees and keeps_values:
                    held.clear()  # autograd lets its saved tensors go now, too
            except torch.OutOfMemoryError as error:
                held.clear()
                _give_up(dispatcher, reason_of(error, description))
            except FAILURES as error:
                dispatcher.refuse(weights, reason_of(error, description))
        return sums

    def hook(grads: Sequence[Tensor | None]) -> None:
        contribute(grads)

    if fused is not None and names is not None:

        def sums_by_name(grad: Tensor, wanted: bool) -> dict[str, Tensor]:
            return {names[weight]: total for weight, total in contribute((grad,), wanted and bool(names))}

        fused.sums = sums_by_name
    elif len(outputs) == 1:
        on_gradient(outputs[0], lambda grad: hook((grad,)))
    else:
        register_multi_grad_hook([_hooked(output) for output in outputs], hook)


def _without_gradient() -> AbstractContextManager[object]:
    """Nothing is recorded inside; a backward records nothing anyway, unless it is to create a graph."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _is_refused(weights: list[Weight], dispatcher: Dispatcher) -> bool:
    return bool(dispatcher.refused) and all(weight.names <= dispatcher.refused.keys() for weight in weights)


def _give_up(dispatcher: Dispatcher, reason: str) -> None:
    """Let go of everything that this backward has gathered: the training needs the memory."""
    for weight in dispatcher.weights:
        weight.forget()
    dispatcher.refuse(dispatcher.weights, reason)


def refuse_where_used(outputs: Iterable[Tensor], weights: list[Weight], reason: str, dispatcher: Dispatcher) -> None:
    """Refuse the weights of a call as soon as a gradient reaches one of its outputs.

    Args:
        outputs: the call's outputs.
        weights: the weights among its operands.
        reason: why there are no values.
        dispatcher: is told.
    """

    def hook(grad: Tensor) -> None:
        if dispatcher.accepting:
            dispatcher.refuse(weights, reason)

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook)


def note_term(outputs: Iterable[Tensor], names: frozenset[str], dispatcher: Dispatcher) -> None:
    """Note, once a gradient reaches a call that adds a term of no sample to the loss, whose gradient has it.

    Args:
        outputs: the call's outputs.
        names: the parameters that the term is made of.
        dispatcher: is told.
    """

    def hook(grad: Tensor) -> None:
        if dispatcher.accepting:
            dispatcher.penalized |= names

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook)


def on_gradient(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with the output's gradient, after all hooks of the user's that may change it."""
    hooked = _hooked(output)
    node, place = hooked.grad_fn, hooked.output_nr
    if node is None:
        hooked.register_hook(hook)
        return

    def before_node(grads: Sequence[Tensor | None]) -> None:
        grad = grads[place]
        if grad is not None:
            hook(grad)

    node.register_prehook(before_node)


def _hooked(output: Tensor) -> Tensor:
    """The tensor whose hook reports the output's gradient."""
    # An op whose output is a view (linear on three axes, einsum) may be followed by an in-place op, which gives the
    # view a new history and leaves a hook on it silent; the tensor behind the view keeps its gradient.
    base = output._base if output._is_view() else None
    return output if base is None or not base.requires_grad else base


def _gradient_reader(output: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the output's gradient from the gradient that the hook receives."""
    base = _hooked(output)
    if base is output:
        return _detached
    base_size, base_stride = tuple(base.shape), base.stride()
    size, stride, offset = tuple(output.shape), output.stride(), output.storage_offset() - base.storage_offset()

    def read(grad: Tensor) -> Tensor:
        grad = _detached(grad)
        if grad.stride() != base_stride:
            grad = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided(size, stride, grad.storage_offset() + offset)

    return read


def _detached(grad: Tensor) -> Tensor:
    return grad.detach() if grad.requires_grad else grad
