"""The squared norms of a record, made of norms when one of them is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.linalg import vector_norm

__all__ = ["SquaredNorms"]


class SquaredNorms(Mapping[str, Tensor]):
    """By parameter the squared norm of each sample's gradient, (B,).

    Most readers want the norm over all parameters, for which no squares are needed: each op that a training step does
    not run itself costs it as much as a layer of a small model.

    Args:
        names: the parameters.
        norms: the norms, (B, parameters), without a graph.
    """

    def __init__(self, names: tuple[str, ...], norms: Tensor) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._norms = norms
        self._squares: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if self._squares is None:
            self._squares = self._norms.t().contiguous().square_()
            self._rows = self._squares.unbind()
        return self._rows[place]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(dict(self))

    def root_of_sum(self) -> Tensor:
        """The norm over all parameters, (B,), in a new tensor."""
        if self._squares is None:
            return vector_norm(self._norms, 2, 1)
        return self._squares.sum(0).sqrt_()  # (a reader may have changed them in place)
