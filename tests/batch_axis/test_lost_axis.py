"""What is done to values that hold the samples along no axis any more: it is said where it may mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model
from tests.capture.reference import assert_exact, assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

QUEUE, NEIGHBOURS = torch.randn(6, 1, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "classes-of-two-samples": lambda z: F.cross_entropy(z.view(-1, 2), torch.zeros(len(z) // 2, dtype=torch.long)),
    "logsumexp-of-two-samples": lambda z: z.view(-1, 2).logsumexp(1).mean(),
    "normalised-over-two-samples": lambda z: F.layer_norm(z.view(-1, 2), (2,), eps=0.1).exp().mean(),
    "square-of-a-partial-sum": lambda z: z.view(-1, 2).sum(1).pow(2).mean(),
    "square-of-a-partial-mean": lambda z: z.view(-1, 2).mean(1).square().sum(),
    "beyond-a-bound": lambda z: z.square().mean().clamp(max=1e-6),
    "square-of-a-mean": lambda z: z.mean().pow(2),
    "square-of-a-copied-mean": lambda z: z.mean().clone().squeeze().pow(2),
    "root-of-a-mean": lambda z: z.square().view(-1, 2, 1).mean().sqrt(),
    "repeated-and-cut-apart": lambda z: z.repeat(2, 1).view(len(z), 2).std(1).mean(),
    "graph": lambda z: torch.sparse.mm(NEIGHBOURS[: len(z), : len(z)].to_sparse(), z).pow(2).mean(),
    "product-with-fixed-numbers": lambda z: (torch.ones(3, 2) @ z.view(2, -1)).square().sum(),
    "softmax-with-a-queue": lambda z: torch.cat([z, QUEUE]).softmax(0).pow(2).sum(),
    "spread-with-a-queue": lambda z: torch.cat([z, QUEUE]).std(0).sum(),
    "softmax-of-a-padded-batch": lambda z: F.pad(z, (0, 0, 0, 1)).softmax(0).pow(2).sum(),
    "windows-of-samples": lambda z: z[:, 0].unfold(0, 2, 1).logsumexp(1).mean(),
    "taken": lambda z: z.take(torch.tensor([[0, 1], [1, 0]])).softmax(1)[:, 0].sum(),
    "stacked-again": lambda z: torch.stack(list(z)).logsumexp(0).sum(),
    "two-numbers": lambda z: z[0, 0] * z[1, 0],
    "compared": lambda z: -F.logsigmoid(z[0] - z[1]).mean(),
    "product-of-all": lambda z: torch.stack(z.unbind(0)).prod(),
    "product-of-unbound": lambda z: (z.unbind(0)[0] * z.unbind(0)[1]).sum(),
    "written-side-by-side": lambda z: side_by_side(z).softmax(0).square().sum(),
    "masked-by-others": lambda z: (z.view(-1, 2) * (z.detach().flip(0).view(-1, 2) > 0)).sum(),
}


def side_by_side(z: Tensor) -> Tensor:
    room = torch.zeros(2, 1)
    room[0] = z[0]
    room[1] = z[1]
    return room


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_after_their_axis_was_lost_are_said(name: str, samples: int) -> None:
    module = network()
    record = record_of(module, lambda m, x: MIXING[name](m(x)), torch.randn(samples, 5))
    assert (*record.mixing, *record.axis_lost) != (), record.weighting
    assert record.unsupported == {}
    for parameter, p in module.named_parameters():  # values are then each sample's contribution
        torch.testing.assert_close(record.grad_samples[parameter].mean(0), p.grad, rtol=1e-10, atol=1e-12)


def test_one_sample_mixes_with_none() -> None:
    record = record_of(network(), lambda m, x: torch.cat([m(x), QUEUE]).softmax(0).pow(2).sum(), torch.randn(1, 5))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "within-bounds": lambda z, x: z.square().mean().clamp(min=0.0, max=1e9),
    "positive": lambda z, x: torch.maximum(z.square().mean().relu().abs(), torch.zeros(())),
    "to-the-power-of-one": lambda z, x: z.square().sum() ** 1 / len(z),
    "finite": lambda z, x: torch.nan_to_num(z.square().mean()),
    "with-a-product-added": lambda z, x: torch.addcmul(z.square().mean(), torch.tensor(0.5), torch.tensor(2.0)),
    "cut-apart": lambda z, x: z.view(-1, 2).square().mean() if len(z) > 1 else z.square().mean(),
    "cut-apart-and-moved": lambda z, x: (
        (2 * z.exp().view(2, -1).t().reshape(-1).clamp(max=9.0)).mean() if len(z) > 1 else 2 * z.exp().mean()
    ),
    "each-sample-in-a-loop": lambda z, x: (
        sum(F.cross_entropy(torch.cat([row, row.square()]), target) for row, target in zip(z, targets(x), strict=True))
        / len(z)
    ),
    "each-sample-by-its-number": lambda z, x: torch.stack(
        [F.mse_loss(z[i], x[i, :1]) * z[i].exp().sum() for i in range(len(z))]
    ).mean(),
    "each-sample-by-a-mean-of-none-for-some": lambda z, x: torch.stack(
        [z[i][int(targets(x)[i]) :].square().mean().nan_to_num() for i in range(len(z))]
    ).mean(),
    "joined-again": lambda z, x: torch.cat([z[i].sigmoid() for i in range(len(z))]).square().mean(),
    "shuffled-in-a-loop": lambda z, x: torch.stack([z[i] for i in reversed(range(len(z)))]).square().mean(),
    "a-number-of-its-own": lambda z, x: sum(z[i, targets(x)[i] * 0].square() for i in range(len(z))) / len(z),
    "terms": lambda z, x: z.square().mean() + 0.5 * z.flatten().abs().mean() - z.mean() / 3 + 1.0,
    "scaled-sum-of-rows": lambda z, x: (z.square().mean(0) @ torch.ones(1)).reshape(1, 1).sum() * 2,
    "in-place": lambda z, x: added_in_place(z),
    "copied": lambda z, x: z.square().mean().clone().squeeze() + z.mean().clone().detach().squeeze() * 0,
}


def targets(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def added_in_place(z: Tensor) -> Tensor:
    total = z.square().sum() * 0
    for row in z:
        total += row.square().sum()
    return total / len(z)


@pytest.mark.parametrize("name", PLAIN)
def test_values_that_stay_a_sum_over_the_samples_raise_no_alarm(name: str) -> None:
    module, batch = network(), torch.randn(4, 5)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return PLAIN[name](m(x), x)

    record = record_of(module, loss, batch)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, loss, (batch,)))


def test_a_layer_on_samples_that_were_stacked_again_is_exact() -> None:
    module, batch = network(), torch.randn(4, 5)

    def loss(m: Any, x: Tensor) -> Tensor:
        return m[2](torch.stack([2 * m[1](row) for row in m[0](x)])).square().mean()

    record = record_of(module, loss, batch)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, loss, (batch,)))


def test_a_loss_of_some_samples_alone_is_said() -> None:
    record = record_of(
        network(), lambda m, x: (m(x)[0] + m(x)[2]).square().sum() * 0 + m(x)[1].sum(), torch.randn(4, 5)
    )
    assert any("of a value computed over the whole batch" in text for text in record.mixing)
    record = record_of(network(), lambda m, x: m(x)[0].square().sum() + m(x)[2].square().sum(), torch.randn(4, 5))
    assert (record.mixing, record.axis_lost) == ((), ())
    assert record.weighting == (
        "the loss is a sum over the samples, but loss_reduction is 'mean': pass loss_reduction='sum'",
    )
    assert record.samples is not None
    assert (record.samples.tolist(), record.norms().shape) == ([0, 2], (2,))


def routed(x: Tensor) -> list[Tensor]:
    return [torch.where(x[:, 0] > 0)[0], torch.where(x[:, 0] <= 0)[0]]


def numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x)).view(-1, 1)


def added_for_each(m: nn.Module, x: Tensor, out: Tensor, parts: int = 2, *, inplace: bool = False) -> Tensor:
    for index in routed(x)[:parts]:
        add = out.index_add_ if inplace else out.index_add
        out = add(0, index, m[0](x[index]).tanh())
    return m[2](out).square().mean()


def into_rows_of_steps(m: nn.Module, x: Tensor) -> Tensor:
    steps = m[0](x[:, None].expand(-1, 3, -1)).flatten(0, 1)
    index = torch.where(steps.detach()[:, 0] > 0)[0]
    return m[2](torch.zeros(len(steps), 6).index_add(0, index, steps[index].exp())).square().mean()


ROWS_OF_THEIR_OWN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "added-to-zeros": lambda m, x: added_for_each(m, x, torch.zeros(len(x), 6)),
    "added-to-some-zeros": lambda m, x: added_for_each(m, x, torch.zeros(len(x), 6), 1),
    "added-to-zeros-in-place": lambda m, x: added_for_each(m, x, torch.zeros(len(x), 6), inplace=True),
    "added-to-zeros-like": lambda m, x: added_for_each(m, x, torch.zeros_like(m[0](x)), 1),
    "added-to-steps": into_rows_of_steps,
    "copied-in-another-order": lambda m, x: (
        torch.zeros(len(x), 1).index_copy(0, torch.arange(len(x)).flip(0), m(x)).exp().mean()
    ),
    "gathered-in-another-order": lambda m, x: m(x).gather(0, numbers(x).flip(0)).exp().mean(),
    "gathered-where-labelled": lambda m, x: m(x).gather(0, (x[:, :1] > -99).nonzero()[:, :1]).exp().mean(),
    "numbers-gathered": lambda m, x: m(x)[:, 0].gather(0, torch.arange(len(x)).flip(0)).exp().mean(),
    "taken-along": lambda m, x: torch.take_along_dim(m(x), numbers(x).flip(0), 0).exp().mean(),
}


@pytest.mark.parametrize("name", ROWS_OF_THEIR_OWN)
def test_rows_written_or_gathered_by_index_are_exact(name: str) -> None:
    module, batch = network(), torch.randn(6, 5)
    batch[:, 0] -= batch[:, 0].median()  # samples on both ways
    record = record_of(module, ROWS_OF_THEIR_OWN[name], batch)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, ROWS_OF_THEIR_OWN[name], (batch,)))


ROWS_OF_OTHERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "two-samples-in-one-row": lambda m, x: (
        torch.zeros(len(x), 1).index_add(0, torch.arange(len(x)) // 2, m(x)).square().mean()
    ),
    "two-samples-in-one-row-of-the-result": lambda m, x: (
        m[0](x).gather(0, (numbers(x) + torch.arange(6)) % len(x)).softmax(1).square().mean()
    ),
    "chosen-by-the-batch": lambda m, x: m(x).gather(0, m(x).detach().argsort(0)).square().mean(),
    "indices-of-other-samples": lambda m, x: (
        m(x).gather(0, torch.where(x[:, :1] > 9, 0, numbers(x).roll(1))).square().mean()
    ),
}


@pytest.mark.parametrize("name", ROWS_OF_OTHERS)
def test_rows_that_belong_to_no_one_sample_are_said(name: str) -> None:
    record = record_of(network(), ROWS_OF_OTHERS[name], torch.randn(6, 5))
    assert record.axis_lost != () == record.mixing


PICKED_BY_VALUE: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda s: s[s.argmax()],
    "positive": lambda s: s[s > s.min()].sum(),
    "narrowed": lambda s: s.narrow(0, s.argmax(), 1).sum(),
    "selected": lambda s: s.index_select(0, s.argmax()[None]).sum(),
    "gathered": lambda s: s.gather(0, s.topk(2).indices).sum(),
    "masked": lambda s: s.masked_select(s > s.min()).sum(),
    "where": lambda s: torch.where(s > s.min(), s, 0.0).sum(),
    "taken": lambda s: s.take(s.argmax()).sum(),
}


@pytest.mark.parametrize("name", PICKED_BY_VALUE)
def test_a_choice_by_what_the_batch_sums_up_to_is_said(name: str) -> None:
    record = record_of(nn.Linear(5, 3), lambda m, x: PICKED_BY_VALUE[name](m(x).mean(0)), torch.randn(4, 5))
    assert record.mixing != ()


PICKED_FOR_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda z: z[:, z.detach().mean(0).argmax()].mean(),
    "select": lambda z: z.select(1, z.detach().mean(0).argmax()).mean(),
    "narrow": lambda z: z.narrow(1, z.detach().mean(0).argmax(), 1).mean(),
    "sample": lambda z: z[z.detach()[:, 0].argmax()].sum(),
    "entry-of-a-sample": lambda z: z[0, z[1].argmax()] + z[1, 0],
}


@pytest.mark.parametrize("name", PICKED_FOR_ALL)
def test_a_choice_for_every_sample_by_values_of_others_is_said(name: str) -> None:
    record = record_of(nn.Linear(5, 3), lambda m, x: PICKED_FOR_ALL[name](m(x)), torch.randn(4, 5))
    assert record.mixing != ()


@pytest.mark.parametrize(
    "shifts", [((1, 1), (0, 0)), ((1, 1), (0, -2)), ((1, 2, 1), (0, 1, 0)), (1, 0), ((2, 1), (1, 1))]
)
def test_rows_rolled_along_an_axis_named_more_than_once(shifts: tuple[object, object]) -> None:
    module, batch = nn.Linear(4, 4), torch.randn(4, 4)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x.roll(*shifts)).pow(2).mean()

    assert_values(record_of(module, loss, batch), loop(module, loss, (batch,)))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.filterwarnings("error::lightning_persample.PerSampleWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("of", ["data", "activations"])
def test_sequences_of_one_sample_each_are_padded_to_a_batch(of: str, batch_first: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x if of == "data" else m.a(x)
        cut = [hidden[i][: 2 + int(x[i, 0, 0] > 0)] for i in range(len(x))]
        padded = nn.utils.rnn.pad_sequence(cut, batch_first=batch_first)
        padded = padded if batch_first else padded.transpose(0, 1)
        return (m.b(padded).tanh() * (padded != 0).any(-1, keepdim=True)).sum(1)

    x = torch.randn(4, 3, 5)
    x[:, 0, 0] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    module = Model(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 3))
    assert_exact(module, lambda m, x: m(x).square().sum(1).mean(), (x,))
