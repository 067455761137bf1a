"""Numbers of the batch that leave torch, as by ``item()``, and come back as numbers of Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.reference import assert_exact, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B, WEIGHTS = 6, [0.5, 0.8, 1.0, 1.3, 1.7, 2.0]
Loss = Callable[[nn.Module, Tensor], Tensor]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.register_buffer("temperature", torch.tensor(0.737373))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


def losses(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().sum(1)


def in_order(rows: Tensor, order: Sequence[int], weights: Sequence[float]) -> Tensor:
    total = torch.zeros(())
    for place, row in enumerate(order):
        total = total + weights[place] * rows[row]
    return total / B


def by_each_place(rows: Tensor, weights: Sequence[float]) -> Tensor:
    total = torch.zeros(())
    for place, row in enumerate(rows.argsort()):
        total = total + weights[place] * rows[row.item()]
    return total / B


SAID: dict[str, Loss] = {
    "bound": lambda m, x: (lambda each: (each * (each > each.mean().item())).mean())(losses(m, x)),
    "bound-as-float": lambda m, x: (lambda each: (each * (each > float(each.detach().median()))).mean())(losses(m, x)),
    "bound-of-data": lambda m, x: (losses(m, x) * (x[:, 0] > x[:, 0].quantile(0.4).item())).mean(),
    "where": lambda m, x: (lambda z: torch.where(z > z.std().item(), z, 0.5 * z).mean())(m(x)),
    "as-a-tensor": lambda m, x: (lambda each: (each * (each > torch.tensor(each.mean().item()))).mean())(losses(m, x)),
    "filled": lambda m, x: (lambda each: (each * (each > torch.full_like(each, each.mean().item()))).mean())(
        losses(m, x)
    ),
    "clamp": lambda m, x: (lambda each: each.clamp(max=each.mean().item()).mean())(losses(m, x)),
    "scaled": lambda m, x: (m(x) / m(x).std().item()).square().mean(),
    "centred": lambda m, x: m(x - x.mean().item()).square().mean(),
    "of-one-sample": lambda m, x: (losses(m, x) * (x[:, 0] > x[2, 1].item())).mean(),
    "order": lambda m, x: (lambda each: in_order(each, each.argsort().tolist(), WEIGHTS))(losses(m, x)),
    "order-of-data": lambda m, x: in_order(losses(m, x), x[:, 0].argsort().tolist(), WEIGHTS),
    "largest-first": lambda m, x: (lambda each: in_order(each, each.topk(B).indices.tolist(), WEIGHTS))(losses(m, x)),
    "place-by-place": lambda m, x: by_each_place(losses(m, x), WEIGHTS),
}


@pytest.mark.parametrize("name", SAID)
def test_numbers_of_other_samples_that_come_back_are_said(name: str) -> None:
    batch = torch.randn(B, 5)
    for _ in range(2):  # the second step has plans
        record = record_of(Network(), SAID[name], batch)
        assert (*record.mixing, *record.weighting) != ()


def logged(m: nn.Module, x: Tensor) -> Tensor:
    each = losses(m, x)
    loss = each.mean()
    assert 0 < loss.item() <= float(each.detach().max())
    assert len(each.tolist()) == len(x)
    return loss


def own_numbers(m: nn.Module, x: Tensor) -> Tensor:
    numbers = x[:, 0].tolist()
    return sum((row - numbers[i]).square() * x[i, 1].item() for i, row in enumerate(losses(m, x))) / len(x)


def order_is_logged(m: nn.Module, x: Tensor) -> Tensor:
    each = losses(m, x)
    assert sorted(each.argsort().tolist()) == [*range(len(x))]
    return in_order(each, range(len(x)), [2.0] * len(x)) * B / len(x)


def in_an_order(order: Callable[[Tensor], Sequence[int]]) -> Loss:
    return lambda m, x: in_order(losses(m, x), order(losses(m, x)), [2.0] * len(x)) * B / len(x)


def with_a_mask(m: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(len(x), 3) * 0.912345
    return (m(x).square() * mask).sum() / mask.sum().item()


SILENT: dict[str, Loss] = {
    "logged": logged,
    "own-numbers": own_numbers,
    "order-is-logged": order_is_logged,
    "order-with-equal-numbers": in_an_order(lambda each: each.argsort().tolist()),
    "iterated-order-with-equal-numbers": in_an_order(lambda each: each.argsort()),
    "place-by-place-with-equal-numbers": lambda m, x: by_each_place(losses(m, x), [2.0] * len(x)) * B / len(x),
    "buffer": lambda m, x: F.softmax(m(x) / m.temperature.item(), 1).square().mean(),
    "sum-of-a-mask": with_a_mask,
}


@pytest.mark.parametrize("name", SILENT)
def test_numbers_that_leave_torch_and_let_no_samples_influence_each_other_are_not_said(name: str) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        record = assert_exact(Network(), SILENT[name], (torch.randn(B, 5),))
        assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_an_order_that_is_logged_says_nothing_of_weights_by_position() -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        each = losses(m, x)
        each.topk(3).indices.tolist()
        return in_order(each, range(B), WEIGHTS)

    torch.manual_seed(0)
    record = record_of(Network(), loss, torch.randn(B, 5))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
