"""Convolutions by weights whose rows are normalized: the dots of rows and gradients come of the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights
from lightning_persample.capture import plan
from tests.capture.reference import assert_exact, loop


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """What dots were asked of an output for."""
    found: list[tuple[Tensor, ...]] = []
    of_output = plan.row_dots_of_output

    def noting(*args: Any) -> Any:
        found.append(args)
        return of_output(*args)

    monkeypatch.setattr(plan, "row_dots_of_output", noting)
    plan.PLANS.clear()
    return found


class Normalized(nn.Module):
    """A convolution by a weight with normalized rows, and what follows it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        kind: str = "standardised",
        after: Callable[[Tensor], Tensor] = torch.tanh,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(shape) + 0.3), nn.Parameter(torch.rand(shape[0]) + 0.5)
        self.bias = nn.Parameter(torch.randn(shape[0])) if bias else None
        self.shift = nn.Parameter(torch.randn(shape[0])) if kind == "shifted" else None
        self.kind, self.after, self.options = kind, after, options

    def rows(self) -> Tensor:
        if self.kind == "weight_norm":
            return torch._weight_norm(self.weight, self.gain.reshape(-1, *(1,) * (self.weight.dim() - 1)), 0)
        rows, gain = self.weight.reshape(1, len(self.weight), -1), None if self.kind == "plain" else self.gain
        return F.batch_norm(rows, None, None, gain, self.shift, training=True).reshape_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        convolution = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
        return self.after(convolution(x, self.rows(), self.bias, **self.options))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().flatten(1).sum(1).mean()


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((6, 4, 3), (3, 4, 9), {"padding": 1}),
    "of one element": ((6, 4, 1, 1), (3, 4, 5, 4), {}),
    "stride, dilation": ((6, 4, 3, 2), (3, 4, 9, 8), {"stride": (2, 1), "dilation": (1, 2), "padding": (2, 1)}),
    "groups": ((6, 2, 3, 3), (3, 4, 5, 5), {"groups": 2, "padding": 1}),
    "depthwise": ((8, 1, 3, 3), (3, 4, 6, 6), {"groups": 4, "stride": 2}),
    "same": ((6, 4, 2, 3), (3, 4, 5, 6), {"padding": "same"}),
    "one sample": ((6, 4, 3, 3), (1, 4, 5, 5), {}),
    "one position": ((6, 4, 3, 3), (4, 4, 3, 3), {}),
    "3d": ((4, 3, 2, 3, 2), (2, 3, 4, 5, 4), {"stride": (1, 2, 1)}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", ["standardised", "shifted", "plain", "weight_norm"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_dots_come_of_the_output(geometry: str, kind: str, asked: list[tuple[Tensor, ...]]) -> None:
    shape, size, options = GEOMETRIES[geometry]
    module = Normalized(shape, kind, bias=kind != "shifted", **options).double()
    module.gain.requires_grad_(kind != "plain")
    for _ in range(3):
        x = torch.randn(size, dtype=torch.float64)
        assert_exact(module, loss, (x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.rand_like(parameter), alpha=0.1)
    assert asked


def through_data(h: Tensor) -> Tensor:
    h.data.clamp_(-0.5, 0.5)
    return h * 2.0


@pytest.mark.parametrize("after", [torch.relu_, lambda h: h.mul_(2.0), through_data])
def test_an_output_that_was_written_over_is_not_read(
    after: Callable[[Tensor], Tensor], asked: list[tuple[Tensor, ...]]
) -> None:
    module = Normalized((6, 4, 3, 3), after=after).double()
    for _ in range(3):
        assert_exact(module, loss, (torch.randn(3, 4, 6, 6, dtype=torch.float64),))
    assert not asked


def test_a_bias_that_was_changed_since_is_not_read(asked: list[tuple[Tensor, ...]]) -> None:
    module = Normalized((6, 4, 3, 3)).double()
    module.bias.requires_grad_(False)

    def changed(module: Normalized, x: Tensor) -> Tensor:
        value, before = loss(module, x), module.bias.clone()
        module.bias.add_(1.0)
        return value + 0.0 * module.bias.copy_(before).sum()

    for _ in range(3):
        assert_exact(module, changed, (torch.randn(3, 4, 6, 6, dtype=torch.float64),))
    assert not asked


def test_a_gain_of_zero_is_computed_otherwise() -> None:
    module = Normalized((6, 4, 3, 3)).double()
    plan.PLANS.clear()
    for step in range(4):
        with torch.no_grad():
            module.gain[step] = 0.0
        assert_exact(module, loss, (torch.randn(3, 4, 6, 6, dtype=torch.float64),))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
def test_a_bias_far_larger_than_the_product_costs_no_precision(size: float) -> None:
    module, vector = Normalized((6, 4, 3, 3), after=lambda h: h * 0.5), torch.randn(6, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        module.bias.mul_(size)
    x = torch.randn(8, 4, 7, 7, dtype=torch.float64)
    expected = loop(module.double(), lambda module, x: (module(x) * vector).sum() / len(x), (x,))
    module, x = module.float(), x.float()
    for _ in range(3):
        with expanded_weights(module, x, unsupported="error") as capture:
            ((module(x) * vector.float()).sum() / len(x)).backward()
        for name, grads in expected.items():
            squares = grads.flatten(1).square().sum(1)
            torch.testing.assert_close(capture.record.sq_norms[name].double(), squares, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["standardised", "shifted", "weight_norm"])
def test_rows_that_are_equal_numbers_are_computed_otherwise(kind: str) -> None:
    module = Normalized((6, 4, 3, 3), kind).double()
    plan.PLANS.clear()
    for step in range(4):
        with torch.no_grad():
            module.weight[step] = 0.5
            module.weight[step, 0, 0, 0] += 1e-6 * step
        assert_exact(module, loss, (torch.randn(3, 4, 6, 6, dtype=torch.float64),))


@pytest.mark.parametrize("name", ["weight", "gain"])
@pytest.mark.parametrize("kind", ["standardised", "weight_norm"])
def test_what_makes_rows_and_is_changed_unseen_is_refused(kind: str, name: str) -> None:
    module = Normalized((6, 4, 3, 3), kind).double()
    plan.PLANS.clear()
    for changes in (False, False, False, True, False):
        x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
        with expanded_weights(module, x, unsupported="ignore") as capture:
            value = loss(module, x)
            if changes:
                getattr(module, name).data.view(-1)[5] += 0.1  # which no version shows
            value.backward()
        assert set(capture.record.unsupported) == ({"weight", "gain"} if changes else set())
