"""Sums of squares and of products of each sample's numbers, of which norms and dots of structures are made."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lightning_persample.gradients.cost import by_chunks
from lightning_persample.gradients.precision import accumulation_dtype

LONGEST_ROW = 4096
"""Numbers that are added up in a row; longer sums in float32 are split, for their error grows with the length."""

_SHORTEST_ROW = 64  # shorter ones cost more each than they hold


def as_real(tensor: Tensor) -> Tensor:
    """The same numbers as reals: a complex tensor gets a last axis of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_rows(tensor: Tensor) -> Tensor:
    """The real numbers of each sample in a row: (b, numbers)."""
    return as_real(tensor).unsqueeze(-1).flatten(1)


def sq_sum(tensor: Tensor) -> Tensor:
    """Sum |tensor[b]|^2 over all but the first axis, in the tensor's own precision: (b,)."""
    if tensor.dim() == 2 and tensor.shape[1] <= LONGEST_ROW and not tensor.is_complex():
        return squared(torch.linalg.vector_norm(tensor, dim=1))
    count, length = _rows_of(tensor.shape)
    if length and tensor.is_contiguous() and not tensor.is_complex():
        squares = squared(torch.linalg.vector_norm(tensor.view(-1, count, length), dim=2))
        return squares.squeeze(1) if count == 1 else squares.sum(1)
    flat = as_rows(tensor)
    whole = flat.shape[1] // LONGEST_ROW * LONGEST_ROW
    if whole == 0:
        return squared(torch.linalg.vector_norm(flat, dim=1))
    rows = squared(torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, LONGEST_ROW)), dim=2)).sum(1)
    return rows if whole == flat.shape[1] else rows + squared(torch.linalg.vector_norm(flat[:, whole:], dim=1))


def squared(numbers: Tensor) -> Tensor:
    """The squares in place, by a kernel that a step runs anyway: the first call of one takes as long as ten others."""
    return numbers.mul_(numbers)


@lru_cache(4096)
def _rows_of(shape: torch.Size) -> tuple[int, int]:
    """How many rows of which length the trailing axes of each sample make without a rest; no length if none fits."""
    length = 1
    for size in reversed(shape[1:]):
        if length * size > LONGEST_ROW:
            break
        length *= size
    return (prod(shape[1:]) // length, length) if length >= _SHORTEST_ROW and shape[0] else (0, 0)


def dot_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]) over all but the first axis: (b,)."""
    return (as_real(a) * as_real(b)).unsqueeze(-1).flatten(1).sum(1)


def row_sq_norms(tensor: Tensor) -> Tensor:
    """|tensor[b, t]|^2: (b, t, d) to (b, t)."""
    if tensor.shape[2] <= LONGEST_ROW and not tensor.is_complex():
        return squared(torch.linalg.vector_norm(tensor, dim=2))
    return sq_sum(tensor.flatten(0, 1)).view(tensor.shape[:2])


def row_norms(tensor: Tensor, out: Tensor) -> None:
    """Write |tensor[b, t]|, (b, t), for a tensor (b, t, d)."""
    if tensor.shape[2] <= LONGEST_ROW:
        torch.linalg.vector_norm(tensor, dim=2, out=out)
    else:
        torch.sqrt(row_sq_norms(tensor), out=out)


def bytes_of_sample(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of the tensor in `dtype`."""
    return tensor[:1].numel() * dtype.itemsize if tensor.shape[0] else 0


def bytes_to_widen(*tensors: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of those tensors that have to be copied to `dtype`."""
    return sum(bytes_of_sample(tensor, dtype) for tensor in tensors if tensor.dtype != dtype)


def dense_sq_norm(grad: Tensor) -> Tensor:
    """Sum |grad[b]|^2, grad (B, *shape): (B,)."""
    if grad.dtype is torch.float32 or (dtype := accumulation_dtype(grad)) is grad.dtype:  # nothing has to be copied
        return sq_sum(grad)
    return by_chunks(
        len(grad), bytes_to_widen(grad, dtype=dtype), grad.device, lambda part: sq_sum(grad[part].to(dtype))
    )


def dense_inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]), both (B, *shape): (B,)."""
    dtype = accumulation_dtype(a, b)

    def dots(part: slice) -> Tensor:
        return dot_sum(a[part].to(dtype), b[part].to(dtype))

    return by_chunks(len(a), bytes_of_sample(a, dtype), a.device, dots)


def dense_dot(grad: Tensor, vector: Tensor) -> Tensor:
    """Of grad (B, *shape) with vector (*shape): (B,)."""
    dtype = accumulation_dtype(grad, vector)
    other = vector.to(dtype).conj().reshape(-1)
    bytes_each = 0 if grad.dtype == dtype else other.numel() * dtype.itemsize

    def dots(part: slice) -> Tensor:
        product = grad[part].reshape(-1, other.numel()).to(dtype) @ other
        return product.real if dtype.is_complex else product

    return by_chunks(len(grad), bytes_each, grad.device, dots)


def sum_and_trace(products: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of each matrix (b, m, m), and those of its diagonal, added up: (b,) and (b,)."""
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sum(1)


def real_sum(terms: Tensor) -> Tensor:
    """Sum of the real parts over all but the first axis."""
    real = terms.real if terms.is_complex() else terms
    return real.flatten(1).sum(1)
