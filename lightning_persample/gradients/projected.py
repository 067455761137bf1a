"""Random projections of every sample's gradient, without forming the gradients.

Axis letters: b samples, t positions, p rows, d columns, k rows of one sample, o and c channels. A gradient g read as a
matrix (p, d) becomes left g right^T, (a, b), see `lightning_persample.gradients.projection`. Low precision (float16,
bfloat16) is summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_persample.gradients.cost import chunks, patch_costs
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.indexed import indexed_dense
from lightning_persample.gradients.norms import convolved
from lightning_persample.gradients.patch_kernels import Rows
from lightning_persample.gradients.patches import patches_dense
from lightning_persample.gradients.projection import Factors

_WRITTEN = 32  # one number of a projected side, written and read again, in multiply-adds


def _by_chunks(like: Tensor, numbers_each: int, factors: Factors, project: Callable[[slice], Tensor]) -> Tensor:
    """(B, a b), some samples at a time, each of which needs so many numbers for its temporaries."""
    size, dtype = factors.size, factors.dtype
    parts = [project(part) for part in chunks(like.shape[0], (numbers_each + size) * dtype.itemsize, like.device)]
    if not parts:
        return torch.zeros(0, size, dtype=dtype, device=like.device)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1, size)


def _copied(tensor: Tensor, dtype: torch.dtype) -> int:
    """How many numbers of one sample are copied for a product in `dtype`."""
    return tensor[:1].numel() if tensor.dtype != dtype or not tensor.is_contiguous() else 0


def dense_projected(grad: Tensor, factors: Factors) -> Tensor:
    """Of grad (B, *shape): (B, a b)."""
    shape, dtype = grad.shape[1:], factors.dtype
    p = shape[0] if len(shape) > 1 else 1
    if factors.left is None and factors.right is None:
        return grad.reshape(grad.shape[0], factors.size).to(dtype, copy=True)
    d = shape.numel() // p
    numbers = _copied(grad, dtype) + min(p * factors.columns, d * factors.rows)
    return _by_chunks(grad, numbers, factors, lambda part: factors.of(grad[part].to(dtype).reshape(-1, p, d)))


def outer_projected(left: Tensor, right: Tensor, factors: Factors) -> Tensor:
    """Of sum_t left[b, t] (x) right[b, t], left (B, T, p), right (B, T, d): (B, a b)."""
    # Each side is projected before the sum over t, or after it where that takes fewer multiply-adds.
    (T, p), d, a, b, dtype = left.shape[1:], right.shape[2], factors.rows, factors.columns, factors.dtype
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
        one, other = factors.on_rows(one) if left_first else one, factors.on_columns(other) if right_first else other
        product = one.mT * other if T == 1 else torch.bmm(one.mT, other)
        product = product if right_first else factors.on_columns(product)
        return product if left_first else factors.rows_of(product)

    return _by_chunks(left, numbers + _copied(left, dtype) + _copied(right, dtype), factors, project)


def indexed_projected(index: Tensor, right: Tensor, num_rows: int, factors: Factors) -> Tensor:
    """Of sum_t onehot(index[b, t]) (x) right[b, t], index (B, T), right (B, T, d): (B, a b)."""
    # The projected one-hot vectors are columns of the left matrix.
    T, d, a, b, dtype = index.shape[1], right.shape[2], factors.rows, factors.columns, factors.dtype
    numbers = T * (a + b) + _copied(right, dtype)

    def project(part: slice) -> Tensor:
        other = factors.on_columns(right[part].to(dtype))
        if factors.left is None:
            return indexed_dense(index[part], other, num_rows)
        chosen = factors.left.index_select(1, index[part].flatten()).view(a, -1, T)
        return torch.bmm(chosen.transpose(0, 1), other)

    if T * d == 0:
        return torch.zeros(index.shape[0], a * b, dtype=dtype, device=right.device)
    return _by_chunks(right, numbers, factors, project)


def patches_projected(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, factors: Factors) -> Tensor:
    """Of sum_kt grad_out[b, k, :, t] (x) patch[b, k, t]: (B, a b)."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in) -> (B, a b)
    # The projected patches are the convolution of the inputs by the right matrix, so that nothing is unfolded. Where
    # few channels see each other, forming the small gradients costs less.
    a, b, dtype = factors.rows, factors.columns, factors.dtype
    rows = Rows(grad_out, inputs, geometry)
    if not (grad_out.numel() and inputs.numel()):
        return torch.zeros(grad_out.shape[0], a * b, dtype=dtype, device=grad_out.device)
    if dtype.is_complex or _forming_is_cheaper(rows, factors):
        result = rows.sizes(dtype).result
        return _by_chunks(
            grad_out,
            2 * result,
            factors,
            lambda part: factors.of(patches_dense(grad_out[part], inputs[part], geometry).flatten(2).to(dtype)),
        )
    k, groups, (out_channels, channels, *kernel_size) = grad_out.shape[1], geometry.groups, rows.weight_shape
    right = factors.right
    if right is None:
        right = torch.eye(b, dtype=dtype, device=inputs.device)
    kernel = right.view(b, channels, *kernel_size).repeat(groups, *(1,) * (1 + len(kernel_size)))
    left = None if factors.left is None else factors.left.view(a, groups, -1).transpose(0, 1)
    positions = rows.sizes(dtype).positions
    read, every = k * inputs[0, 0].numel(), torch.arange(groups, device=inputs.device)
    numbers = 2 * read + positions * (groups * (a + 2 * b) + out_channels) + k * groups * a * b

    def project(part: slice) -> Tensor:
        samples = part.stop - part.start
        patches = convolved(inputs[part].flatten(0, 1).to(dtype), kernel, geometry, rows.out_size)
        grads = grad_out[part].to(dtype).reshape(samples * k, groups, out_channels // groups, -1)
        if left is None:
            own = grads.new_zeros(samples * k, groups, *grads.shape[1:])  # each group's rows are zero elsewhere
            own[:, every, every] = grads
        elif groups == 1:
            own = torch.bmm(left.expand(samples * k, -1, -1), grads[:, 0])
        else:
            own = torch.einsum("gai,ngit->ngat", left, grads)
        own = own.reshape(samples * k * groups, a, -1)
        product = torch.bmm(own, patches.reshape(samples * k * groups, b, -1).mT)
        return product if k * groups == 1 else product.view(samples, k * groups, a, b).sum(1)

    return _by_chunks(grad_out, numbers, factors, project)


def _forming_is_cheaper(rows: Rows, factors: Factors) -> bool:
    """Whether to form each sample's gradient and project that."""
    sizes, a, b = rows.sizes(factors.dtype), factors.rows, factors.columns
    groups, unfolded = sizes.geometry.groups, sizes.unfolded // sizes.positions
    d = unfolded // groups
    formed = min(patch_costs(sizes, dense=True).values())
    formed += min(sizes.out_channels * b * (d + a), d * a * (sizes.out_channels + b))
    each = unfolded * b + sizes.out_channels * a + groups * (a * b + _WRITTEN * (a + b))
    return formed < sizes.positions * each


def block_projected(grad: Tensor, dim: int, layout: tuple[int, int, int], position: Tensor, factors: Factors) -> Tensor:
    """Of gradients that are zero outside the sample's own entries along one axis: (B, a b)."""
    # layout (outer_size, total, inner_size), position (B,) -> (B, a b)
    # Each sample sees the columns of one matrix that belong to its own entries.
    along_rows, dtype = dim == 0 and grad.dim() > 2, factors.dtype
    outer_size, total, inner_size = layout
    matrix, kept = (factors.left, factors.rows) if along_rows else (factors.right, factors.columns)
    if matrix is None:
        matrix = torch.eye(kept, dtype=dtype, device=grad.device)
    axis = 0 if along_rows or grad.dim() == 2 else dim - 1
    sizes = [] if along_rows or grad.dim() == 2 else list(grad.shape[2:])
    sizes[axis : axis + 1] = [outer_size, total, inner_size]
    of_all = matrix.view(kept, *sizes)
    p = grad.shape[1] if grad.dim() > 2 else 1
    numbers = _copied(grad, dtype) + (matrix.numel() // total) + grad[:1].numel() // p * max(p, factors.rows)

    def project(part: slice) -> Tensor:
        own = of_all.index_select(axis + 2, position[part]).movedim(axis + 2, 0).flatten(2)
        matrices = grad[part].to(dtype).reshape(own.shape[0], p, -1)
        if along_rows:
            return torch.bmm(own, factors.on_columns(matrices))
        return torch.bmm(factors.rows_of(matrices), own.mT)

    return _by_chunks(grad, numbers, factors, project)
