"""Rows written where rows of the same sample lie, and places that hold what the batch says: exact and silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def loss(self, h: Tensor) -> Tensor:
        return self.last(h).square().sum(1).mean()


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def steps(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.first(x)[:, None].expand(-1, 4, -1) * STEPS
    return found


def added(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    rows = torch.where(labels(x) == 1)[0]
    return m.loss(h.index_add(0, rows, m.expert(h[rows])))


def added_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    out, rows = h.clone(), (x[:, 0] > 0).nonzero()[:, 0]
    out.index_add_(0, rows, m.expert(h[rows]))
    return m.loss(out)


def copied(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    rows = torch.where(labels(x) == 1)[0]
    return m.loss(h.index_copy(0, rows, m.expert(h[rows])))


def put_by_a_mask(m: Any, x: Tensor) -> Tensor:
    h, mask = m.first(x), x[:, 0] > 0
    return m.loss(h.index_put((mask,), m.expert(h[mask])))


def margins(m: Any, x: Tensor) -> Tensor:
    z = m.last(m.first(x))
    margin = torch.zeros(z.shape)
    margin[torch.arange(len(x)), labels(x)] = 0.1
    return F.cross_entropy(z - margin, labels(x))


def ends(m: Any, x: Tensor) -> Tensor:
    h = m.expert(steps(m, x))
    mask = torch.zeros(len(x), 4)
    mask[(torch.arange(len(x)), 2 * labels(x))] = 1
    h[~mask.flip(-1).cumsum(-1).flip(-1).bool()] = 0
    return m.loss(h.sum(1))


def masked(m: Any, x: Tensor) -> Tensor:
    h = steps(m, x)
    mask = torch.zeros(len(x), 4)
    mask[h.detach()[..., 0] > 0] = 1.0
    return m.loss((h * mask[..., None]).sum(1))


def up_to_the_longest(m: Any, x: Tensor) -> Tensor:
    lengths = 2 * labels(x) + 2
    mask = torch.arange(lengths.max())[None] < lengths[:, None]
    return m.loss((steps(m, x)[:, : mask.shape[1]] * mask[..., None]).sum(1))


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    each.__name__: each
    for each in (added, added_in_place, copied, put_by_a_mask, margins, ends, masked, up_to_the_longest)
}


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exact_and_nothing_is_said(name: str) -> None:
    module, x = Parts(), torch.randn(6, 5)
    x[0, 0], x[1, 0] = 1.0, -1.0
    record = record_of(module, EXACT[name], x)
    assert (record.mixing, record.weighting, record.not_additive, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, EXACT[name], (x,)))


def test_rows_that_are_added_to_rows_of_other_samples_are_said() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.loss(h.index_add(0, torch.tensor([1, 0]), m.expert(h[:2])))

    assert record_of(Parts(), loss, torch.randn(6, 5)).mixing != ()


def test_a_range_that_starts_at_a_number_of_the_batch_is_said() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        start = x[:, 0].detach().sum()
        return m.loss(m.first(x) * torch.arange(start, start + 5.5)[:6])

    assert record_of(Parts(), loss, torch.randn(6, 5)).mixing != ()
