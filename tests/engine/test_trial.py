"""An op of no known family is tried on samples alone: what mixes them shows, and nothing is drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")


@torch.library.custom_op("persample_test::swap_two", mutates_args=())
def swap_two(x: Tensor) -> Tensor:
    y = x.clone()
    if len(x) > 2:
        y[1], y[2] = x[2], x[1]
    return y


@torch.library.custom_op("persample_test::a_little_of_all", mutates_args=())
def a_little_of_all(x: Tensor) -> Tensor:
    return x + 3e-5 * x.mean(0)


@torch.library.custom_op("persample_test::foreign_noise", mutates_args=())
def foreign_noise(x: Tensor) -> Tensor:
    return x + float(np.random.rand()) * 0.1 + random.random() * 0.1


@torch.library.custom_op("persample_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


swap_two.register_autograd(lambda ctx, grad: swap_two(grad))
a_little_of_all.register_autograd(lambda ctx, grad: grad + 3e-5 * grad.mean(0))
foreign_noise.register_autograd(lambda ctx, grad: grad)
cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 3)


@pytest.mark.parametrize("op", [swap_two, a_little_of_all], ids=["two-in-the-middle", "a-little"])
def test_an_op_that_mixes_is_said(op: object) -> None:
    record = record_of(nn.Linear(4, 3), lambda m, x, y: F.mse_loss(op(m(x)), y), *batch())
    assert "gives a sample another value alone than in its batch" in record.mixing[0]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_an_op_that_does_not_mix_is_exact(size: int) -> None:
    module, data = nn.Linear(4, 3), batch(size)
    record = record_of(module, lambda m, x, y: F.mse_loss(cube(m(x)), y), *data)
    assert record.mixing == ()
    assert_values(record, loop(module, lambda m, x, y: F.mse_loss(cube(m(x)), y), data))


def test_random_numbers_of_python_and_numpy_go_on_as_without() -> None:
    module, (x, y) = nn.Linear(4, 3), batch()
    following = []
    for observed in (False, True):
        np.random.seed(0)
        random.seed(0)
        if observed:
            record_of(module, lambda m, x, y: F.mse_loss(foreign_noise(m(x)), y), x, y)
        else:
            F.mse_loss(foreign_noise(module(x)), y).backward()
        following.append((np.random.rand(), random.random()))
    assert following[0] == following[1]
