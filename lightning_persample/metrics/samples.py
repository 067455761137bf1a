"""Statistics of one value for each sample: its gradient's norm, or its cosine to the mean gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.metrics.base import PerSampleMetric, as_batch_size, as_scalar, as_vector
from lightning_persample.metrics.functional import (
    are_quantiles,
    cosine_to_mean,
    merge_moments,
    moments,
    quantiles_of_sorted,
    statistics_of_moments,
)


class _SampleMetric(PerSampleMetric):
    """Base of the metrics of one value for each sample: their number, mean, spread and extremes."""

    moments: Tensor
    smallest: Tensor
    largest: Tensor
    nonfinite: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._new_state([0.0, 0.0, 0.0], merge_moments, "moments")
        self._new_state(math.inf, "min", "smallest")
        self._new_state(-math.inf, "max", "largest")
        for name in self._counts:
            if name != "count":  # which is one of the moments
                self.add_state(name, torch.tensor(0), "sum")

    def _add(self, values: Tensor) -> None:
        """Add the finite ones among the values of samples, (n,)."""
        finite = values.isfinite()
        self.moments = merge_moments(torch.stack([self.moments, moments(values)]))
        self.smallest = torch.minimum(self.smallest, values.where(finite, math.inf).min())
        self.largest = torch.maximum(self.largest, values.where(finite, -math.inf).max())

    def _statistics(self, further: dict[str, Tensor]) -> dict[str, Tensor]:
        count, mean, deviations = self.moments
        found = statistics_of_moments(count, mean, deviations, self.smallest, self.largest)
        found = {name: value.where(count > 0, math.nan) for name, value in found.items()} | further
        counts = {name: getattr(self, name).to(count.dtype) for name in self._counts if name not in {"count", *further}}
        return found | {"count": count} | counts


class PerSampleNorm(_SampleMetric):
    """Mean, spread, extremes and quantiles of the norms ||g_i|| of all samples since the last `reset`.

    >>> import torch
    >>> metric = PerSampleNorm(quantiles=(0.5,))
    >>> metric.update(torch.tensor([1.0, 2.0]))
    >>> metric.update(torch.tensor([6.0, float("nan")]))
    >>> {name: round(value.item(), 3) for name, value in metric.compute().items()}
    {'mean': 3.0, 'std': 2.646, 'min': 1.0, 'max': 6.0, 'p50': 2.0, 'count': 3.0, 'nonfinite': 1.0}

    Each sample counts once, so that it makes no difference how samples are spread over calls and processes; under DDP
    each process gives its own.

    Not finite: samples whose norm is inf or nan are left out and counted in ``nonfinite``. One sample has no ``std``
    (nan), none has no statistics at all (nan).

    Memory: a fixed amount for mean, std, min and max. Quantiles need every value: 8 bytes for each sample since the
    last `reset`; while processes exchange them, each holds those of all. With ``quantiles=()`` no values are kept.

    Args:
        quantiles: which quantiles, each strictly between 0 and 1; interpolated linearly.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        OptionError: `quantiles` has a value that is not allowed.
    """

    plot_lower_bound = 0.0
    _title = "Per-sample gradient norms"
    _axis = r"norm $\|g_i\|$ of a sample's gradient"
    _counts = ("count", "nonfinite")

    values: list[Tensor]

    def __init__(self, quantiles: Sequence[float] = (0.5, 0.95), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not are_quantiles(tuple(quantiles)):
            raise OptionError(f"quantiles is {quantiles!r}; allowed are different numbers strictly between 0 and 1")
        self.quantiles = tuple(quantiles)
        if self.quantiles:
            self._new_list("values")

    def update(self, norms: Tensor) -> None:
        """Add samples.

        Args:
            norms: ||g_i||, (n,), of any floating dtype.
        """
        values = as_vector(norms, "norms", self.device)
        if values.numel() == 0:
            return
        self._add(values)
        self.nonfinite = self.nonfinite + (~values.isfinite()).sum()
        if self.quantiles:
            self.values.append(values)

    def compute(self) -> dict[str, Tensor]:
        """The statistics.

        Returns:
            ``mean``, ``std`` (unbiased), ``min``, ``max``, a quantile named by percent for each (``p50``), ``count`` of
            the samples these are of, and ``nonfinite``, the number of those left out; each of shape () and of one
            floating dtype, as the Trainer's loggers take them.
        """
        if not self.quantiles:
            return self._statistics({})
        values = self._joined("values")
        ordered = values[values.isfinite()].sort().values
        ordered = ordered if len(ordered) else values.new_full((1,), math.nan)
        return self._statistics(quantiles_of_sorted(ordered, self.quantiles))


class CosineToMean(_SampleMetric):
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

    opposed: Tensor
    undefined: Tensor

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
        self.undefined = self.undefined + (finite & ~cosines.isfinite()).sum()
        self.opposed = self.opposed + (cosines < 0).sum()
        self._add(cosines)

    def compute(self) -> dict[str, Tensor]:
        """The statistics.

        Returns:
            ``mean``, ``std`` (unbiased), ``min``, ``max``, ``opposed``: the share of samples with a negative cosine,
            ``count`` of the samples these are of, and the numbers of those left out, ``undefined`` and ``nonfinite``;
            each of shape () and of one floating dtype, as the Trainer's loggers take them.
        """
        count = self.moments[0]
        return self._statistics({"opposed": (self.opposed / count).where(count > 0, math.nan)})
