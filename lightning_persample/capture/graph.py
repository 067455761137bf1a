"""The autograd graph: which nodes a call made, which gradients reach a weight unseen, and hooks on gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_persample.capture.failure import guard
from lightning_persample.torch_internals import (
    AccumulateGrad,
    counted_from_front,
    is_view,
    view_base,
    without_torch_function,
)

Nodes: TypeAlias = set[Node]
Edges: TypeAlias = dict[Node, list[Node]]

_OF_TORCHSCRIPT = "torch::jit::"
REENTRANT = "CheckpointFunctionBackward"
"""Name of the node of an activation checkpoint that runs its forward again as a backward inside the backward."""


def accumulator(parameter: Tensor) -> Node:
    """The node that adds to the gradient of a leaf."""
    return get_gradient_edge(parameter).node


def boundary(tensors: Iterable[Tensor]) -> Nodes:
    """The nodes that made these tensors and, for views, their bases."""
    found: Nodes = set()
    for tensor in tensors:
        if tensor.grad_fn is not None:
            found.add(tensor.grad_fn)
            base = view_base(tensor)
            if base is not None and base.grad_fn is not None:
                found.add(base.grad_fn)
    return found


def edges_between(tops: Iterable[Node | None], stop: Nodes) -> Edges:
    """The nodes that one call added to the graph, from its outputs' down to those of its inputs, and their edges."""
    found: Edges = {}
    stack = []
    for node in tops:
        if node is not None and node not in stop:
            stack.append((node, node.next_functions))
    while stack:
        node, edges = stack.pop()
        if node in found:
            continue
        found[node] = following = [below for below, _ in edges if below is not None]
        for below in following:
            if below not in stop and below not in found:
                edges = below.next_functions
                if edges:
                    stack.append((below, edges))
    return found


def ends_below(node: Node, inside: Edges) -> Nodes:
    """The nodes outside of `inside` that a walk down from a node within it ends at."""
    found: Nodes = set()
    stack, visited = [node], {node}
    while stack:
        for following in inside[stack.pop()]:
            if following in visited:
                continue
            visited.add(following)
            if following in inside:
                stack.append(following)
            else:
                found.add(following)
    return found


def ends_below_each(inside: Edges, is_wanted: Callable[[Node], bool]) -> dict[Node, Nodes]:
    """For each node of `inside` those of `ends_below` that are wanted, of all in one walk."""
    found: dict[Node, Nodes] = {}
    wanted: dict[Node, bool] = {}
    stack = list(inside)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        within = [each for each in inside[node] if each in inside]
        waiting = [each for each in within if each not in found]
        if waiting:
            stack += [node, *waiting]
            continue
        ends: Nodes = set()
        for each in inside[node]:
            if each not in inside:
                if each not in wanted:
                    wanted[each] = is_wanted(each)
                if wanted[each]:
                    ends.add(each)
        parts = [found[each] for each in within]
        found[node] = parts[0] if len(parts) == 1 and not ends else ends.union(*parts)
    return found


def leaf_of(node: Node) -> Tensor | None:
    """The leaf whose gradient a node adds to, or None for any other node."""
    return node.variable if type(node) is AccumulateGrad else None  # type: ignore[attr-defined]


def unseen_text(node: Node, differentiated: str, *, is_scripted: bool = False) -> str:
    """Why nothing is known of the weights below a node, and what helps; second where a gradient was given a graph."""
    if is_scripted or node.name().startswith(_OF_TORCHSCRIPT):
        return (
            "its gradient also arrives through TorchScript (torch.jit.script or torch.jit.trace), whose calls torch "
            "does not show; use the module or function that was scripted as it was written, or engine='loop' in the "
            "callback (loop_per_sample_grads without a Trainer)"
        )
    if differentiated and not isinstance(node, BackwardCFunction):
        return (
            f"its gradient also arrives through {node.name()}, of the gradient that was computed with create_graph=True"
            f"{differentiated} (a gradient of a gradient), whose calls torch does not show; unsupported='vmap' or "
            "engine='loop' in the callback computes it in automatic optimization, loop_per_sample_grads everywhere"
        )
    if not isinstance(node, BackwardCFunction):
        return (
            f"its gradient also arrives through {node.name()}, a node of no torch call that can be followed: it is of "
            "a tensor from before the step or of a forward outside it (run that in the step), or of torch.vmap or "
            "another transform of torch.func, or of a TorchScript function (which engine='loop' in the callback "
            "computes, or loop_per_sample_grads)"
        )
    if node.name() == REENTRANT:
        return (
            "a tensor made of it is an input of an activation checkpoint with use_reentrant=True, which torch does not "
            "show; use checkpoint(..., use_reentrant=False)"
        )
    name = node.name().removesuffix("Backward")
    return (
        f"its gradient also arrives through {name}.apply, a custom autograd function, which torch does not show; "
        "call it in a function decorated with @torch.overrides.wrap_torch_function(lambda *args: args) (register_rule "
        "then makes it fast), or use engine='loop' in the callback"
    )


def nodes_below(tops: Iterable[Tensor], stop: Collection[Node] = ()) -> Iterator[Node]:
    """Every node that a walk down from these tensors meets that goes through none of the nodes `stop`."""
    stack = [top.grad_fn for top in tops if top.grad_fn is not None and top.grad_fn not in stop]
    visited: Nodes = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited and following not in stop:
                visited.add(following)
                stack.append(following)


def node_below(tops: Iterable[Tensor], name: str) -> bool:
    """Whether there is a node of this name anywhere below these tensors."""
    return any(node.name() == name for node in nodes_below(tops))


def reaches(tops: Iterable[Tensor], nodes: Nodes, stop: Nodes) -> bool:
    """Whether a walk down from these tensors that goes through none of the nodes `stop` meets one of `nodes`."""
    return any(node in nodes for node in nodes_below(tops, stop))


class Takers:
    """Which nodes take what a node gives, below some tensors: what comes of padding."""

    def __init__(self, tops: Iterable[Tensor]) -> None:
        self._of: dict[Node, list[Node]] = {}
        for node in nodes_below(tops):
            for following, _ in node.next_functions:
                if following is not None:
                    self._of.setdefault(following, []).append(node)

    def add_up(self, node: Node, axis: int, rank: int) -> bool:
        """Whether all that takes a tensor are sums over an axis, to which its zeros add nothing."""
        return node in self._of and all(self._adds_up(taker, axis, rank) for taker in self._of[node])

    def _adds_up(self, taker: Any, axis: int, rank: int) -> bool:
        name = taker.name()
        if name == "SumBackward1":
            return axis in counted_from_front(taker._saved_dim, rank)
        if name == "IndexSelectBackward0":  # (of the samples, in another order)
            return axis not in counted_from_front([taker._saved_dim], rank) and self.add_up(taker, axis, rank)
        if name == "TransposeBackward0":
            one, other = counted_from_front((taker._saved_dim0, taker._saved_dim1), rank)
            return self.add_up(taker, {one: other, other: one}.get(axis, axis), rank)
        return False

    def count(self, node: Node, rows: int) -> bool:
        """Whether rows count that add nothing: `rows` of them along the first axis of a tensor or its first two."""
        # A mean divides by their number, and a sum over what attention gives has a term for each of them, unless a
        # mask has made it zero.
        start = node, rows, False
        stack, visited = [start], {start}
        while stack:
            node, rows, attends = stack.pop()
            for taker in self._of.get(node, ()):
                name, shape = taker.name(), _shape_of(taker)
                number = shape[0] if name == "SliceBackward0" and shape else rows
                now = (attends or name.startswith(_ATTENDS)) and not name.startswith(_MASKS)
                keeps = number in {math.prod(shape[:n]) for n in (1, 2)} and _keeps_rows(taker, len(_shape_of(node)))
                if keeps and (taker, number, now) not in visited:
                    visited.add((taker, number, now))
                    stack.append((taker, number, now))
                reduction = getattr(taker, "_saved_reduction", None) if "Loss" in name else None
                is_sum = attends and name.startswith("SumBackward")
                if not keeps and (name.startswith("MeanBackward") or reduction == 1 or is_sum):
                    return True
        return False


_ATTENDS = ("Bmm", "Baddbmm", "ScaledDotProduct")
_MASKS = ("Mul", "MaskedFill", "Where", "Index")


def _keeps_rows(taker: Any, rank: int) -> bool:
    """Whether a call on a tensor of this rank has left its first two axes, or made others of them in a view."""
    dims = getattr(taker, "_saved_dim", None) if taker.name().startswith(("Sum", "Mean", "Amax", "Amin")) else None
    if isinstance(dims, (tuple, list)):
        return not {0, 1} & set(counted_from_front(dims, rank))
    return len(_shape_of(taker)) >= rank or taker.name().startswith(("View", "ReshapeAlias", "UnsafeView", "Squeeze"))


def _shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a call gave, by its node; none where torch does not tell."""
    found = getattr(node, "_input_metadata", ())
    return tuple(found[0].shape) if found else ()


def on_gradient(output: Tensor, hook: Callable[[Tensor], None], failed: Callable[[Exception], None]) -> None:
    """Call the hook with the output's gradient, after all hooks of the user's that may change it."""
    hooked = hooked_tensor(output)
    node, place = hooked.grad_fn, hooked.output_nr
    if node is None:
        on_arrival(hooked, hook, failed)
        return

    def before_node(grads: Sequence[Tensor | None]) -> None:
        grad = grads[place]
        if grad is not None:
            hook(grad)

    node.register_prehook(guard(before_node, failed))


def on_arrival(
    tensor: Tensor, hook: Callable[[Tensor], object], failed: Callable[[Exception], object]
) -> RemovableHandle:
    """Call the hook with the gradient of a leaf or a loss, if it gets one: a custom function may hand on None."""
    guarded = guard(partial(_unoffered, hook), failed)
    return tensor.register_hook(lambda grad: None if grad is None else guarded(grad))


def _unoffered(hook: Callable[[Tensor], object], grad: Tensor) -> None:
    """Nobody is offered the calls in a hook of ours."""
    with without_torch_function():
        hook(grad)


def hooked_tensor(output: Tensor) -> Tensor:
    """The tensor whose hook reports the output's gradient."""
    # An op whose output is a view (linear on three axes, einsum) may be followed by an in-place op, which gives the
    # view a new history and leaves a hook on it silent; the tensor behind the view keeps its gradient.
    base = view_base(output) if is_view(output) else None
    return output if base is None or not base.requires_grad else base


def gradient_reader(output: Tensor, base: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the output's gradient from that of its `hooked_tensor`."""
    if output.is_nested:
        return _rows
    if base is output:
        return detached
    if base.is_contiguous() and output.is_contiguous() and base.numel() == output.numel():
        return partial(_reshaped, output.shape)
    base_size, base_stride = tuple(base.shape), base.stride()
    size, stride, offset = tuple(output.shape), output.stride(), output.storage_offset() - base.storage_offset()

    def read(grad: Tensor) -> Tensor:
        grad = detached(grad)
        if grad.stride() != base_stride:
            grad = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided(size, stride, grad.storage_offset() + offset)

    return read


def _rows(grad: Any) -> Tensor:
    """The gradient of the rows of a jagged output."""
    return detached(grad).values()


def _reshaped(size: torch.Size, grad: Tensor) -> Tensor:
    """The gradient of an output that is the whole of a tensor in other sizes."""
    return detached(grad).reshape(size)


def detached(grad: Tensor) -> Tensor:
    """The gradient of an output that is no view, as it is, but for its history."""
    return grad.detach() if grad.requires_grad else grad
