"""The parameters and buffers of a module are those that torch lists, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_persample.engine.members import parameters_and_buffers


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
