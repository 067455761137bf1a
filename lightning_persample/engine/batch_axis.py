"""Where the batch lies inside a tensor, and what changes of shape do to it.

A tensor that holds the batch has it along one axis ``dim`` of size ``outer * B * inner``: entry ``(o * B + b) * inner
+ i`` of that axis belongs to sample ``b``. Plain activations have ``outer = inner = 1``; ``x.view(B * T, d)`` of a
(B, T, d) tensor has ``inner = T``; of a time-major (T, B, d) tensor ``outer = T``. The axis is declared on the
tensors of the batch and followed from there; it is never read off a size that happens to match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["BatchAxis", "Lost", "batch_first", "one_sample", "reshaped"]


@dataclass(frozen=True)
class BatchAxis:
    """The batch lies along axis `dim`, `outer * inner` rows to a sample.

    Attributes:
        dim: axis that holds the batch, counted from the front.
        outer: rows of one sample that lie B * inner apart.
        inner: rows of one sample that lie next to each other.
        mixing: where a value computed over the whole batch entered this tensor, or None.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    mixing: str | None = None

    @property
    def rows(self) -> int:
        """Rows of this axis that belong to one sample."""
        return self.outer * self.inner

    def moved(self, dim: int) -> BatchAxis:
        """The same layout along another axis."""
        return replace(self, dim=dim)

    def same_layout(self, other: BatchAxis) -> bool:
        """Whether both order the samples of their axis alike."""
        return (self.outer, self.inner) == (other.outer, other.inner)


@dataclass(frozen=True)
class Lost:
    """The tensor depends on the batch, but no axis of it holds the samples one by one.

    Attributes:
        reason: since where.
        reduced: it is a weighted sum over the samples of what each gives alone, as a loss is.
        noted: it has been said already that it is not.
    """

    reason: str
    reduced: bool = False
    noted: bool = False


def batch_first(tensor: Tensor, axis: BatchAxis, batch_size: int) -> Tensor:
    """Bring the samples to the front: (B, *shape with the batch axis reduced to the rows of one sample).

    Args:
        tensor: any tensor that holds the batch along `axis`.
        axis: where the batch lies.
        batch_size: number of samples B.

    Returns:
        A view where strides allow it, shape (B, ..., outer * inner, ...); rows of a sample keep their order.
    """
    before, after = tensor.shape[: axis.dim], tensor.shape[axis.dim + 1 :]
    split = tensor.reshape(*before, axis.outer, batch_size, axis.inner, *after)
    return split.movedim(axis.dim + 1, 0).reshape(batch_size, *before, axis.rows, *after)


def one_sample(tensor: Tensor, axis: BatchAxis, batch_size: int, sample: int) -> Tensor:
    """The rows of one sample, with the number of axes kept."""
    before, after = tensor.shape[: axis.dim], tensor.shape[axis.dim + 1 :]
    split = tensor.reshape(*before, axis.outer, batch_size, axis.inner, *after)
    return split.select(axis.dim + 1, sample).reshape(*before, axis.rows, *after)


def reshaped(axis: BatchAxis, before: Sequence[int], after: Sequence[int], batch_size: int) -> BatchAxis | None:
    """Follow the batch axis through a change of shape that keeps the order of the entries (reshape, view, flatten).

    Args:
        axis: where the batch lies before.
        before: shape before.
        after: shape after.
        batch_size: number of samples B.

    Returns:
        The axis afterwards, or None where the new shape cuts the batch apart.
    """
    ahead = math.prod(before[: axis.dim]) * axis.outer
    behind = math.prod(before[axis.dim + 1 :]) * axis.inner
    if ahead * behind * batch_size != math.prod(after):
        return None
    for dim, size in enumerate(after):
        leading, trailing = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if leading == 0 or trailing == 0 or ahead % leading or behind % trailing:
            continue
        outer, inner = ahead // leading, behind // trailing
        if size == outer * batch_size * inner:
            return replace(axis, dim=dim, outer=outer, inner=inner)
    return None
