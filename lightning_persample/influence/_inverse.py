"""Second moments of the rows of a store, and their factors for solving."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_persample.errors import PerSampleError
from lightning_persample.influence._products import float64_blocks
from lightning_persample.influence.store import GradientStore

__all__ = ["cholesky_factor", "second_moments"]


def second_moments(
    store: GradientStore, columns: Sequence[slice], *, max_memory: int | None, share: int = 1
) -> tuple[list[Tensor], int]:
    """The sums of ``g g^T`` over the rows that are finite, for each of some ranges of columns."""
    moments = [torch.zeros(part.stop - part.start, part.stop - part.start, dtype=torch.float64) for part in columns]
    count = 0
    for _, values in float64_blocks(store, max_memory, share):
        finite = values[values.isfinite().all(1)]
        count += len(finite)
        for part, moment in zip(columns, moments, strict=True):
            moment.addmm_(finite[:, part].T, finite[:, part])
    if count == 0:
        raise PerSampleError(f"none of the {len(store)} gradients of the train store is finite")
    return moments, count


def cholesky_factor(moment: Tensor, damping: float | None, what: str) -> Tensor:
    """L with ``L L^T = moment + damping I``."""
    mean = float(moment.diagonal().mean())
    if damping is None:
        damping = 0.1 * mean
    moment.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(moment)
    pivots = factor.diagonal().square()
    if mean == 0 and damping == 0:
        raise PerSampleError(f"{what} is 0, and so is every gradient that it is of: there is nothing to score by")
    if failed or pivots.min() <= len(pivots) * torch.finfo(moment.dtype).eps * pivots.max():
        raise PerSampleError(
            f"{what} has no inverse with damping={damping!r}: pass a larger one, for example damping={0.1 * mean:.2g}, "
            "a tenth of its mean eigenvalue, or a store of fewer columns (a Projection of smaller dim)"
        )
    return factor
