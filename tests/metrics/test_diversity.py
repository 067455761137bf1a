"""GradientDiversity against NumPy, and however a step is split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_persample.metrics import GradientDiversity, gradient_diversity
from tests.metrics import reference
from tests.metrics.reference import sq_norms


def metric_of(grads, parts=None):
    metric = GradientDiversity()
    for each in grads:
        norms, mean = sq_norms(each)
        for part in norms.split(parts or len(norms)):
            metric.update(part, mean, len(norms))
    return metric


def counts_of(metric):
    return {name: count.item() for name, count in metric.counts().items()}


@pytest.mark.parametrize(
    ("grads", "diversity"), [(torch.ones(4, 3), 0.25), (torch.eye(4), 1.0), (torch.tensor([[3.0], [-1.0]]), 2.5)]
)
def test_equal_orthogonal_and_opposed_gradients(grads, diversity):
    assert gradient_diversity(*sq_norms(grads)).item() == diversity
    assert metric_of([grads]).compute().item() == diversity
    assert reference.diversity(grads.numpy()) == pytest.approx(diversity)


@pytest.mark.parametrize("parts", [None, 1, 4])
def test_of_a_models_gradients(parts):
    grads = [reference.flat(each) for each in reference.model_grads()]
    metric = metric_of(grads, parts)
    expected = np.mean([reference.diversity(each.numpy()) for each in grads])
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
    assert counts_of(metric) == {"steps": 3, "skipped_steps": 0, "undefined_steps": 0, "nonfinite": 0}


def test_terms_of_parts_add_up():
    norms, mean = sq_norms(torch.randn(7, 3, dtype=torch.float64))
    parts = [gradient_diversity(part, mean, 7) for part in norms.split((1, 4, 2))]
    assert sum(parts).item() == pytest.approx(gradient_diversity(norms, mean).item(), rel=1e-12)


def test_one_sample_and_a_mean_of_zero_are_counted_and_left_out():
    cancels = torch.tensor([[1.0], [-1.0]])
    metric = metric_of([torch.ones(1, 3), cancels])
    assert math.isnan(metric.compute())
    assert counts_of(metric) == {"steps": 0, "skipped_steps": 0, "undefined_steps": 2, "nonfinite": 0}
    metric.update(*sq_norms(torch.eye(4)))
    assert metric.compute().item() == 1
    assert gradient_diversity(*sq_norms(cancels)).isnan()
    assert gradient_diversity(torch.empty(0), 1.0).isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out(value):
    metric = metric_of([torch.eye(4)])
    metric.update(torch.tensor([1.0, value]), 0.5)
    metric.update(torch.tensor([1.0, 1.0]), value)
    assert metric.compute().item() == 1
    assert counts_of(metric) == {"steps": 1, "skipped_steps": 2, "undefined_steps": 0, "nonfinite": 1}
    assert gradient_diversity(torch.tensor([1.0, value]), 0.5).isnan()
    assert gradient_diversity(torch.tensor([1.0, 1.0]), value).isnan()


def test_steps_given_as_sums():
    grads = [reference.flat(each) for each in reference.model_grads()]
    metric = GradientDiversity()
    for each in (*grads, torch.tensor([[1.0], [-1.0]], dtype=torch.float64)):  # the last one cancels
        norms, mean = sq_norms(each)
        size = torch.tensor([float(len(each))])
        (own,) = metric.update_sums(norms[None].sum(1), mean[None], size, size)
        assert own.item() == pytest.approx(reference.diversity(each.numpy()) if mean else math.nan, nan_ok=True)
    expected = np.mean([reference.diversity(each.numpy()) for each in grads])
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
