"""Samples that influence each other, and weights of the samples in the loss: said where they are, silent elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.model_cases import Model, mean_of_squares
from tests.engine.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B = 5


def vectors() -> Tensor:
    return torch.randn(B, 6)


def sequences() -> Tensor:
    return torch.randn(B, B, 6)


MIXING = {
    "batch-norm": (
        nn.BatchNorm1d(4),
        mean_of_squares,
        r"`batch_norm` on .* at (model_cases|test_mixing)\.py:\d+ with `b.bias`, `b.weight` normalises with",
    ),
    "centred": (
        lambda h: h - h.mean(0),
        mean_of_squares,
        "`sub` combines samples with a value computed over the whole batch",
    ),
    "contrastive": (
        nn.Identity(),
        lambda m, x: F.cross_entropy(m(x) @ m(x).T, torch.arange(len(x))),
        "`matmul` meets two tensors of the batch with their batch axes at different places",
    ),
    "root-of-mean": (
        nn.Identity(),
        lambda m, x: mean_of_squares(m, x).sqrt(),
        "`sqrt` of a value computed over the whole",
    ),
    "product-of-means": (
        nn.Identity(),
        lambda m, x: mean_of_squares(m, x) * m(x).abs().mean(),
        "`mul` of a value computed over the whole batch is not a sum over samples",
    ),
    "norm-over-batch": (nn.Identity(), lambda m, x: m(x).norm(), "`norm` reduces over the batch axis"),
    "shuffled": (
        lambda h: 0.3 * h + 0.7 * h[torch.arange(B).flip(0)],
        mean_of_squares,
        "`add` combines different samples",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_influence_each_other(name: str) -> None:
    """The values are then each sample's contribution: their weighted sum is the gradient of the batch."""
    after, loss, text = MIXING[name]
    module = Model(lambda m, x: m.b(m.a(x)) if isinstance(after, nn.Module) else after(m.a(x)), a=nn.Linear(6, 4))
    if isinstance(after, nn.Module):
        module.b = after.to(torch.float64)
    record = record_of(module, loss, vectors())
    assert any(re.search(text, entry) for entry in record.mixing), record.mixing
    for name, p in module.named_parameters():
        torch.testing.assert_close(record.grad_samples[name].mean(0), p.grad, rtol=1e-10, atol=1e-12)


def half_masked(x: Tensor) -> Tensor:
    return torch.where(x[..., 0] > 0, -100, 1)


WEIGHTED = {
    "class-weights": lambda m, x: F.cross_entropy(
        m(x[:, 0]), (x[:, 0, 0] > 0).long(), weight=torch.tensor([1.0, 2.0, 3.0, 4.0])
    ),
    "ignored-tokens": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), half_masked(x).flatten()),
    "masked-mean": lambda m, x: (m(x).sum(-1) * (x[..., 0] > 0)).sum() / (x[..., 0] > 0).sum(),
    "picked-tokens": lambda m, x: m(x)[x[..., 0] > 0].square().mean(),
    "half-of-the-samples": lambda m, x: m(x[:2]).square().mean(),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_unequal_weights_in_the_loss_are_named(name: str) -> None:
    torch.manual_seed(1)
    record = record_of(nn.Linear(6, 4), WEIGHTED[name], sequences())
    assert len(record.weighting) == 1
    assert re.search(r"averages over|scales the loss", record.weighting[0])
    assert "test_mixing.py" in record.weighting[0]
    weights = torch.full((B,), 0.5)
    told = record_of(nn.Linear(6, 4), WEIGHTED[name], sequences(), loss_reduction=weights)
    assert told.weighting == ()


PLAIN_LOSSES = {
    "two-terms": lambda m, x: 0.5 * F.mse_loss(m(x), x[..., :4]) + m(x).abs().mean() / 2,
    "equal-ignored-tokens": lambda m, x: F.cross_entropy(
        m(x).flatten(0, 1), torch.tensor([1, -100, 2, 0, -100]).repeat(len(x))
    ),
    "no-reduction": lambda m, x: (
        F.cross_entropy(m(x).flatten(0, 1), torch.ones(x[..., 0].numel(), dtype=torch.long), reduction="none")
        .view(len(x), -1)
        .mean(1)
        .mean()
    ),
    "divergence": lambda m, x: F.kl_div(m(x).log_softmax(-1), x[..., :4].softmax(-1), reduction="batchmean"),
    "triplet": lambda m, x: F.triplet_margin_loss(m(x), m(x + 1), m(x - 1)),
    "smooth": lambda m, x: F.smooth_l1_loss(m(x), x[..., :4]) + F.huber_loss(m(x), x[..., 1:5]),
    "binary": lambda m, x: F.binary_cross_entropy_with_logits(m(x), (x[..., :4] > 0).double()),
    "label-smoothing": lambda m, x: F.cross_entropy(m(x).mT, (x[..., 0] > 0).long(), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", PLAIN_LOSSES)
def test_common_losses_raise_no_alarm(name: str) -> None:
    module, batch = nn.Linear(6, 4), sequences()
    record = record_of(module, PLAIN_LOSSES[name], batch)
    assert record.mixing == ()
    assert record.weighting == ()
    assert_values(record, loop(module, PLAIN_LOSSES[name], (batch,)))


REDUCTIONS = {
    "sum": lambda m, x: F.cross_entropy(m(x).mT, torch.zeros(len(x), B, dtype=torch.long), reduction="sum"),
    "mean": lambda m, x: F.mse_loss(m(x), x[..., :4]),
    "sum-of-means": lambda m, x: m(x).square().mean((1, 2)).sum(),
    "mean-of-sums": lambda m, x: m(x).square().sum((1, 2)).mean(),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_loss_reduced_otherwise_than_declared_is_named(name: str, declared: str) -> None:
    true = "sum" if name.startswith("sum") else "mean"
    module, batch = nn.Linear(6, 4), sequences()
    record = record_of(module, REDUCTIONS[name], batch, loss_reduction=declared)
    if declared == true:
        assert record.weighting == ()
        assert_values(record, loop(module, REDUCTIONS[name], (batch,)))
    else:
        (text,) = record.weighting
        assert text == f"the loss is a {true} over the samples, but loss_reduction is '{declared}': pass " + (
            f"loss_reduction='{true}'"
        )


@pytest.mark.parametrize("scale", [lambda loss: loss / B, lambda loss: 0.5 * loss])
def test_a_scaled_loss_is_taken_as_declared(scale: Callable[[Tensor], Tensor]) -> None:
    record = record_of(nn.Linear(6, 4), lambda m, x: scale(m(x).square().sum()), sequences())
    assert record.weighting == ()


CLASSES_ALONG_THE_BATCH = {
    "cross-entropy": lambda scores: F.cross_entropy(scores, torch.tensor(1)),
    "multilabel-margin": lambda scores: F.multilabel_margin_loss(scores, torch.tensor([1, 3, -1, 0, 0])),
    "multi-margin": lambda scores: F.multi_margin_loss(scores, torch.tensor(2)),
}


@pytest.mark.parametrize("name", CLASSES_ALONG_THE_BATCH)
def test_a_loss_that_takes_the_samples_for_classes_mixes_them(name: str) -> None:
    record = record_of(nn.Linear(6, 1), lambda m, x: CLASSES_ALONG_THE_BATCH[name](m(x).flatten()), vectors())
    assert any("compares entries along the batch axis" in text for text in record.mixing)
