"""The values of a record, from what a backward has left of each weight."""

from __future__ import annotations

from torch import Tensor

from lightning_persample.engine.weight import Weight
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients import SampleGradient

__all__ = ["has_value", "sq_norm_of"]


def has_value(weight: Weight) -> bool:
    """Whether a backward has left anything of a weight's per-sample gradient."""
    return weight.sq_norm is not None or bool(weight.contributions)


def sq_norm_of(weight: Weight, total: SampleGradient | None) -> Tensor:
    """The squared norm (B,) of what the samples contributed to a weight.

    Args:
        weight: the weight.
        total: the sum of its contributions, where they were kept.

    Returns:
        The squared norm.

    Raises:
        PerSampleError: there is neither.
    """
    if weight.sq_norm is not None:
        return weight.sq_norm
    if total is None:
        raise PerSampleError(f"no contribution was kept for {sorted(weight.names)}")
    return total.sq_norm()
