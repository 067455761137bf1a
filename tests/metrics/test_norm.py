"""PerSampleNorm against NumPy, on norms made by hand and on those of a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_persample.metrics import PerSampleNorm
from tests.metrics import reference


def expected(norms: np.ndarray, quantiles=(0.5, 0.95)) -> dict[str, float]:
    names = {f"p{round(100 * quantile)}": np.quantile(norms, quantile) for quantile in quantiles}
    ends = {"min": norms.min(), "max": norms.max()}
    return {"mean": norms.mean(), "std": norms.std(ddof=1), **ends, **names, "count": len(norms), "nonfinite": 0}


def computed(metric: PerSampleNorm) -> dict[str, float]:
    return {name: value.item() for name, value in metric.compute().items()}


def test_statistics_of_norms_made_by_hand():
    metric = PerSampleNorm()
    metric.update(torch.tensor([3.0, 1.0, 4.0, 1.5], dtype=torch.float64))
    assert computed(metric) == pytest.approx(expected(np.array([3.0, 1.0, 4.0, 1.5])), rel=1e-14)


def test_statistics_of_a_models_gradients():
    grads = [reference.flat(each) for each in reference.model_grads()]
    metric = PerSampleNorm(quantiles=(0.1, 0.5, 0.9))
    for each in grads:
        metric.update(torch.linalg.vector_norm(each, dim=1))
    norms = np.linalg.norm(torch.cat(grads).numpy(), axis=1)
    assert computed(metric) == pytest.approx(expected(norms, (0.1, 0.5, 0.9)), rel=1e-12)


@pytest.mark.parametrize("parts", [1, 3, 50])
def test_split_samples_equal_whole_ones(parts):
    norms = torch.rand(50, dtype=torch.float64)
    metric = PerSampleNorm(quantiles=(0.25,))
    for part in norms.split(parts):
        metric.update(part)
    metric.update(norms[:0])
    assert computed(metric) == pytest.approx(expected(norms.numpy(), (0.25,)), rel=1e-12)


def test_a_small_spread_around_a_large_mean_is_kept():
    # sums of squares lose it: 1e9^2 leaves no digit for a spread of 1 in float64
    norms = 1e9 + torch.rand(1000, dtype=torch.float64)
    metric = PerSampleNorm(quantiles=())
    for part in norms.split(10):
        metric.update(part)
    assert metric.compute()["std"].item() == pytest.approx(norms.numpy().std(ddof=1), rel=1e-7)


def test_samples_that_are_not_finite_are_counted_and_left_out():
    metric = PerSampleNorm()
    metric.update(torch.tensor([math.nan, 2.0, math.inf]))
    metric.update(torch.tensor([math.nan]))
    metric.update(torch.tensor([4.0, 3.0]))
    assert computed(metric) == pytest.approx({**expected(np.array([2.0, 4.0, 3.0])), "nonfinite": 3}, rel=1e-12)


def test_only_samples_that_are_not_finite():
    metric = PerSampleNorm()
    metric.update(torch.tensor([math.nan, math.inf]))
    found = computed(metric)
    assert (found.pop("count"), found.pop("nonfinite")) == (0, 2)
    assert all(map(math.isnan, found.values()))


def test_one_sample_has_no_spread():
    metric = PerSampleNorm()
    metric.update(torch.tensor([2.0]))
    found = computed(metric)
    assert math.isnan(found.pop("std"))
    assert found == {"mean": 2, "min": 2, "max": 2, "p50": 2, "p95": 2, "count": 1, "nonfinite": 0}


def test_quantiles_of_more_values_than_torch_takes(monkeypatch):
    monkeypatch.delattr(torch, "quantile")
    test_split_samples_equal_whole_ones(3)


def test_values_are_kept_for_quantiles_only():
    metric = PerSampleNorm(quantiles=())
    metric.update(torch.rand(8))
    assert sum(state.numel() for state in metric.metric_state.values()) == 6
    assert list(computed(metric)) == ["mean", "std", "min", "max", "count", "nonfinite"]
