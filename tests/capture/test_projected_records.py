"""Projected gradients of a record beside those of an independent one-sample loop, for every way to meet the batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import Projection
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, UnsupportedError
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.capture.reference import loop
from tests.in_turn import every_other, in_turn, one_kind_each
from tests.models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

# The cases' parameters are small: of some all numbers are kept, of others one side, of others none.
PROJECTIONS = [Projection(6, seed=1), Projection(24, "rademacher", seed=2)]


def projected(projection: Projection, name: str, grads: Tensor) -> Tensor:
    """By the matrices and the dense gradients (B, *shape) alone."""
    left, right = projection.matrices(name, grads.shape[1:])
    matrices = grads.to(torch.promote_types(grads.dtype, torch.float64))
    matrices = matrices.reshape(len(grads), left.shape[1], right.shape[1])
    left, right = left.to(matrices.dtype), right.to(matrices.dtype)
    return torch.einsum("ap,npd,bd->nab", left, matrices, right).flatten(1)


def assert_projected(
    record: PerSampleRecord, grads: dict[str, Tensor], projection: Projection, rtol: float = 1e-10
) -> None:
    """Relative to the largest entry of all parameters: biases before a normalization have none."""
    found = record.project(projection)
    assert tuple(found) == record.names
    expected = {name: projected(projection, name, grads[name]) for name in found}
    size = max(float(rows.abs().max()) for rows in expected.values())
    for name, rows in found.items():
        assert rows.shape == (record.num_values, projection.size_of(grads[name].shape[1:]))
        torch.testing.assert_close(rows.to(expected[name].dtype), expected[name], rtol=rtol, atol=rtol * size)


def check(module: nn.Module, loss_fn: Any, batch: tuple[Tensor, ...], samples: Tensor | None, **options: Any) -> None:
    expected = loop(module, loss_fn, batch, options.get("batch_dim", 0))
    with expanded_weights(
        module, batch, quantities=("projection",), unsupported="error", samples=samples, **options
    ) as capture:
        loss_fn(module, *batch).backward()
    module.zero_grad()
    record = capture.record
    places = torch.arange(record.batch_size) if samples is None else samples
    for projection in PROJECTIONS:
        assert_projected(record, {name: expected[name][places] for name in record.names}, projection)


@pytest.mark.parametrize(("name", "part"), every_other(in_turn(one_kind_each(CASES), ["all", "some"])))
def test_one_way_to_meet_the_batch(name: str, part: str) -> None:
    case = CASES[name]
    module = case.build().double()
    batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in case.batch(5))
    check(module, case.loss, batch, torch.tensor([3, 0, 4]) if part == "some" else None, **case.options)


@pytest.mark.parametrize("max_memory", [None, 1])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, max_memory: int | None) -> None:
    model = MODELS[name](dtype=torch.float64)
    check(model.module, model.loss_fn, model.make_batch(6), None, max_memory=max_memory)


class Tied(nn.Module):
    """A table that is the head as well, and a position embedding as large as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70, 20)
        self.positions = nn.Parameter(torch.randn(7, 20))

    def forward(self, index: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(index) + self.positions), self.table.weight)


def tied_loss(module: nn.Module, index: Tensor) -> Tensor:
    return F.cross_entropy(module(index)[:, :-1].flatten(0, 1), index[:, 1:].flatten())


@pytest.mark.parametrize("dim", [1, 40, 256, 2000])
def test_tied_weights(dim: int) -> None:
    module, index = Tied().double(), torch.randint(0, 70, (5, 7))
    expected = loop(module, tied_loss, (index,))
    with expanded_weights(module, (index,), quantities=("projection",)) as capture:
        tied_loss(module, index).backward()
    assert_projected(capture.record, expected, Projection(dim))


CONVOLUTIONS = {
    "groups": nn.Conv2d(12, 18, 3, padding=1, groups=3),
    "depthwise": nn.Conv2d(12, 12, 3, padding=1, groups=12),
    "dilation": nn.Conv2d(12, 18, (3, 2), stride=(2, 1), dilation=2, padding=2),
    "circular": nn.Conv2d(12, 18, 3, padding=1, padding_mode="circular"),
    "transposed": nn.ConvTranspose2d(12, 18, 3, stride=2, padding=1, output_padding=1),
    "transposed, groups": nn.ConvTranspose2d(12, 18, (2, 3), stride=(1, 3), dilation=(2, 1), groups=2),
}


@pytest.mark.parametrize("dim", [16, 100])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, dim: int) -> None:
    module, x = CONVOLUTIONS[name].double(), torch.randn(4, 12, 7, 6, dtype=torch.float64)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().flatten(1).mean(1).mean()

    expected = loop(module, loss, (x,))
    with expanded_weights(module, (x,), quantities=("projection",)) as capture:
        loss(module, x).backward()
    assert_projected(capture.record, expected, Projection(dim))


X, Y = torch.randn(4, 30, dtype=torch.float64), torch.randn(4, 20, dtype=torch.float64)


def mse(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(module(x), y)


@pytest.mark.parametrize("samples", [None, torch.tensor([2, 1])], ids=["all", "some"])
@pytest.mark.parametrize("weighting", ["mean", "sum", "tensor"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_weights_and_scale_are_taken_out(weighting: str, samples: Tensor | None, scale: float) -> None:
    module = nn.Linear(30, 20).double()
    weights = torch.tensor([0.1, 0.5, 2.0, 0.7]).double()
    reduce: Any = {"mean": Tensor.mean, "sum": Tensor.sum, "tensor": lambda losses: (losses * weights).sum()}
    own = loop(module, mse, (X, Y))
    reduction: Any = weights if weighting == "tensor" else weighting
    with expanded_weights(
        module, (X, Y), loss_reduction=reduction, quantities=("projection",), samples=samples
    ) as capture:
        loss = reduce[weighting](F.mse_loss(module(X), Y, reduction="none").mean(1))
        capture.attach_loss(loss)
        (loss * scale).backward()
    places = torch.arange(4) if samples is None else samples
    assert_projected(capture.record, {name: grads[places] for name, grads in own.items()}, Projection(100))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision_is_projected_in_float32(dtype: torch.dtype) -> None:
    module, x = nn.Linear(30, 20).to(dtype), X.to(dtype)
    with expanded_weights(module, (x,), loss_reduction="sum", quantities=("projection", "grad_sample")) as capture:
        module(x).float().square().sum().backward()
    record = capture.record
    assert {rows.dtype for rows in record.project(Projection(100)).values()} == {torch.float32}
    assert_projected(record, dict(record.grad_samples), Projection(100), rtol=1e-5)


def test_autocast() -> None:
    module, x, y = nn.Linear(30, 20), X.float(), Y.float()
    with expanded_weights(module, (x, y), quantities=("projection", "grad_sample")) as capture:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(module, x, y)
        loss.backward()
    assert_projected(capture.record, dict(capture.record.grad_samples), Projection(100), rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_projected(capture.record, dict(capture.record.grad_samples), Projection(100), rtol=1e-5)


def test_complex_parameters_and_real_ones_beside_them() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(6, 7, dtype=torch.complex128))
            self.gain = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.gain.to(torch.complex128).T) @ self.filter).abs()

    module, x = Spectral(), torch.randn(4, 5, dtype=torch.complex128)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean(1).mean()

    expected = loop(module, loss, (x,))
    with expanded_weights(module, (x,), quantities=("projection",), unsupported="error") as capture:
        loss(module, x).backward()
    found = capture.record.project(Projection(10))
    assert {name: rows.dtype for name, rows in found.items()} == {"filter": torch.complex128, "gain": torch.float64}
    assert_projected(capture.record, expected, Projection(10))


def test_parameters_of_one_name_are_projected_alike_whatever_else_the_module_has() -> None:
    one = nn.ModuleDict({"head": nn.Linear(30, 20), "body": nn.Linear(20, 30)}).double()
    two = nn.ModuleDict({"body": nn.Linear(20, 30), "head": nn.Linear(30, 20)}).double()
    two.load_state_dict(one.state_dict())
    projection, found = Projection(16), []
    for module in (one, two):
        with expanded_weights(module, (X,), loss_reduction="sum", quantities=("projection",)) as capture:
            module["body"](module["head"](X)).square().sum().backward()
        found.append(capture.record.project(projection))
    assert found[0].keys() == found[1].keys()
    for name, rows in found[0].items():
        torch.testing.assert_close(rows, found[1][name], rtol=1e-12, atol=1e-12)


# Errors ---------------------------------------------------------------------------------------------------------------
def record_of(x: Tensor, *quantities: str) -> PerSampleRecord:
    module = nn.Linear(30, 20).double()
    with expanded_weights(module, (x, Y), quantities=quantities) as capture:
        mse(module, x, Y).backward()
    return capture.record


def test_not_asked_for() -> None:
    text = (
        "projections were not asked for; pass quantities=('sq_norm', 'projection') to expanded_weights, or let `needs`"
    )
    for quantities in (("sq_norm",), ("dot",), ("grad_sample", "square_sum")):
        with pytest.raises(OptionError, match=re.escape(text)):
            record_of(X, *quantities).project(Projection())
    with pytest.raises(OptionError, match=re.escape("dots were not asked for; pass quantities=('sq_norm', 'dot') to")):
        record_of(X, "projection").dot({"weight": torch.zeros(20, 30)})


def test_something_else_than_a_projection() -> None:
    with pytest.raises(OptionError, match=re.escape("project: projection is 256; allowed is a Projection")):
        record_of(X, "projection").project(256)  # type: ignore[arg-type]


def test_after_a_change_in_place() -> None:
    x = X.clone()
    record = record_of(x, "projection")
    x.zero_()
    text = (
        "project: a tensor that the gradient of `weight` is made of was changed in place since the backward; ask for "
        "the projection before that"
    )
    with pytest.raises(UnsupportedError, match=text):
        record.project(Projection())


def test_the_record_is_not_changed_by_what_is_done_to_the_rows() -> None:
    record = record_of(X, "projection")
    first = record.project(Projection(10_000))
    kept = {name: rows.clone() for name, rows in first.items()}
    for rows in first.values():
        rows.zero_()
    for name, rows in record.project(Projection(10_000)).items():
        assert torch.equal(rows, kept[name])
