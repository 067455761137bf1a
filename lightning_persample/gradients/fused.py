"""Squared norms and the sum of all samples' gradients together, where the gradients are formed anyway.

A convolution over many positions needs each sample's weight gradient for its squared norm. Their sum is the gradient of
the batch, which autograd then need not compute a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.gradients import norms
from lightning_persample.gradients.cost import (
    PatchSizes,
    chunks,
    fits,
    memory_budget,
    outer_forms_gradients,
    patches_form_gradients,
)
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.patches import patches_sq_norm_and_sum
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import Dense, Outer, Patches

_IN_CACHE = 4 * 2**20  # bytes of gradients that are squared and summed before the next ones take their place


def linear_is_fused(positions: int, rows: int, columns: int) -> bool:
    """Whether forming the gradients of sum_t left[t] (x) right[t] costs less than their norms and their sum apart.

    Example:
        >>> linear_is_fused(positions=128, rows=1024, columns=256), linear_is_fused(1, 1024, 256)
        (True, False)

    Args:
        positions: T, the number of terms.
        rows: p, the size of left[t].
        columns: d, the size of right[t].

    Returns:
        True where the gradients should be formed.
    """
    return outer_forms_gradients(positions, rows, columns)


def convolution_is_fused(
    input_size: tuple[int, ...], out_channels: int, geometry: PatchGeometry, dtype: torch.dtype, device: torch.device
) -> bool:
    """The same for a convolution's weight gradient.

    Args:
        input_size: (C, *in), with all rows of a sample counted as one.
        out_channels: O.
        geometry: where the patches lie.
        dtype: of the input and the output's gradient.
        device: where the kernel will run.

    Returns:
        True where the gradients should be formed.
    """
    out_size = geometry.output_size(tuple(input_size[1:]))
    if 0 in (*out_size, *input_size, out_channels):
        return False
    sums = torch.promote_types(dtype, torch.float32)
    return patches_form_gradients(PatchSizes(1, input_size[0], out_channels, geometry, out_size, sums.itemsize, device))


def sq_norms_and_sum(gradient: SampleGradient) -> tuple[Tensor, Tensor]:
    """The squared norm of each sample's gradient and the sum of all gradients, each formed once, some at a time.

    Args:
        gradient: what one use of a parameter contributes.

    Returns:
        sum |g[b]|^2, (B,), real; and sum_b g[b], of the parameter's shape. Both float32 at least.
    """
    return gradient._run(_sq_norms_and_sum, gradient)


def _sq_norms_and_sum(gradient: SampleGradient) -> tuple[Tensor, Tensor]:
    if isinstance(gradient, Dense):
        return gradient._sq_norm(), gradient._dense().sum(0)
    if isinstance(gradient, Patches) and not gradient.dtype.is_complex:
        return patches_sq_norm_and_sum(gradient.grad_out, gradient.input, gradient.geometry)
    if isinstance(gradient, Outer):
        return outer_sq_norm_and_sum(gradient.left, gradient.right)
    total = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    squares = gradient._zeros(gradient.dtype)
    for part in chunks(gradient.batch_size, gradient._dense_bytes(), gradient.device):
        formed = gradient.samples(part.start, part.stop)._dense()
        squares[part] = norms.dense_sq_norm(formed)
        total += formed[0] if len(formed) == 1 else formed.sum(0)
    return squares, total


def outer_sq_norm_and_sum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms of sum_t left[t] (x) right[t] and the sum over the samples, in one piece of memory."""
    # left (B, T, p), right (B, T, d) -> (B,) and (p, d)
    dtype = accumulation_dtype(left, right)
    (B, _, p), d = left.shape, right.shape[2]
    bytes_formed, on_cpu = B * p * d * dtype.itemsize, left.device.type == "cpu"
    if B and bytes_formed <= _IN_CACHE and fits(bytes_formed, left.device):
        formed = torch.bmm(left.to(dtype).mT, right.to(dtype))
        return norms.dense_sq_norm(formed), formed.sum(0)
    most = memory_budget(left.device)
    lengths = left.new_empty(B, p, dtype=dtype.to_real())  # of each row of each gradient
    total = left.new_empty(p, d, dtype=dtype) if B else left.new_zeros(p, d, dtype=dtype)
    for part, place, formed in norms.outer_parts(left, right, min(most, _IN_CACHE) if on_cpu else most):
        norms.row_norms(formed, lengths[part, place])
        if part.start == 0:
            torch.sum(formed, 0, out=total[place])
        else:
            total[place] += formed.sum(0)
    return norms.squared(lengths).sum(1), total
