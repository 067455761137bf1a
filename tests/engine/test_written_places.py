"""Rows of the batch written into places that indices name along another axis than the batch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.model_cases import Model, parameter
from tests.engine.reference import assert_exact, record_of

B, T, D = 4, 4, 4  # of one size, so that no axis can be told by it
PLACES: dict[str, tuple[Any, Any]] = {  # where to write, and what of the layer's output
    "list": ((slice(None), [1, 3]), lambda y: y[:, :2]),
    "tensor": ((slice(None), torch.tensor([3, 0, 1])), lambda y: y[:, 1:]),
    "twice-the-same": ((slice(None), [2, 2]), lambda y: y[:, :1]),
    "last-axis": ((..., [0, 2]), lambda y: y[..., :2]),
    "matrix": ((slice(None), torch.tensor([[0, 1], [2, 3]])), lambda y: y.unflatten(1, (2, 2))),
    "two-together": ((slice(None), [0, 1, 2], [3, 0, 2]), lambda y: y[:, :3, 0]),
    "beside-a-number": ((slice(None), 2, [0, 1]), lambda y: y[:, 0, :2]),
    "beside-a-slice": ((slice(None), [0, 3], slice(1, 3)), lambda y: y[:, :2, :2]),
    "of-one-size-with-all": ((slice(None), [3, 1, 0, 2]), lambda y: y),
}


def mean_of_cubes(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten(1).pow(3).mean(1).mean()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("onto", ["zeros", "batch", "weight"])
@pytest.mark.parametrize("place", PLACES)
def test_rows_written_by_index_stay_with_their_samples(place: str, onto: str) -> None:
    index, part = PLACES[place]

    def forward(m: Any, x: Tensor) -> Tensor:
        target = {"zeros": x.new_zeros(x.shape), "batch": m.a(x), "weight": m.w.expand(x.shape).clone()}[onto]
        target[index] = part(m.b(x))
        return m.c(target)

    layers = {name: nn.Linear(D, D) for name in "abc"}
    module = Model(forward, **layers, w=parameter(T, D))
    assert_exact(module, mean_of_cubes, (torch.randn(B, T, D),))


@pytest.mark.usefixtures("double_precision")
def test_across_two_separate_indices() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        target = x.new_zeros(len(x), 3, T, 3, D)
        target[:, [0, 2], :, [1, 2]] = m.a(x).expand(2, *x.shape)
        return m.c(target)

    assert_exact(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, (torch.randn(B, T, D),))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "index",
    [[1, 0, 3, 2], (slice(None), [0, 1, 2, 3])],
    ids=["along-the-batch", "along-another-axis"],
)
def test_rows_written_to_other_samples_have_no_values(index: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        target = x.new_zeros(B, B, D)
        target[index] = m.a(x) if isinstance(index, tuple) else m.a(x)[:, None]
        return m.c(target)

    record = record_of(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, torch.randn(B, D))
    assert {"c.weight", "c.bias"} <= record.unsupported.keys()
    assert record.coverage < 1
