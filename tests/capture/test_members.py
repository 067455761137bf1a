"""The parameters and buffers of a module are those that torch lists, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_persample import (
    call_for_per_sample_grads,
    expanded_weights,
    loop_per_sample_grads,
    vmap_per_sample_grads,
)
from lightning_persample.torch_internals import parameters_and_buffers


class Own(nn.Linear):
    """Lists itself under another name."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"mine.{name}", parameter) for name, parameter in super().named_parameters(*args, **kwargs))


class Hidden(nn.Linear):
    """Is no part of what holds it."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter(())


def shared() -> nn.Module:
    part = nn.Linear(2, 2)
    return nn.ModuleDict({"one": nn.Sequential(part, nn.BatchNorm1d(2)), "two": part})


def tied() -> nn.Module:
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])
    module[2].weight = module[0].weight
    module.register_buffer("one", torch.ones(1))
    module[1].register_buffer("same", module.one)
    module[1].register_buffer("nothing", None)
    module.register_module("nobody", None)
    return module


def buffers_of_others() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.register_buffer("above", module[0].weight)
    module[0].register_buffer("before", module[1].bias)
    module[1].register_buffer("after", module[0].bias)
    return module


def instance() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.named_parameters = lambda *args, **kwargs: iter([("other", module[0].bias)])
    return module


CASES: dict[str, Callable[[], nn.Module]] = {
    "shared": shared,
    "tied": tied,
    "parameters that are buffers elsewhere": buffers_of_others,
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.BatchNorm1d(2)),
    "alone": lambda: nn.Linear(2, 2),
    "empty": nn.Sequential,
    "own": lambda: Own(2, 2),
    "own inside": lambda: nn.Sequential(Own(2, 2)),
    "hidden": lambda: nn.Sequential(nn.Linear(2, 2), Hidden(2, 2)),
    "instance": instance,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_they_are_those_that_torch_lists(build):
    module = build()
    parameters, buffers = parameters_and_buffers(module)
    listed: list[tuple[str, Tensor]] = list(module.named_parameters())
    assert [(name, id(parameter)) for name, parameter in parameters.items()] == [(n, id(p)) for n, p in listed]
    assert list(map(id, buffers)) == list(map(id, module.buffers()))


def test_names_of_a_module_that_fabric_has_set_up_are_its_own() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    wrapped, _ = fabric.setup(network, torch.optim.SGD(network.parameters(), 0.1))
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    _, expected = loop_per_sample_grads(network, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
    with expanded_weights(wrapped, (x, y), quantities=("sq_norm", "grad_sample")) as seen:
        fabric.backward(F.cross_entropy(wrapped(x), y))
    assert seen.record.names == tuple(expected)
    assert list(seen.record.group_norms(1)) == ["0", "2"]
    passes = (vmap_per_sample_grads, loop_per_sample_grads)
    others = [f(wrapped, lambda m, x, y: F.cross_entropy(m(x), y), x, y)[1] for f in passes]
    assert all(isinstance(each, nn.Parameter) for layer in network for each in layer.parameters(recurse=False))
    parameters = dict(network.named_parameters())
    network.zero_grad()
    F.cross_entropy(call_for_per_sample_grads(wrapped, loss_reduction="mean")(x), y).backward()
    assert all(dict(network.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert all(parameter.grad is None for parameter in parameters.values())
    called = {name: parameter.grad_sample for name, parameter in parameters.items()}
    for found in (seen.record.grad_samples, *others, called):
        assert list(found) == list(expected)
        for name, grads in expected.items():
            torch.testing.assert_close(found[name], grads)


class HeldTwice(nn.Module):
    """One layer under two names, in a list, too, and a weight that is another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 5)
        self.target = self.encoder
        self.layers = nn.ModuleList([self.encoder, nn.BatchNorm1d(5).eval()])
        self.table = nn.Embedding(5, 5)
        self.table.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.target(x).tanh()) + self.encoder(x) + x @ self.table.weight


def test_a_layer_that_is_held_twice_has_its_parameters_afterwards() -> None:
    module, x = HeldTwice(), torch.randn(6, 5)
    _, expected = loop_per_sample_grads(module, lambda m, x: m(x).square().sum(), x)
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    before = [dict(part._parameters) for part in parts]
    _, by_vmap = vmap_per_sample_grads(module, lambda m, x: m(x).square().sum(), x)
    call_for_per_sample_grads(module)(x).square().sum().backward()
    for part, parameters in zip(parts, before, strict=True):
        assert all(part._parameters[name] is parameter for name, parameter in parameters.items())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(by_vmap[name], expected[name])
        torch.testing.assert_close(parameter.grad_sample, expected[name])
