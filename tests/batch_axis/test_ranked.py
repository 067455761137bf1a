"""Rows in an order of the batch: exact by themselves, and said where numbers meet them by their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_persample import PerSampleRecord
from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

BY_RANK, CLASSES = torch.linspace(0.5, 2, 6, dtype=torch.float64), torch.arange(6) % 3
COLUMN, FEATURES, TWO = BY_RANK[:, None], torch.linspace(1, 2, 3, dtype=torch.float64), BY_RANK[:2, None, None]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.recurrent = nn.Linear(5, 3), nn.Linear(3, 3), nn.LSTM(1, 2, batch_first=True)
        self.register_buffer("by_rank", BY_RANK.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


def by_first(z: Tensor) -> Tensor:
    return z[:, 0].argsort()


def losses(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().sum(1)


def written(z: Tensor, order: Tensor) -> Tensor:
    rows = torch.zeros_like(z)
    rows[order] = z
    return rows


def with_column(z: Tensor, column: Tensor) -> Tensor:
    changed = z.clone()
    changed[:, 0] = column
    return changed


def with_rows(z: Tensor, features: Tensor) -> Tensor:
    changed = z.clone()
    changed[:, 1:] = features
    return changed


MEETS: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "rows": lambda m, x: (lambda z: z[by_first(z)] * COLUMN)(m(x)),
    "rows-by-data": lambda m, x: m(x)[by_first(x)] * COLUMN,
    "data": lambda m, x: m(x[by_first(x)] * COLUMN),
    "data-first": lambda m, x: m.second(m(x[by_first(x)])) * COLUMN,
    "buffer": lambda m, x: m(x)[by_first(x)] * m.by_rank[:, None],
    "numbers": lambda m, x: m(x)[by_first(x)] * torch.arange(6.0)[:, None],
    "losses": lambda m, x: (lambda each: each[each.argsort()] * BY_RANK)(losses(m, x)),
    "losses-without-gradient": lambda m, x: (lambda each: each[each.detach().argsort()] * BY_RANK)(losses(m, x)),
    "largest": lambda m, x: (lambda each: each[each.topk(6).indices] * BY_RANK)(losses(m, x)),
    "some-of-the-largest": lambda m, x: (lambda each: each[each.topk(3).indices] * BY_RANK[:3])(losses(m, x)),
    "sorted": lambda m, x: (lambda each: each[each.sort().indices] * BY_RANK)(losses(m, x)),
    "index_select": lambda m, x: (lambda each: each.index_select(0, each.argsort()) * BY_RANK)(losses(m, x)),
    "gather": lambda m, x: (lambda each: each.gather(0, each.argsort()) * BY_RANK)(losses(m, x)),
    "take_along_dim": lambda m, x: (lambda each: each.take_along_dim(each.argsort(), 0) * BY_RANK)(losses(m, x)),
    "product": lambda m, x: (lambda each: each[each.argsort()] @ BY_RANK)(losses(m, x)),
    "einsum": lambda m, x: torch.einsum("bd,b->bd", m(x)[by_first(x)], BY_RANK),
    "sum": lambda m, x: m(x)[by_first(x)] + COLUMN,
    "joined": lambda m, x: torch.cat([m(x)[by_first(x)], COLUMN], 1).prod(1),
    "compared": lambda m, x: F.mse_loss(m(x)[by_first(x)], COLUMN.expand(6, 3)),
    "classes": lambda m, x: F.cross_entropy(m(x)[by_first(x)], CLASSES),
    "chosen": lambda m, x: (lambda z: torch.where(COLUMN > 1, z, z.square()))(m(x)[by_first(x)]),
    "in-place": lambda m, x: m(x)[by_first(x)].mul_(COLUMN),
    "another-axis": lambda m, x: m(x)[by_first(x)].T * BY_RANK,
    "flat": lambda m, x: m(x)[by_first(x)].flatten() * torch.arange(18.0),
    "backwards": lambda m, x: m(x)[by_first(x)].flip(0) * COLUMN,
    "part": lambda m, x: m(x)[by_first(x)][:4] * COLUMN[:4],
    "cut-apart": lambda m, x: m(x)[by_first(x)].view(2, 3, 3) * TWO,
    "one-by-one": lambda m, x: torch.stack(list(m(x)[by_first(x)])) * COLUMN,
    "written": lambda m, x: written(m(x), by_first(x)) * COLUMN,
    "index_copy": lambda m, x: torch.zeros(6, 3).index_copy(0, by_first(x), m(x)) * COLUMN,
    "scatter": lambda m, x: torch.zeros(6, 3).scatter(0, by_first(x)[:, None].expand(6, 3), m(x)) * COLUMN,
    "beside-a-written-column": lambda m, x: with_column(m(x)[by_first(x)], BY_RANK).prod(1),
    "twice": lambda m, x: m(x)[by_first(x)][by_first(-x)] * COLUMN,
    "partners": lambda m, x: m(x)[(x[:, 0] * 9).long().abs() % 6] * COLUMN,
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", MEETS)
def test_numbers_that_meet_rows_by_their_place_in_the_batch_are_said(name: str, in_order: bool) -> None:
    batch = torch.randn(6, 5)
    batch = batch[by_first(batch)] if in_order else batch
    for _ in range(2):  # the second step has plans
        record = record_of(Network(), lambda m, x: MEETS[name](m, x).square().mean(), batch)
        assert (*record.weighting, *record.mixing, *record.axis_lost) != ()


def lengths(x: Tensor) -> Tensor:
    return (x[:, 0].abs() * 2).long().clamp(1, 3)


def packed_in_order(m: Network, x: Tensor) -> Tensor:
    order = lengths(x).argsort(descending=True)
    steps = pack_padded_sequence(m(x).unsqueeze(-1)[order], lengths(x)[order], batch_first=True)
    states = m.recurrent(steps)[1][0][-1]
    return states - x[order, :2]


def packed_and_put_back(m: Network, x: Tensor) -> Tensor:
    steps = pack_padded_sequence(m(x).unsqueeze(-1), lengths(x), batch_first=True, enforce_sorted=False)
    outputs, (state, _) = m.recurrent(steps)
    by_step = pad_packed_sequence(outputs, batch_first=True, total_length=3)[0]
    return (by_step.sum(1) + state[-1]) * by_place(x)


def masked_by_length(m: Network, x: Tensor) -> Tensor:
    order = lengths(x).argsort(descending=True)
    there = torch.zeros(len(x), 3)
    for row, length in enumerate(lengths(x)[order].tolist()):
        there[row, :length] = 1
    return m(x)[order] * there


def by_place(x: Tensor) -> Tensor:
    return COLUMN if len(x) == len(COLUMN) else x[:, 4:]  # (where a sample is alone, the number of its place)


def added_each(m: Network, x: Tensor) -> Tensor:
    order = by_first(x)
    return torch.zeros(len(x), 3).index_add(0, order, m(x)[order]) * by_place(x)


STAYS: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "alone": lambda m, x: m.second(m(x)[by_first(x)]),
    "beside-written-features": lambda m, x: with_rows(m(x)[by_first(x)], FEATURES[:2]).square(),
    "features": lambda m, x: m(x)[by_first(x)] * FEATURES,
    "equal-rows": lambda m, x: m(x)[by_first(x)] * torch.ones(len(x), 1) * 2.5,
    "beside-its-own": lambda m, x: m(x)[by_first(x)] * x[by_first(x), :3],
    "labels": lambda m, x: F.cross_entropy(m(x)[by_first(x)], x.argmax(1)[by_first(x)] % 3, reduction="none"),
    "inverse": lambda m, x: m(x)[by_first(x)].exp()[by_first(x).argsort()] * by_place(x),
    "written-back": lambda m, x: written(m(x)[by_first(x)].exp(), by_first(x)) * by_place(x),
    "added-back": added_each,
    "packed-in-order": packed_in_order,
    "packed-and-put-back": packed_and_put_back,
    "masked-by-length": masked_by_length,
}
DRAWN: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "noise": lambda m, x: m(x)[by_first(x)] + torch.randn(len(x), 3),
    "scaled-noise": lambda m, x: m(x)[by_first(x)] * (0.1 * torch.randn(len(x), 1) + 1),
    "dropped": lambda m, x: m(x)[by_first(x)] * (torch.rand(len(x), 1) < 0.9) / 0.9,
    "shuffled": lambda m, x: m(x)[torch.randperm(len(x))] * COLUMN,
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", [*STAYS, *DRAWN])
def test_rows_in_an_order_of_the_batch_are_exact(name: str, in_order: bool) -> None:
    batch, module = torch.randn(6, 5), Network()
    batch = batch[by_first(batch)] if in_order else batch
    batch[:, 4:] = COLUMN

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = {**STAYS, **DRAWN}[name](m, x)
        return made.flatten(1).square().mean(1).mean() if made.dim() > 1 else made.mean()

    for _ in range(2):
        record = record_of(module, loss, batch)
        assert (record.weighting, record.mixing, record.axis_lost, record.unsupported) == ((), (), (), {})
        if name in STAYS:
            assert_values(record, loop(module, loss, (batch,)))


WEIGHTS = [0.5, 0.8, 1.0, 1.3, 1.7, 2.0]
OF_NUMPY = [*map(np.float32, WEIGHTS)]


def in_order(m: Network, x: Tensor) -> Tensor:
    each = losses(m, x)
    return each[each.argsort()]


def one_after_another(numbers: Sequence[float], rows: Iterable[Tensor]) -> Tensor:
    total = torch.zeros(())
    for number, row in zip(numbers, rows, strict=False):
        total = total + number * row.square().sum()
    return total / len(numbers)


ONE_BY_ONE: dict[str, Callable[[Network, Tensor, Sequence[float]], Tensor]] = {
    "numbers": lambda m, x, w: sum(w[i] * row for i, row in enumerate(in_order(m, x))) / 6,
    "by-place": lambda m, x, w: (lambda each: sum(w[i] * each[i] for i in range(len(each))) / 6)(in_order(m, x)),
    "values": lambda m, x, w: (lambda each: sum(w[i] * each[i] for i in range(len(each))) / 6)(
        losses(m, x).sort().values
    ),
    "rows": lambda m, x, w: one_after_another(w, m(x)[by_first(x)]),
    "data": lambda m, x, w: one_after_another(w, (m(row) for row in x[by_first(x)])),
    "unbound": lambda m, x, w: one_after_another(w, m(x)[by_first(x)].unbind()),
    "of-a-buffer": lambda m, x, w: one_after_another(
        m.by_rank if len(set(w)) > 1 else torch.full_like(m.by_rank, w[0]), m(x)[by_first(x)]
    ),
    "divided": lambda m, x, w: sum(row / w[i] for i, row in enumerate(in_order(m, x))) / 6,
    "stacked": lambda m, x, w: torch.stack([w[i] * row for i, row in enumerate(in_order(m, x))]).sum() / 6,
    "powers": lambda m, x, w: sum(row ** w[i] for i, row in enumerate(in_order(m, x))) / 6,
    "interpolated": lambda m, x, w: (
        sum(torch.lerp(torch.zeros(()), row, w[i]) for i, row in enumerate(in_order(m, x))) / 6
    ),
    "multiplied": lambda m, x, w: (
        sum(torch.addcmul(torch.zeros(()), row, torch.tensor(w[i])) for i, row in enumerate(in_order(m, x))) / 6
    ),
    "before-a-function": lambda m, x, w: sum((w[i] * row).square() for i, row in enumerate(in_order(m, x))) / 6,
}


def multiplied_in_place(each: Tensor, number: float) -> Tensor:
    each[:2].mul_(number)
    return each


def divided_in_place(each: Tensor, number: float) -> Tensor:
    each[:2] /= int(number)
    return each


def set_again(each: Tensor, number: float) -> Tensor:
    each[:2] = number * each[:2]
    return each


PARTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sums": lambda each, w: (w * each[:2].sum() + each[2:].sum()) / 6,
    "sums-of-products": lambda each, w: ((w * each[:2]).sum() + each[2:].sum()) / 6,
    "means": lambda each, w: w * each[:3].mean() + each[3:].mean(),
    "split": lambda each, w: (lambda low, high: (low.sum() * w + high.sum()) / 6)(*each.split([2, 4])),
    "joined": lambda each, w: torch.cat([w * each[:2], each[2:]]).mean(),
    "added": lambda each, w: (each[2:].sum()).add(each[:2].sum(), alpha=w) / 6,
    "powers": lambda each, w: (each[:2].pow(w).sum() + each[2:].sum()) / 6,
    "joined powers": lambda each, w: torch.cat([each[:2].pow(w), each[2:]]).mean(),
    "in place": lambda each, w: multiplied_in_place(each.clone(), w).mean(),
    "divided in place": lambda each, w: divided_in_place(each.clone(), w).mean(),
    "set": lambda each, w: set_again(each.clone(), w).mean(),
    "repeated": lambda each, w: each.repeat_interleave(torch.where(torch.arange(6) < 2, int(w), 1)).sum() / 6,
    "subtracted": lambda each, w: (each[2:].sum() + w * -each[:2].sum().neg()) / 6,
}


def said(record: PerSampleRecord) -> bool:
    return any("by their places in an order of the whole batch" in text for text in record.weighting)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("numbers", [WEIGHTS, OF_NUMPY, [2.5] * 6], ids=["different", "numpy", "equal"])
def test_numbers_that_meet_rows_one_by_one_are_said_where_they_differ(numbers: Sequence[float], name: str) -> None:
    batch, module = torch.randn(6, 5), Network()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return ONE_BY_ONE[name](m, x, numbers) * (6 / len(x))

    record = record_of(module, loss, batch)
    if numbers[0] != numbers[1]:
        assert (*record.weighting, *record.mixing) != ()
        assert said(record) or name == "unbound"
    else:
        assert (record.weighting, record.mixing, record.axis_lost, record.unsupported) == ((), (), (), {})
        assert_values(record, loop(module, loss, (batch,)))


@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("number", [2.0, 1.0])
def test_numbers_that_meet_parts_of_an_order_are_said_where_they_differ(
    number: float, name: str, by_values: bool
) -> None:
    batch, module = torch.randn(6, 5), Network()
    if by_values and name in ("joined", "joined powers", "powers", "in place", "divided in place", "set", "repeated"):
        pytest.skip("such parts of sorted values are said to mix")

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return PARTS[name](losses(m, x).sort().values if by_values else in_order(m, x), number)

    record = record_of(module, loss, batch)
    if number != 1:
        assert said(record)
    else:
        assert (record.weighting, record.mixing, record.axis_lost, record.unsupported) == ((), (), (), {})
        scale = 2 if name == "means" else 1
        assert_values(record, loop(module, lambda m, x: scale * losses(m, x).mean(), (batch,)))


def step_by_step(m: Network, x: Tensor) -> Tensor:
    order = lengths(x).argsort(descending=True)
    h, left = m(x)[order], lengths(x)[order]
    total = torch.zeros(())
    for step in range(3):
        total = total + (step + 1) * h[: int((left > step).sum()), step].square().sum()
    return total


def in_a_buffer(m: Network, x: Tensor) -> Tensor:
    order = lengths(x).argsort(descending=True)
    h, left = m(x)[order], lengths(x)[order]
    steps = torch.zeros(len(x), 3)
    for step in range(3):
        count = int((left > step).sum())
        steps[:count, step] = h[:count, step]
    return steps.square().sum()


def in_halves(m: Network, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in m(x)[by_first(x)].chunk(2):
        total = total + m.second(part).square().sum() + 0.3 * part.square().sum()
    return total


def by_length(m: Network, x: Tensor) -> Tensor:
    order, total = lengths(x).argsort(descending=True), torch.zeros(())
    for row, length in zip(m(x)[order], lengths(x)[order].tolist(), strict=True):
        total = total + row[:length].square().sum() / length
    return total


TERMS = {"step-by-step": step_by_step, "in-a-buffer": in_a_buffer, "in-halves": in_halves, "by-length": by_length}


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_sorted_samples_that_are_their_samples_are_exact(name: str) -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return TERMS[name](m, x) / len(x)

    module, batch = Network(), torch.randn(6, 5)
    for _ in range(2):
        record = record_of(module, loss, batch)
        assert (record.weighting, record.mixing, record.axis_lost, record.unsupported) == ((), (), (), {})
        assert_values(record, loop(module, loss, (batch,)))
