"""Second moments of the two sides of gradients: of what makes their rows, and of what makes their columns.

A gradient is a sum over positions t of left[b, t] (x) right[b, t], of a parameter read as a matrix (p, d). Its moments
are those of left, (p, p), and those of right with a one appended, (d + 1, d + 1), added up over samples and positions
whose left side is not 0. An axis longer than `LONGEST` is known by the diagonal alone, as a vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

LONGEST = 4096

Moments = tuple[Tensor, Tensor]
"""Of the rows, (p, p), and of the columns and a one, (d + 1, d + 1); a diagonal as a vector."""


def total_moments(found: Iterable[Moments]) -> Moments:
    """The sums of the moments of each side, at least one of each."""
    rows, columns = zip(*found, strict=True)
    return reduce(_added, rows), reduce(_added, columns)


def _added(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two moments of one side, of which one may be a diagonal."""
    if one.dim() != other.dim():
        one, other = (torch.diag(each) if each.dim() == 1 else each for each in (one, other))
    return one + other


def moment(vectors: Tensor) -> Tensor:
    """Of vectors (n, k): (k, k), or (k,)."""
    return vectors.square().sum(0) if vectors.shape[1] > LONGEST else vectors.mT @ vectors


def with_one(columns: Tensor, one: float) -> Tensor:
    """(n, d) to (n, d + 1)."""
    return torch.constant_pad_nd(columns, (0, 1), one)


def dense_moments(grad: Tensor) -> Moments:
    """Of the rows and the columns of each sample's gradient itself, (B, *shape)."""
    matrices = grad.flatten(2) if grad.dim() > 2 else grad.reshape(len(grad), 1, grad.shape[1:].numel())
    rows, columns = matrices.mT.flatten(0, 1), matrices.flatten(0, 1)
    return moment(rows), moment(with_one(columns, 0.0))
