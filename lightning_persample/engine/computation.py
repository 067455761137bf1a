"""From the gradients of a call's outputs to contributions: by the op's own rule, or by the generic one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_persample.engine.batch_axis import BatchAxis, batch_first
from lightning_persample.engine.by_rule import (
    ByRule,
    Drawn,
    check_unchanged,
    not_tensors,
    placed,
    placement_of,
    versions_of,
)
from lightning_persample.engine.observed import version_of, without_data
from lightning_persample.engine.use import Use
from lightning_persample.engine.weight import Computation, Contributions
from lightning_persample.gradients import Dense
from lightning_persample.rules import Rule, generic_rule
from lightning_persample.rules.elementwise import widen

__all__ = ["computation"]


def computation(use: Use) -> Computation:
    """What to do in backward with the gradients of the outputs that can have one."""
    return _by_rule(use, use.rule) if use.rule is not None else _by_generic_rule(use)


def _by_rule(use: Use, rule: Rule) -> Computation:
    call = use.call
    owners = {name: use.weights[id(value)] for name, value in use.arguments.items() if id(value) in use.weights}
    placement, output = placement_of(use, rule), call.outputs[0]
    values, others = {name: use.arguments[name] for name in placement.kept}, not_tensors(use.arguments)
    memory = {t.data_ptr() for t in use.arguments.values() if isinstance(t, Tensor) and id(t) in call.written}
    compute = ByRule(placement, values, others, owners, use.description, output, memory)
    if rule.reads_output or rule.draws is not None:
        compute.drawn = Drawn(output.detach(), use.followed.outputs[0], call.random_state, version_of(output))
    return compute


def _by_generic_rule(use: Use) -> Computation:
    call, batch_size = use.call, use.call.batch_size
    axis = _UNSPLIT if use.whole else use.outputs[0][1]
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
    of_use = without_data if call.op in _SUMS and not call.inplace else Tensor.detach
    kept = [of_use(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    memory = {leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) in call.written}
    versions = versions_of(kept, memory)
    function, description = call.function, use.description

    def compute(grads: Sequence[Tensor | None]) -> Contributions:
        check_unchanged(versions, description)
        (grad,) = grads
        if grad is None:
            return []
        if entries is not None:
            grad = (widen(grad) * entries.share).expand(entries.shape)
        args, kwargs = tree_unflatten(kept, spec)
        batched = {position: _first(kept[position], where, batch_size) for position, where in axes.items()}
        grad = _first(grad, axis, batch_size, fill=False)
        found = generic_rule(function, args, kwargs, batched, frozenset(owners), grad)
        return [
            (owners[place], placed(Dense(gradient), axes.get(place), description)) for place, gradient in found.items()
        ]

    return compute


_SUMS = frozenset({"add", "sub", "rsub"})  # the gradient of a sum reads no values: only shapes are kept
_UNSPLIT = None  # one sample alone, which has no axis


def _first(tensor: Tensor, axis: BatchAxis | None, batch_size: int, *, fill: bool = True) -> Tensor:
    return tensor[None] if axis is None else batch_first(tensor, axis, batch_size, fill=fill)
