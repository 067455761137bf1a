"""What happens at each torch call: follow the batch, derive weights, attach the hooks that collect contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_persample.engine.batch_axis import BatchAxis, Lost
from lightning_persample.engine.decompose import decomposed, is_composite
from lightning_persample.engine.failure import FAILURES, reason_of
from lightning_persample.engine.following import follow
from lightning_persample.engine.graph import Node, boundary, ends_below, nodes_between
from lightning_persample.engine.marks import Marks
from lightning_persample.engine.observed import ObservedCall, Operand, tensors_in
from lightning_persample.engine.use import Use, attach, refuse_where_used
from lightning_persample.engine.weight import Derivation, Weight
from lightning_persample.gradients import SampleGradient
from lightning_persample.rules import canonical_op, find_rule

__all__ = ["Constant", "Dispatcher"]


class Constant:
    """Mark of a tensor that needs gradient but holds neither weights nor the batch."""


Mark: TypeAlias = Weight | BatchAxis | Lost | Constant

_GETTERS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_SHAPE_OF_SECOND = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})
_SUMS = frozenset({"add", "sub", "rsub", "stack", "cat"})
_NO_TENSOR = frozenset({"__set__", "__delete__", "__len__", "size", "dim", "stride", "numel", "is_floating_point"})
_CONSTANT = Constant()


class Dispatcher:
    """The state of one capture and the one place where a torch call changes it.

    Args:
        weights: the parameters, by name, each with its tensor.
        batch_size: number of samples B.
        keep_structures: keep every contribution until the backward ends, for quantities other than the squared norm.
    """

    def __init__(self, weights: Mapping[str, Tensor], batch_size: int, keep_structures: bool = False) -> None:
        self.batch_size = batch_size
        self.marks: Marks[Mark] = Marks()
        self.weights: list[Weight] = []
        self.nodes: dict[Node, list[Weight]] = {}
        self.seen: set[Node] = set()
        self.refused: dict[str, str] = {}
        self.mixing: dict[str, None] = {}
        self.weighting: dict[str, None] = {}
        self.accepting = True
        self.keep_structures = keep_structures
        for name, parameter in weights.items():
            weight = Weight(frozenset({name}), parameter.shape)
            self.weights.append(weight)
            self.marks[parameter] = weight

    def mark_batch(self, tensor: Tensor, mark: BatchAxis | Lost) -> None:
        """Declare where the batch lies in a tensor of the batch."""
        self.marks[tensor] = mark

    def watch(self, node: Node, weight: Weight) -> None:
        """Remember the autograd node of a weight, to find gradients that reach it unseen."""
        self.nodes.setdefault(node, []).append(weight)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visible: AbstractContextManager[Any],
    ) -> Any:
        """Run one torch call and take note of it.

        Args:
            function: what is called.
            args: positional arguments.
            kwargs: keyword arguments.
            visible: context in which the calls inside a Python function of torch are seen.

        Returns:
            What the function returns, unchanged.
        """
        op = _op_of(function)
        if op is None:
            return function(*args, **kwargs)
        marked = [(tensor, self._mark_of(tensor)) for tensor in tensors_in((args, kwargs))]
        if op in _SHAPE_OF_SECOND:
            marked = marked[:1]
        if all(mark is None for _, mark in marked):
            result = function(*args, **kwargs)
            for output in tensors_in(result):
                if output.requires_grad and output.grad_fn is not None:
                    self.marks[output] = _CONSTANT
            return result
        if is_composite(function):
            with visible:
                return decomposed(function)(*args, **kwargs)
        weights = [(t, m) for t, m in marked if isinstance(m, Weight)] if torch.is_grad_enabled() else []
        inplace = _is_inplace(function)
        stop = boundary(tensor for tensor, _ in marked) if weights else set()
        saved = (args[0].detach().clone(), *args[1:]) if weights and inplace else args
        versions = [(tensor, tensor._version) for tensor, _ in marked] if weights else []
        rule = find_rule(function) if weights else None
        random_state = torch.get_rng_state() if rule is not None and rule.draws is not None else None
        result = function(*args, **kwargs)
        outputs = tuple(tensors_in(args[0] if result is None and inplace else result))
        if not inplace:  # `contiguous`, `to` and the like may return what they were given
            outputs = tuple(output for output in outputs if all(output is not tensor for tensor, _ in marked))
        if not outputs:
            return result
        written = frozenset(id(tensor) for tensor, version in versions if tensor._version != version)
        marks = [mark for _, mark in marked]
        operands = tuple(
            Operand(
                saved[0] if inplace and weights and tensor is args[0] else tensor,
                mark if isinstance(mark, (BatchAxis, Lost)) else None,
            )
            for tensor, mark in marked
        )
        call = ObservedCall(
            op, function, saved, kwargs, operands, outputs, self.batch_size, inplace, written, random_state
        )
        involved = {id(o.tensor): m for o, m in zip(operands, marks, strict=True) if isinstance(m, Weight)}
        live = involved if weights and any(output.requires_grad for output in outputs) else {}
        try:
            self._note(call, live, stop)
        except FAILURES as error:
            self._give_up(call, live, error)
        return result

    def _note(self, call: ObservedCall, involved: Mapping[int, Weight], stop: set[Node]) -> None:
        """Mark the outputs of a call and collect what its weights contribute; `involved` is empty without gradient."""
        if involved:
            self._watch_inside(call.outputs, stop)
        if call.located or call.lost:
            self._with_batch(call, involved)
        elif involved:
            self._derive(call, involved)
        else:
            self._mark_all(call.outputs, _CONSTANT)
        if call.inplace and call.outputs[0]._is_view():
            self._mark_base(call.outputs[0])

    def _give_up(self, call: ObservedCall, involved: Mapping[int, Weight], error: Exception) -> None:
        reason = reason_of(error, call.describe())
        for output in call.outputs:
            self.marks[output] = Lost(reason)
        refuse_where_used(call.outputs, list(involved.values()), reason, self)

    def _watch_inside(self, outputs: tuple[Tensor, ...], stop: set[Node]) -> None:
        """Gradients may enter a call through its outputs only, not through the nodes between them and the weights."""
        nodes = nodes_between(outputs, stop)
        self.seen |= nodes
        inside = nodes - boundary(outputs)
        below = {node: [w for end in ends_below(node, nodes) for w in self.nodes.get(end, [])] for node in inside}
        for node, weights in below.items():
            for weight in weights:
                self.watch(node, weight)

    def _mark_of(self, tensor: Tensor) -> Mark | None:
        mark = self.marks.get(tensor)
        if isinstance(mark, Weight):
            return mark if tensor.requires_grad else None
        if mark is None and tensor.requires_grad and tensor.grad_fn is not None:
            return Lost(
                f"it passed through {tensor.grad_fn.name()}, which is not a torch call that can be seen (a custom "
                "autograd function, or a tensor kept from before this step)"
            )
        return mark

    def _mark_all(self, outputs: Iterable[Tensor], mark: Mark) -> None:
        for output in outputs:
            if output.requires_grad:
                self.marks[output] = mark

    def _mark_base(self, view: Tensor) -> None:
        """After a write through a view, the tensor behind it holds what the view holds."""
        base, mark = view._base, self.marks.get(view)
        if base is None or mark is None or (base.is_leaf and base.requires_grad):
            return
        known = self.marks.get(base)
        if isinstance(known, BatchAxis) and isinstance(mark, BatchAxis):
            return
        self.marks[base] = Lost("it was written to in place through a view; write to the tensor itself instead")

    def _derive(self, call: ObservedCall, involved: Mapping[int, Weight]) -> None:
        leaves, spec = tree_flatten((call.args, dict(call.kwargs)))
        parents = {p: involved[id(leaf)] for p, leaf in enumerate(leaves) if id(leaf) in involved}
        names = frozenset().union(*(parent.names for parent in parents.values()))
        detached = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        text = call.describe()
        for position, output in enumerate(call.outputs):
            if not output.requires_grad:
                continue
            derivation = Derivation(
                call.op, call.function, detached, spec, parents, position, output.detach(), call.inplace, text
            )
            weight = Weight(names, output.shape, derivation)
            for parent in parents.values():
                parent.children += 1
            self.weights.append(weight)
            self.marks[output] = weight
            if output.grad_fn is not None:
                self.watch(output.grad_fn, weight)

    def _with_batch(self, call: ObservedCall, involved: Mapping[int, Weight]) -> None:
        followed = follow(call)
        if followed.mixing is not None:
            self.mixing.setdefault(followed.mixing)
        if followed.weighting is not None:
            self.weighting.setdefault(followed.weighting)
        rule = find_rule(call.function)
        for output, mark in zip(call.outputs, followed.outputs, strict=False):
            if mark is not None:
                self.marks[output] = mark
        use = Use(call, followed, involved, rule)
        if use.mixing is not None:
            self.mixing.setdefault(use.mixing)
            for output, mark in zip(call.outputs, followed.outputs, strict=False):
                if isinstance(mark, BatchAxis):
                    self.marks[output] = replace(mark, mixing=use.mixing)
        if involved and not _adds_a_term(call):
            self._register(use, involved)

    def _register(self, use: Use, involved: Mapping[int, Weight]) -> None:
        weights = list(dict.fromkeys(involved.values()))
        for weight in weights:
            weight.uses += 1
        for text in use.tainted:
            self.mixing.setdefault(text)
        attach(use, self)

    def contribute(self, weight: Weight, gradient: SampleGradient) -> None:
        """Take what one use contributes; where it is all there is, keep only the squared norm."""
        if weight.sq_norm is not None:
            self.refuse([weight], "it was used again by a call that ran during the backward (activation checkpointing)")
            return
        alone = weight.derivation is None and weight.uses == 1 and weight.children == 0
        if alone and not self.keep_structures:
            weight.sq_norm = gradient.sq_norm()
        else:
            weight.contributions.append(gradient)

    def refuse(self, weights: Iterable[Weight], reason: str) -> None:
        """Note that a gradient of these weights could not be split by sample."""
        for weight in weights:
            for name in weight.names:
                self.refused.setdefault(name, reason)

    def close(self) -> None:
        """Forget every mark, weight and node."""
        self.marks.clear()
        self.weights.clear()
        self.nodes.clear()
        self.seen.clear()


def _op_of(function: Callable[..., Any]) -> object | None:
    """The canonical op of a call, or None where it gives no tensor to follow."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return attribute if attribute in _GETTERS else None
    return None if name in _NO_TENSOR else canonical_op(function)


def _is_inplace(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and not name.startswith("_")


def _adds_a_term(call: ObservedCall) -> bool:
    """Whether a number made of weights alone is added to one computed over the whole batch: a penalty."""
    return call.op in _SUMS and not call.located and all(operand.tensor.numel() == 1 for operand in call.operands)
