"""Values whose batch axis was cut apart, while each entry is still of one sample: picked, doubled, padded, added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B, WIDTH = 4, 3
CONSTANTS = torch.randn(2, WIDTH, dtype=torch.float64)


def mean_of_squares(z: Tensor) -> Tensor:
    return z.square().mean()


def norm_of(module: nn.Module, number: Tensor) -> Tensor:
    """The norm of a number's gradient by all parameters."""
    grads = torch.autograd.grad(number, list(module.parameters()), retain_graph=True)
    return torch.cat([grad.flatten() for grad in grads]).norm()


SOME: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {  # what is taken, and the samples it is of
    "by-a-number": (lambda z: z.view(2, 2, WIDTH)[:, 0], [0, 2]),
    "by-a-slice": (lambda z: z.view(2, 2, WIDTH)[:, 1:], [1, 3]),
    "by-an-index": (lambda z: z.view(2, 2, WIDTH)[:, torch.tensor([1])], [1, 3]),
    "selected": (lambda z: z.tanh().view(2, 2, WIDTH).select(1, 0), [0, 2]),
    "narrowed": (lambda z: z.view(2, 2, WIDTH).narrow(1, 0, 1), [0, 2]),
    "one-of-the-unbound": (lambda z: z.view(2, 2, WIDTH).unbind(1)[1], [1, 3]),
    "one-of-the-chunks": (lambda z: (2 * z).view(2, 2, WIDTH).chunk(2, 1)[0], [0, 2]),
    "after-an-op": (lambda z: z.view(2, 2, WIDTH).exp()[:, 0], [0, 2]),
    "after-a-sum-of-features": (lambda z: z.view(2, 2, WIDTH).sum(-1)[:, 0], [0, 2]),
    "padded-and-cut": (lambda z: F.pad(z, (0, 0, 0, 2))[1:4], [1, 2, 3]),
    "taken": (lambda z: z[:, 0].take(torch.tensor([0, 3])), [0, 3]),
    "cut-by-a-pad": (lambda z: F.pad(z.view(2, 2, WIDTH), (0, 0, 0, -1)), [0, 2]),
    "one-window": (lambda z: z.unfold(0, 3, 2).movedim(2, 0), [0, 1, 2]),
    "beside-constants": (lambda z: torch.cat([z, CONSTANTS])[1:3], [1, 2]),
}


@pytest.mark.parametrize("name", SOME)
def test_some_samples_taken_after_the_axis_was_cut_are_known(name: str) -> None:
    taken, samples = SOME[name]
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: mean_of_squares(taken(m(x))), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert record.samples is not None
    assert record.samples.tolist() == samples
    assert record.factor is not None
    assert float(record.factor) == 1 / len(samples)
    values = taken(module(x))
    along = list(values.shape).index(len(samples))
    for norm, row in zip(record.norms(), values.unbind(along), strict=True):
        torch.testing.assert_close(norm, norm_of(module, row.square().mean()), rtol=1e-10, atol=0)


UNEQUAL: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {  # and how often each sample's row is in it
    "doubled": (lambda z: z.view(2, 2, WIDTH)[:, [0, 0, 1]], [2, 1, 2, 1]),
    "joined-with-a-part": (lambda z: torch.cat([v := z.view(2, 2, WIDTH), v[:1]]), [2, 2, 1, 1]),
    "replicated": (lambda z: F.pad(z[None, None], (0, 0, 0, 2), mode="replicate"), [1, 1, 1, 3]),
    "reflected": (lambda z: F.pad(z[None, None], (0, 0, 0, 2), mode="reflect"), [1, 2, 2, 1]),
    "circular": (lambda z: F.pad(z[None, None], (0, 0, 1, 0), mode="circular"), [1, 1, 1, 2]),
    "overlapping-windows": (lambda z: z.unfold(0, 2, 1), [1, 2, 2, 1]),
    "taken-twice": (lambda z: z.take(torch.tensor([[0, 3], [6, 6]])), [1, 1, 2, 0]),
    "cut-off": (lambda z: z.T.reshape(-1).view(6, 2)[:5], [3, 3, 2, 2]),
    "overwritten": (lambda z: overwritten(z.view(2, 2, WIDTH)), [2, 1, 0, 1]),
    "negative": (lambda z: (-z.view(2, 2, WIDTH))[:, [0, 0, 1]], [2, 1, 2, 1]),
    "constants-written-by-an-index": (
        lambda z: overwritten_by_constants(z.view(2, 2, WIDTH).repeat(1, 2, 1), (0, torch.tensor([0]))),
        [1, 2, 2, 2],
    ),
    "repeated": (lambda z: z.view(2, 2, WIDTH).repeat_interleave(torch.tensor([1, 3]), 1), [1, 3, 1, 3]),
}


def overwritten_by_constants(v: Tensor, index: Any) -> Tensor:
    v = v.clone()
    v[index] = CONSTANTS[0]
    return v


def overwritten(v: Tensor) -> Tensor:
    v = v.clone()
    v[1, 0] = v[0, 0]
    return v


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_mean_over_unequal_numbers_of_entries_is_named(name: str) -> None:
    taken, times = UNEQUAL[name]
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: mean_of_squares(taken(m(x))), x)
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    assert record.factor is None
    texts = ("averages over unequal numbers of", "gives the samples unequal weights")
    assert any(text in each for text in texts for each in record.weighting), record.weighting
    present = [sample for sample in range(B) if times[sample]]
    assert (record.samples.tolist() if record.samples is not None else [*range(B)]) == present
    values = taken(module(x))
    number = taken(torch.arange(B).repeat_interleave(WIDTH).view(B, WIDTH).double()).abs().round()
    for norm, sample in zip(record.norms(), present, strict=True):  # each sample's share of the mean, times B
        share = values[number == sample].square().sum() / values.numel()
        torch.testing.assert_close(norm, norm_of(module, share) * B, rtol=1e-10, atol=0)


def test_an_entrywise_loss_over_unequal_numbers_of_entries_is_named() -> None:
    target = torch.randn(2, 3, WIDTH)
    record = record_of(
        nn.Linear(5, WIDTH), lambda m, x: F.mse_loss(m(x).view(2, 2, WIDTH)[:, [0, 0, 1]], target), torch.randn(B, 5)
    )
    assert any("`mse_loss` averages over unequal numbers of rows" in text for text in record.weighting)


WEIGHED: dict[str, Callable[[Tensor], Tensor]] = {
    "product-with-constants": lambda v: (torch.tensor([[1.0, 3.0]]) @ v).sum(),
    "einsum": lambda v: torch.einsum("abc,b->", v, torch.tensor([0.75, 0.25])),
    "running-sum": lambda v: v.cumsum(1).mean(),
    "differences": lambda v: v.diff(dim=1).mean(),
    "mean-of-doubled": lambda v: v[:, [0, 0, 1]].mean(1).mean(),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_constants_that_weigh_the_samples_unequally_are_named(name: str) -> None:
    record = record_of(
        nn.Linear(5, WIDTH), lambda m, x: WEIGHED[name](m(x).square().view(2, 2, WIDTH)), torch.randn(B, 5)
    )
    assert (record.mixing, record.axis_lost, record.factor) == ((), (), None)
    assert any("gives the samples unequal weights" in text or "averages over un" in text for text in record.weighting)


def test_a_choice_among_sums_over_some_samples_each_is_known() -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: m(x).view(2, 2, WIDTH).square().mean(1)[0].mean(), x)
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
    assert_rows(record, module, x, [0, 1])


def assert_rows(record: Any, module: nn.Module, x: Tensor, samples: list[int]) -> None:
    """The values are the gradients of the mean of squares of these samples' rows."""
    assert record.samples.tolist() == samples
    assert float(record.factor) == 1 / len(samples)
    for norm, sample in zip(record.norms(), samples, strict=True):
        torch.testing.assert_close(norm, norm_of(module, mean_of_squares(module(x[[sample]]))), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("picked", "said"),
    [
        (lambda s: F.pad(s[None], (0, 0, 0, 1), mode="replicate").mean(), "gives the samples unequal weights"),
        (lambda s: s[[0, 0]].sum(), "the loss is a sum over the samples"),
    ],
    ids=["padded", "twice"],
)
def test_a_choice_among_sums_that_is_no_mean_is_named(picked: Callable[[Tensor], Tensor], said: str) -> None:
    record = record_of(
        nn.Linear(5, WIDTH), lambda m, x: picked(m(x).view(2, 2, WIDTH).square().mean(1)), torch.randn(B, 5)
    )
    assert any(said in text for text in record.weighting)


EQUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "back": lambda z: mean_of_squares(z.view(-1, 2, WIDTH).view(-1, WIDTH)),
    "shuffled": lambda z: mean_of_squares(z.view(2, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)),
    "made-contiguous": lambda z: mean_of_squares(z.view(2, -1, WIDTH).permute(2, 1, 0).contiguous().view(-1)),
    "all-of-it": lambda z: mean_of_squares(z.view(2, -1, WIDTH)),
    "in-two-steps": lambda z: z.view(2, -1, WIDTH).square().mean(-1).mean(),
    "over-the-samples-first": lambda z: z.view(2, -1, WIDTH).square().mean(1).mean(),
    "over-all-samples-first": lambda z: z.view(2, -1, WIDTH).square().mean((0, 1))[None].mean(),
    "an-axis-more": lambda z: z.view(2, -1, WIDTH).square().mean(1)[..., None].mean(),
    "twice": lambda z: mean_of_squares(z.view(2, -1, WIDTH).repeat(2, 1, 1)),
    "doubled": lambda z: mean_of_squares(z.view(2, -1, WIDTH)[:, [0, 0, 1, 1]]),
    "flipped": lambda z: mean_of_squares(z.view(2, -1, WIDTH).flip(0, 1)),
    "without-overlap": lambda z: mean_of_squares(z.unfold(0, 2, 2)),
    "by-features": lambda z: z.view(2, -1, WIDTH)[..., :2].square().mean() if len(z) > 1 else mean_of_squares(z[:, :2]),
    "times-numbers-of-its-own": lambda z: (z.view(2, -1, WIDTH) * z.detach().exp().view(2, -1, WIDTH)).mean(),
    "taken-all": lambda z: mean_of_squares(z.take(torch.arange(z.numel()).view(2, -1))),
    "each-column-in-another-order": lambda z: mean_of_squares(
        z.gather(0, (torch.arange(len(z))[:, None] + torch.arange(WIDTH)) % len(z))
    ),
    "times-constants-of-features": lambda z: (z.view(2, -1, WIDTH) @ torch.tensor([1.0, -2.0, 1.0])).mean(),
    "times-equal-constants": lambda z: (torch.full((1, len(z) // 2), 0.5) @ z.square().view(2, -1, WIDTH)).mean(),
    "entrywise-loss": lambda z: F.mse_loss(z.view(2, -1, WIDTH), z.new_ones(2, len(z) // 2, WIDTH)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_all_samples_alike_raise_no_alarm(name: str) -> None:
    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: EQUAL[name](m(x)), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})

    def of_one(m: nn.Module, x: Tensor) -> Tensor:  # (two rows of one sample are as one)
        return EQUAL[name](m(x).expand(4, WIDTH))

    assert_values(record, loop(module, of_one, (x,)))


def test_a_layer_on_some_samples_of_a_cut_axis_is_exact() -> None:
    module, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, WIDTH)), torch.randn(B, 5)
    record = record_of(module, lambda m, x: mean_of_squares(m[1](m[0](x).view(2, 2, 4)[:, 0])), x)
    assert (record.coverage, record.mixing, record.axis_lost, record.weighting) == (1.0, (), (), ())
    for norm, sample in zip(record.norms(), (0, 2), strict=True):
        torch.testing.assert_close(norm, norm_of(module, mean_of_squares(module(x[[sample]]))), rtol=1e-10, atol=0)


def test_the_numbers_of_the_samples_never_reach_a_tensor_of_the_user() -> None:
    room, joined = torch.zeros(2, 2, WIDTH), torch.zeros(3, 2, WIDTH)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        z = m(x).view(2, 2, WIDTH)
        room[0] = z.detach()[0]
        torch.cat([z.detach(), z.detach()[:1]], out=joined)
        return mean_of_squares(z)

    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record_of(module, loss, x)
    z = module(x).view(2, 2, WIDTH)
    torch.testing.assert_close(room, torch.stack([z[0], torch.zeros(2, WIDTH)]), rtol=0, atol=0)
    torch.testing.assert_close(joined, torch.cat([z, z[:1]]), rtol=0, atol=0)


def test_entries_overwritten_through_another_tensor_are_not_taken_for_those_of_before() -> None:
    def taken(z: Tensor) -> Tensor:
        v = z.clone().view(2, 2, WIDTH)
        again = v.view(2, 2, 1, WIDTH)
        v[0, 0] = z[3]
        return again[0]

    module, x = nn.Linear(5, WIDTH), torch.randn(B, 5)
    record = record_of(module, lambda m, x: mean_of_squares(taken(m(x))), x)
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
    assert_rows(record, module, x, [1, 3])
