"""What a wrong argument is answered with."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_persample.errors import OptionError
from lightning_persample.metrics import (
    CosineToMean,
    GradientDiversity,
    GradientNoiseScale,
    GradientSignalToNoise,
    PerSampleNorm,
    cosine_to_mean,
    gradient_diversity,
    gradient_signal_to_noise,
    noise_scale_terms,
)

TWO = torch.ones(2)
W = {"w": torch.ones(3)}


def signal_to_noise(**given):
    GradientSignalToNoise({"w": torch.empty(3)}).update(**{"sums": W, "sq_sums": W, "count": 2, **given})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: PerSampleNorm().update(torch.ones(2, 3)),
            "norms has shape (2, 3); one number for each sample, shape (n,), is needed",
        ),
        (
            lambda: PerSampleNorm().update(torch.ones(2, dtype=torch.long)),
            "norms is of type torch.int64; a tensor of a floating dtype is needed",
        ),
        (lambda: PerSampleNorm().update([1.0]), "norms is of type list; a tensor of a floating dtype is needed"),
        (
            lambda: PerSampleNorm().update(torch.ones(2, device="meta")),
            "norms is on meta, the metric on cpu; move it with metric.to('meta')",
        ),
        (
            lambda: PerSampleNorm(quantiles=(0.5, 1.0)),
            "quantiles is (0.5, 1.0); allowed are different numbers strictly between 0 and 1",
        ),
        (
            lambda: PerSampleNorm(quantiles=(0.5, 0.5)),
            "quantiles is (0.5, 0.5); allowed are different numbers strictly between 0 and 1",
        ),
        (
            lambda: GradientNoiseScale(decay=1.0),
            "decay is 1.0; allowed is None or a number of at least 0 and less than 1",
        ),
        (
            lambda: GradientNoiseScale().update(torch.ones(2, 1), 1.0),
            "sq_norms has shape (2, 1); one number for each sample, shape (n,), is needed",
        ),
        (
            lambda: GradientNoiseScale().update(TWO, TWO),
            "sq_norm_of_mean has shape (2,); one number for the whole batch is needed",
        ),
        (
            lambda: GradientDiversity().update(TWO, None),
            "sq_norm_of_mean is of type NoneType; a number or a tensor with one entry is needed",
        ),
        (
            lambda: GradientNoiseScale().update(TWO, 1.0, batch_size=1),
            "batch_size is 1, yet 2 samples are given; it counts the samples of the whole optimizer step, over all "
            "processes and accumulated batches",
        ),
        (
            lambda: GradientDiversity().update(TWO, 1.0, batch_size=2.0),
            "batch_size is 2.0; allowed is None or the number of samples of the effective batch",
        ),
        (
            lambda: GradientDiversity().update(TWO, 1.0, step=0.5),
            "step is 0.5; allowed is None or the number of the optimizer step",
        ),
        (
            lambda: CosineToMean().update(TWO, torch.ones(3), 1.0),
            "sq_norms has 3 samples where the other argument has 2; give one for each",
        ),
        (
            lambda: cosine_to_mean(torch.ones(2, 1), TWO, 1.0),
            "dots has shape (2, 1); one number for each sample, shape (n,), is needed",
        ),
        (
            lambda: noise_scale_terms(torch.ones(()), 1.0),
            "sq_norms has shape (); one number for each sample, shape (n,), is needed",
        ),
        (
            lambda: gradient_diversity(TWO, torch.ones(2)),
            "sq_norm_of_mean has shape (2,); one number for the whole batch is needed",
        ),
        (
            lambda: gradient_signal_to_noise(torch.ones(2), torch.ones(3), 2),
            "sums has shape (2,) and sq_sums (3,); both are the parameter's",
        ),
        (
            lambda: gradient_signal_to_noise(TWO, TWO, -1),
            "count is -1; the number of samples in the sums is needed",
        ),
        (lambda: signal_to_noise(count=2.5), "count is 2.5; the number of samples in the sums is needed"),
        (lambda: signal_to_noise(sums={}), "sums lacks w; it needs every parameter of the groups"),
        (
            lambda: signal_to_noise(sq_sums={"w": TWO}),
            "sq_sums['w'] has shape (2,) and dtype torch.float32; the parameter has shape (3,), and a floating dtype "
            "is needed",
        ),
        (
            lambda: signal_to_noise(sums={"w": torch.ones(3, device="meta")}),
            "sums['w'] is on meta, the metric on cpu; move it with metric.to('meta')",
        ),
        (
            lambda: GradientSignalToNoise(W, {"all": ["w", "v"]}),
            "groups names v, which parameters does not have; check the spelling",
        ),
        (
            lambda: GradientSignalToNoise(W, {"all": ["w"], "again": ["w"]}),
            "groups names w several times; a parameter belongs to one group",
        ),
        (
            lambda: GradientSignalToNoise(W, {"all": []}),
            "groups has a group without parameters, or none at all; name at least one parameter in each",
        ),
        (
            lambda: GradientSignalToNoise({}),
            "groups has a group without parameters, or none at all; name at least one parameter in each",
        ),
    ],
)
def test_text(call, text):
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        call()


def test_a_refused_call_leaves_the_metric_as_it_was():
    metric = PerSampleNorm()
    metric.update(TWO)
    with pytest.raises(OptionError):
        metric.update(torch.ones(2, 3))
    assert metric.compute()["count"].item() == 2
