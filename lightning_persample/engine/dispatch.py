"""What happens at each torch call: follow the batch, derive weights, attach the hooks that collect contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from lightning_persample.engine.batch_axis import BatchAxis, Lost
from lightning_persample.engine.coverage import OUTSIDE
from lightning_persample.engine.decompose import decomposed
from lightning_persample.engine.failure import FAILURES, reason_of
from lightning_persample.engine.following import FACTORIES, common_axis, follow
from lightning_persample.engine.graph import Node, boundary, ends_below, nodes_between, unseen_edges
from lightning_persample.engine.kinds import (
    DATA_SOURCES,
    SHAPE_OF_SECOND,
    adds_a_term,
    attribute_of,
    in_parts,
    kind_of,
)
from lightning_persample.engine.marks import CONSTANT, KNOWN, Constant, Marks
from lightning_persample.engine.observed import ObservedCall, Operand, operands_of, tensors_in, version_of
from lightning_persample.engine.use import Use, attach, refuse_where_used
from lightning_persample.engine.weight import Derivation, Weight
from lightning_persample.gradients import SampleGradient
from lightning_persample.rules import rule_of

__all__ = ["Dispatcher"]

Mark: TypeAlias = Weight | BatchAxis | Lost | Constant


_OF_NO_SAMPLE = {type(None), Constant}
_PLAIN = {type(None), Constant, BatchAxis}


class Dispatcher:
    """The state of one capture and the one place where a torch call changes it.

    Args:
        weights: the parameters, by name, each with its tensor.
        batch_size: number of samples B.
        keep_structures: keep every contribution until the backward ends, for quantities other than the squared norm.
        buffers: tensors of the module that hold no sample's data.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        batch_size: int,
        keep_structures: bool = False,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self.batch_size = batch_size
        self.marks: Marks[Mark] = Marks()
        self.weights: list[Weight] = []
        self.nodes: dict[Node, list[Weight]] = {}
        self.seen: set[Node] = set()
        self.refused: dict[str, str] = {}
        self.mixing: dict[str, None] = {}
        self.weighting: dict[str, None] = {}
        self.not_additive: dict[str, None] = {}
        self.accepting = True
        self.frees = False  # does the present backward free the graph it has gone through?
        self.keep_structures = keep_structures
        self.kept: set[str] = set()
        self.keep: Callable[[Tensor], Tensor] = Tensor.detach  # what weights are computed from, until the backward
        self._written: dict[int, UntypedStorage] = {}
        for name, parameter in weights.items():
            weight = Weight(frozenset({name}), parameter)
            self.weights.append(weight)
            self.marks[parameter] = weight
        for buffer in buffers:
            self.marks[buffer] = KNOWN

    def mark_batch(self, tensor: Tensor, mark: BatchAxis | Lost) -> None:
        """Declare where the batch lies in a tensor of the batch."""
        self.marks[tensor] = mark

    def mark_gradients(self, inputs: list[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """A gradient asked for aside lies where its input lies; that of a weight belongs to the whole batch."""
        for tensor, gradient in zip(inputs, gradients, strict=False):
            mark = self._mark_of(tensor)
            if gradient is None or mark is None or isinstance(mark, Constant):
                continue
            whole = Lost("it is a gradient of the whole batch, computed in the step")
            self._set_mark(gradient, mark if isinstance(mark, BatchAxis) else whole)

    def start_backward(self, losses: list[Tensor], weights: Tensor | None) -> None:
        """Take note of what backward starts from."""
        for loss in losses:
            mark = self.marks.get(loss)
            if isinstance(mark, Weight) and mark.outside:
                self.refuse([mark], OUTSIDE)
            if isinstance(mark, Lost) and not mark.noted and 0 < len(mark.samples) < self.batch_size:
                self.weighting.setdefault(f"the loss takes {len(mark.samples)} of the {self.batch_size} samples alone")
            if isinstance(mark, BatchAxis) and weights is not None and weights.numel() > 1:
                self.weighting.setdefault("`backward` was given a gradient that weighs the samples")

    def check_reduction(self, loss: Tensor, declared: object) -> None:
        """Note a loss that is plainly a sum over the samples where a mean was declared, or the reverse."""
        mark = self.marks.get(loss)
        if not isinstance(mark, Lost) or mark.how is None or declared not in ("mean", "sum") or self.batch_size == 1:
            return
        if mark.how != declared:
            self.weighting.setdefault(
                f"the loss is a {mark.how} over the samples, but loss_reduction is {declared!r}: pass "
                f"loss_reduction={mark.how!r}"
            )

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
        kind = kind_of(function)
        op = kind.op
        if op is None:
            if getattr(function, "__name__", "") == "__set__" and attribute_of(function) == "data":
                self._copy_mark(*args)
            return function(*args, **kwargs)
        tensors = operands_of(args, kwargs)
        if op in SHAPE_OF_SECOND:
            del tensors[1:]
        marks = [self._mark_of(tensor) for tensor in tensors]
        kinds = set(map(type, marks))
        if kinds <= _OF_NO_SAMPLE:
            result = function(*args, **kwargs)
            self._note_constant(op, tensors, result)
            return result
        if kind.pointwise and BatchAxis in kinds and kinds <= _PLAIN:
            axis, rank = common_axis(tensors, marks)
            if axis is not None and not (kind.inplace and len(tensors) > 1) and "out" not in kwargs:
                result = function(*args, **kwargs)  # by far the most calls: the output lies where the inputs do
                for output in (result,) if isinstance(result, Tensor) else tensors_in(result):
                    self._set_mark(output, axis.moved(axis.dim + output.dim() - rank))
                return result
        if any(is_lazy(tensor) for tensor in tensors):
            return function(*args, **kwargs)
        if kind.composite:
            with visible:
                return decomposed(function)(*args, **kwargs)
        marked = list(zip(tensors, marks, strict=True))
        weights = [(t, m) for t, m in marked if isinstance(m, Weight)] if torch.is_grad_enabled() else []
        inplace = kind.inplace
        stop = boundary(tensor for tensor, _ in marked) if weights else set()
        saved = (args[0].detach().clone(), *args[1:]) if weights and inplace else args
        versions = [(tensor, version_of(tensor)) for tensor, _ in marked]
        rule = rule_of(op) if weights else None
        draws = bool(weights) and (op in DATA_SOURCES or (rule is not None and rule.draws is not None))
        random_state = torch.get_rng_state() if draws else None
        result = function(*args, **kwargs)
        outputs = tuple(tensors_in(args[0] if result is None and inplace else result))
        if not inplace and "out" not in kwargs:  # `contiguous`, `to` and the like may return what they were given
            outputs = tuple(output for output in outputs if all(output is not tensor for tensor, _ in marked))
        if not outputs:
            return result
        written = frozenset(id(tensor) for tensor, version in versions if version_of(tensor) != version)
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
            for part in in_parts(call):
                own = live if part is call else {key: live[key] for key in map(id, part.args) if key in live}
                self._note(part, own, stop)
        except FAILURES as error:
            self._give_up(call, live, error)
        return result

    def _note(self, call: ObservedCall, involved: Mapping[int, Weight], stop: set[Node]) -> None:
        """Mark the outputs of a call and collect what its weights contribute; `involved` is empty without gradient."""
        if involved:
            self._watch_inside(call.outputs, stop)
        before = self.marks.get(call.outputs[0])
        if call.located or call.lost:
            self._with_batch(call, involved)
        elif involved:
            self._derive(call, involved)
        elif call.inplace and isinstance(before, Weight):  # written to without gradient: it is still made of weights
            others = [o.tensor for o in call.operands if o.tensor is not call.outputs[0]]
            before.outside |= call.op in DATA_SOURCES or not all(self._is_known(tensor) for tensor in others)
        else:
            self._note_constant(call.op, [operand.tensor for operand in call.operands], call.outputs)
        if call.inplace and call.outputs[0]._is_view():
            self._mark_base(call.outputs[0])
        if call.inplace and (before is None or isinstance(before, Constant)) and not involved:
            storage = call.outputs[0].untyped_storage()  # other views of this memory now hold the batch, too
            self._written[storage.data_ptr()] = storage

    def _give_up(self, call: ObservedCall, involved: Mapping[int, Weight], error: Exception) -> None:
        reason = reason_of(error, call.describe())
        for output in call.outputs:
            self._set_mark(output, Lost(reason))
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

    def _set_mark(self, output: Tensor, mark: Mark) -> None:
        """Mark a result; a parameter that is written to (an update, a clamp) remains what it is."""
        known = self.marks.get(output)
        if not (isinstance(known, Weight) and known.derivation is None):
            self.marks[output] = mark

    def _copy_mark(self, target: Tensor, source: Tensor) -> None:
        mark = self._mark_of(source)
        if mark is not None:
            self._set_mark(target, Lost("its data was replaced by assignment") if isinstance(mark, Weight) else mark)

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether no sample's data can be in a tensor that is not marked as holding it."""
        mark = self.marks.get(tensor)
        if mark is None:
            return isinstance(tensor, nn.Parameter) or tensor.numel() <= 1
        if isinstance(mark, Weight):
            return not mark.outside
        return isinstance(mark, Constant) and mark.known

    def _note_constant(self, op: object, operands: list[Tensor], result: Any) -> None:
        known = op not in DATA_SOURCES and all(self._is_known(tensor) for tensor in operands)
        for output in tensors_in(result):
            foreign = output.requires_grad and output.grad_fn is not None
            if known or foreign or self.marks.get(output) is KNOWN:
                self._set_mark(output, KNOWN if known else CONSTANT)

    def _mark_of(self, tensor: Tensor) -> Mark | None:
        mark = self.marks.get(tensor)
        if type(mark) is BatchAxis:
            return mark
        if type(mark) is Weight:
            return mark if tensor.requires_grad else None
        unmarked = mark is None or type(mark) is Constant
        if unmarked and self._written and tensor.layout == torch.strided:
            shared = tensor.untyped_storage().data_ptr() in self._written
            mark = Lost("it shares its memory with a tensor that the batch was written into") if shared else mark
        if mark is None and tensor.requires_grad and tensor.grad_fn is not None:
            return Lost(
                f"it passed through {tensor.grad_fn.name()}, which is not a torch call that can be seen (a custom "
                "autograd function, or a tensor kept from before this step)"
            )
        return mark

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
        outside = (
            any(parent.outside for parent in parents.values())
            or call.op in DATA_SOURCES
            or not all(self._is_known(leaf) for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in involved)
        )
        detached = tuple(self.keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        text, versions = call.describe(), tuple(version_of(leaf) for leaf in detached if isinstance(leaf, Tensor))
        for position, output in enumerate(call.outputs):
            if not output.requires_grad:
                continue
            derivation = Derivation(
                call.op, call.function, detached, spec, parents, position, self.keep(output), call.inplace, text,
                call.random_state, versions,
            )  # fmt: skip
            weight = Weight(names, output.detach(), derivation, outside=outside)
            for parent in parents.values():
                parent.children += 1
            self.weights.append(weight)
            self.marks[output] = weight
            if output.grad_fn is not None:
                self.watch(output.grad_fn, weight)

    def _with_batch(self, call: ObservedCall, involved: Mapping[int, Weight]) -> None:
        followed = follow(call)
        alone = self.batch_size == 1  # one sample mixes with none
        if followed.mixing is not None and not alone:
            self.mixing.setdefault(followed.mixing)
        if followed.weighting is not None and not alone:
            self.weighting.setdefault(followed.weighting)
        rule = rule_of(call.op)
        for output, mark in zip(call.outputs, followed.outputs, strict=False):
            if mark is not None:
                self._set_mark(output, mark)
        if call.op in FACTORIES and call.op not in DATA_SOURCES:
            for output in call.outputs:
                self._set_mark(output, KNOWN)
        if not involved and (rule is None or rule.mixes_samples is None):
            return
        use = Use(call, followed, involved, rule)
        if use.mixing is not None and not alone:
            self.mixing.setdefault(use.mixing)
            for output, mark in zip(call.outputs, followed.outputs, strict=False):
                if isinstance(mark, BatchAxis):
                    self.marks[output] = mark.mixed(use.mixing)
        if involved and adds_a_term(call):
            outside = [weight for weight in involved.values() if weight.outside]
            refuse_where_used(call.outputs, outside, f"{use.description}: {OUTSIDE}", self)
        elif involved:
            self._register(use, involved)

    def _register(self, use: Use, involved: Mapping[int, Weight]) -> None:
        for operand in use.call.operands:  # one parameter may be given twice to one call
            weight = involved.get(id(operand.tensor))
            if weight is not None:
                weight.uses += 1
        for text in use.tainted if self.batch_size > 1 else ():
            self.mixing.setdefault(text)
        if use.not_additive is not None and self.batch_size > 1:
            self.not_additive.setdefault(use.not_additive)
        attach(use, self)

    def contribute(self, weight: Weight, gradient: SampleGradient) -> None:
        """Take what one use contributes; where it is all there is, keep only the squared norm."""
        if weight.sq_norm is not None:
            self.refuse([weight], "it was used again by a call that ran during the backward (activation checkpointing)")
            return
        alone = weight.derivation is None and weight.uses == 1 and weight.children == 0
        if alone and not self.keep_structures and not weight.names & self.kept:
            weight.sq_norm = gradient.sq_norm()
        else:
            weight.contributions.append(gradient)

    def refuse(self, weights: Iterable[Weight], reason: str) -> None:
        """Note that a gradient of these weights could not be split by sample."""
        for weight in weights:
            for name in weight.names:
                self.refused.setdefault(name, reason)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Report nothing of the gradients computed inside: they are not the training gradient."""
        before, self.accepting = self.accepting, False
        try:
            yield
        finally:
            self.accepting = before

    def find_unseen(self, tops: list[Tensor]) -> None:
        """Refuse the weights that a gradient reaches, from these tensors down, through a call that was not seen."""
        for node, below in unseen_edges(tops, set(self.nodes), self.seen):
            self.refuse(
                self.nodes[below],
                f"its gradient also arrives through {node.name()}, which is not a torch call that can be seen (a "
                "custom autograd function, a gradient of a gradient, a tensor from before, or a forward outside)",
            )

    def close(self) -> None:
        """Forget every mark, weight and node."""
        self.marks.clear()
        self.weights.clear()
        self.nodes.clear()
        self.seen.clear()
        self._written.clear()
