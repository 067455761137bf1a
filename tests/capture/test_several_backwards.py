"""Several backward passes under one capture: a record each, when it has run, with the factor of its own loss."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import PerSampleRecord, expanded_weights, loop_per_sample_grads
from lightning_persample.gradients.cost import CPU_MEMORY_BUDGET, halved_memory_budget, memory_budget

B = 5


def loss_of(module: Any, x: Tensor) -> Tensor:
    return module(x).square().sum(1).mean()


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def expected(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return loop_per_sample_grads(module, loss_of, x)[1]


def assert_own(record: PerSampleRecord, grads: dict[str, Tensor], factor: float = 1.0) -> None:
    for name, rows in grads.items():
        torch.testing.assert_close(record.grad_samples[name], factor * rows)


def test_each_record_comes_when_its_backward_has_run(module: nn.Module) -> None:
    x, steps = torch.randn(B, 3).double(), []

    def before(roots: list[Tensor]) -> None:
        steps.append(("before", len(roots), module[0].weight.grad is None))

    def after(record: PerSampleRecord) -> None:
        total = record.grad_samples["0.weight"].mean(0)
        steps.append(("after", record.backward_index, bool(torch.allclose(module[0].weight.grad, total))))
        module.zero_grad()

    with expanded_weights(module, x, quantities=("grad_sample",)) as capture:
        capture.before_backward, capture.after_backward = before, after
        for factor in (1.0, 2.0):
            loss_of(module, factor * x).backward()
    assert steps == [("before", 1, True), ("after", 0, True), ("before", 1, True), ("after", 1, True)]
    assert [record.backward_index for record in capture.records] == [0, 1]
    assert (capture.before_backward, capture.after_backward) == (None, None)
    for record, factor in zip(capture.records, (1.0, 2.0), strict=True):
        assert_own(record, expected(module, factor * x))


def test_the_factor_of_one_loss_is_not_that_of_the_next(module: nn.Module) -> None:
    x = torch.randn(B, 3).double()
    with expanded_weights(module, x, quantities=("grad_sample",)) as capture:
        loss = loss_of(module, x)
        capture.attach_loss(loss)
        (7 * loss).backward(retain_graph=True)
        (3 * loss).backward(retain_graph=True)  # of a loss that was not named, all of it is the samples' own
        capture.attach_loss(loss)
        capture.attach_loss(3 * loss)
        (5 * loss).backward()
    for record, factor in zip(capture.records, (1.0, 3.0, 5.0), strict=True):
        assert_own(record, expected(module, x), factor)
    assert loss._backward_hooks is None or not loss._backward_hooks


def test_parameters_may_be_frozen_and_stepped_in_between(module: nn.Module) -> None:
    x, optimizer = torch.randn(B, 3).double(), torch.optim.Adam(module.parameters(), 0.1)
    references = []
    with expanded_weights(module, x, quantities=("grad_sample",)) as capture:
        for step in range(3):
            module[0].requires_grad_(step != 1)
            optimizer.zero_grad()
            loss_of(module, x).backward()
            with torch._C.DisableTorchFunction():
                before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            references.append(before)
            optimizer.step()
    module[0].requires_grad_(True)
    assert [len(record.names) for record in capture.records] == [4, 2, 4]
    for record, weights in zip(capture.records, references, strict=True):
        module.load_state_dict(weights)
        assert_own(record, {name: rows for name, rows in expected(module, x).items() if name in record.names})


def test_samples_that_are_not_finite_are_named(module: nn.Module) -> None:
    x = torch.randn(B, 3).double()
    x[1, 0], x[3, 2] = math.inf, math.nan
    with expanded_weights(module, x) as capture:
        F.relu(module(x)).mean().backward()
    assert capture.record.nonfinite().tolist() == [1, 3]
    x = torch.randn(B, 3).double()
    with expanded_weights(module, x) as capture:
        loss_of(module, x).backward()
    assert capture.record.nonfinite().tolist() == []
    nothing = PerSampleRecord(batch_size=3, sq_norms={}, coverage=0.0)
    assert nothing.nonfinite().tolist() == [0, 1, 2]


def test_the_memory_budget_is_halved_for_a_while() -> None:
    device = torch.device("cpu")
    with halved_memory_budget(3):
        assert memory_budget(device) == CPU_MEMORY_BUDGET // 8
        with halved_memory_budget(1):
            assert memory_budget(device) == CPU_MEMORY_BUDGET // 2
        assert memory_budget(device) == CPU_MEMORY_BUDGET // 8
    assert memory_budget(device) == CPU_MEMORY_BUDGET


def in_another_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=lambda: loss.backward(retain_graph=True))
    thread.start()
    thread.join()


def with_nothing_seen(loss: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        loss.backward(retain_graph=True)


@pytest.mark.parametrize("options", [{}, {"fuse_weight_grad": True}, {"samples": torch.tensor([3, 0])}], ids=str)
@pytest.mark.parametrize("rows", [(), (4,)], ids=["one-row", "several-rows"])
@pytest.mark.parametrize("unseen", [in_another_thread, with_nothing_seen])
def test_a_backward_that_is_not_seen_is_in_no_record(
    unseen: Callable[[Tensor], None], rows: tuple[int, ...], options: dict[str, Any], module: nn.Module
) -> None:
    x = torch.randn(B, *rows, 3).double()
    grads = expected(module, x)
    for quantities in (("sq_norm",), ("sq_norm", "grad_sample")):
        with expanded_weights(module, x, quantities=quantities, unsupported="error", **options) as capture:
            loss = loss_of(module, x)
            unseen(loss)
            assert capture.records == []
            loss.backward()
        chosen = options.get("samples", slice(None))
        assert sorted(capture.record.names) == sorted(grads)
        for name, rows_of in grads.items():
            torch.testing.assert_close(capture.record.sq_norms[name], rows_of[chosen].flatten(1).square().sum(1))
        for name, found in (capture.record.grad_samples if len(quantities) > 1 else {}).items():
            torch.testing.assert_close(found, grads[name][chosen])
