"""Per-sample gradients as plain functions: the one-sample loop, which is the reference for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_persample.engine.batch import batch_tensors, read_batch_size

__all__ = ["loop_per_sample_grads"]


def loop_per_sample_grads(
    module: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sample's loss and gradient by running forward and backward on one sample at a time.

    Slow and simple on purpose: ``g_i = d loss_fn(module, *batch[i:i+1]) / d theta``. Neither ``.grad`` nor buffers are
    changed; every sample sees the buffers and the random numbers that the first one saw.

    Args:
        module: the module whose trainable parameters count.
        loss_fn: ``loss_fn(module, *batch)`` gives the loss of a batch; called with batches of one sample.
        *batch: tensors (or nested tuples, lists and dicts of tensors) with the samples along the first axis.

    Returns:
        The losses (B,), and by name the gradients (B, *parameter.shape); zeros for a parameter that a sample's loss
        does not depend on.
    Tensors that do not agree on a batch size give a `BatchSizeError`.
    """
    batch_size = read_batch_size(list(batch_tensors(batch)), 0)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    losses: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}

    def restore_buffers() -> None:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])

    for sample in range(batch_size):
        one = tree_map(lambda leaf: _sample(leaf, sample), batch)  # noqa: B023  (called at once)
        with torch.random.fork_rng(devices=_devices(parameters)), torch.enable_grad():
            loss = loss_fn(module, *one)
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        losses.append(loss.detach())
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(parameter) if grad is None else grad.to_dense().detach())
        restore_buffers()
    return torch.stack(losses), {name: torch.stack(grads) for name, grads in rows.items()}


def _sample(leaf: Any, sample: int) -> Any:
    return leaf[sample : sample + 1] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf


def _devices(parameters: dict[str, nn.Parameter]) -> list[torch.device]:
    return list({parameter.device for parameter in parameters.values() if parameter.device.type == "cuda"})
