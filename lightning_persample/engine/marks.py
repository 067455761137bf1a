"""What one capture knows of a tensor, kept beside the tensors and gone with the capture."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["CONSTANT", "KNOWN", "Constant", "Marks"]

Mark = TypeVar("Mark")


class Constant:
    """Mark of a tensor that holds neither weights nor the batch.

    Args:
        known: it was made of numbers, parameters and buffers alone, so that no sample's data can be in it.
    """

    def __init__(self, *, known: bool) -> None:
        self.known = known


CONSTANT, KNOWN = Constant(known=False), Constant(known=True)


class Marks(Generic[Mark]):
    """A mapping from tensor objects to marks that holds no tensor alive and writes nothing on it.

    An entry answers only for the very object it was made for: ids are reused, so the weak reference is compared too.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Mark]] = {}

    def __setitem__(self, tensor: Tensor, mark: Mark) -> None:
        self._entries[id(tensor)] = (weakref.ref(tensor), mark)

    def __len__(self) -> int:
        """The number of living tensors with a mark."""
        return sum(reference() is not None for reference, _ in self._entries.values())

    def get(self, tensor: Tensor) -> Mark | None:
        """The mark of this tensor object, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
