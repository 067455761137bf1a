"""With `fuse_weight_grad` the norms are the loop's and ``.grad`` is autograd's, up to the order of its sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture import fused
from lightning_persample.capture.mode import expanded_weights
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.capture.reference import assert_exact
from tests.in_turn import every_other, one_kind_each
from tests.models import MODELS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in ("LSTM with projections is not supported with oneDNN", "Using padding='same'")
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse whatever can be, also where it does not pay."""
    monkeypatch.setattr(fused, "linear_is_fused", lambda *sizes: True)
    monkeypatch.setattr(fused, "convolution_is_fused", lambda *sizes: True)


def images(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, generator=torch.Generator().manual_seed(0))


def mean_of_squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten(1).square().mean(1).mean()


def gradients(module: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module.zero_grad()
    loss(module, *batch).backward()
    return {name: p.grad.to_dense().clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(
    module: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...], tolerance: float = 1e-10, **options: Any
) -> None:
    """``.grad`` of parameters and of the batch with the option is that of a plain step."""
    given = [tuple(t.clone().requires_grad_(t.is_floating_point()) for t in batch) for _ in range(2)]
    expected = gradients(module, loss, given[0])
    module.zero_grad()
    with expanded_weights(module, given[1], unsupported="ignore", fuse_weight_grad=True, **options):
        loss(module, *given[1]).backward()
    found = {name: p.grad.to_dense() for name, p in module.named_parameters() if p.grad is not None}
    assert list(found) == list(expected)
    scale = max((grad.abs().max().item() for grad in expected.values() if grad.numel()), default=1.0)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=tolerance, atol=tolerance * max(scale, 1e-30), msg=name)
        assert found[name].dtype == grad.dtype
    for one, two in zip(*given, strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(two.grad, one.grad, rtol=tolerance, atol=tolerance)
    module.zero_grad()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", every_other(one_kind_each(CASES)))
def test_one_way_to_meet_the_batch(name: str) -> None:
    case = CASES[name]
    module = case.build().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in case.batch(5))
    assert_exact(module, case.loss, batch, fuse_weight_grad=True, **case.options)
    assert_same_gradients(module, case.loss, batch, **case.options)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, batch_size: int) -> None:
    model = MODELS[name](dtype=torch.float64)
    batch = model.make_batch(batch_size)
    assert_exact(model.module, model.loss_fn, batch, fuse_weight_grad=True)
    assert_same_gradients(model.module, model.loss_fn, batch)


class Functional(nn.Module):
    """One call on one weight and bias."""

    def __init__(self, function: Callable[..., Tensor], weight: tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(weight, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(weight[0], dtype=torch.float64)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def relu_in_place(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.relu(F.linear(x, weight, bias), inplace=True)


def residual_in_place(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = F.linear(x, weight, bias)
    y += x
    return y


LINEAR: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "two axes": (Functional(F.linear, (4, 6)), (5, 6), {}),
    "three axes": (Functional(F.linear, (4, 6)), (5, 3, 6), {}),
    "four axes": (Functional(F.linear, (4, 6)), (5, 3, 2, 6), {}),
    "no bias": (Functional(F.linear, (4, 6), bias=False), (5, 3, 6), {}),
    "one row": (Functional(F.linear, (1, 6)), (5, 3, 6), {}),
    "relu in place": (Functional(relu_in_place, (6, 6)), (5, 3, 6), {}),
    "residual in place": (Functional(residual_in_place, (6, 6)), (5, 3, 6), {}),
    "time first": (Functional(F.linear, (4, 6)), (3, 5, 6), {"batch_dim": 1}),
}
CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3), (5, 3, 9)),
    "2d": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 7)),
    "2d, no bias": (nn.Conv2d(3, 4, (3, 2), bias=False), (5, 3, 6, 7)),
    "2d, stride": (nn.Conv2d(3, 4, 3, stride=2, padding=(1, 0)), (5, 3, 8, 7)),
    "2d, dilation": (nn.Conv2d(3, 4, (3, 1), dilation=2), (5, 3, 8, 7)),
    "2d, groups": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (5, 4, 8, 7)),
    "2d, depthwise": (nn.Conv2d(4, 8, 3, groups=4), (5, 4, 8, 7)),
    "2d, same": (nn.Conv2d(3, 4, 3, padding="same"), (5, 3, 6, 7)),
    "2d, same, even kernel": (nn.Conv2d(3, 4, 4, padding="same"), (5, 3, 6, 7)),
    "2d, circular": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (5, 3, 6, 7)),
    "3d": (nn.Conv3d(2, 3, 3, dilation=(1, 2, 1), padding=1), (5, 2, 4, 6, 5)),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, frozen: str | None) -> None:
    built, size, options = LINEAR[name]
    module = copy.deepcopy(built)
    if frozen is not None:
        if module.bias is None:
            pytest.skip("has no other parameter")
        getattr(module, frozen).requires_grad_(False)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).movedim(options.get("batch_dim", 0), 0).flatten(1).square().mean(1).mean()

    assert_exact(module, loss, (images(*size),), fuse_weight_grad=True, **options)
    assert_same_gradients(module, loss, (images(*size),), **options)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, frozen: str | None, channels_last: bool) -> None:
    built, size = CONVOLUTIONS[name]
    module, x = copy.deepcopy(built).double(), images(*size)
    if frozen is not None:
        if module.bias is None:
            pytest.skip("has no other parameter")
        getattr(module, frozen).requires_grad_(False)
    if channels_last:
        if len(size) != 4:
            pytest.skip("only images have this layout")
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert_exact(module, mean_of_squares, (x,), fuse_weight_grad=True)
    assert_same_gradients(module, mean_of_squares, (x,))


@pytest.mark.usefixtures("always")
def test_several_rows_of_an_image_batch_belong_to_one_sample() -> None:
    convolution = nn.Conv2d(3, 4, 3).double()

    def loss(module: nn.Module, frames: Tensor) -> Tensor:
        return module(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).flatten(1).square().mean(1).mean()

    assert_exact(convolution, loss, (images(5, 2, 3, 6, 6),), fuse_weight_grad=True)
    assert_same_gradients(convolution, loss, (images(5, 2, 3, 6, 6),))
