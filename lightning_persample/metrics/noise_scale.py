"""The gradient noise scale: from which batch size on a larger one no longer helps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.metrics.base import is_number_below_one
from lightning_persample.metrics.functional import simple_noise_scale, terms_of_sums
from lightning_persample.metrics.steps import StepMetric

__all__ = ["GradientNoiseScale"]


class GradientNoiseScale(StepMetric):
    """The simple noise scale ``B_simple = S / |G|^2``, in samples: a ratio of averages over optimizer steps.

    S estimates the variance of a sample's gradient, tr(Sigma), and |G|^2 the squared norm of the true gradient, both
    unbiased, see `noise_scale_terms`. Both are averaged over steps before the ratio is taken: a ratio of single steps
    is neither unbiased nor tame. A step weighs by the size of its batch, because |G|^2 of a small one is mostly noise:
    the short last batch of an epoch counts for as many samples as it has.

    >>> import torch
    >>> metric = GradientNoiseScale()
    >>> for grads in torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[2.0, 1.0], [2.0, -1.0]]]):
    ...     metric.update(grads.square().sum(1), grads.mean(0).square().sum())
    >>> round(metric.compute().item(), 4)  # S is 2 and 2, |G|^2 is 3 and 3
    0.6667

    Under DDP and gradient accumulation `update` gets the samples at hand, the squared norm of the averaged gradient of
    the step and the size of its effective batch, see there; the result is that of one process with all samples in one
    call. `forward` gives the value of its call alone.

    Not finite: a step with a sample or a mean that is not finite is left out as a whole and counted in
    ``counts()["skipped_steps"]``. B = 1: a step of one sample has no variance; it is left out and counted in
    ``counts()["undefined_steps"]``. Without any step that counts, and where the averaged |G|^2 is not positive, the
    result is nan; more steps are then needed.

    Memory: 48 bytes for each call of `update` since the last `reset`.

    Args:
        decay: how much of its weight a step keeps at each later one, at least 0 and less than 1, for exponential moving
            averages; None weighs all samples equally.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        OptionError: `decay` has a value that is not allowed.

    Reference:
        McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, equation 2.9 and
        appendix A.1.
    """

    plot_lower_bound = 0.0
    _title = "Gradient noise scale"
    _axis = r"noise scale $B_\mathrm{simple}$ (samples)"

    def __init__(self, decay: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if decay is not None and not is_number_below_one(decay):
            raise OptionError(f"decay is {decay!r}; allowed is None or a number of at least 0 and less than 1")
        self.decay = decay

    def compute(self) -> Tensor:
        """The noise scale.

        Returns:
            The ratio of the averages of S and |G|^2, shape (); nan where there is none.
        """
        S, G2, _ = self._averages()
        return simple_noise_scale(S, G2)

    def terms(self) -> dict[str, Tensor]:
        """Both averages, over all processes.

        Returns:
            ``S``, the estimate of tr(Sigma), and ``G2``, that of the squared norm of the true gradient, which may be
            negative; nan without any step that counts.
        """
        with self._synced():
            S, G2, _ = self._averages()
        return {"S": S, "G2": G2}

    def counts(self) -> dict[str, Tensor]:
        """What the value rests on, over all processes.

        Returns:
            ``steps`` that count; ``negative_steps``, those of them whose own |G|^2 is negative; ``skipped_steps`` with
            a sample or a mean that is not finite; ``undefined_steps`` of one sample; and ``nonfinite`` samples. A step
            of which only a part was given counts as that part of one.
        """
        with self._synced():
            negative = self._averages()[2]
        return super().counts() | {"negative_steps": negative}

    def _averages(self) -> tuple[Tensor, Tensor, Tensor]:
        """S, |G|^2, and the number of steps with negative |G|^2."""
        steps = self._steps()
        S, G2 = terms_of_sums(steps.sum_of_sq_norms, steps.samples, steps.batch_size, steps.sq_norm_of_mean)
        age = torch.arange(len(S), dtype=S.dtype, device=S.device).flip(0)
        weights = steps.batch_size * (torch.ones_like(S) if self.decay is None else torch.pow(self.decay, age))
        total = (weights * steps.share).sum()
        average_of_S, average_of_G2 = (((weights * term).sum() / total).where(total > 0, math.nan) for term in (S, G2))
        return average_of_S, average_of_G2, steps.share[G2 < 0].sum()

    def _is_defined(self, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return batch_size > 1
