"""Squared norms and inner products of gradients that have few rows: those of an embedding.

Axis letters: b samples, t positions, d columns. The gradient of sample b is sum_t e(index[b, t]) (x) right[b, t] with
e(i) the unit vector of row i; see `lightning_persample.gradients.norms` for precision and memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.gradients.cost import chunks
from lightning_persample.gradients.norms import (
    by_chunks,
    bytes_of_sample,
    bytes_to_widen,
    dot_sum,
    row_sq_norms,
    sq_sum,
    zeros,
)
from lightning_persample.gradients.precision import accumulation_dtype


def _number_groups(index: Tensor) -> Tensor:
    """Number the distinct indices of all samples: (b, T) int64 to (b, T) in range(b T)."""
    # Two positions get the same number if and only if sample and index are equal. The work does not depend on how many
    # numbers there are, so that an accelerator need not wait for the count.
    ordered, order = index.sort(dim=1)
    rank = torch.constant_pad_nd((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
    first = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * index.shape[1]
    return torch.empty_like(index).scatter_(1, order, rank + first)


def _add_groups(group: Tensor, right: Tensor, num_groups: int) -> Tensor:
    """Sum right (b, T, d) over the positions of each group, group (b, T) in range(num_groups): (num_groups, d)."""
    sums = torch.zeros(num_groups, right.shape[2], dtype=right.dtype, device=right.device)
    return sums.index_add_(0, group.flatten(), right.flatten(0, 1))


def indexed_dense(index: Tensor, right: Tensor, num_rows: int) -> Tensor:
    """sum_t onehot(index[t]) (x) right[t]; index (B, T), right (B, T, d) -> (B, V, d)."""
    first = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * num_rows
    rows = right.to(accumulation_dtype(right))
    return _add_groups(index + first, rows, index.shape[0] * num_rows).view(-1, num_rows, right.shape[2])


def indexed_sq_norm(index: Tensor, right: Tensor) -> Tensor:
    """|sum_t onehot(index[t]) (x) right[t]|^2 in O(T d): what has the same index adds up before it is squared."""
    # index (B, T), right (B, T, d) -> (B,)
    dtype = accumulation_dtype(right)
    squares = _squares_by_repeats if right.device.type == "cpu" else _squares_by_groups
    # There are at most half as many sums as rows.
    each = 3 * bytes_of_sample(right, dtype) // 2 + bytes_to_widen(right, dtype=dtype)
    return by_chunks(right, dtype, each, lambda part: squares(index[part], right[part].to(dtype)))


def _squares_by_groups(index: Tensor, right: Tensor) -> Tensor:
    return sq_sum(_add_groups(_number_groups(index), right, index.numel()).view(index.shape[0], -1))


def _squares_by_repeats(index: Tensor, right: Tensor) -> Tensor:
    """Only what comes twice is added up, which most often is little; its size decides what follows."""
    ordered, order = index.sort(dim=1)
    same, squares = ordered[:, 1:] == ordered[:, :-1], row_sq_norms(right)
    if not same.any():
        return squares.sum(1)
    as_before = torch.constant_pad_nd(same, (1, 1))
    sample, place = (as_before[:, :-1] | as_before[:, 1:]).nonzero(as_tuple=True)
    position, begins = order[sample, place], ~as_before[sample, place]
    group, owner = begins.cumsum(0) - 1, sample[begins]
    sums = right.new_zeros(len(owner), right.shape[2]).index_add_(0, group, right[sample, position])
    squares[sample, position] = 0
    return squares.sum(1).index_add_(0, owner, sq_sum(sums))


def indexed_inner(index: Tensor, right: Tensor, other_index: Tensor, other_right: Tensor) -> Tensor:
    """Inner product of two sums of onehot(index[t]) (x) right[t] in O((T + S) d)."""
    # index (B, T), right (B, T, d), other_index (B, S), other_right (B, S, d) -> (B,)
    dtype = accumulation_dtype(right, other_right)
    T = right.shape[1]
    result = zeros(right, dtype)
    each = 4 * (bytes_of_sample(right, dtype) + bytes_of_sample(other_right, dtype))
    for part in chunks(right.shape[0], each, right.device):
        group = _number_groups(torch.cat([index[part], other_index[part]], 1))
        mine = _add_groups(group[:, :T], right[part].to(dtype), group.numel())
        others = _add_groups(group[:, T:], other_right[part].to(dtype), group.numel())
        result[part] = dot_sum(mine.view(group.shape[0], -1), others.view(group.shape[0], -1))
    return result


def indexed_outer_inner(index: Tensor, right: Tensor, left: Tensor, outer_right: Tensor) -> Tensor:
    """sum_st left[t, index[s]] (right[s] . outer_right[t]), so that no (V, d) matrix is built."""
    # index (B, S), right (B, S, d), left (B, T, V), outer_right (B, T, d) -> (B,)
    dtype = accumulation_dtype(right, left, outer_right)
    S, T = right.shape[1], left.shape[1]
    result = zeros(right, dtype)
    for part in chunks(right.shape[0], 3 * S * T * dtype.itemsize, right.device):
        samples, transposed = part.stop - part.start, right[part].to(dtype).transpose(1, 2)
        for rows in chunks(T, 3 * samples * S * dtype.itemsize, right.device):
            columns = index[part].unsqueeze(1).expand(-1, rows.stop - rows.start, -1)
            chosen = left[part, rows].gather(2, columns).to(dtype)
            result[part] += dot_sum(chosen, torch.bmm(outer_right[part, rows].to(dtype).conj(), transposed))
    return result


def dense_indexed_inner(grad: Tensor, index: Tensor, right: Tensor) -> Tensor:
    """sum_t grad[index[t]] . right[t]: (B,); grad (B, V, d), index (B, T), right (B, T, d) -> (B,)."""
    dtype = accumulation_dtype(grad, right)

    def inner(part: slice) -> Tensor:
        rows = grad[part].gather(1, index[part].unsqueeze(2).expand(-1, -1, grad.shape[2]))
        return dot_sum(rows.to(dtype), right[part].to(dtype))

    return by_chunks(grad, dtype, 3 * bytes_of_sample(right, dtype), inner)
