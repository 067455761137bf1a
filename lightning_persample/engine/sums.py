"""Whether the gradient of a batch is the sum of what its samples contribute, but for rounding.

A gradient may be zero but for rounding, as that of a bias in front of a normalization is. Its size then says nothing of
what rounding makes of it, nor do the samples' own gradients, which may have cancelled as well: what counts is the size
of the terms that were added up. A call that is formed again with its gradient times random numbers tells it, as then
nothing cancels: the square of the sum is on average the sum of the squares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_persample.engine.failure import in_smaller_chunks
from lightning_persample.engine.weight import Weight

__all__ = ["adds_up", "default_tolerance", "size_of_terms"]


def default_tolerance(dtypes: set[torch.dtype], device: torch.device) -> float:
    """The relative error that rounding alone may give in the lowest of these precisions."""
    lowest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if lowest > torch.finfo(torch.float32).eps:
        return 1e-1
    if lowest > torch.finfo(torch.float64).eps:
        return 1e-3 if device.type == "cpu" else 1e-2  # accelerators may multiply with 10 bits of mantissa
    return 1e-7


def adds_up(rest: Tensor, dtypes: set[torch.dtype], *sizes: Callable[[], Tensor]) -> bool:
    """Whether the norm of what remains of a sum, a number, is rounding beside one of these sizes, in these dtypes."""
    tolerance = default_tolerance(dtypes, rest.device)
    return any(not bool(rest > tolerance * size().to(rest)) for size in sizes)  # (of nan nothing can be said)


def size_of_terms(weight: Weight) -> Tensor:
    """The norm of all that the calls of this backward add up for a weight, as if nothing cancelled: a number."""
    squares = torch.zeros((), dtype=torch.float64)
    for compute, grads in weight.calls:
        drawn = [None if grad is None else grad * _random_like(grad) for grad in grads]
        for owner, gradient in in_smaller_chunks(partial(compute, drawn)):
            if owner is weight:
                squares += in_smaller_chunks(gradient.sq_norm).cpu().double().sum()
    return squares.sqrt()


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(0)  # (the user's is left as it is)
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)
