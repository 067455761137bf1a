"""The autograd nodes that the gradients of weights go through, to find gradients that reach a weight unseen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_persample.engine.graph import Edges, Node, boundary, edges_between, ends_below, leaf_of
from lightning_persample.engine.marks import Marks
from lightning_persample.engine.weight import Weight

__all__ = ["WatchedNodes"]

_PRODUCTS = frozenset({"AddmmBackward0", "MmBackward0"})


class WatchedNodes:
    """The nodes of one capture.

    Args:
        marks: tells the leaves that are weights.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._weights: dict[Node, list[Weight]] = {}
        self._seen: set[Node] = set()
        self._calls: dict[Node, tuple[list[Node], list[Weight]]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, node: Node, weight: Weight) -> None:
        """Remember the node of a weight that is no leaf, or whose leaf has no mark."""
        self._weights.setdefault(node, []).append(weight)

    def weights_of(self, node: Node) -> list[Weight]:
        """The weights whose gradient goes through a node."""
        known = self._weights.get(node)
        if known is not None:
            return known
        leaf = leaf_of(node)
        mark = None if leaf is None else self._marks.get(leaf)
        return [mark] if isinstance(mark, Weight) else []

    def watch_inside(self, outputs: Sequence[Tensor], stop: set[Node]) -> Edges:
        """Gradients may enter a call through its outputs only, not through the nodes between them and the weights."""
        inside = edges_between(outputs, stop)
        self._seen.update(inside)
        entrances = boundary(outputs)
        for node in inside:
            if node not in entrances:
                for end in ends_below(node, inside):
                    for weight in self.weights_of(end):
                        self.watch(node, weight)
        return inside

    def watch_call(self, output: Tensor, hooked: Node | None, tensors: Sequence[Tensor]) -> None:
        """`watch_inside` of a call with one output."""
        inside = self.watch_inside((output,), boundary(tensors))
        if hooked is not None and hooked in inside:
            further: list[Node] = []
            weights: list[Weight] = []
            for end in ends_below(hooked, inside):
                if leaf_of(end) is None:
                    further.append(end)
                else:
                    weights += self.weights_of(end)
            self._calls[hooked] = further, weights

    def watch_linear(self, output: Tensor, tensors: Sequence[Tensor], weights: list[Weight]) -> None:
        """`watch_inside` of a linear map of rows, which as a rule is a product with the transpose of its weight."""
        node = output.grad_fn
        edges = () if node is None else node.next_functions
        inner = edges[-1][0] if len(edges) == len(tensors) else None
        if node is None or inner is None or node.name() not in _PRODUCTS or inner.name() != "TBackward0":
            self.watch_inside((output,), boundary(tensors))
            return
        self._seen.add(node)
        self._seen.add(inner)
        self.watch(inner, weights[0])
        if all(weight.derivation is None for weight in weights):
            self._calls[node] = [] if edges[-2][0] is None else [edges[-2][0]], weights

    def below(self, tops: list[Tensor]) -> tuple[list[tuple[Node, list[Weight]]], list[Weight]]:
        """What a backward will meet."""
        unseen: list[tuple[Node, list[Weight]]] = []
        met: list[Weight] = []
        stack = [top.grad_fn for top in tops if top.grad_fn is not None]
        visited = set(stack)
        while stack:
            node = stack.pop()
            call = self._calls.get(node)
            if call is not None:  # what is below it is known as far as the nodes of its inputs
                met += call[1]
                for further in call[0]:
                    if further not in visited:
                        visited.add(further)
                        stack.append(further)
                continue
            is_unseen = node not in self._seen
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if is_unseen:
                    weights = self.weights_of(following)
                    if weights:
                        unseen.append((node, weights))
                if following not in visited:
                    visited.add(following)
                    stack.append(following)
        return unseen, met

    def release_later(self, handle: RemovableHandle) -> None:
        """Take a hook away when no backward will come: it holds nodes that hold it, a circle that no collector sees."""
        self._handles.append(handle)

    def release(self) -> None:
        """Take away the hooks that were to be."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget every node."""
        self._calls.clear()
        self._weights.clear()
        self._seen.clear()
