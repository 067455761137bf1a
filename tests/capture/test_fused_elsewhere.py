"""Where something else has a say in a call, or torch refuses it, the option `fuse_weight_grad` changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_persample.capture.mode import expanded_weights
from tests.capture.test_fused import always, images  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("always")

Step = Callable[[nn.Module, Tensor], Any]


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 4).double(), images(5, 3, 6)


def in_three_ways(step: Step, build: Callable[[], tuple[nn.Module, Tensor]]) -> list[Any]:
    """What a step gives plain, observed, and observed with the option; or the error that it raises."""
    found = []
    for options in (None, {}, {"fuse_weight_grad": True}):
        module, x = build()
        context: Any = (
            nullcontext() if options is None else expanded_weights(module, x, unsupported="ignore", **options)
        )
        with context:
            try:
                found.append(step(module, x))
            except Exception as error:  # whatever torch raises must stay the same
                found.append((type(error), str(error)))
    return found


def assert_alike(step: Step, build: Callable[[], tuple[nn.Module, Tensor]] = linear) -> Any:
    plain, observed, fused = in_three_ways(step, build)
    if isinstance(plain, Tensor):
        assert torch.equal(observed, plain)
        torch.testing.assert_close(fused, plain, rtol=1e-10, atol=1e-14)
    else:
        assert observed == plain
        assert fused == plain
    return plain


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is F.linear else output


@pytest.mark.parametrize("outside", [True, False])
def test_a_function_mode_of_the_users(outside: bool) -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        with nullcontext() if outside else Doubled():
            module(x).square().mean().backward()
        return module.weight.grad

    with Doubled() if outside else nullcontext():
        assert_alike(step)


class Sink(torch.autograd.Function):
    """What DistributedDataParallel puts behind a forward with unused parameters."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def test_a_layer_that_is_not_used_has_no_gradient() -> None:
    def step(module: nn.Module, x: Tensor) -> list[bool]:
        used, _ = Sink.apply(module[0](x), module[1](x))
        used.square().mean().backward()
        return [p.grad is None for p in module.parameters()]

    layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]).double()
    assert assert_alike(step, lambda: (layers.requires_grad_(), images(5, 3, 6))) == [False, False, True, True]


def test_what_overflows_in_half_precision_overflows_in_the_weight() -> None:
    """A GradScaler decides by it whether to step."""

    def step(module: nn.Module, x: Tensor) -> bool:
        with torch.autocast("cpu", torch.float16):
            output = module(x)
        (output.float().mean() * 2**22).backward()
        return bool(module.weight.grad.isinf().any())

    assert assert_alike(step, lambda: (nn.Linear(6, 4), torch.ones(5, 64, 6)))


def asked_aside(module: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().mean(), module.weight)[0]


def offloaded(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        output = checkpoint(module, x * 1, use_reentrant=False)
    output.square().mean().backward()
    return module.weight.grad


def renormalized(module: nn.Module, x: Tensor) -> Tensor:
    loss = module(x).square().mean()
    with torch.no_grad():
        module.weight.renorm_(2, 0, 1.0)
    loss.backward()
    return module.weight.grad


@pytest.mark.parametrize("step", [asked_aside, offloaded, renormalized])
def test_what_is_saved_is_what_torch_saves(step: Step) -> None:
    assert_alike(step)


def test_a_backward_outside_of_the_capture() -> None:
    module, x = linear()
    with expanded_weights(module, x, fuse_weight_grad=True):
        loss = checkpoint(module, x, use_reentrant=False).square().mean()
    loss.backward()
    found = module.weight.grad.clone()
    module.zero_grad()
    module(x).square().mean().backward()
    torch.testing.assert_close(found, module.weight.grad)


def test_a_step_between_forward_and_backward_under_autocast() -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).float().square().mean()
        with torch.no_grad():
            module[1].weight.mul_(0.9)
        loss.backward()
        return module[1].weight.grad

    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), images(5, 3, 6, 6, dtype=torch.float32)

    plain, observed, fused = in_three_ways(step, build)
    assert torch.equal(observed, plain)
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=1e-2 * plain.abs().max().item())


def test_a_residual_into_tokens_that_lie_apart() -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        tokens = module[0](x).flatten(2).transpose(1, 2)
        tokens += module[1](tokens)
        tokens.square().mean().backward()
        return module[1].weight.grad

    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 6, 2), nn.Linear(6, 6)).double(), images(5, 3, 4, 4)

    assert_alike(step, build)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_bias_made_of_the_batch(batch_size: int) -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        F.linear(x, module.weight, -x.mean(0)[:4]).square().mean().backward()
        return module.weight.grad

    assert_alike(step, lambda: (linear()[0], images(batch_size, 6)))


WRONG: list[dict[str, Any]] = [
    {"stride": 2, "padding": "same"}, {"groups": 5}, {"stride": 0}, {"dilation": 0}, {"groups": 0}, {"padding": -1},
    {"stride": (1, 1, 1)}, {"padding": "foo"}, {"padding": 0, "dilation": 9},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_what_torch_refuses_it_refuses_itself(options: dict[str, Any]) -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x, module.weight, module.bias, **options)

    kind, _ = assert_alike(step, lambda: (nn.Conv2d(3, 4, 3).double(), images(2, 3, 6, 6)))
    assert issubclass(kind, RuntimeError)


def test_a_linear_map_of_other_sizes_is_refused_by_torch() -> None:
    assert_alike(lambda module, x: F.linear(x[..., :5], module.weight))


def test_a_backward_inside_autocast_multiplies_as_it_would() -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = module(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return x.grad

    plain, _, fused = in_three_ways(step, lambda: (linear()[0].float(), images(5, 3, 6, dtype=torch.float32)))
    assert torch.equal(fused, plain)
