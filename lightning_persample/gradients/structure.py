"""What one use of one parameter contributes to each sample's gradient, in the form that is cheapest to hold.

A rule returns one of these structures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_persample.gradients import norms, precision
from lightning_persample.gradients.cost import MatrixKernel, by_chunks, chunks, fits, memory_budget, outer_kernel
from lightning_persample.gradients.moments import Moments, moment, with_one
from lightning_persample.gradients.norms import bytes_of_sample, bytes_to_widen
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.gradients.projection import Factors, copied_numbers
from lightning_persample.gradients.sample_gradient import SampleGradient

_FULL_ROWS = 256  # a matrix product with fewer rows takes longer for each
_IN_CACHE = 4 * 2**20  # bytes of gradients that are squared and summed before the next ones take their place
_WRITTEN = 32  # one number of a projected side, written and read again, in multiply-adds


def shapes(**tensors: Tensor) -> str:
    """Tensors in a message."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


@dataclass(frozen=True, eq=False)
class Dense(SampleGradient):
    """The gradient itself, g[b] = grad[b].

    Attributes:
        grad: (B, *shape).

    Raises:
        ValueError: when grad has no batch axis.
    """

    grad: Tensor

    def __post_init__(self) -> None:
        if self.grad.ndim < 1:
            raise ValueError("Dense: grad has shape (B, *shape), got a tensor without axes.")

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.grad.shape[1:]

    def _dense(self) -> Tensor:
        return self.grad.to(self.dtype)

    def _sq_norm(self) -> Tensor:
        return norms.dense_sq_norm(self.grad)

    def _sq_norm_and_sum(self) -> tuple[Tensor, Tensor]:
        return self._sq_norm(), self._dense().sum(0)

    def _dot(self, vector: Tensor) -> Tensor:
        return norms.dense_dot(self.grad, vector)

    def _project(self, factors: Factors) -> Tensor:
        return factors.of_gradients(self.grad)

    def _row_dots(self, rows: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.grad, rows)
        return torch.bmm(self.grad.flatten(2).transpose(0, 1).to(dtype), rows.to(dtype).unsqueeze(2)).squeeze(2).mT

    def _row_sums(self) -> Tensor:
        return self.grad.flatten(2).sum(2, dtype=self.dtype)

    def _by_row(self, factor: Tensor) -> Dense:
        return Dense(self.grad * factor.view(-1, *(1,) * (self.grad.dim() - 2)))

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Dense):
            return norms.dense_inner(self.grad, other.grad)
        return None


@dataclass(frozen=True, eq=False)
class Outer(SampleGradient):
    """A sum of outer products, g[b] = sum_t left[b, t] (x) right[b, t]; nothing is conjugated.

    Example:
        >>> gradient = Outer(left=torch.ones(5, 3, 2), right=torch.ones(5, 3, 4))
        >>> gradient.shape, gradient.sq_norm().round()
        (torch.Size([2, 4]), tensor([72., 72., 72., 72., 72.]))

    Attributes:
        left: (B, T, p).
        right: (B, T, d).

    Raises:
        ValueError: when left and right do not have three axes, or differ in B or T.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.ndim != 3 or self.right.ndim != 3 or self.left.shape[:2] != self.right.shape[:2]:
            got = shapes(left=self.left, right=self.right)
            raise ValueError(f"Outer: left has shape (B, T, p) and right (B, T, d), got {got}.")

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, (p, d)."""
        return torch.Size((self.left.shape[2], self.right.shape[2]))

    def _dense(self) -> Tensor:
        return torch.bmm(self.left.to(self.dtype).transpose(1, 2), self.right.to(self.dtype))

    def _sq_norm(self, later: precision.Later | None = None) -> Tensor:
        positions = self.left.shape[1]
        if positions == 1:
            return self._terms_sq_norm()
        if self._kernel() == "direct":
            return self._direct_sq_norm()
        value, scale = self._gram_sq_norm()

        def again(some: Tensor) -> Tensor:
            return self.pick(some)._widened()._direct_sq_norm().to(value.dtype)

        return precision.corrected(value, scale, again, self.left, later)

    _sq_norm_or_later = _sq_norm

    def _kernel(self) -> MatrixKernel:
        return outer_kernel(self.left.shape[1], *self.shape)

    def _is_formed(self) -> bool:
        return self.left.shape[1] > 1 and self._kernel() == "direct"

    def _terms_sq_norm(self) -> Tensor:
        dtype = self.dtype

        def terms(part: slice) -> Tensor:
            sides = self.left[part].to(dtype), self.right[part].to(dtype)
            products = norms.row_sq_norms(sides[0]) * norms.row_sq_norms(sides[1])
            return products.squeeze(1) if products.shape[1] == 1 else products.sum(1)

        return by_chunks(self.batch_size, bytes_to_widen(self.left, self.right, dtype=dtype), self.device, terms)

    def _gram_sq_norm(self) -> tuple[Tensor, Tensor]:
        """The squared norm from the Gram matrices of both sides, and the size of what was added up for it."""
        left, right = self.left, self.right
        dtype, (B, T, _) = self.dtype, left.shape
        if B == 0 or not fits(3 * T * T * dtype.itemsize, left.device):
            return self._gram_inner(self), self._terms_sq_norm()
        bytes_each = 2 * T * T * dtype.itemsize + bytes_to_widen(left, right, dtype=dtype)
        parts = [_gram_sums(left[part].to(dtype), right[part].to(dtype)) for part in chunks(B, bytes_each, left.device)]
        value, scale = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return value, scale

    def _direct_sq_norm(self) -> Tensor:
        """The squared norm of the gradient, formed a part at a time."""
        left = self.left
        lengths = left.new_empty(left.shape[0], left.shape[2], dtype=self.dtype.to_real())
        for part, place, formed in self._parts(memory_budget(left.device)):
            norms.row_norms(formed, lengths[part, place])
        return norms.squared(lengths).sum(1)

    def _parts(self, most: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Form the gradient a part at a time, by few calls: on a CPU each costs as much as reading 200 KB."""
        left, right, dtype = self.left, self.right, self.dtype
        (B, _, p), d = left.shape, right.shape[2]
        numbers = most // dtype.itemsize
        samples = max(1, min(B, numbers // max(1, min(p, _FULL_ROWS) * d)))
        rows = max(1, min(p, numbers // max(1, samples * d)))
        memory = left.new_empty(samples * rows * d, dtype=dtype)
        across = left.transpose(1, 2)
        for start in range(0, B, samples):
            part = slice(start, min(start + samples, B))
            of_part, columns = (across, right.to(dtype)) if samples == B else (across[part], right[part].to(dtype))
            for first in range(0, p, rows):
                place = slice(first, min(first + rows, p))
                size = (columns.shape[0], place.stop - first, d)
                formed = memory[: prod(size)].view(size)
                torch.bmm(of_part[:, place].to(dtype), columns, out=formed)
                yield part, place, formed

    def _sq_norm_and_sum(self) -> tuple[Tensor, Tensor]:
        left, right, dtype = self.left, self.right, self.dtype
        (B, _, p), d = left.shape, right.shape[2]
        bytes_formed, on_cpu = B * p * d * dtype.itemsize, left.device.type == "cpu"
        if B and bytes_formed <= _IN_CACHE and fits(bytes_formed, left.device):
            formed = torch.bmm(left.to(dtype).mT, right.to(dtype))
            return norms.dense_sq_norm(formed), formed.sum(0)
        most = memory_budget(left.device)
        lengths = left.new_empty(B, p, dtype=dtype.to_real())  # of each row of each gradient
        total = left.new_empty(p, d, dtype=dtype) if B else left.new_zeros(p, d, dtype=dtype)
        for part, place, formed in self._parts(min(most, _IN_CACHE) if on_cpu else most):
            norms.row_norms(formed, lengths[part, place])
            if part.start == 0:
                torch.sum(formed, 0, out=total[place])
            else:
                total[place] += formed.sum(0)
        return norms.squared(lengths).sum(1), total

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Dense):
            return self._inner_of_dense(other.grad)
        if not isinstance(other, Outer):
            return None
        kernel = outer_kernel(self.left.shape[1], self.left.shape[2], self.right.shape[2], other.left.shape[1])
        return self._gram_inner(other) if kernel == "gram" else self._direct_inner(other)

    def _inner_of_dense(self, grad: Tensor) -> Tensor:
        """sum_t left[t]^T grad right[t], conjugated as it must be; grad (B, p, d)."""
        dtype = accumulation_dtype(grad, self.left, self.right)

        def inner(part: slice) -> Tensor:
            rows = torch.bmm(self.left[part].to(dtype).conj(), grad[part].to(dtype))
            return norms.dot_sum(self.right[part].to(dtype), rows)

        bytes_each = 2 * bytes_of_sample(self.right, dtype) + bytes_to_widen(grad, dtype=dtype)
        return by_chunks(len(grad), bytes_each, grad.device, inner)

    def _gram_inner(self, other: Outer) -> Tensor:
        """sum_ts Re(conj(left[t]) . other_left[s] conj(right[t]) . other_right[s])."""
        left, right = self.left, self.right
        dtype = accumulation_dtype(left, right, other.left, other.right)
        (B, T), S = left.shape[:2], other.left.shape[1]
        result = self._zeros(dtype)
        for part in chunks(B, 3 * T * S * dtype.itemsize, left.device):
            samples = part.stop - part.start
            transposed = [x[part].to(dtype).transpose(1, 2) for x in (other.left, other.right)]
            for rows in chunks(T, 3 * samples * S * dtype.itemsize, left.device):
                left_gram = torch.bmm(left[part, rows].to(dtype).conj(), transposed[0])
                right_gram = torch.bmm(right[part, rows].to(dtype).conj(), transposed[1])
                result[part] += (left_gram * right_gram).flatten(1).sum(1).real
        return result

    def _direct_inner(self, other: Outer) -> Tensor:
        """The inner product of both gradients, formed some rows at a time."""
        left, right, (p, d) = self.left, self.right, self.shape
        dtype = accumulation_dtype(left, right, other.left, other.right)
        result = self._zeros(dtype)
        for part in chunks(left.shape[0], 3 * p * d * dtype.itemsize, left.device):
            samples, columns, others = part.stop - part.start, right[part].to(dtype), other.right[part].to(dtype)
            for rows in chunks(p, 3 * samples * d * dtype.itemsize, left.device):
                mine = torch.bmm(left[part, :, rows].to(dtype).transpose(1, 2), columns)
                theirs = torch.bmm(other.left[part, :, rows].to(dtype).transpose(1, 2), others)
                result[part] += norms.dot_sum(mine, theirs)
        return result

    def _dot(self, vector: Tensor) -> Tensor:
        left, right, dtype = self.left, self.right, accumulation_dtype(self.left, self.right, vector)
        matrix = vector.to(dtype).conj()
        if left.shape[2] < right.shape[2]:  # the product with the vector is as wide as the narrower of the two
            left, right, matrix = right, left, matrix.mT
        bytes_each = left.shape[1] * (2 * right.shape[2] + left.shape[2]) * dtype.itemsize

        def dots(part: slice) -> Tensor:
            return norms.real_sum((left[part].to(dtype) @ matrix).mul_(right[part].to(dtype)))

        return by_chunks(len(left), bytes_each, left.device, dots)

    def _row_dots(self, rows: Tensor) -> Tensor:
        left, right, dtype = self.left, self.right, self.dtype
        each, across = left.shape[1] * (2 * left.shape[2] + right.shape[2]) * dtype.itemsize, rows.to(dtype).mT

        def dots(part: slice) -> Tensor:
            return (left[part].to(dtype) * (right[part].to(dtype) @ across)).sum(1)

        return by_chunks(len(left), each, left.device, dots)

    def _row_sums(self) -> Tensor:
        dtype = self.dtype
        return torch.bmm(self.left.to(dtype).mT, self.right.sum(2, keepdim=True, dtype=dtype)).squeeze(2)

    def _by_row(self, factor: Tensor) -> Outer:
        return Outer(self.left * factor, self.right)

    def _project(self, factors: Factors) -> Tensor:
        # Each side is projected before the sum over t, or after it where that takes fewer multiply-adds.
        left, right, a, b, dtype = self.left, self.right, factors.rows, factors.columns, factors.dtype
        (T, p), d = left.shape[1:], right.shape[2]
        on_left, on_right = (0 if factors.left is None else T * p * a), (0 if factors.right is None else T * d * b)
        costs = {
            (True, True): on_left + on_right + T * a * b,
            (True, False): on_left + T * a * d + (_WRITTEN + b) * a * d,
            (False, True): on_right + T * p * b + (_WRITTEN + a) * p * b,
        }
        left_first, right_first = min(costs, key=lambda order: costs[order])
        numbers = T * (a * left_first + b * right_first) + (a if left_first else p) * (b if right_first else d)

        def project(part: slice) -> Tensor:
            one, other = left[part].to(dtype), right[part].to(dtype)
            one = factors.on_rows(one) if left_first else one
            other = factors.on_columns(other) if right_first else other
            product = one.mT * other if T == 1 else torch.bmm(one.mT, other)
            product = product if right_first else factors.on_columns(product)
            return product if left_first else factors.rows_of(product)

        return factors.by_chunks(left, numbers + copied_numbers(left, dtype) + copied_numbers(right, dtype), project)

    def _moments(self) -> Moments:
        left = self.left.to(self.dtype).flatten(0, 1)
        counted = left.any(1)
        return moment(left[counted]), moment(with_one(self.right.to(self.dtype).flatten(0, 1)[counted], 1.0))

    def times_one(self) -> Tensor:
        """The sum over positions of the left sides, (B, p)."""
        return self.left.sum(1, dtype=self.dtype)

    def _square_sum(self) -> Tensor:
        if self.left.shape[1] != 1 or self.dtype.is_complex:
            return super()._square_sum()
        return self.left[:, 0].to(self.dtype).square().mT @ self.right[:, 0].to(self.dtype).square()


def _gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of the product of both Gram matrices, and its diagonal, added up: (b,) and (b,)."""
    products = torch.bmm(left.conj(), left.mT)
    products *= torch.bmm(right.conj(), right.mT)
    value, scale = norms.sum_and_trace(products)
    return value.real, scale.real
