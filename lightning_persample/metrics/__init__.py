"""Statistics of per-sample gradients as torchmetrics metrics, and the formulas as functions of tensors."""

# Metrics: torchmetrics.Metric, with states that several processes and several calls add up in
from lightning_persample.metrics.cosine import CosineToMean
from lightning_persample.metrics.diversity import GradientDiversity

# The formulas
from lightning_persample.metrics.functional import (
    cosine_to_mean,
    gradient_diversity,
    gradient_signal_to_noise,
    noise_scale_terms,
    simple_noise_scale,
)
from lightning_persample.metrics.noise_scale import GradientNoiseScale
from lightning_persample.metrics.norm import PerSampleNorm
from lightning_persample.metrics.signal_to_noise import GradientSignalToNoise

__all__ = [
    "CosineToMean",
    "GradientDiversity",
    "GradientNoiseScale",
    "GradientSignalToNoise",
    "PerSampleNorm",
    "cosine_to_mean",
    "gradient_diversity",
    "gradient_signal_to_noise",
    "noise_scale_terms",
    "simple_noise_scale",
]
