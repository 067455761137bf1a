"""Statistics of per-sample gradients as torchmetrics metrics, and the formulas as functions of tensors.

They take numbers, wherever these come from; here from a record, and the mean gradient from ``.grad``:

>>> import torch
>>> from torch import nn
>>> from lightning_persample import expanded_weights
>>> model, noise_scale = nn.Linear(4, 1), GradientNoiseScale()
>>> for x in torch.randn(10, 32, 4):
...     with expanded_weights(model, x) as capture:
...         (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
...     sq_norm_of_mean = sum(parameter.grad.square().sum() for parameter in model.parameters())
...     noise_scale.update(capture.record.norms().square(), sq_norm_of_mean)
...     model.zero_grad()
>>> noise_scale.compute() > 0, noise_scale.counts()["steps"].item()
(tensor(True), 10.0)

``.grad`` has to be the mean over the samples of the effective batch: take it after the last accumulated backward and
after DDP's average, before clipping, and divided by the loss scale of mixed precision.
"""

from lightning_persample.metrics.functional import (
    cosine_to_mean,
    gradient_diversity,
    gradient_signal_to_noise,
    noise_scale_terms,
    simple_noise_scale,
)
from lightning_persample.metrics.samples import CosineToMean, PerSampleNorm
from lightning_persample.metrics.signal_to_noise import GradientSignalToNoise
from lightning_persample.metrics.steps import GradientDiversity, GradientNoiseScale

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
