"""Data that a training step draws or makes itself, declared to hold the batch's samples."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mark_samples"]


@torch.overrides.wrap_torch_function(lambda tensor, batch_dim=0: (tensor,))
def mark_samples(tensor: Tensor, batch_dim: int = 0) -> Tensor:
    """Declare that a tensor made in the training step holds the samples of the batch along an axis.

    Noise of a generator, one row for each sample, is no tensor of the batch: which of its axes counts samples is not
    guessed from its sizes. Without this, what such data contributes to a gradient is reported as unsupported.

    >>> import torch
    >>> noise = mark_samples(torch.randn(4, 2))
    >>> noise.shape
    torch.Size([4, 2])

    Args:
        tensor: data with B rows along `batch_dim`, or k * B, k rows for each sample; what was computed with parameters
            is not changed by it.
        batch_dim: the axis that holds the samples.

    Returns:
        The tensor itself; outside a capture nothing else happens.
    """
    return tensor
