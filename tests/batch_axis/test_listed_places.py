"""Places of true entries are rows of the samples whose entries they are: what is read by them has its own gradients."""

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

B, T, D = 6, 4, 3


def network() -> Model:
    parts = {"a": nn.Linear(5, D), "table": nn.Embedding(T, D), "place": nn.Embedding(T, D)}
    return Model(lambda m, x: x, **parts, last=nn.Linear(T, D))


def chosen(x: Tensor) -> Tensor:
    return x[..., 0] > -0.4


def by_table(mask: Tensor) -> tuple[Tensor, Tensor]:
    found = mask.nonzero()
    return found[:, 0], found[:, 1]


def by_flat_places(mask: Tensor) -> tuple[Tensor, Tensor]:
    found = mask.flatten().nonzero().squeeze(1)
    return torch.div(found, T, rounding_mode="floor"), found % T


def by_columns_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    step, row = mask.T.nonzero(as_tuple=True)
    return row, step


def by_running_numbers(mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask.nonzero()[:, 0], (mask.cumsum(1) - 1)[mask]


WAYS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "tuple": lambda mask: mask.nonzero(as_tuple=True),
    "table": by_table,
    "transposed": lambda mask: tuple(mask.nonzero().T),
    "unbound": lambda mask: mask.nonzero().unbind(1),
    "argwhere": lambda mask: torch.argwhere(mask).split(1, 1),
    "where": lambda mask: torch.where(mask),
    "flat": by_flat_places,
    "columns-first": by_columns_first,
    "running-numbers": by_running_numbers,
    "expanded": lambda mask: (mask.nonzero()[:, 0], torch.arange(T).expand(mask.shape)[mask]),
    "selected": lambda mask: (mask.nonzero()[:, 0], torch.arange(T).expand(mask.shape).masked_select(mask)),
    "selected-from-one-row": lambda mask: (mask.nonzero()[:, 0], torch.arange(T).masked_select(mask)),
}
READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "embedding": lambda m, step: m.place(step),
    "row": lambda m, step: m.place.weight[step],
    "index_select": lambda m, step: m.place.weight.index_select(0, step),
    "one_hot": lambda m, step: m.last(F.one_hot(step, T).double()),
    "number": lambda m, step: m.last.bias * (step[:, None] / T),
    "constants": lambda m, step: m.last.bias * torch.linspace(0, 1, T)[step, None],
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_by_places_is_of_their_sample(way: str, read: str) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        row, step = (each.flatten() for each in WAYS[way](chosen(x)))
        h = m.a(x)[row, step].tanh() + READS[read](m, step)
        return torch.zeros(len(x), D).index_add(0, row, h).square().sum(1).mean()

    torch.manual_seed(0)
    record = assert_exact(network(), loss, (torch.randn(B, T, 5),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


PUT_BACK: dict[str, Callable[[Tensor, tuple[Tensor, Tensor], Tensor], Tensor]] = {
    "written": lambda out, places, rows: out.index_put(places, rows),
    "added": lambda out, places, rows: out.index_put(places, rows, accumulate=True),
    "flat": lambda out, places, rows: out.flatten(0, 1).index_copy(0, places[0] * T + places[1], rows).view_as(out),
}


def loss_of_rows_put_back(name: str) -> Callable[[Any, Tensor], Tensor]:
    def loss(m: Any, x: Tensor) -> Tensor:
        places = chosen(x).nonzero(as_tuple=True)
        rows = m.a(x[places]).tanh() + m.place(places[1])
        return PUT_BACK[name](torch.zeros(*x.shape[:2], D), places, rows).square().sum((1, 2)).mean()

    return loss


@pytest.mark.parametrize("name", PUT_BACK)
def test_rows_that_are_put_back_to_their_places_are_exact(name: str) -> None:
    torch.manual_seed(0)
    record = assert_exact(network(), loss_of_rows_put_back(name), (torch.randn(B, T, 5),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_an_entry_of_a_row_of_each_place_is_of_its_sample() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        row, step, feature = (x > 0).nonzero(as_tuple=True)
        h = m.place(step) * m.table(feature % T) * x[row, step, feature, None]
        return torch.zeros(len(x), D).index_add(0, row, h).square().sum(1).mean()

    torch.manual_seed(0)
    record = assert_exact(network(), loss, (torch.randn(B, T, 5),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


@pytest.mark.parametrize("name", ["written", "added"])  # (of flat rows beside, it is not known whose they are)
def test_a_sample_without_a_true_entry_keeps_its_row_of_constants(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, T, 5)
    x[1:4:2, :, 0] = -1.0
    record = assert_exact(network(), loss_of_rows_put_back(name), (x,))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x[..., 0] > x[..., 0].mean(),
    "mean-over-samples": lambda x: x[..., 0] > x[..., 0].mean(0),
    "median": lambda x: x[..., 0] > x[..., 0].median(),
}
CHOSEN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "tuple": lambda m, x, mask: m.a(x)[mask.nonzero(as_tuple=True)],
    "where": lambda m, x, mask: m.a(x)[torch.where(mask)],
    "columns": lambda m, x, mask: m.a(x)[mask.nonzero()[:, 0], mask.nonzero()[:, 1]],
    "flat": lambda m, x, mask: m.a(x).flatten(0, 1)[mask.flatten().nonzero().squeeze(1)],
    "index_select": lambda m, x, mask: m.a(x).flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1)),
    "gather": lambda m, x, mask: m.a(x).flatten(0, 1).gather(0, mask.flatten().nonzero().expand(-1, D)),
    "data": lambda m, x, mask: m.a(x[torch.where(mask)]),
    "filled": lambda m, x, mask: m.a(x).flatten(0, 1).index_fill(0, mask.flatten().nonzero().squeeze(1), 0.0),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", CHOSEN)
def test_places_that_a_bound_of_the_batch_says_are_said(name: str, bound: str) -> None:
    module = network()
    for _ in range(2):  # the second step has plans
        record = record_of(
            module, lambda m, x: CHOSEN[name](m, x, BOUNDS[bound](x)).square().sum() / len(x), torch.randn(B, T, 5)
        )
        assert (*record.mixing, *record.weighting, *record.axis_lost) != ()


@pytest.mark.parametrize("is_sorted", [False, True])
def test_places_among_rows_that_others_place_are_named_where_their_numbers_count(is_sorted: bool) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        rows = x[x[:, 0, 0].argsort(), 0] if is_sorted else x[chosen(x)]
        among = (rows[:, 1] > 0).nonzero().squeeze(1)
        return (m.a(rows)[among] * m.table(among % T)).square().sum() / len(x)

    record = record_of(network(), loss, torch.randn(B, T, 5))
    assert "table.weight" in record.unsupported


BESIDE_PLACES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "mask": (lambda z, mask, y: z[mask, torch.arange(int(mask.sum())) % D], True),
    "places": (lambda z, mask, y: z[mask.nonzero()[:, 0], torch.arange(int(mask.sum())) % D], True),
    "labels": (lambda z, mask, y: z[mask, y[mask]], False),
    "columns": (lambda z, mask, y: z[mask.nonzero(), torch.arange(2)], False),
    "one": (lambda z, mask, y: z[mask, torch.tensor([1])], False),
}


@pytest.mark.parametrize("name", BESIDE_PLACES)
def test_numbers_that_meet_picked_samples_by_their_places_are_said(name: str) -> None:
    pick, is_said = BESIDE_PLACES[name]

    def loss(m: Any, x: Tensor) -> Tensor:
        return pick(m(x), x[:, 0] > 0, (x[:, 1] > 0.5).long()).square().sum()

    torch.manual_seed(0)
    module, x = nn.Linear(5, D), torch.randn(B, 5).abs()
    x[0, 0] = -1.0
    record = record_of(module, loss, x, loss_reduction="sum")
    texts = (*record.mixing, *record.weighting, *record.axis_lost)
    assert bool(texts) == is_said
    assert all("`getitem` combines different samples at test_listed_places.py" in text for text in texts)
    if not is_said:
        assert_values(record, {name: grads[record.samples] for name, grads in loop(module, loss, (x,)).items()})


def test_rows_in_an_order_that_a_bound_picks_are_of_their_samples() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = rows[rows[:, 0].argsort()]
        return m(rows).index_select(0, (rows[:, 0] > 0.0).nonzero()[:, 0]).square().sum() / len(x)

    torch.manual_seed(0)
    module, x = nn.Linear(5, D), torch.randn(B, T, 5)
    record = record_of(module, loss, x)
    assert_values(record, loop(module, loss, (x,)))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_whose_offsets_are_counted_from_the_batch_are_of_their_samples(mode: str, is_weighed: bool) -> None:
    if is_weighed and mode != "sum":
        pytest.skip("torch weighs the rows of sums alone")

    def loss(m: Any, x: Tensor) -> Tensor:
        mask = torch.cat([torch.ones(len(x), 1, dtype=torch.bool), chosen(x)[:, 1:]], 1)
        starts = F.pad(mask.sum(1).cumsum(0), (1, 0))[:-1]
        tokens = (x[..., 1].abs() * 2).long().clamp(0, T - 1)
        weights = m.a(x).square().sum(2)[mask] if is_weighed else None
        bags = F.embedding_bag(tokens[mask], m.table.weight, starts, mode=mode, per_sample_weights=weights)
        return bags.square().sum(1).mean()

    torch.manual_seed(0)
    record = assert_exact(network(), loss, (torch.randn(B, T, 5),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def by_numbers(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, inverse, counts = ids.flatten().unique(return_inverse=True, return_counts=True)
    return torch.div(found, 4, rounding_mode="floor"), inverse, counts


def by_rows(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.stack([torch.div(ids, 4, rounding_mode="floor").flatten(), ids.flatten() % 4], 1)
    found, inverse, counts = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    return found[:, 0], inverse, counts


@pytest.mark.parametrize("way", [by_numbers, by_rows], ids=lambda way: way.__name__)
def test_cells_of_points_are_of_the_sample_whose_points_they_hold(way: Callable[..., Any]) -> None:
    """As points are pooled in voxels, which are numbered over the whole batch."""

    def loss(m: Any, x: Tensor) -> Tensor:
        cell = (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0).long()
        row, inverse, counts = way(cell + 4 * torch.arange(len(x))[:, None])
        h = m.a(x).flatten(0, 1).tanh()
        means = torch.zeros(len(row), D).index_add(0, inverse, h) / counts[:, None]
        return torch.zeros(len(x), D).index_add(0, row, means.exp()).square().sum(1).mean()

    torch.manual_seed(0)
    record = assert_exact(network(), loss, (torch.randn(B, T, 5),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_numbers_that_occur_in_several_samples_are_no_samples() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        cell = (x[:, 0, 0] > 0).long()
        _, inverse, counts = cell.unique(return_inverse=True, return_counts=True)
        means = torch.zeros(len(counts), D).index_add(0, inverse, m.a(x).mean(1)) / counts[:, None]
        return means.square().sum(1).mean()

    record = record_of(network(), loss, torch.randn(B, T, 5))
    assert (*record.mixing, *record.axis_lost, *record.weighting) != ()
