"""A small net that is trained by hand, its gradients sample by sample, and stores of gradients that are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.influence.shards import Shards, StoreManifest, StoreWriter, columns_for
from lightning_persample.influence.store import GradientStore


def net(seed: int = 0) -> nn.Sequential:
    """A net of 26 parameters in float64."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 2, (count,), generator=generator)


def sample_grads(module: nn.Module, inputs: Tensor, targets: Tensor, of=F.cross_entropy) -> Tensor:
    """Each sample's own gradient, (n, P), by a backward for each."""
    rows = []
    for i in range(len(inputs)):
        grads = torch.autograd.grad(of(module(inputs[i : i + 1]), targets[i : i + 1]).sum(), list(module.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def sgd_step(module: nn.Module, direction: Tensor, rate: float) -> None:
    """Move the parameters by ``-rate * direction``."""
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(module.parameters()) - rate * direction, module.parameters()
        )


def store_of(
    folder: Path,
    parts: Sequence[tuple[Tensor, dict]],
    *,
    shapes: dict[str, tuple[int, ...]] | None = None,
    checkpoints: Sequence[dict] = ({"step": 5, "learning_rate": 0.1},),
    rows_per_shard: int = 3,
    **manifest,
) -> GradientStore:
    """A store in full, float64 if not said otherwise, of the values and the rows of each part."""
    if shapes is None:
        shapes = {"weight": (parts[0][0].shape[1],)}
    sizes = {name: (shape, torch.Size(shape).numel()) for name, shape in shapes.items()}
    settings = {"dtype": "float64", **manifest}
    found = StoreManifest("run", columns_for(sizes), checkpoints=tuple(checkpoints), **settings)
    folder.mkdir()
    Shards(folder).write_manifest(found)
    writer = StoreWriter(folder, found, rows_per_shard=rows_per_shard)
    for values, rows in parts:
        writer.add(values, rows)
    writer.flush()
    return GradientStore(folder)


def simple(folder: Path, values: Sequence[Sequence[float]], **options) -> GradientStore:
    """A store of one checkpoint, its samples 0, 1, 2 and so on."""
    values = torch.tensor(values, dtype=torch.float64)
    return store_of(folder, [(values, {"sample_index": torch.arange(len(values))})], **options)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
