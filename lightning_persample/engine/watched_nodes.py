"""The autograd nodes that the gradients of weights go through, to find gradients that reach a weight unseen."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_persample.engine.graph import Node, boundary, ends_below, leaf_of, nodes_between, unseen_edges
from lightning_persample.engine.marks import Marks
from lightning_persample.engine.weight import Weight

__all__ = ["WatchedNodes"]


class WatchedNodes:
    """The nodes of one capture.

    Args:
        marks: tells the leaves that are weights.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._weights: dict[Node, list[Weight]] = {}
        self._seen: set[Node] = set()

    def watch(self, node: Node, weight: Weight) -> None:
        """Remember the node of a weight that is no leaf, or whose leaf has no mark."""
        self._weights.setdefault(node, []).append(weight)

    def weights_of(self, node: Node) -> list[Weight]:
        """The weights whose gradient goes through a node."""
        known, leaf = self._weights.get(node), leaf_of(node)
        mark = self._marks.get(leaf) if known is None and leaf is not None else None
        return [mark] if isinstance(mark, Weight) else known or []

    def watch_inside(self, outputs: tuple[Tensor, ...], stop: set[Node]) -> None:
        """Gradients may enter a call through its outputs only, not through the nodes between them and the weights.

        Args:
            outputs: of a call that was seen.
            stop: the nodes of its operands.
        """
        nodes = nodes_between(outputs, stop)
        self._seen |= nodes
        for node in nodes - boundary(outputs):
            for end in ends_below(node, nodes):
                for weight in self.weights_of(end):
                    self.watch(node, weight)

    def unseen(self, tops: list[Tensor]) -> Iterator[tuple[Node, list[Weight]]]:
        """The nodes of no call that was seen, from which a gradient goes to weights, with these; from the tops down."""
        for node, below in unseen_edges(tops, lambda node: bool(self.weights_of(node)), self._seen):
            yield node, self.weights_of(below)

    def clear(self) -> None:
        """Forget every node."""
        self._weights.clear()
        self._seen.clear()
