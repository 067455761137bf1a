"""What a tensor is converted to gives a dtype, a device or a shape, and no sample's data."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import ExpandedWeight, call_for_per_sample_grads
from tests.capture.model_cases import Model, mean_of_squares, parameter
from tests.capture.reference import assert_exact, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4
NUMBER, ROW, TABLE = torch.tensor(2.0), torch.randn(5), torch.randn(7, 5)
MASK = torch.rand(3, 5) > 0.5


def data() -> tuple[Tensor]:
    return (torch.randn(B, 5),)


def orthogonality(w: Tensor, like: Tensor) -> Tensor:
    return w.mT @ w - torch.eye(5).to(like)


# of a linear layer `a` (3, 5) and x (B, 5): values for each sample
FORWARD: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "temperature": lambda m, x: m.a(x) / NUMBER.to(m.a(x)),
    "temperature-like-a-parameter": lambda m, x: m.a(x) / NUMBER.to(m.a.weight),
    "temperature-like-a-mean": lambda m, x: m.a(x) / NUMBER.to(m.a(x).mean()),
    "keyword": lambda m, x: m.a(x) / NUMBER.to(tensor=x),
    "type-as": lambda m, x: m.a(x) * NUMBER.type_as(x),
    "row": lambda m, x: m.a(x * ROW.to(x)[None].expand(len(x), -1)),
    "row-expanded": lambda m, x: m.a(x + ROW.expand_as(x)),
    "row-viewed": lambda m, x: m.a(x + ROW.view_as(x[0])),
    "row-reshaped": lambda m, x: m.a(x + ROW.reshape_as(x[0]).to(x)),
    "masked-weight": lambda m, x: F.linear(x, m.a.weight * MASK.to(x)),
    "weight-that-is-in-it": lambda m, x: F.linear(x, m.a.weight.to(x), m.a.bias.type_as(x)),
    "bias-expanded": lambda m, x: m.a(x) + m.a.bias.expand_as(m.a(x)),
    "weight-viewed": lambda m, x: F.linear(x, m.a.weight.t().reshape_as(m.a.weight)),
    "batch-to-a-weight": lambda m, x: m.a(x.float().to(m.a.weight)),
    "batch-to-another-rank": lambda m, x: m.a(x) * x[:, 0].float().to(m.a(x))[:, None],
    "batch-to-another-axis": lambda m, x: m.a(x * x[:, :1].float().to(x.t().contiguous())),
    "table": lambda m, x: m.a(x) + m.a(TABLE[:3].to(x)).sum(0),
    "zeros": lambda m, x: torch.where(m.a(x) > 0, m.a(x), torch.zeros_like(m.a(x)) - 0.1),
    "full": lambda m, x: m.a(x) * torch.full_like(m.a(x), 2.0) + x.new_full((3,), 1.5),
    "new-numbers": lambda m, x: m.a(x) * x.new_ones(3),
    "zeros-like-a-weight": lambda m, x: F.linear(x, m.a.weight + torch.ones_like(m.a.weight)),
    "penalty": lambda m, x: m.a(x) + 0 * orthogonality(m.a.weight, x).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_values_are_exact_and_nothing_is_said(name: str) -> None:
    module = Model(FORWARD[name], a=nn.Linear(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(module, mean_of_squares, data())


@pytest.mark.parametrize("name", FORWARD)
def test_values_of_a_call_are_exact(name: str) -> None:
    module, batch = Model(FORWARD[name], a=nn.Linear(5, 3)), data()
    expected = loop(module, mean_of_squares, batch)
    out = call_for_per_sample_grads(module, loss_reduction="mean")(*batch)
    mean_of_squares(lambda _: out, *batch).backward()
    for name, p in module.named_parameters():
        if getattr(p, "grad_sample", None) is None:
            assert not expected[name].any(), name
        else:
            torch.testing.assert_close(p.grad_sample, expected[name], rtol=1e-10, atol=1e-12)


def test_a_weight_in_place_of_its_tensor_form() -> None:
    weight, (x,) = parameter(3, 5), data()
    expanded = ExpandedWeight(weight, B, "sum")
    F.linear(x, (expanded * MASK.to(x)).to(x)).square().sum().backward()
    rows = []
    for sample in x:
        (grad,) = torch.autograd.grad(F.linear(sample, weight * MASK.to(sample)).square().sum(), weight)
        rows.append(grad)
    torch.testing.assert_close(weight.grad_sample, torch.stack(rows))


def test_a_penalty_on_a_weight_keeps_each_samples_values() -> None:
    module = Model(lambda m, x: m.a(x), a=nn.Linear(5, 3))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return mean_of_squares(m, x) + orthogonality(m.a.weight, x).square().sum()

    batch = data()
    record = record_of(module, loss, *batch)
    expected = loop(module, mean_of_squares, batch)
    assert record.coverage == 1.0
    for name in record.names:
        torch.testing.assert_close(record.grad_samples[name], expected[name], rtol=1e-10, atol=1e-12)


def test_class_weights_are_no_data() -> None:
    counts, labels = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float32), torch.tensor([0, 2, 1, 1])
    module = nn.Linear(5, 3)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y, weight=counts.to(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(module, loss, (*data(), labels))


@pytest.mark.parametrize("converted", [lambda a, x: a.to(x), lambda a, x: a.type_as(x), lambda a, x: a.to(x.dtype)])
def test_rows_that_are_in_no_batch_stay_unknown(converted: Callable[[Tensor, Tensor], Tensor]) -> None:
    anchors, labels = torch.randn(B, 5, dtype=torch.float32), torch.tensor([0, 2, 1, 1])
    module = nn.Linear(5, 3)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y) + m(converted(anchors, x)).square().mean()

    record = record_of(module, loss, *data(), labels)
    assert set(record.unsupported) == {"weight", "bias"}
    assert all("calls without a tensor of the batch" in reason for reason in record.unsupported.values())


def test_random_numbers_of_the_batchs_shape_stay_unknown() -> None:
    module = nn.Linear(5, 3)
    record = record_of(module, lambda m, x: m(torch.randn_like(x)).square().mean(), *data())
    assert set(record.unsupported) == {"weight", "bias"}


def test_a_copy_of_the_batchs_tensor_holds_the_samples() -> None:
    module = nn.Linear(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on new_tensor
        assert_exact(module, lambda m, x: m(m.weight.new_tensor(x)).square().mean(1).mean(), data())


def test_a_number_of_the_batch_in_a_new_tensor_belongs_to_the_batch() -> None:
    module = nn.Linear(5, 3)
    record = record_of(module, lambda m, x: m(x * x.new_full((5,), x.square().mean())).square().mean(), *data())
    assert "`mul` combines samples with a value computed over the whole batch" in record.mixing[0]


def test_what_a_weight_is_converted_to_may_be_written_to() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        like = x.clone()
        weight = (2 * m.a.weight).to(like)
        like.zero_()
        return F.linear(x, weight)

    assert_exact(Model(forward, a=nn.Linear(5, 3, bias=False)), mean_of_squares, data())
