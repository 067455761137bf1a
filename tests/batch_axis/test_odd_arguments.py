"""Arguments that are changed, that hold tensors out of sight, that have no sizes; results in the place of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import Dense, register_rule
from lightning_persample.capture import plan
from lightning_persample.capture.mode import expanded_weights
from tests.capture.model_cases import Model, mean_of_squares
from tests.capture.reference import assert_exact, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B, T, D = 4, 5, 3


def cube() -> Tensor:
    return torch.randn(B, T, D)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_a_list_that_is_changed_before_the_backward(monkeypatch: pytest.MonkeyPatch, name: str, fuse: bool) -> None:
    plan.PLANS.clear()  # the first call of a layout, and one that is known

    def forward(module: Any, x: Tensor) -> Tensor:
        options = {name: [2, 2]}
        y = F.conv2d(x, module.a.weight, module.a.bias, **options)
        options[name][:] = [1, 1]
        return y

    module = Model(forward, a=nn.Conv2d(2, 3, 3))
    for _ in range(2):
        assert_exact(module, mean_of_squares, (torch.randn(B, 2, 9, 9),))
        x = torch.randn(B, 2, 9, 9)
        module.zero_grad()
        mean_of_squares(module, x).backward()
        expected = module.a.weight.grad.clone()
        module.zero_grad()
        with expanded_weights(module, x, fuse_weight_grad=fuse):
            mean_of_squares(module, x).backward()
        torch.testing.assert_close(module.a.weight.grad, expected)


NUMBERS_AMONG_TENSORS = {
    "one": lambda m, x: torch.addmm(2, m.bias, x, m.weight),
    "two": lambda m, x: torch.addmm(2, m.bias, 3, x, m.weight),
    "method": lambda m, x: (x @ m.weight).addmm(2, x + m.bias.sum(), m.weight),
    "method, two": lambda m, x: (x @ m.weight).addmm(2, 3, x + m.bias.sum(), m.weight),
    "vector": lambda m, x: torch.addmv(2, m.bias.sum().expand(len(x)), 3, x, m.weight[:, 0])[:, None],
}


@pytest.mark.filterwarnings("ignore:This overload of add:UserWarning")
@pytest.mark.parametrize("forward", NUMBERS_AMONG_TENSORS.values(), ids=NUMBERS_AMONG_TENSORS)
def test_an_overload_with_numbers_among_its_tensors(forward: Any) -> None:
    module = Model(forward, weight=nn.Parameter(torch.randn(D, T)), bias=nn.Parameter(torch.randn(T)))
    assert_exact(module, mean_of_squares, (torch.randn(B, D),))


NUMBERS_AS_TENSORS = {
    "add": lambda m, x, number: torch.add(x[:, :T], m.bias, alpha=number),
    "sub": lambda m, x, number: torch.sub(x[:, :T], m.bias, alpha=number),
    "rsub": lambda m, x, number: torch.rsub(m.bias, x[:, :T], alpha=number),
    "addmm": lambda m, x, number: torch.addmm(m.bias, x, m.weight, alpha=number, beta=number),
}


@pytest.mark.parametrize("number", [torch.tensor(2.0), torch.tensor(3), np.float32(2)], ids=["float", "int", "numpy"])
@pytest.mark.parametrize("name", NUMBERS_AS_TENSORS)
def test_a_factor_that_is_a_tensor_or_of_numpy(name: str, number: Any) -> None:
    module = Model(
        lambda m, x: NUMBERS_AS_TENSORS[name](m, x, number),
        weight=nn.Parameter(torch.randn(6, T)),
        bias=nn.Parameter(torch.randn(T)),
    )
    assert_exact(module, mean_of_squares, (torch.randn(B, 6),))


@pytest.mark.parametrize("name", NUMBERS_AS_TENSORS)
def test_a_factor_that_is_changed_before_the_backward_is_named(name: str) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        number = torch.tensor(2.0)
        y = NUMBERS_AS_TENSORS[name](module, x, number)
        number.mul_(5)
        return y

    module = Model(forward, weight=nn.Parameter(torch.randn(6, T)), bias=nn.Parameter(torch.randn(T)))
    record = record_of(module, mean_of_squares, torch.randn(B, 6))
    assert set(record.unsupported) == ({"weight", "bias"} if name == "addmm" else {"bias"})
    assert all("was changed in place by `mul_`" in text for text in record.unsupported.values())


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int64])
def test_a_sum_that_is_divided_by_a_number_of_numpy_is_a_mean(kind: Any) -> None:
    record = assert_exact(nn.Linear(D, T), lambda m, x: m(x).square().sum() / kind(len(x)), (torch.randn(B, D),))
    assert record.weighting == ()


@pytest.mark.filterwarnings("ignore:This overload of add:UserWarning")
@pytest.mark.parametrize("numbers", [{"beta": 2, "alpha": 3}, {}], ids=["named", "among its tensors"])
def test_a_sum_with_a_product_over_the_batch(numbers: dict[str, float]) -> None:
    added, matrix = torch.randn(T, B), torch.randn(B, B)

    def forward(module: Any, x: Tensor) -> Tensor:
        h = module.a(x).T
        return torch.addmm(added, h, matrix, **numbers) if numbers else torch.addmm(2, added, 3, h, matrix)

    record = record_of(Model(forward, a=nn.Linear(D, T)), lambda m, x: m(x).square().sum(), torch.randn(B, D))
    assert [text.startswith("`square` of a value computed over the whole batch") for text in record.mixing] == [True]


@pytest.mark.usefixtures("own_rules")
def test_a_rule_that_writes_into_a_list_that_it_is_given() -> None:
    names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")

    @register_rule(torch.layer_norm, arguments=names, batched=("input",), weights=("weight", "bias"), overwrite=True)
    def rule(call: Any, grad: Tensor) -> dict[str, Dense]:
        shape = call.arguments["normalized_shape"]
        normalized = F.layer_norm(call.arguments["input"], tuple(shape))
        shape.append(7)
        return {
            name: Dense((grad * normalized if name == "weight" else grad).flatten(1, -2).sum(1))
            for name in call.weights
        }

    module = Model(lambda m, x: F.layer_norm(x, [D], m.a.weight, m.a.bias), a=nn.LayerNorm(D))
    for _ in range(3):
        assert_exact(module, mean_of_squares, (cube(),))


BOUNDS = {
    "stop": lambda y, n: y[:, :n],
    "start": lambda y, n: y[:, n:],
    "step": lambda y, n: y[:, ::n],
    "of another axis": lambda y, n: y[..., :n],
    "alone": lambda y, n: y.transpose(0, 1)[:n].transpose(0, 1),
}


@pytest.mark.parametrize("weights", [False, True], ids=["of the batch", "of a weight"])
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_slices_whose_bounds_are_tensors(bound: Any, weights: bool) -> None:
    limit = torch.tensor([1, 2]).max()

    def forward(module: Any, x: Tensor) -> Tensor:
        if weights:
            return x * bound(module.a.weight[None], limit).sum()
        return bound(module.a(x), limit)

    module = Model(forward, a=nn.Linear(D, D))
    for _ in range(2):
        assert_exact(module, mean_of_squares, (cube(),))


def test_a_slice_up_to_a_length_of_the_batch() -> None:
    """As a step cuts its padding off; the longest sample is in every batch, so that the loop cuts alike."""
    lengths = torch.full((B,), 3)
    module = Model(lambda m, x, n: m.a(x)[:, : n.max()], a=nn.Linear(D, D))
    for _ in range(2):
        assert_exact(module, mean_of_squares, (cube(), lengths))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore::lightning_persample.errors.PerSampleWarning")
def test_nested_tensors_run_as_without() -> None:
    lengths = (2, 3, 4)

    def forward(module: Any, x: Tensor) -> Tensor:
        y = module.a(x)
        nested = torch.nested.as_nested_tensor([y[i, :length] for i, length in enumerate(lengths)])
        return torch.nested.to_padded_tensor(nested * 2, 0.0)

    module, x = Model(forward, a=nn.Linear(D, D)), torch.randn(len(lengths), T, D)
    expected = module(x)
    with expanded_weights(module, x, unsupported="ignore", loss_reduction="sum") as seen:
        found = module(x)
        found.square().sum().backward()
    assert torch.equal(found, expected)
    assert seen.record.axis_lost
    for place, (one, length) in enumerate(zip(x, lengths, strict=True)):
        module.zero_grad()
        (2 * module.a(one[:length])).square().sum().backward()
        for name, values in seen.record.sq_norms.items():
            torch.testing.assert_close(values[place], module.get_parameter(name).grad.square().sum())


@pytest.mark.parametrize("held", range(12))
def test_a_result_in_the_place_of_another_that_is_gone(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """Of two calls of one op, laid out differently, the second's result may get the id of the first's."""
    plan.PLANS.clear()
    size = 3 + held
    x = torch.randn(size, size, D)
    first = Model(lambda m, x: F.layer_norm(x, (D,), m.a.weight, m.a.bias), a=nn.LayerNorm(D))
    for _ in range(3):
        record_of(first, mean_of_squares, x)

    def forward(module: Any, x: Tensor) -> Tensor:
        turned, taken = x.transpose(0, 1), [torch.empty(0) for _ in range(held)]
        gone = F.layer_norm(x, (D,), module.a.weight, module.a.bias)
        del gone
        taken.clear()
        return F.layer_norm(turned, (D,), module.a.weight, module.a.bias).transpose(0, 1)

    for _ in range(2):
        assert_exact(Model(forward, a=nn.LayerNorm(D)), mean_of_squares, (x,))
