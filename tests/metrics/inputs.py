"""Every metric, and arguments of `update` for it: one call for each part of a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_persample.metrics import (
    CosineToMean,
    GradientDiversity,
    GradientNoiseScale,
    GradientSignalToNoise,
    PerSampleNorm,
)


class Case(NamedTuple):
    """A metric, and what `update` takes for rows of per-sample gradients (n, P) out of a batch."""

    make: Callable[..., Metric]
    arguments: Callable[[Tensor, Tensor], dict[str, Any]]


def _norms(rows: Tensor, batch: Tensor) -> dict[str, Any]:
    return {"norms": torch.linalg.vector_norm(rows, dim=1)}


def _step(rows: Tensor, batch: Tensor) -> dict[str, Any]:
    sq_norms, sq_norm_of_mean = rows.square().sum(1), batch.mean(0).square().sum()
    return {"sq_norms": sq_norms, "sq_norm_of_mean": sq_norm_of_mean, "batch_size": len(batch)}


def _cosine(rows: Tensor, batch: Tensor) -> dict[str, Any]:
    return {"dots": rows @ batch.mean(0), **_step(rows, batch)}


def _sums(rows: Tensor, batch: Tensor) -> dict[str, Any]:
    return {"sums": {"w": rows.sum(0)}, "sq_sums": {"w": rows.square().sum(0)}, "count": len(rows)}


def _signal_to_noise(**settings: Any) -> GradientSignalToNoise:
    return GradientSignalToNoise({"w": torch.empty(3)}, {"weights": ["w"]}, **settings)


def _moving_noise_scale(**settings: Any) -> GradientNoiseScale:
    return GradientNoiseScale(0.8, **settings)


CASES = {
    "norm": Case(PerSampleNorm, _norms),
    "noise scale": Case(GradientNoiseScale, _step),
    "moving noise scale": Case(_moving_noise_scale, _step),
    "diversity": Case(GradientDiversity, _step),
    "cosine": Case(CosineToMean, _cosine),
    "signal to noise": Case(_signal_to_noise, _sums),
}


def batches(steps: int = 4, batch_size: int = 6) -> list[Tensor]:
    """Per-sample gradients (B, P) of a few steps, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    return [1.0 + torch.randn(batch_size, 3, generator=generator, dtype=torch.float64) for _ in range(steps)]


def results(metric: Metric) -> dict[str, float]:
    """Everything a metric says, by name."""
    value = metric.compute()
    found = dict(value) if isinstance(value, dict) else {"value": value}
    for further in ("terms", "counts"):
        found |= getattr(metric, further, dict)()
    return {name: each.item() for name, each in found.items()}
