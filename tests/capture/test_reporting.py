"""A parameter whose one call reports its gradient has no hook of its own, and is known from the others as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture.mode import Capture, expanded_weights

B, D, P = 5, 4, 3


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, P)).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, D, dtype=torch.float64)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the leaves that get a hook."""
    found: list[tuple[int, ...]] = []
    register = Tensor.register_hook

    def noted(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if self.is_leaf:
            found.append(tuple(self.shape))
        return register(self, hook)

    monkeypatch.setattr(Tensor, "register_hook", noted)
    return found


def squares(out: Tensor) -> Tensor:
    return out.square().sum(-1).mean()


def seen(net: nn.Module, x: Tensor, step: Callable[[], None]) -> Capture:
    with expanded_weights(net, x, unsupported="ignore") as capture:
        step()
    assert not any(parameter._backward_hooks for parameter in net.parameters())
    return capture


def expected(net: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], name: str) -> Tensor:
    """The squared norm for each sample alone."""
    found = []
    for one in x:
        net.zero_grad()
        loss(one[None]).backward()
        grad = net.get_parameter(name).grad
        assert grad is not None
        found.append(grad.square().sum())
    net.zero_grad()
    return torch.stack(found)


def test_no_leaf_of_a_plain_network_gets_a_hook(net, x, hooked):
    record = seen(net, x, lambda: squares(net(x)).backward()).record
    assert not hooked
    assert record.coverage == 1
    for name, sq_norm in record.sq_norms.items():
        torch.testing.assert_close(sq_norm, expected(net, x, lambda one: squares(net(one)), name))


@pytest.mark.parametrize("owner", [Tensor, torch.autograd], ids=["tensor", "autograd"])
def test_with_inputs_the_others_are_unused(net, x, owner):
    record = seen(net, x, lambda: owner.backward(squares(net(x)), inputs=[net[0].bias])).record
    assert tuple(record.sq_norms) == ("0.bias",)
    assert set(record.unused) == {"0.weight", "2.weight", "2.bias"}
    torch.testing.assert_close(record.sq_norms["0.bias"], expected(net, x, lambda one: squares(net(one)), "0.bias"))


def test_a_call_that_the_loss_does_not_reach_tells_nothing(net, x):
    def step() -> None:
        net(x)
        squares(net[0](2 * x)).backward()

    record = seen(net, x, step).record
    assert set(record.unused) == {"2.weight", "2.bias"}
    torch.testing.assert_close(
        record.sq_norms["0.weight"], expected(net, x, lambda one: squares(net[0](2 * one)), "0.weight")
    )


def test_a_penalty_alone_is_no_samples(net, x, hooked):
    penalty = net[2].weight
    record = seen(net, x, lambda: (squares(net[0](x)) + penalty.square().sum()).backward()).record
    assert (P, D) in hooked
    assert set(record.sq_norms) == {"0.weight", "0.bias"}
    assert record.unsupported == {}
    assert record.unused == ("2.weight", "2.bias")


class Again(torch.autograd.Function):
    """Its backward runs another one, which reaches a parameter of the network by a way that is not the loss's."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.weight.square().sum().backward()
        return grad, None


def test_a_backward_inside_of_the_backward_is_watched(net, x, hooked):
    """The last layer is not reached from the loss, but from within."""
    weight = net[2].weight

    def step() -> None:
        net(x)
        squares(Again.apply(net[0](x), weight)).backward()

    record = seen(net, x, step).record
    assert (P, D) in hooked
    assert "2.weight" in record.unsupported
    assert "2.weight" not in record.sq_norms


def test_every_backward_of_a_step_tells_anew(net, x):
    def step() -> None:
        h = net[0](x)
        squares(h).backward(retain_graph=True)
        squares(net[2](h)).backward()

    first, second = seen(net, x, step).records
    assert set(first.unused) == {"2.weight", "2.bias"}
    assert not second.unused
    for name, sq_norm in second.sq_norms.items():
        torch.testing.assert_close(sq_norm, expected(net, x, lambda one: squares(net[2](net[0](one))), name))


def test_a_hook_of_the_users_that_is_put_on_later_is_seen(net, x):
    def step() -> None:
        loss = squares(net(x))
        loss.backward(retain_graph=True)
        handle = net[0].weight.register_hook(lambda grad: 3 * grad)
        loss.backward()
        handle.remove()

    first, second = seen(net, x, step).records
    assert first.coverage == 1
    assert "a hook registered on it changes its gradient" in second.unsupported["0.weight"]


def test_frozen_and_unfrozen_between_two_captures(net, x):
    names = []
    for trainable in (True, False, True):
        net[0].weight.requires_grad_(trainable)
        names.append("0.weight" in seen(net, x, lambda: squares(net(x)).backward()).record.sq_norms)
    net[0].weight = nn.Parameter(torch.randn(D, D, dtype=torch.float64))
    record = seen(net, x, lambda: squares(net(x)).backward()).record
    assert names == [True, False, True]
    torch.testing.assert_close(record.sq_norms["0.weight"], expected(net, x, lambda one: squares(net(one)), "0.weight"))


def test_torch_functions_that_somebody_has_replaced_are_called(net, x, monkeypatch):
    calls: list[int] = []
    backward = torch.autograd.backward

    def replaced(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", replaced)
    record = seen(net, x, lambda: squares(net(x)).backward()).record
    assert calls
    monkeypatch.undo()
    torch.testing.assert_close(record.sq_norms["0.bias"], expected(net, x, lambda one: squares(net(one)), "0.bias"))


@pytest.mark.parametrize("ignored", [-100, 1])
def test_a_cross_entropy_that_is_known_looks_at_its_targets(ignored):
    module, x = nn.Linear(D, P), torch.randn(B, D)
    targets = torch.tensor([0, 2, 2, 0, 2])
    some = torch.tensor([0, ignored, 2, 0, 2])
    found = []
    for y in (targets, targets, targets, some, targets):
        with expanded_weights(module, (x, y), unsupported="ignore") as capture:
            F.cross_entropy(module(x), y, ignore_index=ignored).backward()
        found.append(len(capture.record.weighting))
    assert found == [0, 0, 0, 1, 0]


def test_a_cross_entropy_that_is_known_tells_its_reduction():
    module, x, y = nn.Linear(D, P), torch.randn(B, D), torch.zeros(B, dtype=torch.int64)
    found = []
    for reduction in ("mean", "mean", "mean", "sum", "sum", "sum", "mean"):
        with expanded_weights(module, (x, y), unsupported="ignore") as capture:
            F.cross_entropy(module(x), y, reduction=reduction).backward()
        found.append(len(capture.record.weighting))
    assert found == [0, 0, 0, 1, 1, 1, 0]
