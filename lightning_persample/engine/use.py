"""One use of weights together with the batch: the hook that turns the output's gradient into contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_persample.engine.batch_axis import BatchAxis, Lost, batch_first
from lightning_persample.engine.failure import FAILURES, reason_of
from lightning_persample.engine.following import POINTWISE, Followed
from lightning_persample.engine.observed import ObservedCall
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Block, Dense, SampleGradient
from lightning_persample.rules import Call, Rule, generic_rule

if TYPE_CHECKING:
    from lightning_persample.engine.dispatch import Dispatcher
    from lightning_persample.engine.weight import Weight

__all__ = ["Use", "attach", "refuse_where_used"]

Contribution = tuple["Weight", SampleGradient]


class Use:
    """A call that mixes weights with the batch.

    Args:
        call: the call, after it has run.
        followed: where the batch lies in its outputs.
        weights: the weights among its operands, by the id of their tensor.
        rule: the op's own rule, if it has one.
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
        arguments = rule.bind(call.args, call.kwargs) if rule is not None else None
        if rule is None or arguments is None:
            return
        if rule.mixes_samples is not None and rule.mixes_samples(arguments):
            self.mixing = f"{self.describe()} normalises with the statistics of the whole batch"
        if _answers(rule, arguments, self):
            self.rule, self.arguments = rule, arguments

    @property
    def tainted(self) -> list[str]:
        """Where values computed over the whole batch entered the operands."""
        return [axis.mixing for _, axis in self.call.located if axis.mixing is not None]

    def describe(self) -> str:
        """Op, sizes, line and parameters, for messages."""
        return f"{self.call.describe()}{self._owners()}"

    def _owners(self) -> str:
        names = sorted({name for weight in self.weights.values() for name in weight.names})
        return f" with {', '.join(f'`{name}`' for name in names)}" if names else ""

    def reason_against(self) -> str | None:
        """Why the contributions of this call cannot be told apart by sample, or None."""
        outputs = [
            (output, axis)
            for output, axis in zip(self.call.outputs, self.followed.outputs, strict=False)
            if output.requires_grad
        ]
        lost = next((axis for _, axis in outputs if isinstance(axis, Lost)), None)
        if lost is not None:
            return (
                f"{self.describe()}: the batch axis cannot be followed here: {lost.reason}; the samples must stay "
                "along one axis (see `batch_dim` for where the batch has it, and `batch_size` where sizes differ)"
            )
        if len(outputs) != 1:
            return f"{self.describe()} has {len(outputs)} outputs; give it a rule with register_rule, or use its parts"
        return None


def attach(use: Use, dispatcher: Dispatcher) -> None:
    """Hook the gradient of the call's output, so that backward reports what each sample contributes.

    Args:
        use: the call.
        dispatcher: receives contributions, or the reason why there are none.
    """
    weights = list(dict.fromkeys(use.weights.values()))
    reason = use.reason_against()
    if reason is not None:
        refuse_where_used(use.call.outputs, weights, reason, dispatcher)
        return
    output = next(output for output in use.call.outputs if output.requires_grad)
    compute, read = _computation(use), _gradient_reader(output)
    kind, description = output.device.type, use.describe()

    def hook(grad: Tensor) -> None:
        if not dispatcher.accepting:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast(kind, enabled=False):
            try:
                for weight, gradient in compute(read(grad.detach())):
                    dispatcher.contribute(weight, gradient)
            except FAILURES as error:
                dispatcher.refuse(weights, reason_of(error, description))

    _register_hook(output, hook)


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
            _register_hook(output, hook)


def _register_hook(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    # An op whose output is a view (linear on three axes, einsum) may be followed by an in-place op, which gives the
    # view a new history and leaves a hook on it silent; the tensor behind the view keeps its gradient.
    base = output._base if output._is_view() else None
    (output if base is None or not base.requires_grad else base).register_hook(hook)


def _gradient_reader(output: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the output's gradient from the gradient that the hook receives."""
    base = output._base if output._is_view() else None
    if base is None or not base.requires_grad:
        return lambda grad: grad
    base_size, base_stride = tuple(base.shape), base.stride()
    size, stride, offset = tuple(output.shape), output.stride(), output.storage_offset() - base.storage_offset()

    def read(grad: Tensor) -> Tensor:
        if grad.stride() != base_stride:
            grad = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided(size, stride, grad.storage_offset() + offset)

    return read


def _answers(rule: Rule, arguments: Mapping[str, Any], use: Use) -> bool:
    """Whether weights and batch stand only where the rule expects them."""
    weights = {id(value) for name, value in arguments.items() if name in rule.weights and isinstance(value, Tensor)}
    batched = {id(value) for name, value in arguments.items() if name in rule.batched and isinstance(value, Tensor)}
    if any(key not in weights for key in use.weights):
        return False
    if any(id(tensor) not in batched for tensor, _ in use.call.located):
        return False
    aligned = use.followed.aligned
    return not any(
        id(operand.tensor) in weights | batched
        and operand.axis is None
        and aligned is not None
        and aligned(operand.tensor) is not None
        for operand in use.call.operands
    )


def _computation(use: Use) -> Callable[[Tensor], list[Contribution]]:
    axis = next(
        axis
        for output, axis in zip(use.call.outputs, use.followed.outputs, strict=False)
        if output.requires_grad and isinstance(axis, BatchAxis)
    )
    return _by_rule(use, use.rule, axis) if use.rule is not None else _by_generic_rule(use, axis)


def _by_rule(use: Use, rule: Rule, axis: BatchAxis) -> Callable[[Tensor], list[Contribution]]:
    call, batch_size = use.call, use.call.batch_size
    owners = {name: use.weights[id(value)] for name, value in use.arguments.items() if id(value) in use.weights}
    rank = use.call.outputs[0].dim() if call.op in POINTWISE else 0
    kept: dict[str, Any] = {}
    axes: dict[str, BatchAxis] = {}
    for name, value in use.arguments.items():
        if not isinstance(value, Tensor):
            kept[name] = value
        elif name in rule.reads or name in owners:
            kept[name] = value.detach()
            where = call.axis_of(value)
            if isinstance(where, BatchAxis):
                axes[name] = where
        elif name not in rule.batched:
            kept[name] = value.detach()
    unchanged = _Unchanged(use, use.arguments.values(), kept.values())

    def compute(grad: Tensor) -> list[Contribution]:
        unchanged.check()
        arguments = dict(kept)
        for name, where in axes.items():
            tensor = kept[name]
            extra = max(rank - tensor.dim(), 0)
            if extra:
                tensor = tensor.reshape(*(1,) * extra, *tensor.shape)
            arguments[name] = batch_first(tensor, where.moved(where.dim + extra), batch_size)
        given = rule.function(
            Call(batch_size, arguments, frozenset(owners)), batch_first(grad, axis, batch_size, fill=False)
        )
        return [(owners[name], gradient) for name, gradient in given.items()]

    return compute


def _by_generic_rule(use: Use, axis: BatchAxis) -> Callable[[Tensor], list[Contribution]]:
    call, batch_size = use.call, use.call.batch_size
    leaves, spec = tree_flatten((call.args, dict(call.kwargs)))
    owners = {position: use.weights[id(leaf)] for position, leaf in enumerate(leaves) if id(leaf) in use.weights}
    axes: dict[int, BatchAxis] = {}
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        where = call.axis_of(leaf)
        if isinstance(where, BatchAxis):
            axes[position] = where
        elif use.followed.aligned is not None and (dim := use.followed.aligned(leaf)) is not None:
            axes[position] = axis.moved(dim)
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    unchanged = _Unchanged(use, leaves, kept)

    def compute(grad: Tensor) -> list[Contribution]:
        unchanged.check()
        args, kwargs = tree_unflatten(kept, spec)
        batched = {position: batch_first(kept[position], where, batch_size) for position, where in axes.items()}
        given = generic_rule(
            call.function, args, kwargs, batched, frozenset(owners), batch_first(grad, axis, batch_size, fill=False)
        )
        contributions: list[Contribution] = []
        for position, gradient in given.items():
            where = axes.get(position)
            if where is not None and where.owner is not None:
                raise UnsupportedError(f"{use.describe()} lays a weight along rows that were picked from the batch")
            structure = Dense(gradient) if where is None else Block(gradient, where.dim, where.outer, where.inner)
            contributions.append((owners[position], structure))
        return contributions

    return compute


class _Unchanged:
    """Guards the values that a rule reads in backward against in-place changes since the forward."""

    def __init__(self, use: Use, given: Iterable[Any], kept: Iterable[Any]) -> None:
        written = {
            tensor.data_ptr() for tensor in given if isinstance(tensor, Tensor) and id(tensor) in use.call.written
        }
        self._versions = [
            (tensor, tensor._version)
            for tensor in kept
            if isinstance(tensor, Tensor) and tensor.data_ptr() not in written
        ]
        self._text = use.describe()

    def check(self) -> None:
        """Raise if one of the tensors was written to.

        Raises:
            UnsupportedError: a tensor has another version than at the call.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise UnsupportedError(
                    f"{self._text}: a tensor of sizes {tuple(tensor.shape)} that the per-sample gradient needs was "
                    "changed in "
                    "place between forward and backward; write the result to a new tensor instead"
                )
