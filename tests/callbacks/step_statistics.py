"""The statistics of optimizer steps in NumPy, from gradients of a one-sample loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.callbacks.runs import Classifier, logged

ALL = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
DECAY = 0.95


class WithGradients(Classifier):
    """Computes every sample's own gradient, over all parameters in a row, before the training step sees the batch."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[np.ndarray] = []

    def on_train_batch_start(self, batch, batch_idx):
        inputs, labels = batch
        rows = []
        for i in range(len(inputs)):
            loss = F.cross_entropy(self.network(inputs[i : i + 1]), labels[i : i + 1])
            grads = torch.autograd.grad(loss, list(self.parameters()))
            rows.append(torch.cat([grad.flatten() for grad in grads]).double().numpy())
        self.batches.append(np.stack(rows))


def terms(grads: np.ndarray) -> tuple[float, float]:
    B = len(grads)
    mean = grads.mean(0)
    S = B / (B - 1) * ((grads**2).sum(1).mean() - (mean**2).sum())
    return S, (mean**2).sum() - S / B


def expected(steps: list[np.ndarray], columns: slice = slice(None)) -> list[dict[str, float]]:
    """What is logged of optimizer steps on these samples' gradients (samples, entries)."""
    found, S, G2 = [], 0.0, 0.0
    for grads in steps:
        grads = grads[:, columns]
        own = terms(grads)
        S, G2 = DECAY * S + len(grads) * own[0], DECAY * G2 + len(grads) * own[1]
        mean = grads.mean(0)
        cosines = grads @ mean / np.linalg.norm(grads, axis=1) / np.linalg.norm(mean)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = mean**2 / grads.var(0, ddof=1)
        found.append({
            "norm_of_mean": np.linalg.norm(mean),
            "noise_scale": S / G2 if G2 > 0 else math.nan,
            "diversity": (grads**2).sum() / (grads.sum(0) ** 2).sum(),
            "cosine_to_mean": cosines.mean(),
            "cosine_to_mean_min": cosines.min(),
            "signal_to_noise": ratios[np.isfinite(ratios)].mean(),
        })  # fmt: skip
    return found


def check(trainer, steps: list[np.ndarray], rtol: float = 1e-9, prefix: str = "per_sample_grad", **columns) -> None:
    rows = logged(trainer)
    wanted = expected(steps, **columns)
    assert len(rows) == len(wanted)
    for row, values in zip(rows, wanted, strict=True):
        for name, value in values.items():
            if f"{prefix}/{name}" in row:
                assert row[f"{prefix}/{name}"] == pytest.approx(value, rel=rtol, nan_ok=True), name


def windows(batches: list[np.ndarray], accumulate: int) -> list[np.ndarray]:
    return [np.concatenate(batches[start : start + accumulate]) for start in range(0, len(batches), accumulate)]
