"""The part of a gradient that this process holds."""

from __future__ import annotations

from torch import Tensor

__all__ = ["entries", "is_distributed", "local"]


def is_distributed(grad: Tensor) -> bool:
    """Whether a gradient is spread over devices."""
    return hasattr(grad, "placements")


def local(grad: Tensor) -> Tensor:
    """This process's shard of a gradient that is spread over devices, and any other gradient as it is; no graph."""
    own: Tensor = grad.to_local() if is_distributed(grad) else grad  # type: ignore[attr-defined]
    return own.detach()


def entries(grad: Tensor) -> Tensor:
    """The entries that are stored here, those of a sparse gradient each once: a tensor of the same norms."""
    own = local(grad)
    return own.coalesce().values() if own.is_sparse else own
