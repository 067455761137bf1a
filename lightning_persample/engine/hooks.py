"""Hooks on the gradient of an output, whatever is done to it in place afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_persample.engine.failure import guard

__all__ = ["detached", "gradient_reader", "hooked_tensor", "on_gradient"]


def on_gradient(output: Tensor, hook: Callable[[Tensor], None], failed: Callable[[Exception], None]) -> None:
    """Call the hook with the output's gradient, after all hooks of the user's that may change it."""
    hooked = hooked_tensor(output)
    node, place = hooked.grad_fn, hooked.output_nr
    if node is None:
        hooked.register_hook(guard(hook, failed))
        return

    def before_node(grads: Sequence[Tensor | None]) -> None:
        grad = grads[place]
        if grad is not None:
            hook(grad)

    node.register_prehook(guard(before_node, failed))


def hooked_tensor(output: Tensor) -> Tensor:
    """The tensor whose hook reports the output's gradient."""
    # An op whose output is a view (linear on three axes, einsum) may be followed by an in-place op, which gives the
    # view a new history and leaves a hook on it silent; the tensor behind the view keeps its gradient.
    base = output._base if output._is_view() else None
    return output if base is None or not base.requires_grad else base


def gradient_reader(output: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the output's gradient from the gradient that the hook receives."""
    base = hooked_tensor(output)
    if base is output:
        return detached
    if base.is_contiguous() and output.is_contiguous() and base.numel() == output.numel():
        return partial(_reshaped, output.shape)
    base_size, base_stride = tuple(base.shape), base.stride()
    size, stride, offset = tuple(output.shape), output.stride(), output.storage_offset() - base.storage_offset()

    def read(grad: Tensor) -> Tensor:
        grad = detached(grad)
        if grad.stride() != base_stride:
            grad = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided(size, stride, grad.storage_offset() + offset)

    return read


def _reshaped(size: torch.Size, grad: Tensor) -> Tensor:
    """The gradient of an output that is the whole of a tensor in other sizes."""
    return detached(grad).reshape(size)


def detached(grad: Tensor) -> Tensor:
    """The gradient of an output that is no view, as it is, but for its history."""
    return grad.detach() if grad.requires_grad else grad
