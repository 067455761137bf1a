"""A cut batch axis, written to through its views, masked, doubled or weighed: exact, or named with true shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from tests.capture.reference import record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B, WIDTH = 4, 3
FIRST, MASK = torch.tensor([0]), torch.tensor([[True, False], [True, True]])[..., None]


def cut(z: Tensor) -> Tensor:
    return z.view(2, 2, WIDTH)


def shares_of(module: nn.Linear, loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What the row of each sample adds to the gradients of the batch, (B, out, in + 1)."""
    z = module(x).detach().requires_grad_()
    (rows,) = torch.autograd.grad(loss(z * 1.0), z)
    return rows[:, :, None] * F.pad(x, (0, 1), value=1.0)[:, None]


def assert_shares(record: PerSampleRecord, shares: Tensor) -> None:
    """The values times the weight of a sample are its shares, and who has no value has no share."""
    values = torch.cat([record.grad_samples["weight"], record.grad_samples["bias"][..., None]], 2)
    samples = range(B) if record.samples is None else record.samples.tolist()
    weight = 1 / B if record.factor is None else float(record.factor)
    for value, sample in zip(values, samples, strict=True):
        torch.testing.assert_close(value * weight, shares[sample], rtol=1e-10, atol=1e-14)
    assert not shares[[sample for sample in range(B) if sample not in samples]].any()


def written(write: Callable[[Tensor], object], read: Callable[[Tensor], Tensor] = lambda v: v) -> Callable:
    """A mean of squares of a cut tensor that was written to."""

    def loss(z: Tensor) -> Tensor:
        v = cut(z.clone())
        write(v)
        return read(v).square().mean()

    return loss


def written_beside(write: Callable[[Tensor], object], made: Callable[[Tensor], Tensor]) -> Callable:
    """The same of what was made of the tensor's memory before."""

    def loss(z: Tensor) -> Tensor:
        base = z.clone()
        v = cut(base)
        again = made(base)
        write(v)
        return again.square().mean()

    return loss


def copy_of_another(v: Tensor) -> None:
    v[:, 0].copy_(v[:, 1].clone())


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": written(lambda v: v[:, 0].zero_()),
    "a-number": written(lambda v: v.select(1, 0).fill_(0.5)),
    "constants": written(lambda v: v.narrow(0, 1, 1).copy_(torch.ones(1, 2, WIDTH))),
    "some-features": written(lambda v: v[..., 1].zero_()),
    "those-of-another": written(copy_of_another),
    "those-of-another-read-at-the-base": written_beside(copy_of_another, lambda base: base),
    "those-of-another-in-a-part": written_beside(copy_of_another, lambda base: base.view(2, 2, 1, WIDTH)[:1]),
    "swapped": written(lambda v: v.select(0, 0).copy_(v.flip(0)[0].clone()), lambda v: v[:1]),
    "of-a-chunk": written(lambda v: v.narrow(1, 0, 1).copy_(v.chunk(2, 1)[1].clone())),
    "by-a-transpose": written(lambda v: v.transpose(0, 1)[0].copy_(v.transpose(0, 1)[1].clone())),
    "copied-by-an-index": written(lambda v: v.index_copy_(0, FIRST, v[1:].clone())),
    "a-part-copied-by-an-index": written(lambda v: v.index_copy_(0, FIRST, v[1:].clone()), lambda v: v[:1]),
    "features-copied-by-an-index": written(lambda v: v.index_copy_(2, FIRST, v[..., 1:2].clone())),
    "filled-rows-of-samples": lambda z: z.index_fill(0, FIRST, 0.5).square().mean(),
    "constants-in-rows-of-samples": lambda z: z.index_copy(0, FIRST, torch.ones(1, WIDTH)).square().mean(),
    "features-copied-into-constants": lambda z: torch.zeros(B, 5).index_copy(1, FIRST + 4, z[:, :1]).square().mean(),
    "added-by-an-index": written(lambda v: v.index_add_(2, FIRST, v[..., 1:2].clone())),
    "masked-and-divided": lambda z: torch.where(MASK, cut(z.square()), 0.0).sum() / (3 * WIDTH),
    "masked": lambda z: cut(z.square()).masked_fill(~MASK, 0.0).mean(),
    "times-a-mask": lambda z: (cut(z.square()) * MASK).mean((0, 1)).mean(),
    "a-sum-in-each-pair": lambda z: cut(z.square()).sum(1).mean(),
    "windows-of-which-some-are-taken": lambda z: torch.where(
        torch.tensor([True, False, True])[:, None, None], z.square().unfold(0, 2, 1), 0.0
    ).mean(),
    "norms-of-features": lambda z: torch.linalg.vector_norm(cut(z), dim=-1).mean(),
    "a-softmax-over-features": lambda z: (cut(z).softmax(-1) * torch.tensor([1.0, -2.0, 3.0])).sum((1, 2)).mean(),
    "a-mean-over-samples-written-through-a-view": lambda z: doubled(z.square().mean()),
    "a-loss-beside-constants": lambda z: F.smooth_l1_loss(cut(z), torch.arange(12.0).view(2, 2, WIDTH)),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_becomes_of_the_samples_of_a_cut_axis_is_known(name: str) -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: EXACT[name](m(x)), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_shares(record, shares_of(module, EXACT[name], x))


def overlapping(z: Tensor) -> Tensor:
    windows = z.unfold(0, 2, 1)
    windows.copy_(windows.flip(0).clone())
    return z


def shifted(z: Tensor) -> Tensor:
    flat = z.view(-1)
    flat[:3].add_(z[3].clone())
    return flat


def doubled(number: Tensor) -> Tensor:
    """Twice a number, written through a view of it."""
    number.view(1).mul_(2.0)
    return number


def two_means(z: Tensor) -> Tensor:
    """The mean over the first two samples, and that over the others."""
    return torch.stack([z.square()[:2].mean(), z.square()[2:].mean()])


def windows_less_one(z: Tensor) -> Tensor:
    """Samples 0 and 1, 1 and 2, 2 and 3, where none of 0 and 1 is left."""
    windows = z.unfold(0, 2, 1)
    windows.unfold(0, 1, 2)[0] = 0.0
    return windows


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "one-less-the-other": lambda z: (cut(z)[:, 0] - cut(z)[:, 1]).mean(),
    "by-a-diagonal": written(lambda v: v.diagonal(0, 0, 1).copy_(v[:, 0].T.clone())),
    "by-strides": written(lambda v: v.as_strided((2, WIDTH), (2 * WIDTH, 1)).copy_(v[:, 1].clone())),
    "those-of-another-read-by-an-earlier-view": written_beside(copy_of_another, lambda base: base[1:]),
    "doubled-and-summed-in-pairs": lambda z: cut(z.square())[:, [0, 0, 1]].sum(1).mean(),
    "doubled-windows": lambda z: z.square().unfold(0, 2, 1).sum(-1).mean(),
    "doubled-and-divided": lambda z: cut(z.square())[:, [0, 0, 1]].sum() / (6 * WIDTH),
    "divided-before": lambda z: (cut(z.square())[:, [0, 0, 1]] / (6 * WIDTH)).sum(),
    "by-a-dot": lambda z: cut(z.square())[:, [0, 0, 1]].flatten().dot(torch.full((18,), 1 / 18)),
    "added-in-place": written(lambda v: v[:, 0].add_(v[:, 1].clone())),
    "all-added-in-place": written(lambda v: v.add_(v.flip(0).clone())),
    "added": written(lambda v: None, lambda v: v + v.flip(1)),
    "lerped": written(lambda v: v[0].lerp_(v[1].clone(), 0.3)),
    "norms-across-a-pair": lambda z: torch.linalg.vector_norm(cut(z), dim=1).mean(),
    "a-softmax-across-a-pair": lambda z: (cut(z).softmax(1) * torch.tensor([1.0, -2.0])[:, None]).mean(),
    "less-the-mean-of-a-pair": lambda z: (cut(z) - cut(z).mean(1, keepdim=True)).square().mean(),
    "numbers-one-by-one": lambda z: sum(cut(z).amax(1).flatten().unbind()) / 6,
    "the-square-of-a-mean-written-through-a-view": lambda z: doubled(z.square().mean()).square(),
    "a-sum-written-through-a-view": lambda z: doubled(z.square().sum()),
    "two-means-written-through-a-view": lambda z: doubled(two_means(z).sum()).square(),
    "one-of-two-means-negated-in-place": lambda z: two_means(z).neg_()[0],
    "one-of-two-means-scaled-in-place": lambda z: two_means(z).mul_(2.0)[0],
    "one-of-two-means-and-a-constant": lambda z: (two_means(z) + 1.0)[1],
    "two-means-weighed": lambda z: (two_means(z) * torch.tensor([0.75, 0.25])).sum(),
    "a-constant-in-the-place-of-others": lambda z: windows_less_one(z.clone()).mean(),
    "places-that-overlap": lambda z: overlapping(z.clone()).square().mean(),
    "added-to-a-part-and-read-one-by-one": lambda z: sum(each.square() for each in shifted(z.clone())) / 12,
    "weights-by-place": lambda z: torch.einsum("abc,b->", cut(z.square()), torch.tensor([0.75, 0.25])),
}


@pytest.mark.parametrize("name", NAMED)
def test_samples_of_a_cut_axis_that_weigh_unequally_or_meet_are_named(name: str) -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: NAMED[name](m(x)), x)
    assert (*record.mixing, *record.axis_lost, *record.weighting) != ()
    assert record.unsupported == {}
    assert_shares(record, shares_of(module, NAMED[name], x))


@pytest.mark.parametrize("name", ["sum", "rows-of-a-mean", "a-dot", "one-by-one", "losses-of-some"])
def test_rows_taken_twice_and_divided_by_their_number_are_named(name: str) -> None:
    taken = [3, 1, 2, 3]
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda z: z.square()[taken].sum() / len(taken),
        "rows-of-a-mean": lambda z: (z.square()[taken] / (WIDTH * len(taken))).sum(),
        "a-dot": lambda z: z.square()[taken].flatten().dot(torch.full((12,), 1 / 12)),
        "one-by-one": lambda z: sum(row.square().mean() for row in z[taken]) / len(taken),
        "losses-of-some": lambda z: (z[:2].square().mean() + z[:2].exp().mean() + z[2:].square().mean()) / 3,
    }
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: losses[name](m(x)), x)
    assert any("averages over unequal numbers of rows" in text for text in record.weighting)


PAIRS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    # (one over the six entries of a pair may as well be one over the number of samples)
    "copied": (6, lambda v: v.index_copy(0, torch.tensor([0]), v[-1:])),
    "beside-constants": (4, lambda v: v.index_fill(2, torch.tensor([0]), 0.2)[[1, 0, 1]]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_means_over_pairs_of_samples_of_which_one_is_taken_twice_are_named(name: str) -> None:
    size, taken = PAIRS[name]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([pair.mean() for pair in taken(m(x).clone().view(-1, 2, WIDTH))]).mean()

    record = record_of(nn.Linear(5, WIDTH), loss, torch.randn(size, 5))
    assert any("over different numbers of samples, or over some twice" in text for text in record.weighting)


def test_a_tensor_of_data_that_was_cut_with_the_samples_stays_beside_them() -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.vector_norm(cut(m(x)) - cut(y), dim=-1).mean()

    module, x, y = nn.Linear(5, WIDTH), torch.randn(B, 5), torch.randn(B, WIDTH)
    record = record_of(module, loss, x, y)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_shares(record, shares_of(module, lambda z: torch.linalg.vector_norm(cut(z) - cut(y), dim=-1).mean(), x))


IN_PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "a-mean-of-sums": lambda v: (v[:, 0].square() + v[:, 1].square()).mean(),
    "a-mean-of-means": lambda v: ((v[:, 0].square() + v[:, 1].exp()) / 2).mean(),
    "by-rows": lambda v: (v[:, 0].square().sum(1) + v[:, 1].square().sum(1)).mean() / 2,
    "less-constants": lambda v: (v[:, 0].square() - 1.0 + v[:, 1].square()).sum(-1).mean(),
}


@pytest.mark.parametrize("name", IN_PAIRS)
def test_losses_of_the_samples_of_a_pair_are_added(name: str) -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: IN_PAIRS[name](cut(m(x))), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_shares(record, shares_of(module, lambda z: IN_PAIRS[name](cut(z)), x))


MEET_IN_PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda v: (v[:, 0] - v[:, 1]).square().mean(),
    "multiplied": lambda v: (v[:, 0] * v[:, 1]).mean(),
    "the-larger": lambda v: torch.maximum(v[:, 0], v[:, 1]).mean(),
    "half-of-one": lambda v: (v[:, 0].square() + 0.5 * v[:, 1].square()).mean() + v[:, 0].mean() * v[:, 1].mean(),
}


@pytest.mark.parametrize("name", MEET_IN_PAIRS)
def test_samples_that_meet_in_a_pair_are_named(name: str) -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: MEET_IN_PAIRS[name](cut(m(x))), x)
    assert record.mixing != ()
    assert_shares(record, shares_of(module, lambda z: MEET_IN_PAIRS[name](cut(z)), x))


@pytest.mark.parametrize("name", ["entries", "sums", "doubled"])
def test_what_a_sample_weighs_in_several_numbers_of_a_cut_axis_is_said_not_to_be_known(name: str) -> None:
    numbers: dict[str, Callable[[Tensor], Tensor]] = {
        "entries": lambda v: v.square(),
        "sums": lambda v: v.square().sum(1),
        "doubled": lambda v: v[:, [0, 0, 1]].square().sum(1),
    }
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        found = numbers[name](cut(module(x)))
        found.backward(torch.ones_like(found))
    assert any("go backward from one number" in text for text in capture.record.weighting)
