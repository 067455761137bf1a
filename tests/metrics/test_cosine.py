"""CosineToMean against NumPy, and which samples have none."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_persample.metrics import CosineToMean, cosine_to_mean
from tests.metrics import reference


def arguments(grads):
    mean = grads.mean(0)
    return grads @ mean, grads.square().sum(1), mean.square().sum()


def computed(metric):
    return {name: value.item() for name, value in metric.compute().items()}


def expected(cosines, undefined=0, nonfinite=0):
    statistics = {"mean": cosines.mean(), "std": cosines.std(ddof=1), "min": cosines.min(), "max": cosines.max()}
    return statistics | {
        "opposed": (cosines < 0).mean(),
        "count": len(cosines),
        "undefined": undefined,
        "nonfinite": nonfinite,
    }


def test_cosines_equal_those_of_whole_gradients():
    grads = reference.flat(reference.model_grads(1)[0])
    assert cosine_to_mean(*arguments(grads)).tolist() == pytest.approx(reference.cosines(grads.numpy()), rel=1e-12)


@pytest.mark.parametrize("parts", [1, 4, 6])
def test_statistics_of_a_models_gradients_however_split(parts):
    metric, cosines = CosineToMean(), []
    for each in reference.model_grads():
        grads = reference.flat(each)
        dots, norms, mean = arguments(grads)
        for dots_part, norms_part in zip(dots.split(parts), norms.split(parts), strict=True):
            metric.update(dots_part, norms_part, mean, batch_size=6)
        cosines.append(torch.tensor(reference.cosines(grads.numpy())))
    assert computed(metric) == pytest.approx(expected(torch.cat(cosines).numpy()), rel=1e-12)


def test_opposed_samples_are_a_share():
    grads = torch.tensor([[5.0, 0.0], [-1.0, 1.0], [2.0, 2.0], [1.0, -1.0]], dtype=torch.float64)
    metric = CosineToMean()
    metric.update(*arguments(grads))
    assert computed(metric)["opposed"] == 0.25
    assert computed(metric) == pytest.approx(expected(reference.cosines(grads.numpy())), rel=1e-12)


def test_samples_without_a_cosine_are_counted_and_left_out():
    grads = torch.tensor([[3.0, 4.0], [3.0, -4.0], [0.0, 0.0]])
    dots, norms, mean = arguments(grads)
    metric = CosineToMean()
    metric.update(dots, norms, mean)
    metric.update(torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([1.0, math.inf, 16.0]), 1.0)
    metric.update(dots, norms, math.nan)
    metric.update(torch.zeros(2), torch.ones(2), 0.0)
    metric.update(torch.ones(1), torch.ones(1), 1.0)
    metric.update(torch.tensor([math.nan]), torch.tensor([math.nan]), math.nan)
    metric.update(dots[:0], norms[:0], mean, batch_size=8)
    cosines = torch.tensor([0.6, 0.6, 0.5], dtype=torch.float64).numpy()
    assert computed(metric) == pytest.approx(expected(cosines, undefined=4, nonfinite=6), rel=1e-7)


def test_only_one_sample_is_absent():
    metric = CosineToMean()
    metric.update(torch.ones(1), torch.ones(1), 1.0)
    found = computed(metric)
    assert [found.pop(name) for name in ("count", "undefined", "nonfinite")] == [0, 1, 0]
    assert all(map(math.isnan, found.values()))


def test_large_and_small_gradients_keep_their_cosine():
    for scale in (1e-150, 1e150):
        grads = scale * torch.tensor([[3.0, 4.0], [3.0, -4.0]], dtype=torch.float64)
        assert cosine_to_mean(*arguments(grads)).tolist() == pytest.approx([0.6, 0.6])
