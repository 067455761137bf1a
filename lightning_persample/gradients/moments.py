"""Second moments of the two sides of gradients: of what makes their rows, and of what makes their columns.

A gradient is a sum over positions t of left[b, t] (x) right[b, t], of a parameter read as a matrix (p, d). Its moments
are those of left, (p, p), and those of right with a one appended, (d + 1, d + 1), added up over samples and positions
whose left side is not 0. An axis longer than `LONGEST` is known by the diagonal alone, as a vector.

Axis letters: b samples, t positions, p rows, d columns, k rows of one sample, o and c channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import prod

import torch
from torch import Tensor

from lightning_persample.gradients.cost import chunks
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.patch_kernels import Rows

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


def _moment(vectors: Tensor) -> Tensor:
    """Of vectors (n, k): (k, k), or (k,)."""
    return vectors.square().sum(0) if vectors.shape[1] > LONGEST else vectors.mT @ vectors


def _with_one(columns: Tensor, one: float) -> Tensor:
    """(n, d) to (n, d + 1)."""
    return torch.constant_pad_nd(columns, (0, 1), one)


def outer_moments(left: Tensor, right: Tensor) -> Moments:
    """Of left (B, T, p) and right (B, T, d)."""
    left = left.flatten(0, 1)
    counted = left.any(1)
    return _moment(left[counted]), _moment(_with_one(right.flatten(0, 1)[counted], 1.0))


def indexed_moments(index: Tensor, right: Tensor, num_rows: int) -> Moments:
    """Of one-hot rows, which have a diagonal, at the places that receive something: index (B, T), right (B, T, d)."""
    # The gradient comes from the right side here, and no bias is added to an embedding.
    right = right.flatten(0, 1)
    counted = right.any(1)
    times = torch.bincount(index.flatten()[counted], minlength=num_rows)
    return times.to(right.dtype), _moment(_with_one(right[counted], 0.0))


def dense_moments(grad: Tensor) -> Moments:
    """Of the rows and the columns of each sample's gradient itself, (B, *shape)."""
    matrices = grad.flatten(2) if grad.dim() > 2 else grad.reshape(len(grad), 1, grad.shape[1:].numel())
    rows, columns = matrices.mT.flatten(0, 1), matrices.flatten(0, 1)
    return _moment(rows), _moment(_with_one(columns, 0.0))


def patches_moments(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Moments:
    """Of the output gradients and of the unfolded patches, those of all groups of channels together."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in) -> (O, O), (C/groups K + 1, C/groups K + 1)
    whole = Rows(grad_out, inputs, geometry)
    of_rows = _moment(grad_out.transpose(1, 2).flatten(2).mT.flatten(0, 1))
    of_columns: Tensor | None = None
    each = 3 * whole.sizes(inputs.dtype).unfolded * inputs.dtype.itemsize
    for part in chunks(len(grad_out), each, inputs.device):
        rows = Rows(grad_out[part], inputs[part], geometry)
        counted = rows.output_rows().any(1).flatten()
        found = _moment(_with_one(rows.unfolded().mT.flatten(0, 1)[counted], 1.0))
        of_columns = found if of_columns is None else of_columns + found
    if of_columns is None:
        of_columns = _moment(inputs.new_zeros(0, prod(whole.weight_shape[1:]) + 1))
    return of_rows, of_columns
