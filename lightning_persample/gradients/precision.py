"""In which precision sums over samples' gradients are taken."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["accumulation_dtype", "wide_dtype", "without_autocast"]


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which sums over these tensors are taken: their common dtype, and float32 at least.

    Example:
        >>> accumulation_dtype(torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16))
        torch.float32

    Args:
        *tensors: of a floating point or complex dtype.

    Returns:
        The dtype.
    """
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype is not dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The widest dtype of the same kind that the tensor's device has."""
    if tensor.device.type == "mps":  # which has no float64
        return accumulation_dtype(tensor)
    return torch.complex128 if tensor.is_complex() else torch.float64


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, which, were it on, would round the inputs of every matrix product."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
