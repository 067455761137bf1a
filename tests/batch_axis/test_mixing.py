"""Samples that influence each other, and weights of the samples in the loss: said where they are, silent elsewhere."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.errors import PerSampleWarning
from lightning_persample.tensor_form.call_for import call_for_per_sample_grads
from tests.capture.model_cases import Model, mean_of_squares
from tests.capture.reference import assert_exact, assert_values, loop, record_of
from tests.in_turn import in_turn

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
}
COUNTED = {  # what a sample counts in the loss, up to one factor for all, (B,)
    "class-weights": lambda x: 1.0 + (x[:, 0, 0] > 0),
    "ignored-tokens": lambda x: (x[..., 0] <= 0).sum(1),
    "masked-mean": lambda x: (x[..., 0] > 0).sum(1),
    "picked-tokens": lambda x: (x[..., 0] > 0).sum(1),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_unequal_weights_in_the_loss_are_named(name: str) -> None:
    torch.manual_seed(1)
    x = sequences()
    record = record_of(nn.Linear(6, 4), WEIGHTED[name], x)
    assert len(record.weighting) == 1
    assert re.search(r"averages over|scales the loss", record.weighting[0])
    assert "test_mixing.py" in record.weighting[0]
    counted = COUNTED[name](x)
    told = record_of(nn.Linear(6, 4), WEIGHTED[name], x, loss_reduction=counted / counted.sum())
    assert told.weighting == ()


def without_the_true_class(scores: Tensor, label: Tensor) -> Tensor:
    scores = scores * 1
    scores[torch.arange(len(scores)), label] = 0.0
    scores[label > 0] *= 2.0
    return scores


PLAIN_LOSSES = {
    "true-class-struck-out": lambda m, x: (
        without_the_true_class(m(x[:, 0]), (x[:, 0, 0] > 0).long()).square().sum(1).mean()
    ),
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
    assert (record.mixing, record.axis_lost) == ((), ())
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


def squares(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().sum((1, 2))


def halves(m: nn.Module, x: Tensor, weight: float = 1.0) -> list[Tensor]:
    return [weight * squares(m, part).sum() for part in (x[: len(x) // 2], x[len(x) // 2 :]) if len(part)]


SUMS = {  # what one sample gives is what it adds to the loss of the batch
    "scaled": lambda m, x: 0.5 * squares(m, x).sum(),
    "divided": lambda m, x: squares(m, x).sum() / 1000,
    "by-a-tensor": lambda m, x: squares(m, x).sum() * torch.tensor(0.5),
    "by-one-entry": lambda m, x: squares(m, x).sum() * torch.tensor([0.3]),
    "in-place": lambda m, x: squares(m, x).sum().div_(7),
    "negated": lambda m, x: -(-3.0 * squares(m, x).sum()),
    "added": lambda m, x: squares(m, x).sum() + 0.1 * m(x).abs().sum(),
    "subtracted": lambda m, x: squares(m, x).sum() - 0.5 * m(x).abs().sum(),
    "alpha": lambda m, x: torch.add(squares(m, x).sum(), m(x).abs().sum(), alpha=0.1),
    "reflected": lambda m, x: 1.0 - squares(m, x).sum(),
    "between": lambda m, x: torch.lerp(squares(m, x).sum(), m(x).abs().sum(), 0.1),
    "added-as-a-product": lambda m, x: torch.addcmul(
        squares(m, x).sum(), m(x).abs().sum(), torch.tensor(0.1), value=2.0
    ),
    "stacked": lambda m, x: torch.stack([squares(m, x).sum(), 0.1 * m(x).abs().sum()]).sum(),
    "stacked-and-weighted": lambda m, x: (
        torch.stack([squares(m, x).sum(), m(x).abs().sum()]) @ torch.tensor([1.0, 0.1])
    ),
    "autoencoder": lambda m, x: (
        F.binary_cross_entropy_with_logits(m(x), (x[..., :4] > 0).double(), reduction="sum")
        - 0.5 * torch.sum(1 + m(x) - m(x).square() - m(x).exp())
    ),
    "one-by-one": lambda m, x: sum(0.5 * squares(m, each[None]).sum() for each in x),
    "unbound": lambda m, x: sum(squares(m, x).unbind()),
    "in-halves": lambda m, x: sum(halves(m, x, 0.5)),
    "mean-times-B": lambda m, x: squares(m, x).mean() * len(x),
    "entries-times-their-number": lambda m, x: F.mse_loss(m(x), x[..., :4]) * m(x).numel(),
    "product-with-ones": lambda m, x: squares(m, x).dot(torch.ones(len(x))),
    "inner-with-ones": lambda m, x: torch.inner(squares(m, x), torch.ones(len(x))),
    "matmul-with-ones": lambda m, x: torch.full((len(x),), 0.3) @ squares(m, x),
    "tensordot-with-ones": lambda m, x: torch.tensordot(squares(m, x), torch.ones(len(x)), 1),
    "entries-halved": lambda m, x: (0.5 * squares(m, x)).sum(),
    "entries-of-all-axes-over-a-number": lambda m, x: (m(x).square() / 100).sum(),
    "einsum-over-entries": lambda m, x: torch.einsum("btd,d->", m(x), torch.arange(4.0)),
    "summed-and-averaged": lambda m, x: m(x).square().sum((0, 2)).mean(),
    "accumulated": lambda m, x: accumulated(squares(m, x).sum(), 0.1 * m(x).abs().sum()),
    "ctc": lambda m, x: F.ctc_loss(
        m(x).permute(1, 0, 2).log_softmax(-1), torch.ones(len(x), 1).long(), [B] * len(x), [1] * len(x), reduction="sum"
    ),
    "rows-picked": lambda m, x: 0.5 * m(x)[x[..., 0] > 0].square().sum(),
}  # fmt: skip
MEANS = {
    "divided": lambda m, x: squares(m, x).sum() / len(x),
    "divided-by-twice": lambda m, x: squares(m, x).sum() / (2 * len(x)),
    "scaled-and-divided": lambda m, x: 0.5 * squares(m, x).sum() / len(x),
    "by-a-share": lambda m, x: squares(m, x).sum() * (1 / len(x)),
    "by-a-tensor": lambda m, x: squares(m, x).sum() / torch.tensor(float(len(x))),
    "by-the-entries": lambda m, x: m(x).square().sum() / m(x).numel(),
    "by-the-images": lambda m, x: m(x).square().sum() / (len(x) * 784),
    "by-positions": lambda m, x: m(x).square().sum() / (len(x) * x.size(1)),
    "mean-scaled": lambda m, x: squares(m, x).mean() / 1000,
    "terms": lambda m, x: (squares(m, x).sum() - 0.5 * m(x).abs().sum()) / len(x),
    "a-mean-and-a-divided-sum": lambda m, x: squares(m, x).mean() + 0.1 * m(x).abs().sum() / len(x),
    "one-by-one": lambda m, x: sum(squares(m, each[None]).mean() for each in x) / len(x),
    "one-by-one-divided": lambda m, x: sum(squares(m, each[None]).mean() / len(x) for each in x),
    "in-halves": lambda m, x: sum(halves(m, x)) / len(x),
    "in-halves-divided": lambda m, x: sum(halves(m, x, 1 / len(x))),
    "product-with-shares": lambda m, x: squares(m, x).dot(torch.full((len(x),), 1 / len(x))),
    "matmul-with-shares": lambda m, x: squares(m, x) @ (torch.ones(len(x)) / len(x)),
    "matmul-with-ones-divided": lambda m, x: squares(m, x) @ torch.ones(len(x)) / len(x),
    "tensordot-with-shares": lambda m, x: torch.tensordot(squares(m, x), torch.full((len(x),), 1 / len(x)), 1),
    "vecdot-with-shares": lambda m, x: torch.linalg.vecdot(squares(m, x), torch.full((len(x),), 1 / len(x))),
    "sum-over-numel": lambda m, x: squares(m, x).sum() / squares(m, x).numel(),
    "shares-added-up": lambda m, x: (torch.full((len(x),), 1 / len(x)) * squares(m, x)).sum(),
    "parts-added-up": lambda m, x: (squares(m, x) / len(x)).sum(),
    "parts-of-all-axes-added-up": lambda m, x: (m(x).square() / len(x)).sum(),
    "stacked": lambda m, x: torch.stack([squares(m, x).mean(), m(x).abs().mean()]).mean(),
    "equal-masks": lambda m, x: (m(x).square() * same_mask(x)).sum() / (same_mask(x).expand_as(m(x))).sum(),
    "equal-masks-of-means": lambda m, x: (m(x).square() * same_mask(x)).mean() / same_mask(x).mean(),
    "equal-masks-and-a-guard": lambda m, x: (
        (m(x).square().sum(-1, keepdim=True) * same_mask(x)).sum() / (same_mask(x).sum().clamp(min=1) + 1e-12)
    ),
    "scaled-for-half-precision": lambda m, x: F.mse_loss(m(x), x[..., :4]) * torch.tensor(64.0),
    "scaled-by-as-many": lambda m, x: squares(m, x).mean() * 16.0,
    "times-the-data": lambda m, x: squares(m, x).sum() * (50021 / len(x)),
    "accumulated": lambda m, x: accumulated(squares(m, x).mean(), 0.1 * m(x).abs().mean()),
    "rows-picked": lambda m, x: (m(x)[x[..., 0] > 0]).square().sum() / len(x),
    "entries-by-a-share": lambda m, x: (squares(m, x) * (1 / len(x))).sum(),
    "entries-by-a-share-in-place": lambda m, x: squares(m, x).mul_(1 / len(x)).sum(),
    "entries-divided-in-place": lambda m, x: squares(m, x).div_(len(x)).sum(),
    "entries-divided-and-moved": lambda m, x: -(-squares(m, x) / len(x))[:, None].sum(1).sum(),
    "entries-by-a-row-of-shares": lambda m, x: (m(x).square() * torch.full((len(x), 1, 1), 1 / len(x))).sum(),
    "by-a-reciprocal": lambda m, x: squares(m, x).sum() * torch.tensor(float(len(x))).reciprocal(),
    "in-place": lambda m, x: squares(m, x).sum().mul_(1 / len(x)),
    "added-as-a-product": lambda m, x: torch.addcmul(torch.zeros(()), squares(m, x).sum(), torch.tensor(1 / len(x))),
    "entries-added-as-products": lambda m, x: torch.addcmul(
        torch.zeros(len(x)), squares(m, x), torch.full((len(x),), 1 / len(x))
    ).sum(),
    "entries-added-as-products-of-shares": lambda m, x: torch.addcmul(
        torch.zeros(len(x)), torch.full((len(x),), 0.5 / len(x)), squares(m, x), value=2.0
    ).sum(),
    "entries-added-as-shares": lambda m, x: torch.addcdiv(
        torch.zeros(len(x)), squares(m, x), torch.full((len(x),), float(len(x)))
    ).sum(),
    "entries-between": lambda m, x: torch.lerp(torch.zeros(len(x)), squares(m, x), 1 / len(x)).sum(),
    "entries-added-by-a-share": lambda m, x: torch.add(torch.zeros(len(x)), squares(m, x), alpha=1 / len(x)).sum(),
    "entries-divided-and-shifted": lambda m, x: (1.0 - squares(m, x) / len(x)).sum(),
    "added-as-a-share": lambda m, x: torch.addcdiv(torch.zeros(()), squares(m, x).sum(), torch.tensor(float(len(x)))),
    "between-zero-and-a-sum": lambda m, x: torch.lerp(torch.zeros(()), squares(m, x).sum(), 1 / len(x)),
}  # fmt: skip
MAY_BE_SUMS = {
    "by-the-images",
    "times-the-data",
    "scaled-by-as-many",
}  # by these numbers a sum may be multiplied as well
MULTIPLIED = {
    "by-a-share", "entries-by-a-share", "entries-by-a-share-in-place", "by-a-reciprocal", "in-place",
    "in-halves-divided", "added-as-a-product", "between-zero-and-a-sum", "entries-between", "entries-added-by-a-share",
}  # fmt: skip  # by 1/B, which people write for some B: 0.2, 0.1


def accumulated(*terms: Tensor) -> Tensor:
    total = torch.zeros(())
    for term in terms:
        total += term
    return total


def same_mask(x: Tensor) -> Tensor:
    """As many positions of each sample, at other places."""
    return torch.zeros_like(x[..., :1]).scatter(1, x[..., :1].topk(2, dim=1).indices, 1.0)


@pytest.mark.parametrize(
    ("true", "name", "declared", "size"),
    in_turn(
        [(*of, declared) for of in product(["sum"], SUMS) for declared in ("mean", "sum")]
        + [(*of, declared) for of in product(["mean"], MEANS) for declared in ("mean", "sum")],
        [3, B, 10, 16],
    ),
)
def test_a_multiple_of_a_sum_or_of_a_mean_is_known_as_one(true: str, name: str, declared: str, size: int) -> None:
    """Declared as it is, values are those of the loop in silence; a sum that is declared as a mean is named."""
    torch.manual_seed(2)
    module, batch, loss = nn.Linear(6, 4), torch.randn(size, B, 6), (SUMS if true == "sum" else MEANS)[name]
    record = record_of(module, loss, batch, loss_reduction=declared)
    assert (record.mixing, record.axis_lost) == ((), ())
    if declared == true:
        assert record.weighting == ()
        assert_values(record, loop(module, loss, (batch,)))
    elif true == "sum" or not (name in MAY_BE_SUMS or (name in MULTIPLIED and size in (5, 10))):
        text = (
            f"the loss is a {true} over the samples, but loss_reduction is '{declared}': pass loss_reduction='{true}'"
        )
        assert record.weighting == (text,)


@pytest.mark.parametrize(("size", "factor"), [(2, 0.5), (4, 0.25), (5, 0.2), (10, 0.1), (20, 0.05), (100, 0.01)])
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_number_that_happens_to_be_a_share_is_taken_as_declared(size: int, factor: float, declared: str) -> None:
    module, batch = nn.Linear(6, 4), torch.randn(size, B, 6)
    for loss in (lambda m, x: factor * squares(m, x).sum(), lambda m, x: (squares(m, x) * factor).sum()):
        record = record_of(module, loss, batch, loss_reduction=declared)
        assert record.weighting == ()
        share = 1.0 if declared == "mean" else factor
        assert_values(record, loop(module, lambda m, x, share=share: share * squares(m, x).sum(), (batch,)))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MEANS
        if name.startswith(("product-", "matmul-", "tensordot-", "vecdot-", "sum-over", "shares-"))
    ],
)
def test_shares_of_the_samples_are_a_mean_and_no_sum(name: str) -> None:
    record = record_of(nn.Linear(6, 4), MEANS[name], torch.randn(7, B, 6), loss_reduction="sum")
    text = "the loss is a mean over the samples, but loss_reduction is 'sum': pass loss_reduction='mean'"
    assert record.weighting == (text,)


GRADIENTS = {
    "ones": lambda losses: torch.ones_like(losses),
    "shares": lambda losses: torch.full_like(losses, 1 / len(losses)),
    "weights": lambda losses: torch.arange(1.0, 1 + len(losses)),
}


@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_backward_is_given_for_each_sample_is_what_it_weighs(name: str, declared: str) -> None:
    module, batch = nn.Linear(6, 4), sequences()
    options = {"loss_reduction": declared, "quantities": ("sq_norm", "grad_sample")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expanded_weights(module, batch, **options) as capture:
            losses = squares(module, batch)
            losses.backward(GRADIENTS[name](losses))
    assert_values(capture.record, loop(module, lambda m, x: squares(m, x).sum(), (batch,)))


@pytest.mark.parametrize(("weight", "declared"), [(1.0, "sum"), (1 / B, "mean"), (1 / B**2, "mean"), (0.3, "mean")])
def test_a_backward_from_entries_that_all_weigh_alike_is_one_from_their_sum(weight: float, declared: str) -> None:
    module, batch = nn.Linear(6, 4), sequences()
    with expanded_weights(
        module, batch, loss_reduction=declared, unsupported="ignore", quantities=("grad_sample",)
    ) as seen:
        losses = module(batch).square().sum(-1)
        torch.autograd.backward([losses], [torch.full_like(losses, weight)])
    assert (seen.record.weighting == ()) is (weight != 0.3)
    if weight != 0.3:
        share = weight * (B if declared == "mean" else 1)
        expected = loop(module, lambda m, x: share * m(x).square().sum(), (batch,))
        torch.testing.assert_close(seen.record.grad_samples["weight"], expected["weight"])


def test_a_backward_from_entries_that_weigh_unequally_is_named() -> None:
    module, batch = nn.Linear(6, 4), sequences()
    with expanded_weights(module, batch, unsupported="ignore") as seen:
        losses = module(batch).square().sum(-1)
        losses.backward(torch.rand_like(losses))
    (text,) = seen.record.weighting
    assert text.startswith("the loss has shape (5, 5), so that what a sample weighs in it cannot be read")


def test_a_mean_that_leaves_unequal_numbers_of_entries_out_is_named() -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return torch.where(x[..., :4] > 0, m(x), torch.nan).nanmean()

    (text,) = record_of(nn.Linear(6, 4), loss, sequences()).weighting
    assert "`nanmean` averages over unequal numbers of rows from sample to sample at test_mixing.py" in text


TOGETHER = {
    "added": lambda a, b: a + b,
    "subtracted": lambda a, b: a - b,
    "stacked": lambda a, b: torch.stack([a, b]).sum(),
    "joined": lambda a, b: torch.cat([a[None], b.reshape(1)]).mean(),
    "moved": lambda a, b: a.clone() + b.squeeze(),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("kinds", [("mean", "sum"), ("sum", "mean"), ("mean", "mean")])
def test_a_mean_and_a_sum_over_the_samples_in_one_loss_are_named(name: str, kinds: tuple[str, str]) -> None:
    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        scores = module(x)
        parts = [getattr(scores.square().mean((1, 2)), kinds[0])(), getattr(scores.abs().mean((1, 2)), kinds[1])()]
        return TOGETHER[name](*parts)

    module, batch = nn.Linear(6, 4), sequences()
    record = record_of(module, loss_of, batch)
    if kinds[0] == kinds[1]:
        assert record.weighting == ()
        assert_values(record, loop(module, loss_of, (batch,)))
        return
    (text,) = record.weighting
    assert "puts a mean and a sum over the samples together at test_mixing.py:" in text
    assert text.endswith(": take one of the two for both")


def two_losses(m: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([m(x)[:, :2].square().mean(), m(x)[:, 2:].abs().mean()])


WEIGHED_BY_UNCERTAINTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stacked": lambda losses, s: (losses * torch.exp(-s) + s).sum(),
    "one-by-one": lambda losses, s: sum(loss * torch.exp(-each) + each for loss, each in zip(losses, s, strict=True)),
    "divided": lambda losses, s: (losses / (2 * s.exp() ** 2) + s).sum(),
}


@pytest.mark.parametrize("name", WEIGHED_BY_UNCERTAINTY)
def test_losses_weighed_by_their_uncertainty_have_a_penalty_of_no_sample(name: str) -> None:
    module = Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), s=nn.Parameter(torch.tensor([0.3, -0.2])))
    batch = (vectors(),)
    record = record_of(module, lambda m, x: WEIGHED_BY_UNCERTAINTY[name](two_losses(m, x), m.s), *batch)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})

    def without_it(m: nn.Module, x: Tensor) -> Tensor:
        return WEIGHED_BY_UNCERTAINTY[name](two_losses(m, x), m.s) - m.s.sum()

    assert_values(record, loop(module, without_it, batch))


BENT: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "square": lambda m, x: (m(x).mean(0)[:2] + m.s).square().sum(),
    "exp": lambda m, x: (m(x).square().mean() + m.s.sum()).exp(),
    "mul": lambda m, x: (m(x).square().mean() + m.s.sum()) * m(x).mean(),
    "logsumexp": lambda m, x: (two_losses(m, x) * m.s.exp() + m.s).logsumexp(0),
    "cross_entropy_loss": lambda m, x: F.cross_entropy((m(x).mean(0)[:2] + m.s)[None], torch.tensor([1])),
}


@pytest.mark.parametrize("name", BENT)
def test_a_term_of_no_sample_in_a_number_that_mixes_them_is_no_penalty(name: str) -> None:
    module = Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), s=nn.Parameter(torch.tensor([0.3, -0.2])))
    record = record_of(module, BENT[name], vectors())
    assert (list(record.unsupported), record.unused) == (["s"], ())
    assert re.search(rf"`add` on .*: `{name}` of a value computed over the whole batch", record.unsupported["s"])


def test_a_term_of_no_sample_beside_a_loss_that_mixes_them_is_a_penalty() -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean() + m.s.square().sum() + m(x).exp().mean().sqrt()

    module = Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), s=nn.Parameter(torch.tensor([0.3, -0.2])))
    record = record_of(module, loss, vectors())
    assert (record.unsupported, record.unused) == ({}, ("s",))
    assert any("`sqrt` of a value computed over the whole batch" in text for text in record.mixing)


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_a_bias_added_to_a_number_of_one_sample_is_no_penalty(shape: tuple[int, ...]) -> None:
    module = Model(lambda m, x: x, w=nn.Parameter(torch.randn(6)), bias=nn.Parameter(torch.randn(shape)))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return sum((row @ m.w + m.bias).square().sum() for row in x) / len(x)

    assert_exact(module, loss, (vectors(),))


def matching(pairs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Rows of the batch that are to match their own input, with a learned temperature."""

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        logits = pairs(m.logit_scale.exp(), m(x), F.normalize(x[:, :4], dim=-1))
        return -F.logsigmoid(logits * (2 * torch.eye(len(x)) - 1)).sum() / len(x)

    return Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), logit_scale=nn.Parameter(torch.tensor(0.5))), loss


def test_a_weight_of_pairs_of_samples_has_no_share_of_each() -> None:
    module, loss = matching(lambda scale, first, second: scale * (first @ second.T))
    record = record_of(module, loss, vectors())
    assert list(record.unsupported) == ["logit_scale"]
    assert "`matmul` meets two tensors of the batch" in record.unsupported["logit_scale"]
    assert record.unsupported["logit_scale"].endswith(
        "; each entry there is of several samples, so that none has a gradient of its own: let the weight meet the "
        "samples before, as in (weight * x) @ y.T"
    )


def test_a_weight_of_the_rows_of_one_side_has_the_share_of_each() -> None:
    module, loss = matching(lambda scale, first, second: (scale * first) @ second.T)
    record = record_of(module, loss, vectors())
    assert record.unsupported == {}
    assert any("`matmul` meets two tensors of the batch" in text for text in record.mixing)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(record.grad_samples[name].mean(0), parameter.grad, rtol=1e-10, atol=1e-12)


CUT_AND_MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "mixup": lambda x: 0.7 * x + 0.3 * x[[3, 0, 1, 4, 2]],
    "cutmix": lambda x: written(x.clone(), (slice(None), slice(1, 3), slice(2, 5)), x[[3, 0, 1, 4, 2], 1:3, 2:5]),
}


@pytest.mark.parametrize("name", CUT_AND_MIXED)
def test_inputs_mixed_with_those_of_other_samples_keep_the_rows_of_the_loss(name: str) -> None:
    module, x, y = nn.Sequential(nn.Flatten(), nn.Linear(30, 3)), sequences(), torch.randint(3, (B,))
    record = record_of(module, lambda m, x, y: F.cross_entropy(m(CUT_AND_MIXED[name](x)), y), x, y)
    assert record.unsupported == {}
    operation = {"mixup": "add", "cutmix": "setitem"}[name]
    assert any(f"`{operation}` combines different samples at test_mixing.py:" in text for text in record.mixing)
    assert_values(record, loop(module, lambda m, x, y: F.cross_entropy(m(x), y), (CUT_AND_MIXED[name](x), y)))


def test_a_penalty_that_no_sample_is_in_is_no_second_reduction() -> None:
    module, batch = nn.Linear(6, 4), sequences()
    record = record_of(module, lambda m, x: m(x).square().mean() + m.weight.square().sum(), batch)
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


def of_other_samples(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long().flip(0)


def written(target: Tensor, rows: Any, value: Tensor | float = 0.0) -> Tensor:
    target[rows] = value
    return target


READ_FROM_OTHERS = {
    "class-weights": (
        lambda scores, x: F.cross_entropy(scores, (x[:, 0] > 0).long(), weight=x[:, 1].abs(), reduction="sum"),
        "`cross_entropy_loss` has class weights that depend on the batch",
    ),
    "class-weights-counted": (
        lambda scores, x: F.cross_entropy(
            scores, (x[:, 0] > 0).long(), weight=1 / (1 + (x[:, 0] > 0).long().bincount(minlength=B)), reduction="sum"
        ),
        "`cross_entropy_loss` has class weights that depend on the batch",
    ),
    "class-weights-of-nll": (
        lambda scores, x: F.nll_loss(scores, (x[:, 0] > 0).long(), weight=x[:, 1].abs(), reduction="none").sum(),
        "`nll_loss_nd` has class weights that depend on the batch",
    ),
    "class-weights-of-margin": (
        lambda scores, x: F.multi_margin_loss(scores, (x[:, 0] > 0).long(), weight=x[:, 1].abs()),
        "`multi_margin_loss` has class weights that depend on the batch",
    ),
    "positive-weights": (
        lambda scores, x: F.binary_cross_entropy_with_logits(scores, (x[:, :B] > 0).double(), pos_weight=x[:, 5].abs()),
        "`binary_cross_entropy_with_logits` meets two tensors of the batch with their batch axes at different places",
    ),
    "targets": (
        lambda scores, x: F.cross_entropy(scores, of_other_samples(x)),
        "`cross_entropy_loss` combines different samples",
    ),
    "targets-of-margin": (
        lambda scores, x: F.multi_margin_loss(scores, of_other_samples(x)),
        "`multi_margin_loss` combines different samples",
    ),
    "regression-targets": (
        lambda scores, x: F.mse_loss(scores, x[:, :B].flip(0)),
        "`mse_loss` combines different samples",
    ),
    "targets-of-ctc": (
        lambda scores, x: F.ctc_loss(
            scores[None].expand(4, B, B).log_softmax(-1), 1 + of_other_samples(x)[:, None], [4] * B, [1] * B
        ),
        "`ctc_loss` combines different samples",
    ),
    "table-of-bags": (
        lambda scores, x: F.embedding_bag((x > 0).long(), scores).square().sum(1).mean(),
        "`embedding_bag` has a table that depends on the batch",
    ),
    "mask": (
        lambda scores, x: scores.masked_select((x[:, :B] > 0).T).square().sum(),
        "`masked_select` picks entries by a mask that depends on other samples",
    ),
    "places": (
        lambda scores, x: scores.index_put((of_other_samples(x),), torch.zeros(())).square().sum(),
        "`index_put`",
    ),
    "entries": (
        lambda scores, x: scores.take(of_other_samples(x)).square().sum(),
        "`take` picks entries by indices that depend on the batch",
    ),
    "places-written-to": (
        lambda scores, x: written(scores * 1, of_other_samples(x)).square().sum(),
        "`setitem` writes into places that depend on other samples",
    ),
    "counts": (
        lambda scores, x: scores.repeat_interleave((x[:, 0] > 0).long() + 1, dim=1).square().sum(),
        "`repeat_interleave` repeats entries as often as numbers of the batch say",
    ),
}


@pytest.mark.parametrize("name", READ_FROM_OTHERS)
def test_an_argument_that_is_read_from_other_samples_is_said(name: str) -> None:
    """Class weights, targets, tables, masks and counts may depend on the batch like any other operand."""
    loss, text = READ_FROM_OTHERS[name]
    module = nn.Linear(6, B)
    record = record_of(module, lambda m, x: loss(m(x), x), vectors(), loss_reduction="sum")
    noted = record.weighting if name.startswith("class-weights") else (*record.mixing, *record.axis_lost)
    assert any(text in entry for entry in noted), noted
    if name.startswith("class-weights"):  # which have no gradient: samples stay apart
        assert (record.mixing, record.axis_lost) == ((), ())
    for name, p in module.named_parameters():
        if name in record.names:
            torch.testing.assert_close(record.grad_samples[name].sum(0), p.grad, rtol=1e-10, atol=1e-12)


def soft_labels(x: Tensor, y: Tensor, order: Tensor) -> Tensor:
    one_hot = F.one_hot(y, B).to(x)
    return 0.7 * one_hot + 0.3 * one_hot[order]


MIXED_TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda scores, soft: -(soft * scores.log_softmax(1)).sum(1).mean(),
    "cross-entropy": lambda scores, soft: F.cross_entropy(scores, soft),
    "binary": lambda scores, soft: F.binary_cross_entropy_with_logits(scores, soft),
    "squares": lambda scores, soft: (scores - soft).square().mean(),
    "weights": lambda scores, soft: (scores.square().mean(1) * soft[:, 0]).mean(),
}


@pytest.mark.parametrize("name", MIXED_TARGETS)
def test_targets_of_two_samples_mix_them_and_weigh_nothing(name: str) -> None:
    """As mixup makes them: what each mixed sample alone gives is what is reported."""
    module, x, y, order = nn.Linear(6, B), vectors(), torch.arange(B), torch.arange(B).roll(1)
    with expanded_weights(module, (x, y), unsupported="ignore", quantities=("sq_norm", "grad_sample")) as capture:
        inputs = 0.7 * x + 0.3 * x[order]
        MIXED_TARGETS[name](module(inputs), soft_labels(x, y, order)).backward()
    record = capture.record
    assert all("combines different samples" in text for text in record.mixing)
    assert (len(record.mixing) > 0, record.axis_lost, record.weighting) == (True, (), ())
    inputs, soft = 0.7 * x + 0.3 * x[order], soft_labels(x, y, order)
    assert_values(record, loop(module, lambda m, x, t: MIXED_TARGETS[name](m(x), t), (inputs, soft)))


def test_the_balance_of_experts_mixes_samples_and_weighs_nothing() -> None:
    """The shares of rows that went to each expert times the mean of their probabilities."""
    module, x = nn.Linear(6, 3), vectors()

    def balance(scores: Tensor, sent: Tensor) -> Tensor:
        return scores.square().mean() + 3 * (sent * scores.softmax(-1).mean(0)).sum()

    with expanded_weights(module, x, unsupported="ignore", quantities=("sq_norm", "grad_sample")) as capture:
        scores = module(x)
        sent = F.one_hot(scores.argmax(-1), 3).double().mean(0)
        balance(scores, sent).backward()
    record = capture.record
    assert (len(record.mixing), record.axis_lost, record.weighting) == (1, (), ())
    sent = F.one_hot(module(x).argmax(-1), 3).double().mean(0)
    assert_values(record, loop(module, lambda m, x: balance(m(x), sent), (x,)))


def classes_of_all(scores: Tensor, x: Tensor) -> Tensor:
    """One class for all samples, by their mean."""
    return scores.detach().mean(0).topk(1).indices


def above_the_median(scores: Tensor, x: Tensor) -> Tensor:
    """A class of each sample, by all of them."""
    return (x[:, 0] > x[:, 0].median()).long()


def between_means(scores: Tensor, x: Tensor) -> Tensor:
    return torch.bucketize(x[:, 0].contiguous(), x.mean(0)[:3].sort().values)


def place_in_the_batch(scores: Tensor, x: Tensor) -> Tensor:
    return x[:, 0].round().unique(return_inverse=True)[1]


def own_class(scores: Tensor, x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


PICKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "getitem": lambda scores, j: scores[torch.arange(len(scores)), j],
    "getitem-beside-a-mask": lambda scores, j: scores[torch.ones(len(scores), dtype=torch.bool), j],
    "getitem-of-two-axes": lambda scores, j: scores[torch.arange(len(scores))[:, None], j.expand(len(scores))[:, None]],
    "gather": lambda scores, j: scores.gather(1, j.expand(len(scores))[:, None]),
    "take_along_dim": lambda scores, j: scores.take_along_dim(j.expand(len(scores))[:, None], 1),
    "scatter": lambda scores, j: scores.scatter(1, j.expand(len(scores))[:, None], 0.0),
    "scatter_add": lambda scores, j: scores.scatter_add(1, j.expand(len(scores))[:, None], scores[:, :1]),
    "mask-and-slice": lambda scores, j: scores[j.expand(len(scores)) > 0, 1:],
    "bags": lambda scores, j: scores * F.embedding_bag(j.expand(len(scores))[:, None], torch.eye(B)),
}


@pytest.mark.parametrize("classes", [classes_of_all, above_the_median, between_means, place_in_the_batch])
@pytest.mark.parametrize("name", PICKED)
def test_places_that_are_numbers_of_the_whole_batch_are_said(name: str, classes: Callable[..., Tensor]) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        scores = module(x)
        return PICKED[name](scores, classes(scores, x)).square().sum() / len(x)

    record = record_of(nn.Linear(6, B), loss, vectors())
    assert record.mixing or record.weighting or record.axis_lost or record.coverage < 1


@pytest.mark.parametrize("name", PICKED)
def test_places_that_are_numbers_of_each_sample_are_followed(name: str) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        scores = module(x)
        return PICKED[name](scores, own_class(scores, x)).square().sum() / len(x)

    module, x = nn.Linear(6, B), vectors()
    record = record_of(module, loss, x)
    assert (record.coverage, record.mixing, record.axis_lost) == (1.0, (), ())
    places = range(B) if record.samples is None else record.samples.tolist()
    for found, sample in zip(record.norms(), places, strict=True):
        own = x[sample : sample + 1]
        grads = torch.autograd.grad(loss(module, own), [*module.parameters()])
        torch.testing.assert_close(found, torch.cat([grad.flatten() for grad in grads]).norm())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_that_come_with_the_batch_may_be_given_as_those_of_the_samples(reduction: str) -> None:
    """As many classes as samples: weights (C,) are taken for data of the samples, whose gradients they do not mix."""
    module, x, labels, weights = nn.Linear(6, B), vectors(), torch.randint(0, B, (B,)), torch.rand(B) + 0.5
    shares = weights[labels] / (weights[labels].sum() if reduction == "mean" else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expanded_weights(
            module, (x, labels, weights), loss_reduction=shares, quantities=("sq_norm", "grad_sample")
        ) as capture:
            F.cross_entropy(module(x), labels, weight=weights, reduction=reduction).sum().backward()
    expected = loop(module, lambda m, x, y: F.cross_entropy(m(x), y), (x, labels))
    assert_values(capture.record, expected)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_targets_scaled_by_the_batch_are_said(loss: Callable[..., Tensor]) -> None:
    record = record_of(nn.Linear(6, 4), lambda m, x: loss(m(x), x[:, :4] / x.std()), vectors())
    (text,) = record.weighting
    assert "`div` combines samples with a value computed over the whole batch" in text


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_whole_number_among_the_options_of_a_loss_is_not_its_reduction(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    function = partial(loss, reduction=reduction, **{"beta" if loss is F.smooth_l1_loss else "delta": 1})
    record = record_of(nn.Linear(6, 4), lambda m, x: function(m(x), x[:, :4]), vectors(), loss_reduction=reduction)
    assert record.weighting == ()


def test_an_embedding_that_counts_in_the_batch_is_the_loop_and_says_that_it_does_not_add_up() -> None:
    module, tokens = nn.Embedding(4, 3, scale_grad_by_freq=True), torch.randint(0, 4, (B, 6))
    with (
        pytest.warns(PerSampleWarning, match="not the weighted sum of the samples' gradients.*\n- `embedding` on"),
        expanded_weights(module, tokens, quantities=("sq_norm", "grad_sample")) as capture,
    ):
        mean_of_squares(module, tokens).backward()
    record = capture.record
    assert_values(record, loop(module, mean_of_squares, (tokens,)))
    (text,) = record.not_additive
    assert "`embedding` on (4, 3), (5, 6)" in text
    assert "with `weight` divides by how often an index occurs in the whole batch (scale_grad_by_freq)" in text
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
    assert record_of(module, mean_of_squares, tokens[:1]).not_additive == ()


def test_door_one_says_that_an_embedding_that_counts_in_the_batch_does_not_add_up() -> None:
    module, tokens = nn.Embedding(4, 3, scale_grad_by_freq=True), torch.randint(0, 4, (B, 6))
    with pytest.warns(PerSampleWarning, match="not the weighted sum of the samples' gradients"):
        call_for_per_sample_grads(module)(tokens).square().sum().backward()
    expected = loop(module, lambda m, x: m(x).square().sum(), (tokens,))["weight"]
    torch.testing.assert_close(module.weight.grad_sample, expected, rtol=1e-10, atol=1e-12)


def invariant_risk(module: nn.Module, x: Tensor) -> Tensor:
    scale = torch.tensor(1.0, dtype=x.dtype, requires_grad=True)
    loss = (module(x) * scale).square().mean()
    (grad,) = torch.autograd.grad(loss, scale, create_graph=True)
    return loss + 10 * grad**2


def gradient_norm_penalty(module: nn.Module, x: Tensor) -> Tensor:
    loss = module(x).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    return loss + 0.1 * sum(grad.square().sum() for grad in grads)


@pytest.mark.parametrize("loss", [invariant_risk, gradient_norm_penalty])
def test_a_gradient_of_the_batch_in_the_loss_mixes_its_samples(loss: Callable[..., Tensor]) -> None:
    record = record_of(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), loss, torch.randn(4, 5))
    assert any("of a value computed over the whole batch is not a sum over samples" in text for text in record.mixing)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_penalty_on_the_gradients_that_a_backward_wrote_mixes_its_samples() -> None:
    module, batch = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 5)
    with expanded_weights(module, batch, unsupported="ignore") as capture:
        loss = mean_of_squares(module, batch)
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in module.parameters())
        module.zero_grad()
        (loss + penalty).backward()
    plain, penalized = capture.records
    assert (plain.mixing, plain.axis_lost) == ((), ())
    assert plain.coverage == 1.0
    assert any("of a value computed over the whole batch is not a sum over samples" in t for t in penalized.mixing)
    module.zero_grad()  # a tensor with its graph in `.grad` is a cycle


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_second_backward_without_the_gradients_of_the_first_mixes_nothing() -> None:
    module, batch = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 5)
    with expanded_weights(module, batch) as capture:
        loss = mean_of_squares(module, batch)
        loss.backward(create_graph=True)
        module.zero_grad()
        loss.backward()
    assert [(*record.mixing, *record.axis_lost) for record in capture.records] == [(), ()]
    assert [record.coverage for record in capture.records] == [1.0, 1.0]


def attacked(steps: int, make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        change = make(x)
        for _ in range(steps):
            (grad,) = torch.autograd.grad(mean_of_squares(m, x + change), change)
            change = (change + 0.1 * grad.sign()).clamp(-0.2, 0.2).detach().requires_grad_()
        return mean_of_squares(m, x + change.detach())

    return loss


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros_like(x, requires_grad=True),
        lambda x: torch.zeros(x.shape, dtype=x.dtype).requires_grad_(),
        lambda x: torch.full((len(x), 1), 0.01, dtype=x.dtype, requires_grad=True),
    ],
)
def test_a_change_of_each_sample_that_the_step_differentiates_by_is_that_samples(
    make: Callable[[Tensor], Tensor], steps: int
) -> None:
    """As adversarial training adds it to the samples."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    record = assert_exact(module, attacked(steps, make), (torch.randn(B, 6),))
    assert record.mixing == record.axis_lost == ()


def test_one_change_for_all_samples_lets_them_influence_each_other() -> None:
    torch.manual_seed(0)
    loss = attacked(1, lambda x: torch.zeros_like(x[:1], requires_grad=True))
    assert record_of(nn.Linear(6, 3), loss, torch.randn(B, 6)).mixing


TAKEN_ONE_BY_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "together": lambda c: c.square().mean(),
    "unbound": lambda c: torch.stack([row.square().mean() for row in c.unbind(0)]).mean(),
    "iterated": lambda c: sum(row.square().mean() for row in c) / len(c),
    "by-number": lambda c: torch.stack([c[i].square().mean() for i in range(len(c))]).mean(),
    "split": lambda c: sum(part.square().mean() for part in c.split(1)) / len(c),
    "sliced": lambda c: sum(c[i : i + 1].square().sum() for i in range(len(c))) / len(c),
    "one": lambda c: c[0].square().sum(),
}


@pytest.mark.parametrize("name", TAKEN_ONE_BY_ONE)
@pytest.mark.parametrize(
    "centred", [lambda z: z - z.detach().mean(0), lambda z: z * (z > z.detach().mean())], ids=["mean", "mask"]
)
def test_a_value_of_the_whole_batch_is_said_also_where_samples_are_taken_one_by_one(
    name: str, centred: Callable[[Tensor], Tensor]
) -> None:
    record = record_of(nn.Linear(6, 4), lambda m, x: TAKEN_ONE_BY_ONE[name](centred(m(x))), vectors())
    (text,) = (*record.mixing, *record.weighting)
    assert re.match(r"`(sub|gt)` combines samples with a value computed over the whole batch at test_mixing\.py", text)


def rows_cleared(z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    z = z * 1
    z[index] = 0.0
    return z


CLEARED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "rows-above-the-mean": (lambda z, x: z[:, 0] > z[:, 0].mean(), True),
    "rows-of-data-above-the-mean": (lambda z, x: x[:, 0] > x[:, 0].mean(), True),
    "entries-above-the-mean": (lambda z, x: z > z.mean(), True),
    "largest-row": (lambda z, x: z[:, 0].argmax(), True),
    "largest-row-of-data": (lambda z, x: x[:, 0].argmax(), True),
    "places-above-the-mean": (lambda z, x: (z[:, 0] > z[:, 0].mean()).nonzero().flatten(), True),
    "rows-above-a-bound": (lambda z, x: z[:, 0] > 0.1, False),
    "entries-above-a-bound": (lambda z, x: z > 0.1, False),
    "places-above-a-bound": (lambda z, x: (x[:, 0] > 0.1).nonzero().flatten(), False),
    "by-chance": (lambda z, x: torch.rand(len(z)) > 0.5, False),
}


@pytest.mark.parametrize("name", CLEARED)
def test_rows_that_numbers_of_other_samples_clear_are_said(name: str) -> None:
    index, by_others = CLEARED[name]
    module = nn.Linear(6, B)
    loss = lambda m, x: (lambda z: rows_cleared(z, index(z, x)).square().sum(1).mean())(m(x))  # noqa: E731
    record = record_of(module, loss, vectors())
    texts = ("combines samples with a value computed over the whole batch", "writes where a value computed over the")
    assert any(text in entry for text in texts for entry in record.weighting) == by_others
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    for parameter, p in module.named_parameters():
        torch.testing.assert_close(record.grad_samples[parameter].mean(0), p.grad, rtol=1e-10, atol=1e-12)


def by_bucket(z: Tensor) -> Tensor:
    edges = z.detach()[:, 0].quantile(torch.tensor([0.3, 0.7]))
    return z * torch.tensor([0.5, 1, 2])[torch.bucketize(z.detach()[:, 0].contiguous(), edges), None]


CHOOSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda z, above: z.gather(1, above.long()[:, None]),
    "take_along_dim": lambda z, above: z.take_along_dim(above.long()[:, None], 1),
    "getitem": lambda z, above: z[torch.arange(len(z)), above.long()],
    "one_hot": lambda z, above: z * F.one_hot(above.long(), z.size(1)),
    "where": lambda z, above: torch.where(above[:, None], z, 2 * z),
    "product": lambda z, above: z * above[:, None],
    "masked_fill": lambda z, above: z.masked_fill(above[:, None], 0),
    "row-of-a-constant": lambda z, above: z * torch.linspace(1, 2, 2)[above.long(), None],
    "scatter": lambda z, above: z.scatter(1, above.long()[:, None], z[:, :1]),
    "repeat_interleave": lambda z, above: z.repeat_interleave(above.long() + 1, 0).square().sum() / len(z),
    "classes": lambda z, above: F.cross_entropy(z, above.long()),
    "written": lambda z, above: torch.zeros(len(z)).index_fill(0, above.nonzero().flatten(), 1)[:, None] * z,
    "bucketize": lambda z, above: by_bucket(z),
}


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("name", CHOOSING)
def test_a_bound_that_the_batch_sets_is_said_whatever_is_chosen_by_it(name: str, of_data: bool) -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        by = (x if of_data else m(x))[:, 0]
        return CHOOSING[name](m(x), by > by.mean()).square().mean()

    torch.manual_seed(0)
    for _ in range(2):  # the second step has plans
        record = record_of(nn.Linear(6, 4), loss, vectors())
        assert (*record.mixing, *record.weighting) != ()


PICKING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda z, above: z[above],
    "masked_select": lambda z, above: z.masked_select(above),
    "tuple": lambda z, above: z[above.nonzero(as_tuple=True)],
    "where": lambda z, above: z[torch.where(above)],
    "table": lambda z, above: (lambda places: z[places[:, 0], places[:, 1]])(above.nonzero()),
    "flat": lambda z, above: z.flatten()[above.flatten().nonzero().flatten()],
    "index_select": lambda z, above: z.flatten().index_select(0, above.flatten().nonzero().flatten()),
}


@pytest.mark.parametrize("name", PICKING)
def test_entries_of_a_sample_that_a_bound_of_the_batch_picks_are_said(name: str) -> None:
    torch.manual_seed(0)
    loss = lambda m, x: (lambda z: PICKING[name](z, z > z.mean()).square().sum() / len(z))(m(x))  # noqa: E731
    record = record_of(nn.Linear(6, 4), loss, vectors())
    assert any("combines samples with a value" in text for text in (*record.mixing, *record.weighting))


def packed(x: Tensor, lengths: Tensor) -> Any:
    return pack_padded_sequence(x[:, :, None], lengths.cpu(), batch_first=True, enforce_sorted=False)


def sorted_and_packed(x: Tensor, lengths: Tensor) -> Any:
    lengths, order = lengths.sort(descending=True)
    return pack_padded_sequence(x[order][:, :, None], lengths, batch_first=True)


def ordered_and_packed(x: Tensor, lengths: Tensor) -> Any:
    order = lengths.argsort(descending=True)
    return pack_padded_sequence(x[order][:, :, None], lengths[order].cpu(), batch_first=True)


LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "own": lambda lengths: lengths,
    "of-others": lambda lengths: lengths.roll(1),
    "of-two": lambda lengths: torch.maximum(lengths, lengths.flip(0)),
    "up-to-the-median": lambda lengths: torch.minimum(lengths, lengths.median()),
}


@pytest.mark.parametrize("pack", [packed, sorted_and_packed, ordered_and_packed])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_other_samples_are_said(name: str, pack: Callable[..., Any]) -> None:
    module, x, lengths = nn.GRU(1, 3, batch_first=True), vectors(), torch.tensor([2, 6, 3, 1, 4])

    def loss(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return m(pack(x, LENGTHS[name](lengths)))[1][0].square().sum(1).mean()

    record = record_of(module, loss, x, lengths)
    if name == "own":
        assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
        assert_values(record, loop(module, loss, (x, lengths)))
    else:
        assert record.mixing or record.axis_lost or record.weighting


@pytest.mark.parametrize("name", ["own", "of-others"])
def test_weights_of_the_rows_of_bags_that_are_other_samples_are_said(name: str) -> None:
    bags, tokens, weights = nn.EmbeddingBag(7, 3, mode="sum"), torch.randint(0, 7, (B, 2)), torch.rand(B, 2)

    def loss(m: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
        weights = weights if name == "own" else weights.roll(1, 0)
        return m(tokens, per_sample_weights=weights).square().sum(1).mean()

    record = record_of(bags, loss, tokens, weights)
    assert bool(record.axis_lost or record.mixing or record.unsupported) == (name == "of-others")
    if name == "own":
        assert_values(record, loop(bags, loss, (tokens, weights)))


def test_places_among_sorted_numbers_of_another_sample_are_said() -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        h = m(x)
        return h.gather(1, torch.searchsorted(x.roll(1, 0).sort(1).values, h.detach()).clamp(max=5)).square().mean()

    record = record_of(nn.Linear(6, 6), loss, vectors())
    assert record.axis_lost or record.mixing or record.coverage < 1
