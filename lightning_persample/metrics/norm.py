"""Statistics of per-sample gradient norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.metrics.base import PerSampleMetric, as_vector, is_number_below_one
from lightning_persample.metrics.functional import merge_moments, moments, quantiles_of_sorted

__all__ = ["PerSampleNorm"]


class PerSampleNorm(PerSampleMetric):
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

    moments: Tensor
    smallest: Tensor
    largest: Tensor
    nonfinite: Tensor
    values: list[Tensor]

    def __init__(self, quantiles: Sequence[float] = (0.5, 0.95), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        allowed = all(is_number_below_one(quantile) and quantile > 0 for quantile in quantiles)
        if not allowed or len(set(quantiles)) < len(quantiles):
            raise OptionError(f"quantiles is {quantiles!r}; allowed are different numbers strictly between 0 and 1")
        self.quantiles = tuple(quantiles)
        self._new_state([0.0, 0.0, 0.0], merge_moments, "moments")
        self._new_state(math.inf, "min", "smallest")
        self._new_state(-math.inf, "max", "largest")
        self._new_count("nonfinite")
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
        finite = values.isfinite()
        self.moments = merge_moments(torch.stack([self.moments, moments(values)]))
        self.smallest = torch.minimum(self.smallest, values.where(finite, math.inf).min())
        self.largest = torch.maximum(self.largest, values.where(finite, -math.inf).max())
        self.nonfinite = self.nonfinite + (~finite).sum()
        if self.quantiles:
            self.values.append(values)

    def compute(self) -> dict[str, Tensor]:
        """The statistics.

        Returns:
            ``mean``, ``std`` (unbiased), ``min``, ``max``, a quantile named by percent for each (``p50``), ``count`` of
            the samples these are of, and ``nonfinite``, the number of those left out; each of shape () and of one
            floating dtype, as the Trainer's loggers take them.
        """
        count, mean, deviations = self.moments
        some = count > 0
        statistics = {
            "mean": mean.where(some, math.nan),
            "std": (deviations / (count - 1)).sqrt().where(count > 1, math.nan),
            "min": self.smallest.where(some, math.nan),
            "max": self.largest.where(some, math.nan),
        }
        if self.quantiles:
            values = self._joined("values")
            found = quantiles_of_sorted(values[values.isfinite()].sort().values, self.quantiles)
            statistics |= {f"p{100 * q:.10g}": value for q, value in zip(self.quantiles, found, strict=True)}
        return statistics | {"count": count, "nonfinite": self.nonfinite.to(count.dtype)}
