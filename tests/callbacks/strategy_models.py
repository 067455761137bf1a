"""Models, batches and references for fits in several processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.callbacks.runs import CLASSES, FEATURES, Classifier

STEPS = 6


def rank() -> int:
    """Which of the processes this is."""
    return int(os.environ["RANK"])


def joined(sizes=(4, 4), count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """The batches of all ranks together, in double precision."""
    generator = torch.Generator().manual_seed(1)
    size = sum(sizes)
    inputs = [torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(each, torch.randint(0, CLASSES, (size,), generator=generator)) for each in inputs]


def own_batches(sizes=(4, 4)) -> list[tuple[Tensor, ...]]:
    """Those of this rank: `sizes` samples of the joined batch, by rank."""
    start = sum(sizes[: rank()])
    return [tuple(part[start : start + sizes[rank()]] for part in batch) for batch in joined(sizes)]


def network() -> nn.Module:
    """Two layers in double precision, the same at every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class EachHasItsOwn(nn.Module):
    """A layer that all ranks use, one for each rank, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(FEATURES, CLASSES).double()
        self.own = nn.ModuleList(nn.Linear(FEATURES, CLASSES).double() for _ in range(3))

    def forward(self, x):
        return self.shared(x) + self.own[dist.get_rank()](x)


class Double(torch.autograd.Function):
    """Twice the product, unseen by a capture, and unknown to vmap."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).sum(0)


class HiddenOnOneRank(EachHasItsOwn):
    """A weight that rank 0 alone uses, in a function that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, x):
        outputs = super().forward(x)
        return Double.apply(outputs, self.scale) if dist.get_rank() == 0 else outputs


class Referenced(Classifier):
    """Computes the norm of each sample's own gradient by plain autograd, before the training step sees the batch."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.reference: list[Tensor] = []

    def on_train_batch_start(self, batch, batch_idx):
        norms = torch.zeros(len(batch[0]), dtype=torch.float64)
        for i in range(len(norms)):
            loss = F.cross_entropy(self.network(batch[0][i : i + 1]), batch[1][i : i + 1])
            grads = torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)
            norms[i] = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()
        self.reference.append(norms)


class Sharded(Classifier):
    """Each layer with parameters is sharded by itself, and so is the network around them."""

    def configure_model(self):
        if not isinstance(self.network, FSDPModule):
            for part in (self.network[0], self.network[2], self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


class TensorParallel(Classifier):
    def configure_model(self):
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
