"""Rows sent to experts and back, written and read by lists of places, and kernels repeated over the samples: exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.reference import assert_exact, assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def chosen(self, h: Tensor, number: int) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate(h).softmax(-1).topk(number, -1)
        return weights, experts


def added_at_rows(m: Any, h: Tensor) -> Tensor:
    weights, chosen = m.chosen(h, 2)
    out = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == number)
        out[rows] += weights[rows, place, None] * expert(h[rows])
    return out


def set_at_rows(m: Any, h: Tensor) -> Tensor:
    weights, chosen = m.chosen(h, 2)
    out = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == number)
        out[rows] = out[rows] + weights[rows, place].unsqueeze(-1) * expert(h[rows])
    return out


def set_at_places(m: Any, h: Tensor) -> Tensor:
    weights, chosen = m.chosen(h, 2)
    found = torch.zeros(len(h), 2, 6)
    for number, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == number)
        found[rows, place] = expert(h[rows])
    return (found * weights[..., None]).sum(1)


def by_masks_with_an_axis_more(m: Any, h: Tensor) -> Tensor:
    weights, chosen = m.chosen(h, 1)
    out = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        mask = chosen[:, 0] == number
        out[mask] = expert(h[mask]) * weights[:, 0][mask, None]
    return out


def by_a_sorted_list(m: Any, h: Tensor) -> Tensor:
    weights, chosen = m.chosen(h, 2)
    gates = torch.zeros(len(h), 3).scatter(1, chosen, weights)
    order = torch.nonzero(gates)[:, 1].argsort(stable=True)
    rows, expert = (torch.nonzero(gates)[order, column] for column in (0, 1))
    parts = h[rows].split((gates > 0).sum(0).tolist())
    joined = torch.cat([layer(part) for layer, part in zip(m.experts, parts, strict=True)])
    return torch.zeros_like(h).index_add(0, rows, joined * gates[rows].gather(1, expert[:, None]))


ROUTES = (added_at_rows, set_at_rows, set_at_places, by_masks_with_an_axis_more, by_a_sorted_list)


@pytest.mark.parametrize("shape", [(B, 5), (B, 3, 5)], ids=["samples", "tokens"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_rows_sent_to_experts_and_back_are_exact(route: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).relu().view(-1, 6)
        return m.last(route(m, h) + h).square().mean()

    module, x = Experts(), torch.randn(shape)
    every = module.chosen(module.first(x).relu().view(-1, 6), 1)[1].unique()
    assert every[0] == 0  # (the first expert gets rows)
    record = assert_exact(module, loss, (x,))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_rows_of_slots_that_no_sample_fills_are_named() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).relu()
        weights, chosen = (each[:, 0] for each in m.chosen(h, 1))
        sent = F.one_hot(chosen, 3)
        slots = chosen * len(h) + (sent.cumsum(0) * sent).sum(-1) - 1
        room = torch.zeros(3 * len(h), 6)
        room[slots] = h
        found = torch.cat([expert(rows) for expert, rows in zip(m.experts, room.chunk(3), strict=True)])
        return m.last(found[slots] * weights[:, None] + h).square().mean()

    record = record_of(Experts(), loss, torch.randn(B, 5))
    assert any("leaves rows of no sample" in text for text in record.unsupported.values())


TO_SAMPLES: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda z, own, rows: z.index_add(0, own, rows),
    "index_add_": lambda z, own, rows: z.index_add_(0, own, rows),
    "scatter_add": lambda z, own, rows: z.scatter_add(0, own[:, None].expand_as(rows), rows),
    "scatter_reduce": lambda z, own, rows: z.scatter_reduce(0, own[:, None].expand_as(rows), rows, "amax"),
    "index_put": lambda z, own, rows: z.index_put((own,), rows, accumulate=True),
    "one_hot": lambda z, own, rows: F.one_hot(own, len(z)).to(rows).T @ rows,
}


def rows_added_up(how: str) -> Callable[[Any, Tensor], Tensor]:
    """A loss on what each sample's rows of a positive first entry add up to."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h, of_sample = m.first(x).relu(), torch.arange(len(x)).repeat_interleave(x.size(1))
        counts = x[..., 0].flatten() > 0
        return TO_SAMPLES[how](torch.zeros(len(x), 6), of_sample[counts], h.flatten(0, 1)[counts]).sum(1).mean()

    return loss


def with_positive_rows(*counts: int) -> Tensor:
    """Samples of four rows, so many of which have a positive first entry."""
    x = torch.randn(len(counts), 4, 5)
    x[..., 0] = torch.where(torch.arange(4) < torch.tensor(counts)[:, None], 1.0, -1.0)
    return x


@pytest.mark.parametrize("how", TO_SAMPLES)
@pytest.mark.parametrize("counts", [(0, 2), (0, 3, 0), (4, 0, 0, 0)])
def test_as_many_rows_as_samples_and_all_of_one_are_named_not_taken_for_all_that_the_loss_has(
    counts: tuple[int, ...], how: str
) -> None:
    record = record_of(Experts(), rows_added_up(how), with_positive_rows(*counts))
    assert record.samples is None
    assert any("leaves room for rows that a sample of the batch does not have" in text for text in record.axis_lost)


@pytest.mark.parametrize("how", TO_SAMPLES)
@pytest.mark.parametrize("counts", [(0, 0), (0, 1), (2, 0, 0), (0, 2, 3)])
def test_samples_without_rows_add_nothing_and_raise_no_alarm(counts: tuple[int, ...], how: str) -> None:
    module, x = Experts(), with_positive_rows(*counts)
    record = record_of(module, rows_added_up(how), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, rows_added_up(how), (x,)))


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(torch.randn(6))
        self.single, self.style = nn.Parameter(torch.randn(2, 1, 3, 3)), nn.Linear(8, 2)


def in_one_row(x: Tensor) -> Tensor:
    return x.reshape(1, -1, 8, 8)


def modulated(m: Any, x: Tensor) -> Tensor:
    weight = m.weight[None] * (m.style(x[:, 0, 0]) + 1)[:, None, :, None, None]
    weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
    return F.conv2d(in_one_row(x), weight.view(-1, 2, 3, 3), padding=1, groups=len(x))


KERNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "repeated": lambda m, x: F.conv2d(
        in_one_row(x), m.weight.repeat(len(x), 1, 1, 1), m.bias.repeat(len(x)), 2, 1, 1, len(x)
    ),
    "expanded": lambda m, x: F.conv2d(
        in_one_row(x), m.weight.expand(len(x), 6, 2, 3, 3).reshape(-1, 2, 3, 3), groups=len(x)
    ),
    "one-for-each-channel": lambda m, x: F.conv2d(in_one_row(x), m.single.repeat(len(x), 1, 1, 1), groups=2 * len(x)),
    "transposed": lambda m, x: F.conv_transpose2d(
        in_one_row(x), m.weight.transpose(0, 1).repeat(len(x), 1, 1, 1), groups=len(x)
    ),
    "modulated": modulated,
    "made-of-the-samples": lambda m, x: F.conv2d(
        in_one_row(x), m.style(x[:, 0, 0]).view(-1, 1, 1, 1) * m.single.repeat(len(x), 1, 1, 1), groups=2 * len(x)
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_repeated_over_groups_of_one_sample_each_is_exact(name: str) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return KERNELS[name](m, x).sin().reshape(len(x), -1).mean(1).mean()

    record = assert_exact(Kernels(), loss, (torch.randn(B, 2, 8, 8),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
