"""The engine beside an independent loop over single samples, written with torch.autograd.grad alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord

LossFunction = Callable[..., Tensor]


def loop(module: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...], batch_dim: int = 0) -> dict[str, Tensor]:
    """Each sample's gradient by name: (B, *shape)."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for sample in range(batch[0].size(batch_dim)):
        one = [tensor.narrow(batch_dim, sample, 1) for tensor in batch]
        grads = torch.autograd.grad(loss_fn(module, *one), list(parameters.values()), allow_unused=True)
        for (name, p), grad in zip(parameters.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad.to_dense())
    return {name: torch.stack(grads) for name, grads in rows.items()}


def capture(module: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...], **options: Any) -> PerSampleRecord:
    """The engine's record of one backward, with gradients and norms."""
    with expanded_weights(module, batch, quantities=("sq_norm", "grad_sample"), unsupported="error", **options) as seen:
        loss_fn(module, *batch).backward()
    return seen.record


def assert_exact(
    module: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Tensor, ...],
    *,
    tolerance: float = 1e-10,
    batch_dim: int = 0,
    **options: Any,
) -> PerSampleRecord:
    """Every gradient, squared norm and norm equals the loop's, relative to the sample's largest entry or norm."""
    expected = loop(module, loss_fn, batch, batch_dim)
    record = capture(module, loss_fn, batch, batch_dim=batch_dim, **options)
    with expanded_weights(module, batch, unsupported="error", batch_dim=batch_dim, **options) as seen:
        loss_fn(module, *batch).backward()
    module.zero_grad()
    lean = seen.record
    used = [name for name, grads in expected.items() if name not in record.unused]
    assert sorted(record.names) == sorted(used)
    assert record.coverage == 1.0
    assert record.unsupported == {}
    total = torch.stack([grads.reshape(len(grads), -1).square().sum(1) for grads in expected.values()]).sum(0)
    scale = total.sqrt().clamp_min(1e-18)
    for name, grads in expected.items():
        if name in record.unused:
            assert not grads.any(), name
            continue
        worst = ((record.grad_samples[name] - grads).reshape(len(grads), -1).abs().amax(1) / scale).max().item()
        assert worst <= tolerance, f"{name}: {worst:.1e}"
        for found in (record, lean):
            sq_norm = grads.reshape(len(grads), -1).square().sum(1)
            worst = ((found.sq_norms[name] - sq_norm).abs() / scale.square()).max().item()
            assert worst <= 2 * tolerance, f"{name} sq_norm: {worst:.1e}"
    for found in (record, lean):
        torch.testing.assert_close(found.norms(), total.sqrt(), rtol=tolerance, atol=0.0)
    return record


def record_of(module: nn.Module, loss: Callable[..., Tensor], *batch: Tensor, **options: Any) -> PerSampleRecord:
    quantities = ("sq_norm", "grad_sample")
    with expanded_weights(module, batch, quantities=quantities, unsupported="ignore", **options) as capture:
        loss(module, *batch).backward()
    return capture.record


def assert_values(record: PerSampleRecord, expected: dict[str, Tensor]) -> None:
    for name in record.names:
        torch.testing.assert_close(record.grad_samples[name], expected[name], rtol=1e-10, atol=1e-12)
