"""check_per_sample_gradients on losses that compare the samples of a batch: a sample alone has no such loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import check_per_sample_gradients


def contrastive(module, batch):
    z = F.normalize(module(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def listwise(module, batch):
    return -(batch[1].softmax(0) * module(batch[0])[:, 0].log_softmax(0)).sum()


def pairwise(module, batch):
    scores = module(batch[0])[:, 0]
    return F.softplus(scores[None, :] - scores[:, None]).mean()


def variance(module, batch):
    return module(batch[0]).var(0, unbiased=False).sum()


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss_fn", "noted"),
    [
        (contrastive, "`matmul` meets two tensors of the batch with their batch axes at different places"),
        (listwise, "`log_softmax` works along the batch axis"),
        (pairwise, "`sub` meets two tensors of the batch with their batch axes at different places"),
        (variance, "`var` reduces over the batch axis"),
    ],
)
def test_samples_that_are_compared_with_each_other_are_named(loss_fn, noted: str, loss_reduction: str):
    batch = torch.randn(6, 5), torch.rand(6)
    report = check_per_sample_gradients(nn.Linear(5, 3), batch, loss_fn, loss_reduction=loss_reduction)
    assert not report
    for row in report.named("differs"):
        assert row.reason.startswith(
            "samples influence each other, so a sample in its batch and the same sample alone have different "
            f"gradients; the engine gives each sample's contribution to the batch's gradient: {noted}"
        )
    assert report.named("differs")
    assert "nan" not in str(report)
