"""`max_memory` reaches the kernels, in whatever thread the backward runs, and changes no value."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights
from lightning_persample.gradients import KernelOptions, patches
from lightning_persample.gradients.cost import current_options
from tests.capture.reference import assert_exact

OPTIONS: list[dict[str, Any]] = [{"max_memory": 1}, {"max_memory": 3000}]
CHOOSE = patches.patch_kernel


class Shared(nn.Module):
    """A convolution used twice, a weight that is computed from a parameter, and a table that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(4, 1))
        self.inner = nn.Linear(4, 4)
        self.words = nn.Embedding(6, 4)

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index).transpose(1, 2)
        x = torch.tanh(self.conv(torch.tanh(self.conv(x)))).transpose(1, 2)
        return F.linear(F.linear(x, self.inner.weight * self.scale, self.inner.bias), self.words.weight)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_are_the_same(options: dict[str, Any]) -> None:
    module, index = Shared().double(), torch.randint(0, 6, (5, 9))
    target = torch.randint(0, 6, (5, 9))
    assert_exact(module, lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y), (index, target), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_are_those_of_a_run_without(options: dict[str, Any]) -> None:
    module, index = Shared(), torch.randint(0, 6, (5, 9))
    grads = []
    for captured in (False, True):
        module.zero_grad()
        if captured:
            with expanded_weights(module, index, **options):
                module(index).square().mean().backward()
        else:
            module(index).square().mean().backward()
        grads.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_hold_in_the_thread_of_the_backward(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the hooks run in a thread of the autograd engine."""
    seen: list[KernelOptions] = []

    def choose(*sizes: Any, **options: Any) -> str:
        seen.append(current_options())
        return CHOOSE(*sizes, **options)

    monkeypatch.setattr(patches, "patch_kernel", choose)
    module, x = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 5, 5)
    capture = expanded_weights(module, x, **options)
    with capture.observe():
        loss = module(x).square().mean()

    def backward() -> None:
        with capture.observe():
            loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(timeout=60)
    capture.close()
    assert seen == [KernelOptions(**options)]
    assert current_options() == KernelOptions()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """How many samples each pass of an op without a rule takes at once."""
    seen: list[int | None] = []
    vmap = torch.vmap

    def counted(function: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(options.get("chunk_size"))
        return vmap(function, *arguments, **options)

    monkeypatch.setattr(torch, "vmap", counted)
    return seen


def test_an_op_without_a_rule_takes_as_many_samples_at_once_as_the_memory_allows(parts: list[int | None]) -> None:
    module, batch = nn.Bilinear(3, 3, 2).double(), (torch.randn(5, 3).double(), torch.randn(5, 3).double())

    def loss(module: nn.Module, left: Tensor, right: Tensor) -> Tensor:
        return module(left, right).square().sum(1).mean()

    assert_exact(module, loss, batch)
    assert set(parts) == {None}
    parts.clear()
    each = 8 * sum(parameter.numel() for parameter in module.parameters())
    assert_exact(module, loss, batch, max_memory=2 * each)
    assert set(parts) == {2}


def test_an_op_without_a_rule_that_ran_out_of_memory_is_tried_on_fewer_samples(
    parts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = torch.vmap

    def short_of_memory(function: Any, *arguments: Any, **options: Any) -> Any:
        found = counted(function, *arguments, **options)
        if options.get("chunk_size") not in (1, 2):
            raise torch.OutOfMemoryError("no memory is left")
        return found

    monkeypatch.setattr(torch, "vmap", short_of_memory)
    module, batch = nn.Bilinear(3, 3, 2), (torch.randn(8, 3), torch.randn(8, 3))
    with expanded_weights(module, batch) as capture:
        module(*batch).square().sum(1).mean().backward()
    assert capture.record.coverage == 1.0
    assert parts == [None, 4, 2]
