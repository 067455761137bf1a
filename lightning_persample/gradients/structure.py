"""What one use of one parameter contributes to each sample's gradient, in the form that is cheapest to hold.

A rule returns one of these structures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_persample.gradients import indexed, moments, norms, precision, projected
from lightning_persample.gradients.cost import MatrixKernel, outer_kernel
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.patches import (
    patches_are_formed,
    patches_dense,
    patches_row_sums,
    patches_sq_norm,
    patches_terms_sq_norm,
)
from lightning_persample.gradients.projection import Factors
from lightning_persample.gradients.sample_gradient import SampleGradient


def _shapes(**tensors: Tensor) -> str:
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

    def _dot(self, vector: Tensor) -> Tensor:
        return norms.dense_dot(self.grad, vector)

    def _project(self, factors: Factors) -> Tensor:
        return projected.dense_projected(self.grad, factors)

    def _row_dots(self, rows: Tensor) -> Tensor:
        return norms.dense_row_dots(self.grad.flatten(2), rows)

    def _row_sums(self) -> Tensor:
        return self.grad.flatten(2).sum(2, dtype=self.dtype)

    def _by_row(self, factor: Tensor) -> Dense:
        return Dense(self.grad * factor.view(-1, *(1,) * (self.grad.dim() - 2)))

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Dense):
            return norms.dense_inner(self.grad, other.grad)
        if isinstance(other, Outer):
            return norms.dense_outer_inner(self.grad, other.left, other.right)
        if isinstance(other, Indexed):
            return indexed.dense_indexed_inner(self.grad, other.index, other.right)
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
            shapes = _shapes(left=self.left, right=self.right)
            raise ValueError(f"Outer: left has shape (B, T, p) and right (B, T, d), got {shapes}.")

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
            return norms.outer_direct_sq_norm(self.left, self.right)
        value, scale = norms.outer_gram_sq_norm(self.left, self.right)

        def again(some: Tensor) -> Tensor:
            wide = self.pick(some)._widened()
            return norms.outer_direct_sq_norm(wide.left, wide.right).to(value.dtype)

        return precision.corrected(value, scale, again, self.left, later)

    _sq_norm_or_later = _sq_norm

    def _kernel(self) -> MatrixKernel:
        return outer_kernel(self.left.shape[1], *self.shape)

    def _is_formed(self) -> bool:
        return self.left.shape[1] > 1 and self._kernel() == "direct"

    def _row_dots(self, rows: Tensor) -> Tensor:
        return norms.outer_row_dots(self.left, self.right, rows)

    def _row_sums(self) -> Tensor:
        return norms.outer_row_sums(self.left, self.right)

    def _by_row(self, factor: Tensor) -> Outer:
        return Outer(self.left * factor, self.right)

    def _terms_sq_norm(self) -> Tensor:
        return norms.outer_terms_sq_norm(self.left, self.right)

    def _dot(self, vector: Tensor) -> Tensor:
        return norms.outer_dot(self.left, self.right, vector)

    def _project(self, factors: Factors) -> Tensor:
        return projected.outer_projected(self.left, self.right, factors)

    def _moments(self) -> moments.Moments:
        return moments.outer_moments(self.left.to(self.dtype), self.right.to(self.dtype))

    def times_one(self) -> Tensor:
        """The sum over positions of the left sides, (B, p)."""
        return self.left.sum(1, dtype=self.dtype)

    def _square_sum(self) -> Tensor:
        if self.left.shape[1] != 1 or self.dtype.is_complex:
            return super()._square_sum()
        return self.left[:, 0].to(self.dtype).square().mT @ self.right[:, 0].to(self.dtype).square()

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Outer):
            return norms.outer_inner(self.left, self.right, other.left, other.right)
        return None


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
            shapes = _shapes(index=self.index, right=self.right)
            raise ValueError(f"Indexed: index has shape (B, T) and right (B, T, d), got {shapes}.")
        if self.index.is_floating_point() or self.index.is_complex() or self.index.dtype is torch.bool:
            raise ValueError(f"Indexed: index has an integer dtype, got {self.index.dtype}.")
        object.__setattr__(self, "index", self.index.long())

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, (num_rows, d)."""
        return torch.Size((self.num_rows, self.right.shape[2]))

    def _dense(self) -> Tensor:
        return indexed.indexed_dense(self.index, self.right, self.num_rows)

    def _sq_norm(self) -> Tensor:
        return indexed.indexed_sq_norm(self.index, self.right)

    def _terms_sq_norm(self) -> Tensor:
        return norms.dense_sq_norm(self.right)  # if no index came twice

    def _dot(self, vector: Tensor) -> Tensor:
        return norms.indexed_dot(self.index, self.right, vector)

    def _project(self, factors: Factors) -> Tensor:
        return projected.indexed_projected(self.index, self.right, self.num_rows, factors)

    def _moments(self) -> moments.Moments:
        return moments.indexed_moments(self.index, self.right.to(self.dtype), self.num_rows)

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Indexed):
            return indexed.indexed_inner(self.index, self.right, other.index, other.right)
        if isinstance(other, Outer):
            return indexed.indexed_outer_inner(self.index, self.right, other.left, other.right)
        return None


@dataclass(frozen=True, eq=False)
class Patches(SampleGradient):
    """A convolution's weight gradient, g[b] = sum_kt grad_out[b, k, :, t] (x) patch[b, k, t]; nothing is conjugated.

    patch[b, k, t] is what the kernel covers at output position t of input[b, k]; it is not built unless this is the
    cheapest way. With groups, each group of output channels sees its own group of input channels.

    >>> geometry = PatchGeometry((3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    >>> gradient = Patches(torch.ones(4, 1, 8, 5, 5), torch.ones(4, 1, 2, 5, 5), geometry)
    >>> gradient.shape, gradient.dense().shape
    (torch.Size([8, 2, 3, 3]), torch.Size([4, 8, 2, 3, 3]))

    Attributes:
        grad_out: (B, k, O, *out), k rows per sample.
        input: (B, k, C, *in).
        geometry: where the patches lie in the input.

    Raises:
        ValueError: when the shapes do not agree with each other or with the geometry.
    """

    grad_out: Tensor
    input: Tensor
    geometry: PatchGeometry

    def __post_init__(self) -> None:
        axes, groups = 3 + len(self.geometry.kernel_size), self.geometry.groups
        of_output, of_input = self.grad_out.shape, self.input.shape
        if not (len(of_output) == len(of_input) == axes) or of_output[:2] != of_input[:2]:
            raise ValueError(
                f"Patches: grad_out has shape (B, k, O, *out) and input (B, k, C, *in) with {axes - 3} spatial axes, "
                f"got {self._sizes()}."
            )
        if of_output[2] % groups or of_input[2] % groups:
            raise ValueError(f"Patches: O and C are multiples of groups, got {self._sizes()} and {groups} groups.")
        most = self.geometry.output_size(tuple(of_input[3:]))
        if of_output[3:] != most and any(out > limit for out, limit in zip(of_output[3:], most, strict=True)):
            raise ValueError(
                f"Patches: at most {most} patches fit into the input, got {self._sizes()} and {self.geometry}."
            )

    def _sizes(self) -> str:
        return _shapes(grad_out=self.grad_out, input=self.input)

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, (O, C/groups, *kernel_size)."""
        channels = self.input.shape[2] // self.geometry.groups
        return torch.Size((self.grad_out.shape[2], channels, *self.geometry.kernel_size))

    def _dense(self) -> Tensor:
        return patches_dense(self.grad_out, self.input, self.geometry)

    def _sq_norm(self, later: precision.Later | None = None) -> Tensor:
        return patches_sq_norm(self.grad_out, self.input, self.geometry, later)

    _sq_norm_or_later = _sq_norm

    def _terms_sq_norm(self) -> Tensor:
        return patches_terms_sq_norm(self.grad_out, self.input, self.geometry)

    def _is_formed(self) -> bool:
        return not (self.grad_out.numel() and self.input.numel()) or patches_are_formed(
            self.grad_out, self.input, self.geometry
        )

    def _row_dots(self, rows: Tensor) -> Tensor:
        return norms.patches_row_dots(self.grad_out, self.input, self.geometry, rows)

    def _row_sums(self) -> Tensor:
        return patches_row_sums(self.grad_out, self.input, self.geometry)

    def _by_row(self, factor: Tensor) -> Patches:
        grad_out = self.grad_out * factor.reshape(-1, *(1,) * (self.grad_out.dim() - 3))
        return Patches(grad_out, self.input, self.geometry)

    def _dot(self, vector: Tensor) -> Tensor:
        return norms.patches_dot(self.grad_out, self.input, self.geometry, vector)

    def _project(self, factors: Factors) -> Tensor:
        return projected.patches_projected(self.grad_out, self.input, self.geometry, factors)

    def _moments(self) -> moments.Moments:
        return moments.patches_moments(self.grad_out.to(self.dtype), self.input.to(self.dtype), self.geometry)

    def times_one(self) -> Tensor:
        """The sum over rows and positions of the output gradients, (B, O)."""
        return self.grad_out.transpose(1, 2).flatten(2).sum(2, dtype=self.dtype)
