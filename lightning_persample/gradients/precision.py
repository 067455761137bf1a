"""In which precision sums over samples' gradients are taken, and where it has not sufficed."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

_CANCELLATION = 1e-2  # a result smaller than this part of what was added up is computed again another way
_AS_IT_IS = contextlib.nullcontext()
_has_autocast = functools.cache(torch.amp.is_autocast_available)


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
    if not (_has_autocast(device_type) and torch.is_autocast_enabled(device_type)):  # as nearly always
        return _AS_IT_IS
    return torch.autocast(device_type, enabled=False)


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is in force on a kind of device; on some there is none to be asked about."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def suspect(value: Tensor, scale: Tensor, gradients: Tensor | None = None) -> Tensor | None:
    """Which squared norms may be little but rounding errors; value (B,), scale (B,), gradients (B, ...) -> (B,)."""
    # Those are so much smaller than what was added up for them that rounding errors may show (NaN counts, since an
    # overflow may have made it), or so small that products on the way to them may have become zero.
    tiny = 0.0 if gradients is None else float(torch.finfo(value.dtype).tiny) ** 0.8
    if (
        value.numel() == 0 or value.is_meta or float(torch.sub(value, scale, alpha=_CANCELLATION).amin()) >= tiny
    ):  # as nearly always
        return None
    found = ~(value >= _CANCELLATION * scale)
    if gradients is not None:
        found |= (value < tiny) & gradients.flatten(1).any(1)
    return found if found.any() else None
