"""How far each sample's gradient points along the mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_persample.metrics.base import PerSampleMetric, as_batch_size, as_scalar, as_vector
from lightning_persample.metrics.functional import cosine_to_mean, merge_moments, moments

__all__ = ["CosineToMean"]


class CosineToMean(PerSampleMetric):
    """Cosines ``g_i . gbar / (||g_i|| ||gbar||)`` of the samples to the mean gradient of their batch.

    >>> import torch
    >>> grads = torch.tensor([[3.0, 4.0], [3.0, -4.0], [0.0, 0.0]])
    >>> metric = CosineToMean()
    >>> metric.update(grads @ grads.mean(0), grads.square().sum(1), grads.mean(0).square().sum())
    >>> {name: round(value.item(), 3) for name, value in metric.compute().items()}  # doctest: +NORMALIZE_WHITESPACE
    {'mean': 0.6, 'std': 0.0, 'min': 0.6, 'max': 0.6, 'opposed': 0.0, 'count': 2.0, 'undefined': 1.0,
     'nonfinite': 0.0}

    A sample is part of the mean it is compared with: with gradients that are independent and of one length, the mean
    cosine of a batch of B samples is about B^-1/2, not 0.

    Each sample counts once, so that it makes no difference how samples are spread over calls and processes. Under DDP
    and gradient accumulation each process gives its own samples, with gbar over the effective batch: the averaged
    gradient that the optimizer gets, if the loss is a mean over samples.

    Not finite: samples with a squared norm or dot product that is not finite are left out and counted in ``nonfinite``,
    and so are all samples of a batch whose mean is not. B = 1: one sample always has cosine 1 to itself, which says
    nothing; it is left out and counted in ``undefined``, as is a sample whose gradient is zero, and every sample of a
    batch whose mean is zero. Without any sample that counts the statistics are nan.

    Args:
        **kwargs: those of `torchmetrics.Metric`.
    """

    plot_lower_bound = -1.0
    plot_upper_bound = 1.0
    _title = "Cosine of per-sample gradients to their mean"
    _axis = r"cosine $g_i \cdot \bar g \;/\; (\|g_i\| \, \|\bar g\|)$"
    _counts = ("opposed", "count", "undefined", "nonfinite")

    moments: Tensor
    smallest: Tensor
    largest: Tensor
    opposed: Tensor
    undefined: Tensor
    nonfinite: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._new_state([0.0, 0.0, 0.0], merge_moments, "moments")
        self._new_state(math.inf, "min", "smallest")
        self._new_state(-math.inf, "max", "largest")
        for name in ("opposed", "undefined", "nonfinite"):
            self._new_count(name)

    def update(
        self, dots: Tensor, sq_norms: Tensor, sq_norm_of_mean: Tensor | float, batch_size: int | None = None
    ) -> None:
        """Add samples of one batch.

        Args:
            dots: g_i . gbar of the samples at hand, (n,), of any floating dtype.
            sq_norms: ||g_i||^2, (n,).
            sq_norm_of_mean: ||gbar||^2 of the mean gradient over the effective batch.
            batch_size: number of samples B of the effective batch; None if all of them are at hand.
        """
        dots = as_vector(dots, "dots", self.device)
        sq_norms = as_vector(sq_norms, "sq_norms", self.device, dots.numel())
        mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", self.device)
        size = as_batch_size(batch_size, dots.numel())
        if dots.numel() == 0:
            return
        finite = dots.isfinite() & sq_norms.isfinite() & mean.isfinite()
        self.nonfinite = self.nonfinite + (~finite).sum()
        if size == 1:
            self.undefined = self.undefined + finite.sum()
            return
        cosines = cosine_to_mean(dots, sq_norms, mean)
        defined = cosines.isfinite()
        self.undefined = self.undefined + (finite & ~defined).sum()
        self.moments = merge_moments(torch.stack([self.moments, moments(cosines)]))
        self.smallest = torch.minimum(self.smallest, cosines.where(defined, math.inf).min())
        self.largest = torch.maximum(self.largest, cosines.where(defined, -math.inf).max())
        self.opposed = self.opposed + (cosines < 0).sum()

    def compute(self) -> dict[str, Tensor]:
        """The statistics.

        Returns:
            ``mean``, ``std`` (unbiased), ``min``, ``max``, ``opposed``: the share of samples with a negative cosine,
            ``count`` of the samples these are of, and the numbers of those left out, ``undefined`` and ``nonfinite``;
            each of shape () and of one floating dtype, as the Trainer's loggers take them.
        """
        count, mean, deviations = self.moments
        some = count > 0
        return {
            "mean": mean.where(some, math.nan),
            "std": (deviations / (count - 1)).sqrt().where(count > 1, math.nan),
            "min": self.smallest.where(some, math.nan),
            "max": self.largest.where(some, math.nan),
            "opposed": (self.opposed / count).where(some, math.nan),
            "count": count,
            "undefined": self.undefined.to(count.dtype),
            "nonfinite": self.nonfinite.to(count.dtype),
        }
