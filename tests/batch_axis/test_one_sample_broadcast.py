"""A batch of one sample, whose one row is laid over several: all of them are this sample's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, assert_values, record_of

N, D = 5, 4
OTHERS = torch.randn(N, D, dtype=torch.float64)
FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weight-added": lambda m, x: m.b(m.a(x) + m.rows),
    "subtracted-from-weight": lambda m, x: m.b(m.rows - m.a(x)),
    "weight-multiplied": lambda m, x: m.b(m.a(x) * m.rows),
    "constant-added": lambda m, x: m.b(m.a(x) + OTHERS),
    "constant-before-every-layer": lambda m, x: m.b(m.a(x * OTHERS)),
    "constant-with-one-axis-more": lambda m, x: m.b(m.a(x + OTHERS[:, None]) * m.rows),
    "expanded": lambda m, x: m.b(m.a(x).expand(N, D) * m.rows),
    "expanded-with-one-axis-more": lambda m, x: m.b(m.a(x).expand(3, N, D) * m.rows),
    "broadcast-tensors": lambda m, x: m.b(torch.broadcast_tensors(m.a(x), m.rows)[0]),
    "where": lambda m, x: m.b(torch.where(OTHERS > 0, m.a(x), m.rows)),
    "layer-norm": lambda m, x: m.b(F.layer_norm(m.a(x) + m.rows, (D,), m.v, m.v)),
    "column": lambda m, x: m.b((m.a(x).t() + m.v).t()),
    "addmm": lambda m, x: torch.addmm(m.rows, m.a(x).expand(N, D), m.a.weight),
    "attention": lambda m, x: F.scaled_dot_product_attention(m.rows, m.a(x) + m.rows, m.rows),
    "convolution": lambda m, x: F.conv1d((m.a(x) + m.rows).t()[None], m.kernel, padding=1),
    "recurrent-cell": lambda m, x: torch.rnn_tanh_cell(m.a(x) + OTHERS, m.rows, m.a.weight, m.a.weight),
    "reduced-again": lambda m, x: m.b((m.a(x) + m.rows).amax(0, keepdim=True)),
}


def mean_of_cubes(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).pow(3).mean()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("options", [{}, {"fuse_weight_grad": True}, {"max_memory": 1}], ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_one_sample_laid_over_several_rows(forward: str, options: dict[str, Any]) -> None:
    module = Model(
        FORWARDS[forward],
        a=nn.Linear(D, D),
        b=nn.Linear(D, 3),
        rows=parameter(N, D),
        v=parameter(D),
        kernel=parameter(2, D, 3),
    )
    assert_exact(module, mean_of_cubes, (torch.randn(1, D),), **options)


@pytest.mark.usefixtures("double_precision")
def test_the_one_row_picked_from_a_batch_is_its_samples() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        chosen = m.a(x)[x[:, 0] > 1] * m.rows
        return m.b(x) + F.pad(m.b(chosen).mean() * m.v[None, :1], (0, 2)) * (x[:, :1] > 1)

    x = torch.randn(3, D)
    x[:, 0] = torch.tensor([0.0, 2.0, -1.0])
    module = Model(forward, a=nn.Linear(D, D), b=nn.Linear(D, 3), rows=parameter(N, D), v=parameter(D))

    expected: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for value in module(x).pow(3).mean(1):
        grads = torch.autograd.grad(value, list(module.parameters()), retain_graph=True, materialize_grads=True)
        for name, grad in zip(expected, grads, strict=True):
            expected[name].append(grad)
    record = record_of(module, mean_of_cubes, x)
    assert {"rows", "a.weight", "a.bias", "b.weight", "b.bias"} <= set(record.names)
    assert_values(record, {name: torch.stack(grads) for name, grads in expected.items()})
