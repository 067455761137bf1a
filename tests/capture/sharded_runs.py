"""Models under ``fully_shard``, observed by two processes.

Run as ``python -m tests.capture.sharded_runs FOLDER KEY...``; `tests.processes` starts the processes. What each found
goes to ``FOLDER/<rank>.pt``.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_persample import expanded_weights, loop_per_sample_grads
from lightning_persample.capture.parameters import is_sharded, sharded_elsewhere
from tests.models import MODELS, Model

D = 6


def _model(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> Model:
    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        return torch.randn(batch_size, 4, D, dtype=dtype), torch.randn(batch_size, 4, D, dtype=dtype)

    def loss_fn(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(module(inputs), targets)

    return Model(nn.Sequential(*layers).to(dtype), make_batch, loss_fn)


class LoRA(nn.Module):
    """A frozen weight with a trained product of two added to it, so that freed memory is read where none was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D), requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, D))
        self.b = nn.Parameter(torch.randn(D, 2))

    def forward(self, x):
        return F.linear(x, self.weight + self.b @ self.a)


class Functional(nn.Module):
    """Weights used by transposes, slices, einsum and elementwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.table = nn.Parameter(torch.randn(8, D))

    def forward(self, x):
        x = x @ self.weight.t() * self.scale + self.table[:4]
        return torch.einsum("btd,de->bte", x, self.weight.tanh())


class Hidden(nn.Module):
    """A weight used by a call that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return x * self.weight


class OtherMethod(nn.Module):
    """Runs through a method that is not forward, so that no hook of a module runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def encode(self, x):
        return self.inner(x)


class Outside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.other = OtherMethod(inner)

    def forward(self, x):
        return self.other.encode(self.first(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x)


def _normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(D, D))


def _frozen() -> nn.Module:
    return nn.Linear(D, D).requires_grad_(False)


CASES: dict[str, Any] = {
    **MODELS,
    "lora": lambda: _model(nn.Linear(D, D), LoRA(), nn.Linear(D, D)),
    "functional": lambda: _model(nn.Linear(D, D), Functional(), nn.Linear(D, D)),
    "weight norm": lambda: _model(nn.Linear(D, D), _normed(), nn.Linear(D, D)),
    "layer norm, frozen layer": lambda: _model(nn.LayerNorm(D), _frozen(), nn.Linear(D, D)),
    "checkpointing": lambda: _model(nn.Linear(D, D), Checkpointed(), nn.Linear(D, D)),
    "twice": lambda: _model(nn.Linear(D, D), Twice(), nn.Linear(D, D)),
    "attention": lambda: _model(nn.Linear(D, D), Attention(), nn.Linear(D, D)),
    "other method": lambda: _model(nn.Linear(D, D), Outside(nn.Linear(D, D)), nn.Linear(D, D)),
    "hidden": lambda: _model(nn.Linear(D, D), Hidden(), nn.Linear(D, D)),
    "hidden, other method": lambda: _model(nn.Linear(D, D), Outside(Hidden()), nn.Linear(D, D)),
}
BATCHES = 2


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard a copy of the module: its blocks, and what is left around them."""
    module = copy.deepcopy(module)
    call = functools.partial(fully_shard, mesh=mesh, **options)
    for block in module.blocks if hasattr(module, "blocks") else module.children():
        if isinstance(block, Outside):
            call(block.other)
            register_fsdp_forward_method(block.other, "encode")
        if any(True for _ in block.parameters()):
            call(block)
    return call(module)


def whole_grads(module: nn.Module) -> dict[str, Tensor]:
    """The gradients with all their entries."""
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def observed(model: Model, module: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """The record of one step, and the gradients it leaves."""
    module.zero_grad()
    with expanded_weights(module, batch, quantities=("sq_norm", "grad_sample"), unsupported="ignore") as capture:
        model.loss_fn(module, *batch).backward()
    record = capture.record
    return {
        "grad_samples": dict(record.grad_samples),
        "sq_norms": dict(record.sq_norms),
        "unsupported": dict(record.unsupported),
        "unused": record.unused,
        "coverage": record.coverage,
        "grads": whole_grads(module),
    }


def compared(model: Model, mesh: DeviceMesh, reference: Model | None = None, **options: Any) -> list[dict[str, Any]]:
    """What a sharded copy gives for some batches, with the gradients of one that was not observed, and the loop's."""
    first, second = shard(model.module, mesh, **options), shard(model.module, mesh, **options)
    found = []
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(BATCHES):
        batch = model.make_batch(3)
        second.zero_grad()
        model.loss_fn(second, *batch).backward()
        alone = reference or model
        dtype = next(alone.module.parameters()).dtype
        as_reference = tuple(part.to(dtype) if part.is_floating_point() else part for part in batch)
        _, loop = loop_per_sample_grads(copy.deepcopy(alone.module), alone.loss_fn, *as_reference)
        found.append({**observed(model, first, batch), "plain": whole_grads(second), "loop": loop})
    return found


def of_case(name: str, mesh: DeviceMesh, reshard: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return compared(CASES[name](), mesh, reshard_after_forward=reshard)


def replicated_and_sharded() -> list[dict[str, Any]]:
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    return compared(MODELS["gpt"](), replicas)


def in_half_precision(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Weights and inputs are cast to bfloat16 inside the forward."""
    torch.manual_seed(0)
    model = MODELS["cnn"](dtype=torch.float32)
    half = model._replace(module=copy.deepcopy(model.module).bfloat16())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compared(model, mesh, half, mp_policy=policy)


def tensor_parallel(also_sharded: bool) -> dict[str, Any]:
    """The first two layers are split over two devices."""
    torch.manual_seed(0)
    model = MODELS["mlp"](dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model.module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if also_sharded:
        fully_shard(model.module, mesh=mesh["data"])
    result = {"elsewhere": sharded_elsewhere(model.module), "sharded": is_sharded(model.module)}
    return {**result, **observed(model, model.module, model.make_batch(3))}


def main(folder: str, *keys: str) -> None:
    """Do the named cases and save what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    runs: dict[str, Callable[[], Any]] = {
        f"{name}, {reshard}": functools.partial(of_case, name, mesh, reshard)
        for name in CASES
        for reshard in (True, False)
    }
    runs["replicated and sharded"] = replicated_and_sharded
    runs["half precision"] = functools.partial(in_half_precision, mesh)
    runs["tensor parallel"] = functools.partial(tensor_parallel, also_sharded=False)
    runs["tensor parallel, sharded"] = functools.partial(tensor_parallel, also_sharded=True)
    torch.save({key: runs[key]() for key in keys}, Path(folder, f"{dist.get_rank()}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
