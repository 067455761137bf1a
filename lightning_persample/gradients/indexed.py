"""Gradients that have few rows: those of an embedding.

Axis letters: b samples, t positions, d columns; see `lightning_persample.gradients.norms` for precision and memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_persample.gradients import norms
from lightning_persample.gradients.cost import by_chunks, chunks
from lightning_persample.gradients.moments import Moments, moment, with_one
from lightning_persample.gradients.norms import bytes_of_sample, bytes_to_widen
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.gradients.projection import Factors, copied_numbers
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import Dense, Outer, shapes


@dataclass(frozen=True, eq=False)
class Indexed(SampleGradient):
    """A sum of rows put in their places, g[b] = sum_t onehot(index[b, t]) (x) right[b, t].

    Example:
        >>> gradient = Indexed(torch.tensor([[7, 7, 2]]), torch.ones(1, 3, 1), num_rows=10)
        >>> gradient.sq_norm().round()  # 2^2 + 1^2
        tensor([5.])

    Attributes:
        index: (B, T) integers in range(num_rows); this is not checked.
        right: (B, T, d).
        num_rows: number of rows of the parameter.

    Raises:
        ValueError: when index or right have other shapes, or index is not of an integer dtype.
    """

    index: Tensor
    right: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        if self.index.ndim != 2 or self.right.ndim != 3 or self.index.shape != self.right.shape[:2]:
            got = shapes(index=self.index, right=self.right)
            raise ValueError(f"Indexed: index has shape (B, T) and right (B, T, d), got {got}.")
        if self.index.is_floating_point() or self.index.is_complex() or self.index.dtype is torch.bool:
            raise ValueError(f"Indexed: index has an integer dtype, got {self.index.dtype}.")
        object.__setattr__(self, "index", self.index.long())

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, (num_rows, d)."""
        return torch.Size((self.num_rows, self.right.shape[2]))

    def _dense(self) -> Tensor:
        return self._placed(self.index, self.right.to(self.dtype))

    def _placed(self, index: Tensor, right: Tensor) -> Tensor:
        """Rows (b, T, c) put in their places by index (b, T): (b, num_rows, c)."""
        first = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * self.num_rows
        sums = _add_groups(index + first, right, index.shape[0] * self.num_rows)
        return sums.view(index.shape[0], self.num_rows, right.shape[2])

    def _sq_norm(self) -> Tensor:
        # In O(T d): what has the same index adds up before it is squared. There are at most half as many sums as rows.
        right, dtype = self.right, self.dtype
        squares = _squares_by_repeats if right.device.type == "cpu" else _squares_by_groups
        each = 3 * bytes_of_sample(right, dtype) // 2 + bytes_to_widen(right, dtype=dtype)

        def some(part: slice) -> Tensor:
            return squares(self.index[part], right[part].to(dtype))

        return by_chunks(len(right), each, right.device, some)

    def _terms_sq_norm(self) -> Tensor:
        return norms.dense_sq_norm(self.right)  # if no index came twice

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Dense):
            return self._inner_of_dense(other.grad)
        if isinstance(other, Indexed):
            return self._inner_of_indexed(other)
        return self._inner_of_outer(other) if isinstance(other, Outer) else None

    def _inner_of_dense(self, grad: Tensor) -> Tensor:
        """sum_t grad[index[t]] . right[t], grad (B, V, d)."""
        dtype = accumulation_dtype(grad, self.right)

        def inner(part: slice) -> Tensor:
            rows = grad[part].gather(1, self.index[part].unsqueeze(2).expand(-1, -1, grad.shape[2]))
            return norms.dot_sum(rows.to(dtype), self.right[part].to(dtype))

        return by_chunks(len(grad), 3 * bytes_of_sample(self.right, dtype), grad.device, inner)

    def _inner_of_indexed(self, other: Indexed) -> Tensor:
        """In O((T + S) d)."""
        right, dtype, T = self.right, accumulation_dtype(self.right, other.right), self.right.shape[1]

        def inner(part: slice) -> Tensor:
            group = _number_groups(torch.cat([self.index[part], other.index[part]], 1))
            mine = _add_groups(group[:, :T], right[part].to(dtype), group.numel())
            others = _add_groups(group[:, T:], other.right[part].to(dtype), group.numel())
            return norms.dot_sum(mine.view(*group.shape, right.shape[2]), others.view(*group.shape, right.shape[2]))

        each = 4 * (bytes_of_sample(right, dtype) + bytes_of_sample(other.right, dtype))
        return by_chunks(len(right), each, right.device, inner)

    def _inner_of_outer(self, other: Outer) -> Tensor:
        """sum_st left[t, index[s]] (right[s] . outer_right[t]), so that no (V, d) matrix is built."""
        right, dtype = self.right, accumulation_dtype(self.right, other.left, other.right)
        S, T = right.shape[1], other.left.shape[1]
        result = self._zeros(dtype)
        for part in chunks(right.shape[0], 3 * S * T * dtype.itemsize, right.device):
            samples, transposed = part.stop - part.start, right[part].to(dtype).transpose(1, 2)
            for rows in chunks(T, 3 * samples * S * dtype.itemsize, right.device):
                columns = self.index[part].unsqueeze(1).expand(-1, rows.stop - rows.start, -1)
                chosen = other.left[part, rows].gather(2, columns).to(dtype)
                products = torch.bmm(other.right[part, rows].to(dtype).conj(), transposed)
                result[part] += norms.dot_sum(chosen, products)
        return result

    def _dot(self, vector: Tensor) -> Tensor:
        right, dtype = self.right, accumulation_dtype(self.right, vector)

        def dots(part: slice) -> Tensor:
            return norms.real_sum(vector[self.index[part]].to(dtype).conj() * right[part].to(dtype))

        return by_chunks(len(right), 3 * right.shape[1] * right.shape[2] * dtype.itemsize, right.device, dots)

    def _project(self, factors: Factors) -> Tensor:
        # The projected one-hot vectors are columns of the left matrix.
        T, a, right, dtype = self.index.shape[1], factors.rows, self.right, factors.dtype
        if T * right.shape[2] == 0:
            return torch.zeros(len(right), factors.size, dtype=dtype, device=right.device)

        def project(part: slice) -> Tensor:
            other = factors.on_columns(right[part].to(dtype))
            if factors.left is None:
                return self._placed(self.index[part], other)
            chosen = factors.left.index_select(1, self.index[part].flatten()).view(a, -1, T)
            return torch.bmm(chosen.transpose(0, 1), other)

        return factors.by_chunks(right, T * (a + factors.columns) + copied_numbers(right, dtype), project)

    def _moments(self) -> Moments:
        # Of one-hot rows, which have a diagonal, at the places that receive something; the gradient comes from the
        # right side here, and no bias is added to an embedding.
        right = self.right.to(self.dtype).flatten(0, 1)
        counted = right.any(1)
        times = torch.bincount(self.index.flatten()[counted], minlength=self.num_rows)
        return times.to(right.dtype), moment(with_one(right[counted], 0.0))


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


def _squares_by_groups(index: Tensor, right: Tensor) -> Tensor:
    return norms.sq_sum(_add_groups(_number_groups(index), right, index.numel()).view(right.shape).flatten(1))


def _squares_by_repeats(index: Tensor, right: Tensor) -> Tensor:
    """Only what comes twice is added up, which most often is little; its size decides what follows."""
    ordered, order = index.sort(dim=1)
    same, squares = ordered[:, 1:] == ordered[:, :-1], norms.row_sq_norms(right)
    if not same.any():
        return squares.sum(1)
    as_before = torch.constant_pad_nd(same, (1, 1))
    sample, place = (as_before[:, :-1] | as_before[:, 1:]).nonzero(as_tuple=True)
    position, begins = order[sample, place], ~as_before[sample, place]
    group, owner = begins.cumsum(0) - 1, sample[begins]
    sums = right.new_zeros(len(owner), right.shape[2]).index_add_(0, group, right[sample, position])
    squares[sample, position] = 0
    return squares.sum(1).index_add_(0, owner, norms.sq_sum(sums))
