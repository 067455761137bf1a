"""Dots of every sample's gradient with one vector, without forming the gradients.

Axis letters: b samples, t positions, p rows, d columns, k rows of one sample, o and c channels. A vector is a tensor of
the parameter's shape; the dot is Re(conj(g[b]) v), summed. It costs what the layer's forward costs with the vector as
its weight. Low precision (float16, bfloat16) is summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.norms import by_chunks
from lightning_persample.gradients.precision import accumulation_dtype

__all__ = ["convolved", "dense_dot", "indexed_dot", "outer_dot", "patches_dot"]

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _sum(terms: Tensor) -> Tensor:
    """Sum of the real parts over all but the first axis."""
    real = terms.real if terms.is_complex() else terms
    return real.reshape(real.shape[0], -1).sum(1)


def dense_dot(grad: Tensor, vector: Tensor) -> Tensor:
    """Of grad (B, *shape) with vector (*shape): (B,)."""
    dtype = accumulation_dtype(grad, vector)
    other = vector.to(dtype).conj().reshape(-1)
    bytes_each = 0 if grad.dtype == dtype else other.numel() * dtype.itemsize

    def dots(part: slice) -> Tensor:
        product = grad[part].reshape(-1, other.numel()).to(dtype) @ other
        return product.real if dtype.is_complex else product

    return by_chunks(grad, dtype, bytes_each, dots)


def outer_dot(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """Of sum_t left[b, t] (x) right[b, t], left (B, T, p), right (B, T, d), with vector (p, d): (B,)."""
    dtype = accumulation_dtype(left, right, vector)
    matrix = vector.to(dtype).conj()
    if left.shape[2] < right.shape[2]:  # the product with the vector is as wide as the narrower of the two
        left, right, matrix = right, left, matrix.mT
    bytes_each = left.shape[1] * (2 * right.shape[2] + left.shape[2]) * dtype.itemsize

    def dots(part: slice) -> Tensor:
        return _sum(left[part].to(dtype) @ matrix * right[part].to(dtype))

    return by_chunks(left, dtype, bytes_each, dots)


def indexed_dot(index: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """Of sum_t onehot(index[b, t]) (x) right[b, t], index (B, T), right (B, T, d), with vector (rows, d): (B,)."""
    dtype = accumulation_dtype(right, vector)
    bytes_each = 3 * right.shape[1] * right.shape[2] * dtype.itemsize

    def dots(part: slice) -> Tensor:
        return _sum(vector[index[part]].to(dtype).conj() * right[part].to(dtype))

    return by_chunks(right, dtype, bytes_each, dots)


def convolved(inputs: Tensor, kernel: Tensor, geometry: PatchGeometry, out_size: tuple[int, ...]) -> Tensor:
    """The convolution of inputs by a kernel, at the positions of the output."""
    # inputs (n, C, *in), kernel (O, C/groups, *kernel) -> (n, O, *out_size)
    padding = tuple(before for before, _ in geometry.padding)
    if any(before != after for before, after in geometry.padding):
        inputs = F.pad(inputs, [number for pair in reversed(geometry.padding) for number in pair])
        padding = (0,) * len(padding)
    out = _CONVOLUTIONS[len(out_size)](
        inputs, kernel, None, geometry.stride, padding, geometry.dilation, geometry.groups
    )  # may hold more positions than the output has
    for axis, size in enumerate(out_size, start=2):
        out = out if out.shape[axis] == size else out.narrow(axis, 0, size)
    return out


def patches_dot(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, vector: Tensor) -> Tensor:
    """Of sum_kt grad_out[b, k, :, t] (x) patch[b, k, t] with vector (O, C/groups, *kernel): (B,)."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in), vector (O, C/groups, *kernel) -> (B,)
    # That is the convolution of the inputs by the vector, at the positions of the output, with grad_out.
    dtype = accumulation_dtype(grad_out, inputs, vector)
    kernel = vector.to(dtype).conj().resolve_conj()
    bytes_each = 2 * (grad_out[:1].numel() + inputs[:1].numel()) * dtype.itemsize if grad_out.shape[0] else 0

    def dots(part: slice) -> Tensor:
        grads = grad_out[part].to(dtype)
        if not (grads.numel() and inputs.numel()):
            return grads.new_zeros(grads.shape[0], dtype=dtype.to_real())
        out = convolved(inputs[part].to(dtype).flatten(0, 1), kernel, geometry, tuple(grads.shape[3:]))
        return _sum(out.unflatten(0, grads.shape[:2]) * grads)

    return by_chunks(inputs, dtype, bytes_each, dots)
