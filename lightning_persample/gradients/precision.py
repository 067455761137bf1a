"""In which precision sums over samples' gradients are taken, and where it has not sufficed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients.host import ASYNCHRONOUS, on_its_way
from lightning_persample.gradients.program import at_least
from lightning_persample.torch_internals import version_counter

_CANCELLATION = 1e-2  # a result smaller than this part of what was added up is computed again another way
_AS_IT_IS = contextlib.nullcontext()
_has_autocast = functools.cache(torch.amp.is_autocast_available)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which sums over these tensors are taken: their common one, and float32 at least."""
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


class Later:
    """Takes what corrects squared norms once the host can read whether it has to, made of tensors of this version."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.corrections: list[Callable[[], None]] = []
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._versions = [(tensor, _version_of(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Raise where one of the tensors was changed since."""
        if any(_version_of(tensor) != version for tensor, version in self._versions):
            raise UnsupportedError(
                "rounding errors may show in its norms, and what they are computed from was changed in place during "
                "the backward, before the device had them; change a copy"
            )


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_counter(tensor)


def corrected(
    value: Tensor,
    scale: Tensor,
    again: Callable[[Tensor], Tensor],
    gradients: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """`value` (B,), computed again where `suspect`: at once, or what `later` gets does it."""

    def correct() -> None:
        found = suspect(value, scale, gradients)
        if found is not None:
            if later is not None:
                later.check()
            value[found] = again(found)

    if later is None or value.device.type not in ASYNCHRONOUS or value.numel() == 0:
        correct()
        return value
    least, enough = on_its_way(_excess(value, scale)), _tiny(value, gradients)
    later.corrections.append(lambda: None if float(least()) >= enough else correct())
    return value


def _excess(value: Tensor, scale: Tensor) -> Tensor:
    """By how much the nearest of the values lies above what cancellation may have left, a number."""
    return torch.sub(value, scale, alpha=_CANCELLATION).amin()


def _tiny(value: Tensor, gradients: Tensor | None) -> float:
    return 0.0 if gradients is None else float(torch.finfo(value.dtype).tiny) ** 0.8


def suspect(value: Tensor, scale: Tensor, gradients: Tensor | None = None) -> Tensor | None:
    """Which squared norms may be little but rounding errors; value (B,), scale (B,), gradients (B, ...) -> (B,)."""
    # Those are so much smaller than what was added up for them that rounding errors may show (NaN counts, since an
    # overflow may have made it), or so small that products on the way to them may have become zero.
    tiny = _tiny(value, gradients)
    if value.numel() == 0 or value.is_meta or at_least(_excess(value, scale), tiny):  # as nearly always
        return None
    found = ~(value >= _CANCELLATION * scale)
    if gradients is not None:
        found |= (value < tiny) & gradients.flatten(1).any(1)
    return found if found.any() else None
