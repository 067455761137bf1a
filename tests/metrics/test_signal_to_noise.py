"""GradientSignalToNoise against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_persample.metrics import GradientSignalToNoise, gradient_signal_to_noise
from tests.metrics import reference


def sums_of(grads):
    return {name: grad.sum(0) for name, grad in grads.items()}, {
        name: grad.square().sum(0) for name, grad in grads.items()
    }


def ratios(grads: torch.Tensor) -> np.ndarray:
    values = grads.numpy()
    return values.mean(0) ** 2 / values.var(0, ddof=1)


def joined(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def spread(grads, names):
    """Entries that vary over the samples: behind a ReLU that is off for all of them none does."""
    whole = np.concatenate([ratios(grads[name]).ravel() for name in names])
    return whole[np.isfinite(whole)]


def test_ratio_of_each_entry():
    grads = torch.randn(9, 4, 3, dtype=torch.float64)
    found = gradient_signal_to_noise(grads.sum(0), grads.square().sum(0), 9)
    assert found.numpy() == pytest.approx(ratios(grads), rel=1e-10)


@pytest.mark.parametrize("parts", [1, 4, 18])
def test_of_a_models_gradients_however_split(parts):
    grads = joined(reference.model_grads())
    groups = {"first": ["0.weight", "0.bias"], "last": ["4.weight"]}
    metric = GradientSignalToNoise({name: grad[0] for name, grad in grads.items()}, groups)
    for start in range(0, 18, parts):
        part = {name: grad[start : start + parts] for name, grad in grads.items()}
        metric.update(*sums_of(part), count=len(part["0.weight"]))
    expected = {group: spread(grads, names) for group, names in groups.items()}
    found = {group: value.item() for group, value in metric.compute().items()}
    assert found == pytest.approx({group: values.mean() for group, values in expected.items()}, rel=1e-9)
    counts = metric.counts()
    assert (counts["samples"].item(), counts["nonfinite"].item()) == (18, 0)
    assert counts["undefined/first"].item() == 16 * 13 - expected["first"].size


def test_each_parameter_is_a_group_by_default():
    grads = joined(reference.model_grads())
    metric = GradientSignalToNoise({name: grad[0] for name, grad in grads.items()})
    metric.update(*sums_of(grads), count=18)
    found = {name: value.item() for name, value in metric.compute().items()}
    assert found == pytest.approx({name: spread(grads, [name]).mean() for name in grads}, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_entries_without_noise_are_absent_however_they_round(dtype):
    grads = torch.full((7, 3), 0.1, dtype=dtype)
    grads[:, 2] = torch.linspace(0, 1, 7)
    found = gradient_signal_to_noise(grads.sum(0), grads.square().sum(0), 7)
    assert found.isnan().tolist() == [True, True, False]
    metric = GradientSignalToNoise({"w": torch.empty(3)})
    metric.update(*sums_of({"w": grads}), count=7)
    assert metric.compute()["w"].item() == found[2].item()
    assert metric.counts()["undefined/w"].item() == 2
    assert gradient_signal_to_noise(torch.zeros(1), torch.zeros(1), 7).isnan()


@pytest.mark.parametrize("count", [0, 1])
def test_less_than_two_samples_are_absent(count):
    metric = GradientSignalToNoise({"w": torch.empty(3)})
    metric.update({"w": torch.ones(3)}, {"w": torch.ones(3)}, count)
    assert math.isnan(metric.compute()["w"])
    assert gradient_signal_to_noise(torch.ones(3), torch.ones(3), count).isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sums_that_are_not_finite_are_left_out_with_their_samples(value):
    grads = {"w": torch.randn(6, 3, dtype=torch.float64), "b": torch.randn(6, 1, dtype=torch.float64)}
    metric = GradientSignalToNoise({"w": torch.empty(3), "b": torch.empty(1)})
    metric.update(*sums_of(grads), count=6)
    metric.update(
        {"w": torch.tensor([1.0, value, 1.0]), "b": torch.ones(1)}, {"w": torch.ones(3), "b": torch.ones(1)}, 4
    )
    assert {name: found.item() for name, found in metric.compute().items()} == pytest.approx(
        {name: ratios(grad).mean() for name, grad in grads.items()}, rel=1e-10
    )
    assert (metric.counts()["samples"].item(), metric.counts()["nonfinite"].item()) == (6, 4)


def test_parameters_of_a_module_are_enough():
    module = nn.Linear(2, 3)
    metric = GradientSignalToNoise(dict(module.named_parameters()))
    assert sum(state.numel() for state in (metric.sums, metric.sq_sums)) == 18
