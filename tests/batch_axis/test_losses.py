"""A parameter inside a loss that adds up the samples: each sample's term is differentiated by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, loop, record_of
from tests.in_turn import in_turn

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:Using a target size"),  # (which is what is meant here)
]

D = 4


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def scores(m: Any, x: Tensor) -> Tensor:
    return m.w.expand(len(x), -1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda m, x, r: F.mse_loss(x, m.w, reduction=r),
    "mse-of-a-layer": lambda m, x, r: F.mse_loss(m.a(x), m.w, reduction=r),
    "mse-of-a-number": lambda m, x, r: F.mse_loss(m.a(x), m.w[:1], reduction=r),
    "mse-reversed": lambda m, x, r: F.mse_loss(scores(m, x), x, reduction=r),
    "mse-expanded": lambda m, x, r: F.mse_loss(m.a(x), scores(m, x), reduction=r),
    "mse-weighted": lambda m, x, r: F.mse_loss(x, m.w, weight=torch.ones_like(x), reduction=r),
    "mse-of-sequences": lambda m, x, r: F.mse_loss(m.a(x[:, None].repeat(1, 3, 1)), m.w, reduction=r),
    "l1": lambda m, x, r: F.l1_loss(m.a(x), m.w, reduction=r),
    "smooth-l1": lambda m, x, r: F.smooth_l1_loss(m.a(x), m.w, reduction=r, beta=1),
    "huber": lambda m, x, r: F.huber_loss(m.a(x), m.w, reduction=r, delta=1),
    "poisson": lambda m, x, r: F.poisson_nll_loss(m.w, x.abs(), reduction=r),
    "soft-margin": lambda m, x, r: F.soft_margin_loss(scores(m, x), x.sign(), reduction=r),
    "margin-ranking": lambda m, x, r: F.margin_ranking_loss(m.a(x), scores(m, x), x.sign(), reduction=r),
    "hinge": lambda m, x, r: F.hinge_embedding_loss(scores(m, x), x.sign(), reduction=r),
    "binary": lambda m, x, r: F.binary_cross_entropy(scores(m, x).sigmoid(), (x > 0).to(x.dtype), reduction=r),
    "binary-logits": lambda m, x, r: F.binary_cross_entropy_with_logits(
        scores(m, x), (x > 0).to(x.dtype), pos_weight=torch.tensor([0.3, 1.0, 0.7, 2.0]), reduction=r
    ),
    "divergence": lambda m, x, r: F.kl_div(
        scores(m, x).log_softmax(-1), x.softmax(-1), reduction="batchmean" if r == "mean" else r
    ),
    "classes": lambda m, x, r: F.cross_entropy(scores(m, x), labels(x), reduction=r, label_smoothing=0.1),
    "classes-of-positions": lambda m, x, r: F.cross_entropy(
        m.w[None, :, None].expand(len(x), -1, 3), labels(x)[:, None].expand(-1, 3), reduction=r
    ),
    "class-probabilities": lambda m, x, r: F.cross_entropy(m.a(x), scores(m, x).softmax(-1), reduction=r),
    "nll": lambda m, x, r: F.nll_loss(m.w.log_softmax(0).expand(len(x), -1), labels(x), reduction=r),
    "triplet": lambda m, x, r: F.triplet_margin_loss(m.a(x), m.w[None], -m.w[None], reduction=r),
    "cosine": lambda m, x, r: F.cosine_embedding_loss(m.a(x), scores(m, x), x[:, 0].sign(), reduction=r),
    "multi-margin": lambda m, x, r: F.multi_margin_loss(
        scores(m, x), labels(x), weight=torch.tensor([0.3, 1.0, 0.7, 2.0]), reduction=r
    ),
    "multilabel-margin": lambda m, x, r: F.multilabel_margin_loss(
        scores(m, x), labels(x)[:, None].expand(-1, D).contiguous(), reduction=r
    ),
    "multilabel-soft-margin": lambda m, x, r: F.multilabel_soft_margin_loss(
        scores(m, x), (x > 0).to(x.dtype), reduction=r
    ),
    "gaussian": lambda m, x, r: F.gaussian_nll_loss(m.a(x), x, m.w.exp().expand(len(x), -1), reduction=r),
    "gaussian-of-one-variance": lambda m, x, r: F.gaussian_nll_loss(
        m.a(x), x, m.w[:1].exp().expand(len(x)), reduction=r
    ),
}


@pytest.mark.parametrize(("name", "reduction", "batch_size"), in_turn(product(LOSSES, ["mean", "sum"]), [1, 3, D, 6]))
def test_a_parameter_in_a_loss_is_exact(name: str, reduction: str, batch_size: int) -> None:
    torch.manual_seed(0)
    module = Model(lambda m, x: LOSSES[name](m, x, reduction), w=parameter(D), a=nn.Linear(D, D))
    record = assert_exact(module, lambda m, x: m(x), (torch.randn(batch_size, D),), loss_reduction=reduction)
    assert "w" in record.names
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_classes_that_weigh_unequally_or_are_ignored(reduction: str) -> None:
    """The term of a sample in the batch's mean; a mean over the batch weighs the samples, which is said."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss(m: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(scores(m, x), labels(x), weight=weights, ignore_index=2, reduction=reduction)

    torch.manual_seed(0)
    module, batch = Model(loss, w=parameter(D)), torch.randn(6, D)
    record = record_of(module, lambda m, x: m(x), batch, loss_reduction="sum")
    torch.testing.assert_close(record.grad_samples["w"].sum(0), module.w.grad, rtol=1e-10, atol=1e-12)
    target = labels(batch)
    total = float((weights[target] * (target != 2)).sum()) if reduction == "mean" else 1.0
    for sample, label in enumerate(target.tolist()):
        term = -weights[label] * (label != 2) * module.w.log_softmax(0)[label] / total
        (expected,) = torch.autograd.grad(term, module.w)
        torch.testing.assert_close(record.grad_samples["w"][sample], expected, rtol=1e-10, atol=1e-12)
    assert any("weigh unequally" in text for text in record.weighting) is (reduction == "mean")


def test_rows_that_were_picked_from_the_batch_are_refused_by_name() -> None:
    module = Model(lambda m, x: F.mse_loss(x[x > 0], m.w), w=parameter(1))
    record = record_of(module, lambda m, x: m(x), torch.randn(6, D))
    text = r"`mse_loss` on \(\d+,\), \(\d+,\) at .* with `w` lays a weight along rows that were picked from the batch"
    assert re.search(text, record.unsupported["w"])


def test_a_weight_that_is_written_to_without_gradient_is_still_followed() -> None:
    def clamped(m: Any, x: Tensor) -> Tensor:
        scale = m.w * 1
        with torch.no_grad():
            scale.clamp_(min=-10.0)
        return (x * scale).square().sum(1).mean()

    record = assert_exact(Model(clamped, w=parameter(D)), lambda m, x: m(x), (torch.randn(6, D),))
    assert record.names == ("w",)


class Scaled(nn.Module):
    """Losses times learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.t = nn.Linear(D, D), nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor([0.7]))
        self.v = nn.Parameter(torch.randn(D))

    def losses(self, x: Tensor) -> Tensor:
        return self.a(x).square().sum(1)


LEARNED_SCALES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda m, x: m.losses(x).mean() * m.s.exp(),
    "mean-behind": lambda m, x: m.s * m.losses(x).mean(),
    "mean-divided": lambda m, x: m.losses(x).mean() / m.s,
    "mean-of-all-entries": lambda m, x: m.a(x).square().mean() * m.s,
    "mean-by-column": lambda m, x: (m.a(x).square().mean(0) * m.v).sum(),
    "mean-by-column-kept": lambda m, x: (m.a(x).square().mean(0, keepdim=True) / m.v).sum(),
    "mean-over-a-vector": lambda m, x: (m.a(x).square().mean() * m.v).sum(),
    "mean-by-hand": lambda m, x: m.losses(x).sum() / len(x) * m.t,
    "classes": lambda m, x: F.cross_entropy(m.a(x), labels(x)) * torch.exp(-m.s),
    "classes-that-are-ignored": lambda m, x: (
        F.cross_entropy(m.a(x)[..., None].expand(-1, -1, 2), torch.stack((labels(x), labels(x) * 0 - 100), 1)) * m.s
    ),
    "mse": lambda m, x: F.mse_loss(m.a(x), x) * m.t,
    "two": lambda m, x: (
        0.5 * torch.exp(-m.s) * F.cross_entropy(m.a(x), labels(x)) + 0.5 * torch.exp(-m.t) * F.mse_loss(m.a(x), x)
    ),
    "of-two": lambda m, x: (F.mse_loss(m.a(x), x) - 0.3 * -m.losses(x).mean()) * m.s / m.t,
    "twice": lambda m, x: m.losses(x).mean() * m.s * m.s,
    "stacked": lambda m, x: (torch.stack([F.mse_loss(m.a(x), x), m.losses(x).mean()]) * m.v[:2].softmax(0)).sum(),
    "stacked-product": lambda m, x: torch.stack([F.mse_loss(m.a(x), x), m.losses(x).mean()]) @ m.v[:2],
    "columns-product": lambda m, x: m.a(x).square().mean(0) @ m.v,
    "one-by-one": lambda m, x: sum(v * loss for v, loss in zip(m.v, m.a(x).square().mean(0).unbind(), strict=True)),
    "reshaped": lambda m, x: m.losses(x).mean().view(1, 1).squeeze(0).double() * m.t,
    "of-data": lambda m, x: m.losses(x).mean() + m.s * x.square().mean(),
    "also-inside": lambda m, x: m.losses(m.s * x).mean() * m.s,
}


@pytest.mark.parametrize("name", LEARNED_SCALES)
def test_a_learned_scale_of_a_loss_is_exact(name: str) -> None:
    module, x = Scaled(), torch.randn(5, D)
    for _ in range(2):  # the second time the loss is known from the first
        record = assert_exact(module, lambda m, x: LEARNED_SCALES[name](m, x).sum(), (x,))
        assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_a_learned_scale_of_a_sum_is_exact() -> None:
    record = assert_exact(Scaled(), lambda m, x: m.losses(x).sum() * m.s, (torch.randn(5, D),), loss_reduction="sum")
    assert record.weighting == ()


def test_a_learned_scale_of_a_large_loss_is_exact_from_the_second_step_on() -> None:
    module, x = Scaled(), torch.randn(3, 8192, D)
    for names in (["a.bias", "a.weight"], ["a.bias", "a.weight", "s"]):
        record = record_of(module, lambda m, x: F.mse_loss(m.a(x), x) * m.s, x)
        assert sorted(record.names) == names
    assert_exact(module, lambda m, x: m.a(x).square().mean() * m.s, (x,))


def test_a_learned_scale_of_losses_that_were_overwritten_is_refused_by_name() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        losses = m.losses(x)
        mean = losses.mean()
        losses.detach().zero_()
        return mean * m.s

    record = record_of(Scaled(), loss, torch.randn(5, D))
    assert "`mean` reduces over the batch axis" in record.unsupported["s"]


def test_a_learned_scale_of_what_is_no_sum_is_refused_by_name() -> None:
    for after in (
        Tensor.sqrt,
        Tensor.exp,
        lambda mean: mean + 1,
        lambda mean: F.pad(mean[None], (0, 1), value=2.0).sum(),
    ):
        record = record_of(Scaled(), lambda m, x, after=after: after(m.losses(x).mean()) * m.s, torch.randn(5, D))
        assert "`mean` reduces over the batch axis" in record.unsupported["s"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: (z.square().sum(1) / z.shape[1]).sum(),
        lambda z: (z.square().view(-1, 2, 2).sum((-1, -2)) / 4).sum(),
        lambda z: F.multilabel_soft_margin_loss(z, (z > 0).to(z.dtype), reduction="sum"),
    ],
)
def test_an_average_over_as_many_entries_as_there_are_samples_is_no_mean_over_these(loss: Any) -> None:
    torch.manual_seed(0)
    record = assert_exact(nn.Linear(D, D), lambda m, x: loss(m(x)), (torch.randn(D, D),), loss_reduction="sum")
    assert record.weighting == ()


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_a_sum_over_as_many_rows_as_there_are_entries_in_each_is_no_average(factor: float) -> None:
    """The samples give unequal numbers of rows: each of them the sum over its own ones."""
    module, x, rows = nn.Linear(D, 3), torch.randn(5, D), torch.tensor([0, 0, 1])
    record = record_of(module, lambda m, x: m(x).square()[rows].sum() * factor, x, loss_reduction="sum")
    assert (record.weighting, record.mixing, record.axis_lost) == ((), (), ())
    expected = loop(module, lambda m, x: m(x).square().sum() * factor, (x,))["weight"][:2]
    torch.testing.assert_close(record.grad_samples["weight"], expected * torch.tensor([2.0, 1.0])[:, None, None])


MASKED: dict[str, Any] = {
    "sums": lambda loss, mask: (loss * mask).sum() / mask.sum(),
    "means": lambda loss, mask: (loss * mask).mean() / mask.mean(),
    "not-zero": lambda loss, mask: (loss * mask).sum() / (mask.sum() + 1e-12),
    "a-number": lambda loss, mask: 0.5 * (loss * mask).sum() / max(mask.sum().item(), 1),
    "reciprocal": lambda loss, mask: (1 / mask.count_nonzero()) * (loss * mask).sum(1).sum(),
    "before": lambda loss, mask: (mask.sum(), torch.where(mask > 0, loss, 0.0).sum())[1] / mask.sum(),
    "flat": lambda loss, mask: (loss.flatten() * mask.flatten()).sum() / mask.sum(),
    "einsum": lambda loss, mask: torch.einsum("bt,bt->", loss, mask) / mask.sum(),
}


@pytest.mark.parametrize("counts", [(1, 4, 2, 1), (2, 4, 2, 1), (3, 3, 3, 3), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_drawn_in_the_step_weighs_the_samples_as_one_of_the_batch(name: str, counts: tuple[int, ...]) -> None:
    """Unequal counts are said; with equal ones the loss is a mean over the samples of their own masked means."""
    torch.manual_seed(0)
    module, x = nn.Linear(3, 1).double(), torch.randn(4, 4, 3, dtype=torch.float64)
    kept = torch.tensor([[place < count for place in range(4)] for count in counts])

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        drawn = torch.rand(len(x), 4, dtype=x.dtype)
        mask = torch.where(kept[: len(x)], drawn, 0.0).gt(0).to(x.dtype)
        return MASKED[name](m(x).square().squeeze(2), mask)

    if len(set(counts)) == 1:
        assert assert_exact(module, forward, (x,)).weighting == ()
    else:
        weighting = record_of(module, forward, x).weighting
        assert any("to which the samples add unequally" in text for text in weighting), weighting


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: 3 * z.square().sum(1).mean(),
        lambda z: z.square().sum(1).mean() + 3 * z.sin().sum(1).mean(),
        lambda z: z.square().sum(1).mean().mul(3.0),
    ],
)
def test_a_number_that_a_line_took_with_another_number_of_samples_is_not_that_of_this_batch(loss: Any) -> None:
    torch.manual_seed(0)
    module = nn.Linear(D, D)
    for batch_size in (8, 3, 8):
        record = assert_exact(module, lambda m, x: loss(m(x)), (torch.randn(batch_size, D),))
        assert record.weighting == ()


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x: sum(m(part).square().sum(1).mean() * len(part) for part in x.split(2)) / len(x),
        lambda m, x: torch.stack([m(part).square().sum(1).mean() * len(part) for part in x.split(2)]).sum() / len(x),
        lambda m, x: (
            sum(z.mean() * len(z) for z in m(x).square().split(2)) / len(x) + 0.3 * m(x).square().sum(1).mean()
        ),
    ],
)
def test_means_over_parts_of_the_batch_times_their_sizes_raise_no_alarm_however_many_samples_there_are(
    loss: Any,
) -> None:
    module = nn.Linear(D, D)
    for batch_size in (3, 4, 5, 8):
        record = assert_exact(module, loss, (torch.randn(batch_size, D),))
        assert record.weighting == ()


BY_CLASS: dict[str, Callable[..., Tensor]] = {  # of the losses, whose they are, and their number
    "counts": lambda each, own, count: each[own].mean() * own.sum(),
    "counted-places": lambda each, own, count: own.count_nonzero() * each[own].mean(),
    "counted-numbers": lambda each, own, count: each[own].mean() * count,
    "numbers": lambda each, own, count: each[own].mean() * int(count),
    "sums": lambda each, own, count: each[own].sum(),
}


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [0, 0, 0, 1], [2, 2, 2, 2, 2], [0, 1, 1, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("name", BY_CLASS)
def test_losses_added_up_by_class_are_exact(name: str, labels: list[int]) -> None:
    """Each mean times the number of its samples, as the step counts them."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        each, classes = F.cross_entropy(m(x), y, reduction="none"), zip(*y.unique(return_counts=True), strict=True)
        return sum(BY_CLASS[name](each, y == label, count) for label, count in classes) / len(x)

    record = assert_exact(nn.Linear(D, D), loss, (torch.randn(len(labels), D), torch.tensor(labels)))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_a_sum_over_some_samples_is_divided_by_the_number_of_all_however_many_these_are(batch_size: int) -> None:
    module = nn.Linear(D, D)

    def loss(m: Any, x: Tensor) -> Tensor:
        return m(x).square().sum(1)[x[:, 0] > 0].sum() / len(x)

    for count in (batch_size, 1, batch_size, batch_size - 1):
        x = torch.randn(batch_size, D).abs()
        x[count:, 0] *= -1
        record = record_of(module, loss, x)
        assert record.weighting == ()
        expected = loop(module, loss, (x,))
        kept = slice(None) if record.samples is None else record.samples
        for name, grads in expected.items():
            torch.testing.assert_close(record.grad_samples[name], grads[kept])


@pytest.mark.parametrize(
    "nothing",
    [
        lambda z: z.sum() * 0,
        lambda z: 0.0 * z.square().mean(),
        lambda z: (z * 0).sum(),
        lambda z: z[z.detach().sum(1) > 1e9].sum(),
        lambda z: z[z.detach().sum(1) > 1e9].sum() * 0,
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_term_that_is_nothing_is_no_sum_beside_a_mean(reduction: Any, nothing: Any) -> None:
    module = nn.Linear(D, D)
    for batch_size in (3, 4):
        for order in (1, -1):

            def loss(m: Any, x: Tensor, order: int = order) -> Tensor:
                first, second = (F.mse_loss(m(x), x, reduction=reduction), nothing(m(x)))[::order]
                return first + second

            record = assert_exact(module, loss, (torch.randn(batch_size, D),), loss_reduction=reduction)
            assert record.weighting == ()


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy, F.multi_margin_loss])
def test_a_loss_whose_class_weights_alone_are_the_batch_is_named(loss: Any) -> None:
    target = torch.tensor([0, 2, 1, 0, 2])
    module = Model(lambda m, x: loss(m.w, target, weight=x), w=parameter(5, 3))
    record = record_of(module, lambda m, x: m(x), torch.rand(3), loss_reduction="sum")
    assert set(record.unsupported) == {"w"}
    assert "meets the batch in an argument that lies over no row of the others" in record.unsupported["w"]
