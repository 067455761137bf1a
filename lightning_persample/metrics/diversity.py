"""How little the gradients of a batch point the same way."""

from __future__ import annotations

import math

from torch import Tensor

from lightning_persample.metrics.functional import diversity_of_sums
from lightning_persample.metrics.steps import StepMetric

__all__ = ["GradientDiversity"]


class GradientDiversity(StepMetric):
    """Gradient diversity ``sum_i ||g_i||^2 / ||sum_i g_i||^2`` of a batch, averaged over optimizer steps.

    It is 1/B if all gradients of a batch of B samples are equal, 1 if they are orthogonal, and larger if they cancel.

    >>> import torch
    >>> metric = GradientDiversity()
    >>> for grads in (torch.eye(2), torch.ones(2, 2)):
    ...     metric.update(grads.square().sum(1), grads.mean(0).square().sum())
    >>> metric.compute().item()
    0.75

    Under DDP and gradient accumulation `update` gets the samples at hand, the squared norm of the averaged gradient of
    the step and the size of its effective batch, see there; the result is that of one process with all samples in one
    call. `forward` gives the value of its call alone.

    Not finite: a step with a sample or a mean that is not finite is left out as a whole and counted in
    ``counts()["skipped_steps"]``. B = 1: the diversity of one sample is 1 whatever its gradient; such a step says
    nothing, is left out and counted in ``counts()["undefined_steps"]``, as is one whose gradients cancel to exactly
    zero. Without any step that counts the result is nan.

    Memory: 48 bytes for each call of `update` since the last `reset`.

    Args:
        **kwargs: those of `torchmetrics.Metric`.

    Reference:
        Yin et al. 2018, Gradient Diversity, arXiv 1706.05699, definition 1.
    """

    plot_lower_bound = 0.0
    _title = "Gradient diversity"
    _axis = r"diversity $\Sigma_i\,\|g_i\|^2 \;/\; \|\Sigma_i\,g_i\|^2$"

    def compute(self) -> Tensor:
        """The diversity.

        Returns:
            The average over steps, shape (); nan where there is none.
        """
        steps = self._steps()
        total = steps.share.sum()
        each = diversity_of_sums(steps.sum_of_sq_norms, steps.batch_size, steps.sq_norm_of_mean)
        return (each.sum() / total).where(total > 0, math.nan)

    def _is_defined(self, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return (batch_size > 1) & (sq_norm_of_mean > 0)
