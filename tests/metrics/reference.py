"""The quantities as their papers define them, in NumPy, from whole gradients (B, P) of each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_persample import loop_per_sample_grads
from tests.models import mlp


def noise_scale_terms(grads: np.ndarray) -> tuple[float, float]:
    """Trace of the sample covariance, and what is left of the mean's squared norm without the noise in it."""
    variance = np.cov(grads, rowvar=False).trace() if grads.shape[1] > 1 else np.var(grads, ddof=1)
    return variance, np.sum(grads.mean(0) ** 2) - variance / len(grads)


def diversity(grads: np.ndarray) -> float:
    return sum(np.dot(grad, grad) for grad in grads) / np.linalg.norm(grads.sum(0)) ** 2


def cosines(grads: np.ndarray) -> np.ndarray:
    mean = grads.mean(0)
    return np.array([np.dot(grad, mean) / np.linalg.norm(grad) / np.linalg.norm(mean) for grad in grads])


def moving_average(values: list[float], decay: float) -> float:
    """As an optimizer keeps it, with the bias of its start at zero taken out."""
    average = 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
    return average / (1 - decay ** len(values))


def sq_norms(grads: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of the samples and of their mean, as a caller has them."""
    return grads.square().sum(1), grads.mean(0).square().sum()


def model_grads(steps: int = 3, batch_size: int = 6) -> list[dict[str, Tensor]]:
    """Gradients of each sample of a few batches, by parameter, from the loop over single samples in float64."""
    module, make_batch, loss_fn = mlp()
    return [loop_per_sample_grads(module, loss_fn, *make_batch(batch_size))[1] for _ in range(steps)]


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grad.flatten(1) for grad in grads.values()], dim=1)
