"""Linear maps of several rows to a sample give what one sample alone gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from tests.capture.reference import assert_exact
from tests.capture.test_rows import B, D, Linear, P, plain

SEVERAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": plain,
    "two-axes-of-positions": lambda m, x: plain(m, x.unflatten(1, (2, 3))).flatten(1, 2),
    "rows-side-by-side": lambda m, x: plain(m, x.reshape(-1, D)).view(len(x), -1, P),
    "one-position": lambda m, x: plain(m, x[:, :1]),
    "not-contiguous": lambda m, x: plain(m, x.transpose(1, 2).contiguous().transpose(1, 2)),
    "samples-apart-in-memory": lambda m, x: plain(m, x.transpose(0, 1).contiguous().transpose(0, 1)),
    "written-to-in-place": lambda m, x: plain(m, x).add_(1).tanh_(),
    "written-to-through-a-view": lambda m, x: _doubled_at_first(plain(m, x)),
}


def _doubled_at_first(y: Tensor) -> Tensor:
    y[:, 0].mul_(2)
    return y


def total(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum((1, 2)).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("call", SEVERAL.values(), ids=SEVERAL)
def test_several_rows_to_a_sample(call, bias, dtype):
    module, x = Linear(call, bias, dtype), torch.randn(B, 6, D, dtype=dtype)
    with expanded_weights(module, x, unsupported="error") as seen:
        total(module, x).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    total(module, x).backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)
    for place, one in enumerate(x):
        module.zero_grad()
        total(module, one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())


@pytest.mark.parametrize("options", [{"quantities": ("sq_norm", "grad_sample")}, {"fuse_weight_grad": True}])
@pytest.mark.parametrize("call", SEVERAL.values(), ids=SEVERAL)
def test_several_rows_where_more_is_asked_for(call, options):
    module, x = Linear(call), torch.randn(B, 6, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="error", **options) as seen:
        total(module, x).backward()
    for place, one in enumerate(x):
        module.zero_grad()
        total(module, one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())
            if "quantities" in options:
                torch.testing.assert_close(seen.record.grad_samples[name][place], parameter.grad)


def test_a_weight_that_is_written_to_before_the_backward_is_not_read():
    """What a sample contributes is made of the input and of the output's gradient."""
    module, x = Linear(plain), torch.randn(B, 6, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="error") as seen:
        loss = total(module, x)
        with torch.no_grad():
            before = module.weight.clone()
            module.weight.mul_(3)
        loss.backward()
    with torch.no_grad():
        module.weight.copy_(before)
    for place, one in enumerate(x):
        module.zero_grad()
        total(module, one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("sizes", [(B,), (B, 6)], ids=["one row", "several"])
def test_weights_without_entries(sizes: tuple[int, ...]) -> None:
    module, x = nn.Sequential(nn.Linear(D, 0), nn.Linear(0, P)), torch.randn(*sizes, D)

    def loss(x: Tensor) -> Tensor:
        return module(x).square().sum(tuple(range(1, x.dim()))).mean()

    with expanded_weights(module, x, unsupported="error") as seen:
        loss(x).backward()
    for place, one in enumerate(x):
        module.zero_grad()
        loss(one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())


def test_tensors_without_values_pass_with_several_rows() -> None:
    module, x = nn.Linear(D, P, device="meta"), torch.randn(B, 6, D, device="meta")
    with expanded_weights(module, x, unsupported="error") as seen:
        module(x).square().sum((1, 2)).mean().backward()
    assert seen.record.norms().shape == (B,)


class Reused(nn.Module):
    """Positions of a layer are used twice, once in a layer whose output is scaled in place by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        o = self.second(h)
        o.mul_(self.scale)
        return o + h


def test_an_output_scaled_in_place_beside_another_use_of_its_input():
    module, x = Reused().double(), torch.randn(B, 2, D, dtype=torch.float64)
    for _ in range(2):  # the first calls are decided, the others replayed
        assert_exact(module, total, (x,))


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), torch.einsum("...i,...j->ij", x, grad)


class UnseenBelow(Reused):
    def forward(self, x: Tensor) -> Tensor:
        o = self.second(Unseen.apply(x, self.first.weight))
        o.mul_(self.scale)
        return o + self.first(x)


@pytest.mark.parametrize("positions", [(), (2,)])
def test_an_unseen_use_below_an_output_scaled_in_place_is_named(positions):
    module, x = UnseenBelow().double(), torch.randn(B, *positions, D, dtype=torch.float64)
    for _ in range(2):
        with expanded_weights(module, x, unsupported="ignore") as seen:
            module(x).square().flatten(1).sum(1).mean().backward()
        assert "arrives through Unseen.apply" in seen.record.unsupported["first.weight"]
