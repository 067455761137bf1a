"""An op of one's own between a weight and the batch is exact without a rule: it is differentiated for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from tests.capture.model_cases import Model, mean_of_squares, parameter
from tests.capture.reference import assert_exact
from tests.capture.test_absent import OwnMatmul
from tests.capture.two_runs import assert_same, first_order

pytestmark = pytest.mark.usefixtures("double_precision")


class WithSetup(torch.autograd.Function):
    """The form that torch.func knows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = OwnMatmul.backward


@torch.library.custom_op(
    "persample_test::gated", mutates_args=(), schema="(Tensor x, Tensor[] weights, float power) -> Tensor"
)
def gated(x: Tensor, weights: list[Tensor], power: float) -> Tensor:
    return x * weights[0] ** power + weights[1]


def gated_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None]:
    x, (scale, _), power = ctx.inputs
    return grad * scale**power, [(grad * x * power * scale ** (power - 1)).sum(0), grad.sum(0)], None


gated.register_autograd(gated_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "inputs", inputs))


@wrap_torch_function(lambda x, weight: (x, weight))
def own_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return OwnMatmul.apply(x, weight)


@wrap_torch_function(lambda x, weight: (x, weight))
def with_setup(x: Tensor, weight: Tensor) -> Tensor:
    return WithSetup.apply(x, weight)


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autograd-function": lambda m, x: own_matmul(x, m.w),
    "autograd-function-with-setup": lambda m, x: with_setup(x, m.w),
    "used-twice": lambda m, x: own_matmul(x, m.w) + own_matmul(x.sin(), 2 * m.w),
    "custom-op-with-a-list": lambda m, x: gated(x, [m.s, m.t], 3.0),
    "one-of-them-frozen": lambda m, x: gated(x, [m.s.detach(), m.t], 3.0),
}


def module_of(name: str) -> nn.Module:
    return Model(lambda m, x: EXACT[name](m, m.first(x)), first=nn.Linear(5, 6), w=parameter(6, 4), s=parameter(6),
                 t=parameter(6))  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exact_and_training_is_equal_bit_for_bit(name: str) -> None:
    module, batch = module_of(name), torch.randn(4, 5)
    assert_exact(module, mean_of_squares, (batch,))
    assert_same(module, [batch], first_order)
