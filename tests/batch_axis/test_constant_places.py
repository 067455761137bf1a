"""Rows of samples written into a tensor of constants at places that constants name, as in models of sets of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model
from tests.capture.reference import assert_values, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

T, D = 3, 4
COUNTS = (2, 1, 3)


def places(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = torch.cat([torch.full((count,), row) for row, count in enumerate(counts)])
    return rows, torch.cat([torch.arange(count) for count in counts])


def mask_of(counts: Sequence[int], room: int) -> Tensor:
    return torch.arange(room) < torch.tensor(counts)[:, None]


def written(h: Tensor, counts: Sequence[int], room: int) -> Tensor:
    out = torch.zeros(len(counts), room, D)
    out[places(counts)] = h
    return out


def written_by_a_mask(h: Tensor, counts: Sequence[int], room: int) -> Tensor:
    out = torch.zeros(len(counts), room, D)
    out[mask_of(counts, room)] = h
    return out


def written_steps_first(h: Tensor, counts: Sequence[int], room: int) -> Tensor:
    out = torch.zeros(room, len(counts), D)
    out[places(counts)[::-1]] = h
    return out.transpose(0, 1)


def written_feature_by_feature(h: Tensor, counts: Sequence[int], room: int) -> Tensor:
    rows, columns = places(counts)
    out = torch.zeros(len(counts), room, D)
    out[rows[:, None], columns[:, None], torch.arange(D)] = h
    return out


WAYS: dict[str, Callable[[Tensor, Sequence[int], int], Tensor]] = {
    "written": written,
    "written-by-a-mask": written_by_a_mask,
    "written-steps-first": written_steps_first,
    "written-feature-by-feature": written_feature_by_feature,
    "put": lambda h, counts, room: torch.zeros(len(counts), room, D).index_put(places(counts), h),
    "added": lambda h, counts, room: torch.zeros(len(counts), room, D).index_put(places(counts), h, accumulate=True),
    "scattered-by-a-mask": lambda h, counts, room: torch.zeros(len(counts), room, D).masked_scatter(
        mask_of(counts, room)[..., None], h
    ),
}


def network() -> Model:
    return Model(lambda m, x: x, a=nn.Linear(3, D), c=nn.Linear(D, 2))


def loss_of(
    m: Model, x: Tensor, counts: Sequence[int], way: str, room: int, pool: Callable[[Tensor], Tensor]
) -> Tensor:
    h = m.a(torch.cat([row[:count] for row, count in zip(x, counts, strict=True)])).tanh()
    return m.c(pool(WAYS[way](h, counts, room))).square().mean()


def loop_over(m: Model, loss: Callable[[Tensor, Sequence[int]], Tensor], x: Tensor, counts: Sequence[int]) -> dict:
    grads = [
        torch.autograd.grad(loss(x[i : i + 1], counts[i : i + 1]), list(m.parameters()), materialize_grads=True)
        for i in range(len(x))
    ]
    return {
        name: torch.stack(rows) for (name, _), rows in zip(m.named_parameters(), zip(*grads, strict=True), strict=True)
    }


@pytest.mark.parametrize("room", [T, T + 2])
@pytest.mark.parametrize("counts", [COUNTS, (2, 2, 2), (2, 0, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_rows_written_among_those_of_their_sample_are_exact(way: str, counts: Sequence[int], room: int) -> None:
    m, x = network(), torch.randn(3, T, 3)

    def loss(x: Tensor, counts: Sequence[int]) -> Tensor:
        return loss_of(m, x, counts, way, room, lambda out: out.sum(1))

    record = record_of(m, lambda m, x: loss(x, counts), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop_over(m, loss, x, counts))


def test_room_for_more_than_any_sample_has_is_each_samples_own() -> None:
    m, x = network(), torch.randn(3, T, 3)

    def loss(x: Tensor, counts: Sequence[int]) -> Tensor:
        return loss_of(m, x, counts, "written", T + 2, lambda out: out)

    record = record_of(m, lambda m, x: loss(x, COUNTS), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop_over(m, loss, x, COUNTS))


def test_room_for_the_longest_of_the_batch_that_the_loss_takes_in_is_named() -> None:
    record = record_of(
        network(), lambda m, x: loss_of(m, x, COUNTS, "written", T, lambda out: out), torch.randn(3, T, 3)
    )
    assert any("leaves room for rows that a sample of the batch does not have" in text for text in record.axis_lost)


MATCH = [[2, 0], [1, 3], [0, 1]]


def test_targets_at_matched_queries() -> None:
    m, x, y = nn.Linear(3, 8), torch.randn(3, 3), torch.randint(0, 2, (3, 2))

    def loss(m: nn.Module, x: Tensor, y: Tensor, match: list[list[int]] = MATCH) -> Tensor:
        logits = m(x).view(-1, 4, 2)
        target = torch.zeros(len(logits), 4)
        rows = torch.arange(len(logits)).repeat_interleave(2)
        target[rows, torch.tensor(match).flatten()] = torch.cat(list(y)).double()
        return F.mse_loss(logits[..., 0], target)

    record = record_of(m, loss, x, y)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    own = [loss(m, x[i : i + 1], y[i : i + 1], MATCH[i : i + 1]) for i in range(3)]
    grads = [torch.autograd.grad(each, list(m.parameters())) for each in own]
    expected = {
        name: torch.stack(rows) for (name, _), rows in zip(m.named_parameters(), zip(*grads, strict=True), strict=True)
    }
    assert_values(record, expected)


OF_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "each-in-a-row-of-two": lambda h: torch.zeros(2, 3, D).index_put((torch.tensor([0, 0, 1]), torch.arange(3)), h),
    "one-over-another": lambda h: torch.zeros(3, 3, D).index_put(
        (torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 0])), torch.cat([h, h[1:2]])
    ),
    "in-rows-of-other-samples": lambda h: (
        h[:, None].clone().index_put((torch.tensor([0, 1]), torch.tensor([0, 0])), h[1:3])
    ),
    "by-a-mask": lambda h: torch.zeros(2, 2, D).masked_scatter(
        torch.tensor([[True, True], [True, False]])[..., None], h
    ),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_written_among_those_of_other_samples_are_named(name: str) -> None:
    record = record_of(network(), lambda m, x: m.c(OF_OTHERS[name](m.a(x)).sum(1)).square().mean(), torch.randn(3, 3))
    assert (*record.mixing, *record.axis_lost, *record.weighting, *record.unsupported.values()) != ()
