"""Ops in place on what weights alone have made: the values are those of the loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, mean_of_squares, parameter
from tests.capture.reference import assert_exact, record_of
from tests.capture.two_runs import assert_same, first_order

pytestmark = pytest.mark.usefixtures("double_precision")

GRID = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)


class PositionBias(nn.Module):
    """The continuous position bias of Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(inplace=True), nn.Linear(8, 6, bias=False))
        self.linear = nn.Linear(6, 6)
        self.register_buffer("grid", GRID.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 16 * torch.sigmoid(self.mlp(self.grid)).mean(0)


def zeroed(b: Tensor) -> Tensor:
    b = b.clone()
    b[4:].zero_()
    return b


def rotated(w: Tensor) -> Tensor:
    r = torch.zeros(6, 6)
    for i in range(3):
        r[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += w[2 * i : 2 * i + 2, :2]
    return r


def copied(p: Tensor) -> Tensor:
    buffer = torch.ones(3, 6)
    buffer[..., :2].copy_(p[:2])
    return buffer.sum(0)


def siblings(b: Tensor) -> Tensor:
    b = b * 1.0
    left, right = b[:3], b[3:]
    right.mul_(2.0)
    left.add_(1.0)
    return torch.cat([right, left]) + b


def overlapping_siblings(b: Tensor) -> Tensor:
    b = b * 1.0
    left, right = b[:4], b[2:]
    right.zero_()
    return torch.cat([left, right[:2]])


def read_then_overwritten(b: Tensor) -> Tensor:
    b = b * 1.0
    view = b[:3]
    before = view * 2 + b[3:]
    b.mul_(3.0)
    return torch.cat([before, view])


def columns(w: Tensor) -> Tensor:
    w = w * 1.0
    w.t()[1].mul_(5.0)
    w.diagonal().fill_(1.0)
    w.view(-1)[7:9].neg_()
    return w


def chain(w: Tensor) -> Tensor:
    w = w * 1.0
    w.mul_(MASK)
    return w.sub_(1.0).exp_()


def every_second(w: Tensor) -> Tensor:
    w = w.t().clone(memory_format=torch.preserve_format)
    w[::2, 1].neg_()
    w[:, ::3] *= 2.0
    return w


def hidden(write: Callable[[Tensor], object], *, of: Callable[[Tensor], Tensor] = torch.clone) -> Callable[..., Tensor]:
    """What `of` makes of a weight, after `write` has changed it where autograd does not see it."""

    def make(w: Tensor) -> Tensor:
        w = of(w)
        with torch.no_grad():
            write(w)
        return w

    return make


def normalized(w: Tensor) -> None:
    for row in w:
        row.div_(row.norm())
    for row in w.split(1):
        row.add_(1.0)


def view_of_base(w: Tensor) -> Tensor:
    base = w * 1.0
    flat, row = base.view(-1), base[:1]
    with torch.no_grad():
        flat[:5].mul_(0.5)
    return base + flat.view(6, 6) + row


def recorded_before(w: Tensor) -> Tensor:
    w = w * 1.0
    w.mul_(MASK)
    with torch.no_grad():
        w[0].mul_(0.5)
    return w.mul_(2.0)


def detached(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def make(w: Tensor) -> Tensor:
        w = w * 1.0
        write(w.detach())
        return w * w

    return make


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "row": hidden(lambda w: w[0].mul_(0.5)),
    "all": hidden(lambda w: w.mul_(0.5)),
    "of-a-view": hidden(lambda w: w.mul_(0.5), of=lambda w: (w * 1.0)[:, :]),
    "view-of-a-view": hidden(lambda w: w.t()[1:].t()[0].mul_(0.5)),
    "rows": hidden(normalized),
    "by-index": hidden(lambda w: w[0].__setitem__(slice(2), 0.0)),
    "out": hidden(lambda w: torch.mul(w, 0.5, out=w)),
    "out-of-a-row": hidden(lambda w: torch.mul(w[1], 0.5, out=w[0])),
    "initialized": hidden(lambda w: nn.init.constant_(w[1, 2:], 0.3)),
    "by-a-weight": lambda w: hidden(lambda made: made[0].copy_(w[1]))(w),
    "views-of-the-base": view_of_base,
    "expanded": lambda w: hidden(lambda made: made[0].mul_(0.5))(w[0])[None].expand(6, 6),
    "recorded-before": recorded_before,
    "parameter": lambda w: hidden(lambda made: made[0].mul_(1.0), of=lambda made: made)(w),
    "detached": detached(lambda w: w.mul_(MASK)),
    "detached-row": detached(lambda w: w[0].mul_(MASK)),
    "detached-by-mask": detached(lambda w: w.__setitem__(w.abs() < 0.1, 0.0)),
}
ON_A_VECTOR: dict[str, Callable[[Tensor], Tensor]] = {
    "a-view-zeroed": zeroed,
    "a-constant-filled": copied,
    "siblings": siblings,
    "overlapping-siblings": overlapping_siblings,
    "read-then-overwritten": read_then_overwritten,
    "chain": chain,
    "divided": lambda b: b.repeat(2).view(2, 6).div_(3.0).sum(0),
    "relu": lambda b: F.relu(b * 2.0, inplace=True),
    "added-to-a-constant": lambda b: torch.zeros(6).add_(b).mul_(b),
    "added-to-itself": lambda b: (b * 1.0).add_(b).mul_(b),
    "set-by-index": lambda b: (b * 1.0).index_fill_(0, torch.tensor([1, 2]), 0.5).masked_fill_(MASK == 0, 2.0),
    "through-two-views": lambda b: (b * 1.0).view(2, 3).t().mul_(2.0).reshape(6),
}
ON_A_MATRIX: dict[str, Callable[[Tensor], Tensor]] = {
    "rotation": rotated,
    "columns": columns,
    "every-second": every_second,
    "chain": chain,
    "rows-of-a-triangle": lambda w: (w * 1.0).tril_().add_(torch.eye(6)),
    **{f"hidden-{name}": make for name, make in HIDDEN.items()},
}
CASES: dict[str, Callable[[], nn.Module]] = {
    "position-bias": PositionBias,
    **{
        f"vector-{name}": lambda make=make: Model(  # type: ignore[misc]
            lambda m, x: F.linear(x, m.w, make(m.b)).tanh() * make(m.b), w=parameter(6, 6), b=parameter(6)
        )
        for name, make in ON_A_VECTOR.items()
    },
    **{
        f"matrix-{name}": lambda make=make: Model(lambda m, x: F.linear(x, make(m.w)).tanh(), w=parameter(6, 6))  # type: ignore[misc]
        for name, make in ON_A_MATRIX.items()
    },
    "rows-of-every-sample": lambda: Model(
        lambda m, x: x * (m.b.expand(len(x), 6) * 2.0).clone().mul_(m.s).relu_(), b=parameter(6), s=parameter(6)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_exact(name: str) -> None:
    record = assert_exact(CASES[name](), mean_of_squares, (torch.randn(5, 6),))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


@pytest.mark.parametrize("name", CASES)
def test_training_is_equal_bit_for_bit(name: str) -> None:
    assert_same(CASES[name](), [torch.randn(5, 6)], first_order)


def test_weights_that_are_zero_where_a_view_was_zeroed() -> None:
    module = Model(lambda m, x: x[:, :4] * overlapping_siblings(m.b)[:4], b=nn.Parameter(torch.zeros(6)))
    assert_exact(module, lambda m, x: (m(x) - 1).square().sum(1).mean(), (torch.randn(5, 6),))


REFUSED: dict[str, tuple[Callable[[Any], Tensor], str]] = {
    "noise": (
        lambda m: F.relu(drawn(m.b), inplace=True),
        "gives another value when it is repeated: it is random",
    ),
    "what-autograd-kept": (lambda m: kept_by_autograd(m.b), "its inputs or its result were changed in place before"),
    "a-constant-that-is-overwritten": (
        lambda m: with_a_counter(m.b),
        r"computes a weight from a tensor of shape \(6,\) that was changed in place by `add_` at test_weights",
    ),
}


def kept_by_autograd(b: Tensor) -> Tensor:
    made = b.exp()
    made.data.mul_(2.0)  # which the derivative reads, and no version shows
    return made


@torch.library.custom_op("persample_test::drawn", mutates_args=())
def drawn(b: Tensor) -> Tensor:
    return b * torch.rand(6)


drawn.register_autograd(lambda ctx, grad: grad * 0.5)


def with_a_counter(b: Tensor) -> Tensor:
    steps = torch.ones(6)
    out = (b + steps).exp()
    steps.add_(1.0)
    return out


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_again_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    record = record_of(Model(lambda m, x: x * make(m), b=parameter(6)), mean_of_squares, torch.randn(5, 6))
    assert re.search(text, record.unsupported["b"])


def tables(m: Any, x: Tensor) -> Tensor:
    """One copy of a matrix for each sample."""
    return m.w[None].repeat(len(x), 1, 1)


def in_one_row(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    made = tables(m, x)
    row = made[:, 0]
    row.mul_(x)
    return made, row


def in_all(m: Any, x: Tensor) -> Tensor:
    made = tables(m, x)
    made.view(len(x), -1).mul_(x[:, :1])
    return made


def on_the_diagonal(m: Any, x: Tensor) -> Tensor:
    made = tables(m, x)
    made.diagonal(dim1=1, dim2=2).add_(x)
    return made


def by_hand(m: Any, x: Tensor) -> Tensor:
    made = x.new_zeros(len(x), 2, 6)
    made[:, 0] += m.w[0]
    made[:, 1] += x
    return made.prod(1)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.einsum("bi,bij->bj", x, in_one_row(m, x)[0]),
        lambda m, x: in_one_row(m, x)[0][:, 1] * x,
        lambda m, x: torch.einsum("bi,bij->bj", x, on_the_diagonal(m, x)),
        by_hand,
    ],
)
def test_samples_written_into_a_part_of_what_weights_made_leave_no_value(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    module = Model(forward, w=parameter(6, 6))
    record = record_of(module, mean_of_squares, torch.randn(5, 6))
    assert "writes samples into a part of what weights alone have made" in record.unsupported["w"]
    assert_same(module, [torch.randn(5, 6)], first_order)


@pytest.mark.parametrize(
    "forward",
    [lambda m, x: in_one_row(m, x)[1], lambda m, x: torch.einsum("bi,bij->bj", x, in_all(m, x))],
)
def test_samples_written_into_all_that_is_used_of_what_weights_made(forward: Callable[[Any, Tensor], Tensor]) -> None:
    record = assert_exact(Model(forward, w=parameter(6, 6)), mean_of_squares, (torch.randn(5, 6),))
    assert record.mixing == ()


def test_values_of_the_batch_written_to_what_weights_made_are_said() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w * 1.0
        with torch.no_grad():
            w[0].copy_(x.mean(0))
        return F.linear(x, w) + m.b

    module = Model(forward, w=parameter(6, 6), b=parameter(6))
    record = record_of(module, mean_of_squares, torch.randn(5, 6))
    (text,) = record.mixing
    assert text.startswith("a tensor made of weights alone is overwritten by values of the batch at test_weights_in")
    assert (record.coverage, record.axis_lost) == (1.0, ())
