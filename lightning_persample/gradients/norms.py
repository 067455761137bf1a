"""Squared norms and inner products of sums of outer products, by the cheapest kernel.

Axis letters: b samples, t and s positions, p rows, d columns. Complex numbers: |.|^2, and Re(conj(a) b) summed. Every
result is real, and low precision (float16, bfloat16) is summed in float32. Temporaries stay within the memory budget
of `lightning_persample.gradients.cost`. A Gram kernel adds up numbers that may cancel and leave little but their
rounding errors; `precision.suspect` finds the samples for which this matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.autotune import fastest
from lightning_persample.gradients.cost import MatrixKernel, chunks, fits, memory_budget, outer_inner_kernel
from lightning_persample.gradients.options import current_options
from lightning_persample.gradients.precision import accumulation_dtype

__all__ = [
    "LONGEST_ROW",
    "by_chunks",
    "dense_indexed_inner",
    "dense_inner",
    "dense_outer_inner",
    "dense_sq_norm",
    "indexed_dense",
    "indexed_inner",
    "indexed_outer_inner",
    "indexed_sq_norm",
    "outer_direct_sq_norm",
    "outer_gram_inner",
    "outer_gram_sq_norm",
    "outer_inner",
    "outer_terms_sq_norm",
    "sum_and_trace",
    "zeros",
]

LONGEST_ROW = 4096
"""Numbers that are added up in a row; longer sums in float32 are split, for their error grows with the length."""


def _real(tensor: Tensor) -> Tensor:
    """The same numbers as reals: a complex tensor gets a last axis of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sq_sum(tensor: Tensor) -> Tensor:
    """Sum |tensor[b]|^2 over all but the first axis, in the tensor's own precision: (b,)."""
    if tensor.dim() == 2 and tensor.shape[1] <= LONGEST_ROW and not tensor.is_complex():
        return torch.linalg.vector_norm(tensor, dim=1).square()
    flat: Tensor = _real(tensor).unsqueeze(-1).flatten(1)
    whole = flat.shape[1] // LONGEST_ROW * LONGEST_ROW
    if whole == 0:
        return torch.linalg.vector_norm(flat, dim=1).square()
    rows = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, LONGEST_ROW)), dim=2).square().sum(1)
    return rows if whole == flat.shape[1] else rows + torch.linalg.vector_norm(flat[:, whole:], dim=1).square()


def _dot_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]) over all but the first axis: (b,)."""
    return (_real(a) * _real(b)).unsqueeze(-1).flatten(1).sum(1)


def _row_sq_norms(tensor: Tensor) -> Tensor:
    """|tensor[b, t]|^2: (b, t, d) to (b, t)."""
    if tensor.shape[2] <= LONGEST_ROW and not tensor.is_complex():
        return torch.linalg.vector_norm(tensor, dim=2).square()
    return _sq_sum(tensor.flatten(0, 1)).view(tensor.shape[:2])


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """One real zero for each sample, in the precision of `dtype`: (B,)."""
    return torch.zeros(like.shape[0], dtype=dtype.to_real(), device=like.device)


def _size(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of the tensor in `dtype`."""
    return tensor[:1].numel() * dtype.itemsize if tensor.shape[0] else 0


def _widening(*tensors: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of those tensors that have to be copied to `dtype`."""
    return sum(_size(tensor, dtype) for tensor in tensors if tensor.dtype != dtype)


def by_chunks(like: Tensor, dtype: torch.dtype, bytes_each: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """One number per sample, some samples at a time.

    Args:
        like: any tensor (B, ...) on the device.
        dtype: in which the sums are taken.
        bytes_each: bytes of temporaries for one sample.
        compute: gives the numbers of a slice of the samples.

    Returns:
        (B,).
    """
    parts = [compute(part) for part in chunks(like.shape[0], bytes_each, like.device)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else zeros(like, dtype)


def dense_sq_norm(grad: Tensor) -> Tensor:
    """Sum |grad[b]|^2, grad (B, *shape): (B,)."""
    dtype = accumulation_dtype(grad)
    if grad.dtype == dtype:  # nothing has to be copied
        return _sq_sum(grad)
    return by_chunks(grad, dtype, _widening(grad, dtype=dtype), lambda part: _sq_sum(grad[part].to(dtype)))


def dense_inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]), both (B, *shape): (B,)."""
    dtype = accumulation_dtype(a, b)
    return by_chunks(a, dtype, _size(a, dtype), lambda part: _dot_sum(a[part].to(dtype), b[part].to(dtype)))


def outer_terms_sq_norm(left: Tensor, right: Tensor) -> Tensor:
    """sum_t |left[t]|^2 |right[t]|^2, the squared norm if the terms were orthogonal: (B,)."""
    dtype = accumulation_dtype(left, right)

    def terms(part: slice) -> Tensor:
        products = _row_sq_norms(left[part].to(dtype)) * _row_sq_norms(right[part].to(dtype))
        return products.squeeze(1) if products.shape[1] == 1 else products.sum(1)

    return by_chunks(left, dtype, _widening(left, right, dtype=dtype), terms)


def outer_gram_sq_norm(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm of sum_t left[t] (x) right[t] from the Gram matrices of both sides.

    Args:
        left: (B, T, p).
        right: (B, T, d).

    Returns:
        The squared norm (B,), and what it would be if the terms were orthogonal (B,).
    """
    dtype, (B, T, _) = accumulation_dtype(left, right), left.shape
    if B == 0 or not fits(3 * T * T * dtype.itemsize, left.device):
        return outer_gram_inner(left, right, left, right), outer_terms_sq_norm(left, right)

    bytes_each = 2 * T * T * dtype.itemsize + _widening(left, right, dtype=dtype)
    parts = [_gram_sums(left[part].to(dtype), right[part].to(dtype)) for part in chunks(B, bytes_each, left.device)]
    value, scale = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return value, scale


def _gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of the product of both Gram matrices, and its diagonal, added up: (b,) and (b,)."""
    products = torch.bmm(left.conj(), left.mT)
    products *= torch.bmm(right.conj(), right.mT)
    value, scale = sum_and_trace(products)
    return value.real, scale.real


def sum_and_trace(products: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of each matrix (b, m, m), and those of its diagonal, added up: (b,) and (b,)."""
    return products.flatten(1).sum(1), products.diagonal(dim1=1, dim2=2).sum(1)


def outer_gram_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    """sum_ts Re(conj(left[t]) . other_left[s] conj(right[t]) . other_right[s]).

    Args:
        left: (B, T, p).
        right: (B, T, d).
        other_left: (B, S, p).
        other_right: (B, S, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(left, right, other_left, other_right)
    (B, T), S = left.shape[:2], other_left.shape[1]
    result = zeros(left, dtype)
    for part in chunks(B, 3 * T * S * dtype.itemsize, left.device):
        samples = part.stop - part.start
        transposed = [x[part].to(dtype).transpose(1, 2) for x in (other_left, other_right)]
        for rows in chunks(T, 3 * samples * S * dtype.itemsize, left.device):
            left_gram = torch.bmm(left[part, rows].to(dtype).conj(), transposed[0])
            right_gram = torch.bmm(right[part, rows].to(dtype).conj(), transposed[1])
            result[part] += (left_gram * right_gram).flatten(1).sum(1).real
    return result


def outer_direct_sq_norm(left: Tensor, right: Tensor) -> Tensor:
    """|left^T right|^2, left (B, T, p) and right (B, T, d), a block of rows at a time: (B,)."""
    dtype = accumulation_dtype(left, right)
    p, d = left.shape[2], right.shape[2]
    result = zeros(left, dtype)
    for part in chunks(left.shape[0], p * d * dtype.itemsize, left.device):
        samples, columns = part.stop - part.start, right[part].to(dtype)
        for rows in chunks(p, samples * d * dtype.itemsize, left.device):
            result[part] += _sq_sum(torch.bmm(left[part, :, rows].to(dtype).transpose(1, 2), columns))
    return result


def outer_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    """Inner product of sum_t left[t] (x) right[t] with sum_s other_left[s] (x) other_right[s], the cheaper way.

    Args:
        left: (B, T, p).
        right: (B, T, d).
        other_left: (B, S, p).
        other_right: (B, S, d).

    Returns:
        (B,).
    """
    terms = left, right, other_left, other_right
    kernels: dict[MatrixKernel, Callable[[], Tensor]] = {
        "gram": partial(outer_gram_inner, *terms),
        "direct": partial(_outer_direct_inner, *terms),
    }
    name = outer_inner_kernel(left.shape[1], other_left.shape[1], left.shape[2], right.shape[2])
    if current_options().autotune and left.shape[0]:
        sizes = tuple((term.shape, term.dtype) for term in terms)
        name = fastest(("outer inner", sizes, memory_budget(left.device)), kernels, left.device)
    return kernels[name]()


def _outer_direct_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    dtype, p, d = accumulation_dtype(left, right, other_left, other_right), left.shape[2], right.shape[2]
    result = zeros(left, dtype)
    for part in chunks(left.shape[0], 3 * p * d * dtype.itemsize, left.device):
        samples, columns, other_columns = part.stop - part.start, right[part].to(dtype), other_right[part].to(dtype)
        for rows in chunks(p, 3 * samples * d * dtype.itemsize, left.device):
            mine = torch.bmm(left[part, :, rows].to(dtype).transpose(1, 2), columns)
            others = torch.bmm(other_left[part, :, rows].to(dtype).transpose(1, 2), other_columns)
            result[part] += _dot_sum(mine, others)
    return result


def dense_outer_inner(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sum_t left[t]^T grad right[t] (conjugated as it must be): (B,).

    Args:
        grad: (B, p, d).
        left: (B, T, p).
        right: (B, T, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(grad, left, right)
    result = zeros(grad, dtype)
    each = 2 * _size(right, dtype) + (_size(grad, dtype) if grad.dtype != dtype else 0)
    for part in chunks(grad.shape[0], each, grad.device):
        rows = torch.bmm(left[part].to(dtype).conj(), grad[part].to(dtype))
        result[part] = _dot_sum(right[part].to(dtype), rows)
    return result


def _number_groups(index: Tensor) -> Tensor:
    """Number the distinct indices of all samples: (b, T) int64 to (b, T) in range(b T).

    Two positions get the same number if and only if sample and index are equal. The work does not depend on how many
    numbers there are, so that an accelerator need not wait for the count.

    Returns:
        (b, T) int64.
    """
    ordered, order = index.sort(dim=1)
    rank = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
    first = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * index.shape[1]
    return torch.empty_like(index).scatter_(1, order, rank + first)


def _add_groups(group: Tensor, right: Tensor, num_groups: int) -> Tensor:
    """Sum right (b, T, d) over the positions of each group, group (b, T) in range(num_groups): (num_groups, d)."""
    sums = torch.zeros(num_groups, right.shape[2], dtype=right.dtype, device=right.device)
    return sums.index_add_(0, group.flatten(), right.flatten(0, 1))


def indexed_dense(index: Tensor, right: Tensor, num_rows: int) -> Tensor:
    """sum_t onehot(index[t]) (x) right[t].

    Args:
        index: (B, T) int64.
        right: (B, T, d).
        num_rows: V.

    Returns:
        (B, V, d).
    """
    first = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * num_rows
    rows = right.to(accumulation_dtype(right))
    return _add_groups(index + first, rows, index.shape[0] * num_rows).view(-1, num_rows, right.shape[2])


def indexed_sq_norm(index: Tensor, right: Tensor) -> Tensor:
    """|sum_t onehot(index[t]) (x) right[t]|^2 in O(T d): what has the same index adds up before it is squared.

    Args:
        index: (B, T) int64.
        right: (B, T, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(right)
    squares = _squares_by_repeats if right.device.type == "cpu" else _squares_by_groups
    each = 3 * _size(right, dtype) // 2 + _widening(right, dtype=dtype)  # (at most half as many sums as rows)
    return by_chunks(right, dtype, each, lambda part: squares(index[part], right[part].to(dtype)))


def _squares_by_groups(index: Tensor, right: Tensor) -> Tensor:
    return _sq_sum(_add_groups(_number_groups(index), right, index.numel()).view(index.shape[0], -1))


def _squares_by_repeats(index: Tensor, right: Tensor) -> Tensor:
    """Only what comes twice is added up, which most often is little; its size decides what follows."""
    ordered, order = index.sort(dim=1)
    same, squares = ordered[:, 1:] == ordered[:, :-1], _row_sq_norms(right)
    if not same.any():
        return squares.sum(1)
    as_before = F.pad(same, (1, 1))
    sample, place = (as_before[:, :-1] | as_before[:, 1:]).nonzero(as_tuple=True)
    position, begins = order[sample, place], ~as_before[sample, place]
    group, owner = begins.cumsum(0) - 1, sample[begins]
    sums = right.new_zeros(len(owner), right.shape[2]).index_add_(0, group, right[sample, position])
    squares[sample, position] = 0
    return squares.sum(1).index_add_(0, owner, _sq_sum(sums))


def indexed_inner(index: Tensor, right: Tensor, other_index: Tensor, other_right: Tensor) -> Tensor:
    """Inner product of two sums of onehot(index[t]) (x) right[t] in O((T + S) d).

    Args:
        index: (B, T) int64.
        right: (B, T, d).
        other_index: (B, S) int64.
        other_right: (B, S, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(right, other_right)
    T = right.shape[1]
    result = zeros(right, dtype)
    for part in chunks(right.shape[0], 4 * (_size(right, dtype) + _size(other_right, dtype)), right.device):
        group = _number_groups(torch.cat([index[part], other_index[part]], 1))
        mine = _add_groups(group[:, :T], right[part].to(dtype), group.numel())
        others = _add_groups(group[:, T:], other_right[part].to(dtype), group.numel())
        result[part] = _dot_sum(mine.view(group.shape[0], -1), others.view(group.shape[0], -1))
    return result


def indexed_outer_inner(index: Tensor, right: Tensor, left: Tensor, outer_right: Tensor) -> Tensor:
    """sum_st left[t, index[s]] (right[s] . outer_right[t]), so that no (V, d) matrix is built.

    Args:
        index: (B, S) int64.
        right: (B, S, d).
        left: (B, T, V).
        outer_right: (B, T, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(right, left, outer_right)
    S, T = right.shape[1], left.shape[1]
    result = zeros(right, dtype)
    for part in chunks(right.shape[0], 3 * S * T * dtype.itemsize, right.device):
        samples, transposed = part.stop - part.start, right[part].to(dtype).transpose(1, 2)
        for rows in chunks(T, 3 * samples * S * dtype.itemsize, right.device):
            columns = index[part].unsqueeze(1).expand(-1, rows.stop - rows.start, -1)
            chosen = left[part, rows].gather(2, columns).to(dtype)
            result[part] += _dot_sum(chosen, torch.bmm(outer_right[part, rows].to(dtype).conj(), transposed))
    return result


def dense_indexed_inner(grad: Tensor, index: Tensor, right: Tensor) -> Tensor:
    """sum_t grad[index[t]] . right[t]: (B,).

    Args:
        grad: (B, V, d).
        index: (B, T) int64.
        right: (B, T, d).

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(grad, right)

    def inner(part: slice) -> Tensor:
        rows = grad[part].gather(1, index[part].unsqueeze(2).expand(-1, -1, grad.shape[2]))
        return _dot_sum(rows.to(dtype), right[part].to(dtype))

    return by_chunks(grad, dtype, 3 * _size(right, dtype), inner)
