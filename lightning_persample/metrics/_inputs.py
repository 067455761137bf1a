"""What every metric asks of its inputs, and the precision in which it adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.errors import OptionError

__all__ = ["accumulation_dtype", "as_batch_size", "as_scalar", "as_vector", "check_count", "is_number_below_one"]

_WITHOUT_DOUBLE = {"mps"}  # device types that hold no float64


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which sums are formed on a device: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type in _WITHOUT_DOUBLE else torch.float64


def as_vector(value: Tensor, name: str, device: torch.device | None = None, size: int | None = None) -> Tensor:
    """One number for each sample, without graph, in the accumulation dtype."""
    _check_tensor(value, name, device)
    if value.dim() != 1:
        raise OptionError(f"{name} has shape {tuple(value.shape)}; one number for each sample, shape (n,), is needed")
    if size is not None and value.numel() != size:
        raise OptionError(f"{name} has {value.numel()} samples where the other argument has {size}; give one for each")
    return value.detach().to(accumulation_dtype(value.device))


def as_scalar(value: Tensor | float, name: str, device: torch.device) -> Tensor:
    """One number as a tensor without axes, without graph, in the accumulation dtype."""
    if isinstance(value, Tensor):
        _check_tensor(value, name, device)
        if value.numel() != 1:
            raise OptionError(f"{name} has shape {tuple(value.shape)}; one number for the whole batch is needed")
        return value.detach().reshape(()).to(accumulation_dtype(device))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} is of type {type(value).__name__}; a number or a tensor with one entry is needed")
    return torch.tensor(value, dtype=accumulation_dtype(device), device=device)


def as_batch_size(value: int | None, samples: int) -> int:
    """The size B of the effective batch of which `samples` samples are at hand."""
    if value is None:
        return samples
    if not _is_count(value):
        raise OptionError(f"batch_size is {value!r}; allowed is None or the number of samples of the effective batch")
    if value < samples:
        raise OptionError(
            f"batch_size is {value}, yet {samples} samples are given; it counts the samples of the whole optimizer "
            "step, over all processes and accumulated batches"
        )
    return value


def check_count(value: int) -> None:
    """Refuse what is not a number of samples."""
    if not _is_count(value):
        raise OptionError(f"count is {value!r}; the number of samples in the sums is needed")


def is_number_below_one(value: object) -> bool:
    """Whether a value is a number from 0 on and below 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tensor(value: object, name: str, device: torch.device | None) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise OptionError(f"{name} is of type {kind}; a tensor of a floating dtype is needed")
    if device is not None and value.device != device:
        raise OptionError(
            f"{name} is on {value.device}, the metric on {device}; move it with metric.to('{value.device}')"
        )
