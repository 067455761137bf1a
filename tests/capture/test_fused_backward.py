"""What else meets the backward of a fused call: counts of products, second gradients, checkpoints, hooks, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_persample.capture.mode import expanded_weights
from tests.capture.reference import assert_exact, loop
from tests.capture.test_fused import always, gradients, images, mean_of_squares  # noqa: F401  (a fixture)
from tests.torch_release import not_in_the_oldest

aten = torch.ops.aten


class WeightProducts(TorchDispatchMode):
    """Counts the products that autograd makes for weight gradients: convolutions' own, and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is aten.convolution_backward.default and args[10][1] and args[9] == 1:
            self.convolutions += 1
        if func in (aten.mm.default, aten.addmm.default):
            self.products += 1
        return func(*args, **(kwargs or {}))


def two_convolutions(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, bias=False)).to(dtype)


def captured(module: nn.Module, x: Tensor, **options: Any) -> tuple[WeightProducts, Tensor]:
    module.zero_grad()
    with WeightProducts() as counted, expanded_weights(module, x, fuse_weight_grad=True, **options) as capture:
        mean_of_squares(module, x).backward()
    return counted, capture.record.norms()


@not_in_the_oldest
def test_convolutions_are_multiplied_once() -> None:
    """At these sizes norms need the samples' gradients; of the two weights autograd computes none."""
    module, x = two_convolutions(), images(6, 3, 20, 20)
    counted, norms = captured(module, x)
    assert counted.convolutions == 0
    with WeightProducts() as plain, expanded_weights(module, x) as capture:
        mean_of_squares(module, x).backward()
    assert plain.convolutions == 2
    torch.testing.assert_close(norms, capture.record.norms(), rtol=1e-12, atol=0)


@not_in_the_oldest
def test_linear_maps_over_many_positions_are_multiplied_once() -> None:
    module, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double(), images(4, 64, 6)
    counted, _ = captured(module, x)
    assert counted.products == 2 + 1  # forward, and the gradient of the hidden layer


def test_linear_maps_of_one_position_stay_with_autograd() -> None:
    module, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double(), images(4, 6)
    counted, _ = captured(module, x)
    assert counted.products == 2 + 1 + 2
    assert module(x).grad_fn.name() == "AddmmBackward0"


@not_in_the_oldest
def test_gradients_that_are_asked_for_are_formed_once() -> None:
    module, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double(), images(4, 6)
    counted, _ = captured(module, x, quantities=("grad_sample",))
    assert counted.products == 2 + 1


@pytest.mark.usefixtures("always")
def test_a_weight_that_is_used_twice_keeps_autograds_gradient() -> None:
    layer = nn.Linear(6, 6).double()
    x = images(4, 3, 6)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(module(x).tanh()).flatten(1).square().mean(1).mean()

    assert_exact(layer, loss, (x,), fuse_weight_grad=True)
    with expanded_weights(layer, x, fuse_weight_grad=True):
        loss(layer, x).backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    expected = gradients(layer, loss, (x,))
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.usefixtures("always")
def test_gradients_of_gradients() -> None:
    """A gradient that will be differentiated again is autograd's own, and differentiable."""
    module, x = two_convolutions(), images(3, 3, 8, 8).requires_grad_()
    results = []
    for options in ({}, {"fuse_weight_grad": True}):
        module.zero_grad()
        with expanded_weights(module, x, unsupported="ignore", **options):
            loss = module(x).pow(3).mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            grad.square().sum().backward()
        results.append([p.grad.clone() for p in module.parameters()])
    for plain, fused_one in zip(*results, strict=True):
        torch.testing.assert_close(fused_one, plain, rtol=1e-10, atol=1e-14)


@pytest.mark.usefixtures("always")
@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True:UserWarning")
def test_a_backward_that_keeps_its_graph() -> None:
    module, x = two_convolutions(), images(3, 3, 8, 8)
    expected = loop(module, mean_of_squares, (x,))
    for options in ({"retain_graph": True}, {"create_graph": True}):
        module.zero_grad()
        with expanded_weights(module, x, fuse_weight_grad=True) as capture:
            loss = mean_of_squares(module, x)
            loss.backward(**options)
            loss.backward()
        for record in capture.records:
            for name, grads in expected.items():
                torch.testing.assert_close(record.sq_norms[name], grads.flatten(1).square().sum(1), rtol=1e-10, atol=0)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad, 2 * expected[name].mean(0), rtol=1e-10, atol=1e-14)
            p.grad = None


@pytest.mark.usefixtures("always")
def test_a_gradient_aside_is_not_reported() -> None:
    module, x = two_convolutions(), images(3, 3, 8, 8)
    expected = loop(module, mean_of_squares, (x,))
    with expanded_weights(module, x, fuse_weight_grad=True) as capture:
        loss = mean_of_squares(module, x)
        aside = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        loss.backward()
    for (name, p), grad in zip(module.named_parameters(), aside, strict=True):
        torch.testing.assert_close(grad, expected[name].mean(0), rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-14)
        sq_norms = expected[name].flatten(1).square().sum(1)
        torch.testing.assert_close(capture.record.sq_norms[name], sq_norms, rtol=1e-10, atol=0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    module = two_convolutions()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(module, x, use_reentrant=reentrant).flatten(1).square().mean(1).mean()

    x = images(3, 3, 8, 8)
    rows = [gradients(module, mean_of_squares, (x[i : i + 1],)) for i in range(3)]
    module.zero_grad()
    with expanded_weights(module, x, fuse_weight_grad=True) as capture:
        loss(module, x).backward()
    for name, p in module.named_parameters():
        grads = torch.stack([row[name] for row in rows])
        torch.testing.assert_close(p.grad, grads.mean(0), rtol=1e-10, atol=1e-14)
        sq_norms = grads.flatten(1).square().sum(1)
        torch.testing.assert_close(capture.record.sq_norms[name], sq_norms, rtol=1e-10, atol=0)


def _low_precision() -> Iterator[Any]:
    for dtype in (torch.bfloat16, torch.float16):
        yield pytest.param(dtype, two_convolutions, (4, 3, 12, 12), id=f"convolution-{dtype}")
        yield pytest.param(dtype, lambda kind: nn.Linear(6, 4).to(kind), (4, 9, 6), id=f"linear-{dtype}")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("dtype", "build", "size"), list(_low_precision()))
def test_autocast(dtype: torch.dtype, build: Callable[[torch.dtype], nn.Module], size: tuple[int, ...]) -> None:
    """The same products of the same rounded numbers; the sum over the samples is not rounded on the way."""
    module, x = build(torch.float32), images(*size, dtype=torch.float32)
    found = []
    for options in ({}, {"fuse_weight_grad": True}):
        module.zero_grad()
        given = x.clone().requires_grad_()
        with expanded_weights(module, given, **options) as capture:
            with torch.autocast("cpu", dtype):
                output = module(given)
            output.float().flatten(1).square().mean(1).mean().backward()
        found.append((output, given.grad, capture.record.norms(), [p.grad.clone() for p in module.parameters()]))
    (output, of_input, norms, grads), (fused_output, fused_of_input, fused_norms, fused_grads) = found
    assert torch.equal(fused_output, output)
    assert torch.equal(fused_of_input, of_input)
    torch.testing.assert_close(fused_norms, norms, rtol=1e-5, atol=0)
    for one, two in zip(grads, fused_grads, strict=True):
        assert one.dtype == two.dtype == torch.float32
        torch.testing.assert_close(two, one, rtol=2e-2, atol=1e-2 * one.abs().max().item())


@pytest.mark.usefixtures("always")
def test_hooks_of_a_weight_see_its_gradient_once() -> None:
    """What DistributedDataParallel and optimizers in the backward rely on."""
    module, x, seen = two_convolutions(), images(3, 3, 8, 8), []
    for name, p in module.named_parameters():
        p.register_hook(lambda grad, name=name: seen.append((name, tuple(grad.shape))))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    with expanded_weights(module, x, fuse_weight_grad=True):
        mean_of_squares(module, x).backward()
    assert len(seen) == 2 * len(list(module.parameters()))
    for name, p in module.named_parameters():
        assert seen.count((name, tuple(p.shape))) == 1
        assert sum(one is p for one in seen) == 1


@pytest.mark.usefixtures("always")
def test_only_some_gradients_are_asked_for() -> None:
    module, x = two_convolutions(), images(3, 3, 8, 8)
    first = module[0].weight
    with expanded_weights(module, x, fuse_weight_grad=True, unsupported="ignore"):
        mean_of_squares(module, x).backward(inputs=[first])
    expected = loop(module, mean_of_squares, (x,))["0.weight"].mean(0)
    torch.testing.assert_close(first.grad, expected, rtol=1e-10, atol=1e-14)
    assert module[2].weight.grad is None


@not_in_the_oldest
@pytest.mark.usefixtures("always")
def test_a_rule_that_fails_leaves_the_gradient_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_persample.capture import collector, plan

    def fail(gradient: Any) -> None:
        raise RuntimeError("no kernel")

    plan.PLANS.clear()
    for way in (collector, plan):
        monkeypatch.setattr(way, "sq_norms_and_sum", fail)
    module, x = two_convolutions(), images(3, 3, 8, 8)
    expected = gradients(module, mean_of_squares, (x,))
    module.zero_grad()
    with expanded_weights(module, x, fuse_weight_grad=True, unsupported="ignore") as capture:
        mean_of_squares(module, x).backward()
    assert set(capture.record.unsupported) == set(expected)
    for name, p in module.named_parameters():
        assert torch.equal(p.grad, expected[name])


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match=r"fuse_weight_grad=1 is not allowed: fuse_weight_grad must be True or False"):
        expanded_weights(nn.Linear(2, 2), images(3, 2), fuse_weight_grad=1)  # type: ignore[arg-type]
