"""Random numbers of a batch: a sample that runs alone gets those that it had in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.ops import having
from lightning_persample.capture.observing import ObservingMode, decomposed, is_composite
from lightning_persample.rules import canonical_op

# Not dropout, whose probability is 0 meanwhile, nor a permutation of the batch, which is of no sample.
_DRAWS = having("draws") - having("drops") - {"randperm"}


class Draws:
    """Keeps the tensors that torch draws for a batch, and puts their rows into what is drawn for one sample of it.

    Args:
        batch_size: number of samples B.

    Attributes:
        unequal: whether a sample drew otherwise than the batch, so that it had numbers of its own.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._kept: list[Tensor] = []
        self._next = 0
        self._sample: int | None = None
        self._keeps = False
        self.unequal = False

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep what is drawn in this context."""
        self._keeps = True
        with self._seen():
            yield
        self._keeps = False

    @contextmanager
    def again(self, sample: int | None) -> Iterator[None]:
        """Draw the same again in this context, for one sample or for all."""
        self._next, self._sample = 0, sample
        with self._seen():
            yield
        self.unequal |= self._next != len(self._kept)

    @contextmanager
    def _seen(self) -> Iterator[None]:
        mode = ObservingMode(lambda function, args, kwargs: self._call(mode, function, args, kwargs))
        with mode.active():
            yield

    def _call(
        self, mode: ObservingMode, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_composite(function):  # such as gumbel_softmax, which draws inside
            with mode:
                return decomposed(function)(*args, **kwargs)
        result = function(*args, **kwargs)
        if canonical_op(function) in _DRAWS and isinstance(result, Tensor):
            if self._keeps:
                self._kept.append(result.detach().clone())
            else:
                self._put_into(result)
        return result

    def _put_into(self, drawn: Tensor) -> None:
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        self._next += 1
        rows = None if kept is None else self._rows(kept, drawn)
        if rows is None:
            self.unequal = True
            return
        with torch.no_grad():
            drawn.copy_(rows)

    def _rows(self, kept: Tensor, drawn: Tensor) -> Tensor | None:
        """The part of what the batch drew that a sample draws alone; None where their shapes do not tell."""
        if kept.shape == drawn.shape:
            return kept
        if self._sample is None or kept.dim() != drawn.dim():
            return None
        axes = [axis for axis, size in enumerate(kept.shape) if size != drawn.shape[axis]]
        if len(axes) != 1 or (kept.shape[axes[0]], drawn.shape[axes[0]]) != (self._batch_size, 1):
            return None
        return kept.narrow(axes[0], self._sample, 1)
