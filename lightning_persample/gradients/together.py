"""Squared norms and dots of the gradients of several parameters, in fewer passes and calls than one by one.

The weight and the bias of a linear map on one row per sample get g (x) x and g: |g|^2 is needed for both, and reading g
is most of the work. Biases and scales are so small that the calls are most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.gradients import norms, precision
from lightning_persample.gradients.precision import Later
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import Dense, Outer


def sq_norms(gradients: Sequence[SampleGradient], later: list[Later | None] | None = None) -> list[Tensor]:
    """The squared norm (B,) of each sample's gradient for each of several parameters, as `sq_norm` gives it."""
    # `later` takes for each what corrects it, as `SampleGradient.sq_norm_or_later` gives it, or None where nothing has
    # to; None in its place corrects them at once.
    if len(gradients) == 2:
        one, two = gradients
        if (
            type(one) is Outer
            and type(two) is Dense
            and _same(one.left, two.grad)
            and one.right.dtype == two.grad.dtype
        ):
            with precision.without_autocast(two.grad.device.type):
                of_rows = norms.dense_sq_norm(two.grad)
                return [of_rows * norms.dense_sq_norm(one.right.squeeze(1)), of_rows]
    if later is None:
        return [gradient.sq_norm() for gradient in gradients]
    found = [gradient.sq_norm_or_later() for gradient in gradients]
    later[:] = [each for _, each in found]
    return [value for value, _ in found]


_SMALL = 4096  # numbers of a sample that are copied sooner than they are multiplied in a call of their own


def dots(gradients: Sequence[SampleGradient], vectors: Sequence[Tensor]) -> list[Tensor]:
    """The terms, (B,) each, whose sum is the dot of each sample's gradient of several parameters with one vector."""
    terms: list[Tensor] = []
    small: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for gradient, vector in zip(gradients, vectors, strict=True):
        if type(gradient) is Dense and vector.numel() <= _SMALL and vector.layout is torch.strided:
            rows, parts = small.setdefault(
                (gradient.grad.dtype, gradient.device, vector.dtype, vector.device), ([], [])
            )
            rows.append(gradient.grad.unsqueeze(-1).flatten(1))
            parts.append(vector.flatten())
        else:
            terms.append(gradient.dot(vector))
    return terms + [Dense(torch.cat(rows, 1)).dot(torch.cat(parts)) for rows, parts in small.values()]


def sq_norms_and_sum(gradient: SampleGradient) -> tuple[Tensor, Tensor]:
    """The squared norms (B,) and the sum of all gradients, each formed once, some at a time."""
    # For gradients that are formed for their norms anyway, as those of a convolution over many positions: their sum is
    # the gradient of the batch, which autograd then need not compute a second time.
    return gradient._run(gradient._sq_norm_and_sum)


def _same(left: Tensor, rows: Tensor) -> bool:
    """Whether left (B, 1, p) and rows (B, p) are the same memory, read in the same way."""
    return (
        left.shape[1] == 1
        and rows.dim() == 2
        and (left.shape[0], left.shape[2]) == rows.shape
        and left.dtype == rows.dtype
        and left.data_ptr() == rows.data_ptr()
        and (left.stride(0), left.stride(2)) == rows.stride()
    )
