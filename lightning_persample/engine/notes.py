"""What there is to say of calls, and of which of them the present backward goes through."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from lightning_persample.engine.hooks import on_gradient

__all__ = ["Kind", "Notes", "Observes"]

Kind: TypeAlias = Literal["mixing", "weighting", "not_additive"]


class Observes(Protocol):
    """Tells whether the present backward counts, and takes note of a fault of this package."""

    accepting: bool

    def fail(self, error: Exception) -> None:
        """Take note of it."""


class Notes:
    """Texts on calls and on the loss; a record has those of its own backward.

    Args:
        collector: tells whether the present backward counts; it holds the notes, so that they do not hold it.

    Attributes:
        axis_lost: texts after which it is not known whose the values are, and no more.
        excused: the kinds and texts that are not so of the present backward.
    """

    def __init__(self, collector: Observes) -> None:
        self._collector = weakref.ref(collector)
        self._texts: dict[Kind, dict[str, None]] = {"mixing": {}, "weighting": {}, "not_additive": {}}
        self._always: set[tuple[Kind, str]] = set()
        self._reached: set[tuple[Kind, str]] = set()
        self._of_loss: dict[str, None] = {}
        self.axis_lost: set[str] = set()
        self.excused: frozenset[tuple[str, str]] = frozenset()

    def add(self, kind: Kind, text: str, outputs: Iterable[Tensor]) -> None:
        """Say something of a call in every backward that goes through one of its outputs."""
        self._texts[kind].setdefault(text)
        hooked = [output for output in outputs if output.requires_grad]
        if not hooked:
            self._always.add((kind, text))
        for output in hooked:
            on_gradient(output, partial(self._reach, kind, text), self._fail)

    def add_of_loss(self, text: str) -> None:
        """Say that the samples weigh in the loss of the next backward otherwise than `loss_reduction` says."""
        self._of_loss.setdefault(text)

    def known(self, kind: Kind) -> tuple[str, ...]:
        """All texts on calls, whatever a backward goes through."""
        return tuple(self._texts[kind])

    def reached(self, kind: Kind) -> tuple[str, ...]:
        """The texts on calls that the present backward has gone through, and on its loss, in the order of the calls."""
        seen = (self._always | self._reached) - self.excused
        found = tuple(text for text in self._texts[kind] if (kind, text) in seen)
        return (*found, *self._of_loss) if kind == "weighting" else found

    def split(self, texts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts on calls by which samples influence each other, and those after which it is not known whether."""
        lost = tuple(text for text in texts if text in self.axis_lost)
        return tuple(text for text in texts if text not in lost), lost

    def forget(self) -> None:
        """The backward is over."""
        self._of_loss.clear()
        self._reached.clear()
        self.excused = frozenset()

    def _fail(self, error: Exception) -> None:
        collector = self._collector()
        if collector is not None:
            collector.fail(error)

    def _reach(self, kind: Kind, text: str, grad: Tensor) -> None:
        collector = self._collector()
        if collector is not None and collector.accepting:
            self._reached.add((kind, text))
