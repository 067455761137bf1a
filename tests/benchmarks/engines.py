"""One training step with per-sample gradient norms, by this package, its kernels by hand and its peers; one without.

A step is zero_grad, forward, cross-entropy and backward; the norms (B,) are those of the whole gradient of each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from lightning_persample import expanded_weights
from tests.benchmarks.hooks_by_hand import by_hand

__all__ = ["ENGINES", "Step", "available"]

Step = Callable[[], "Tensor | None"]


def plain(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()

    return step


def ours(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    def step() -> Tensor:
        module.zero_grad()
        with expanded_weights(module, (x, y), unsupported="error") as capture:
            F.cross_entropy(module(x), y).backward()
        return capture.record.norms()

    return step


def ours_fused(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    def step() -> Tensor:
        module.zero_grad()
        with expanded_weights(module, (x, y), unsupported="error", fuse_weight_grad=True) as capture:
            F.cross_entropy(module(x), y).backward()
        return capture.record.norms()

    return step


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _norms_of(module: nn.Module, size: int) -> Tensor:
    squares = [p.grad_sample.flatten(1).square().sum(1) for p in _trained(module)]
    return torch.stack(squares).sum(0).sqrt() * size


def opacus_hooks(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(module, loss_reduction="mean")

    def step() -> Tensor:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        return _norms_of(module, 1)  # Opacus multiplies by B itself

    return step


def opacus_ghost(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(module, loss_reduction="mean", use_ghost_clipping=True)

    def step() -> Tensor:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        return wrapped.get_norm_sample()

    return step


def torch_vmap(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}

    def loss(weights: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, {**weights, **frozen}, (one[None],)), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> Tensor:
        grads = each(weights, x, y)
        for name, grad_sample in grads.items():  # a training step needs the gradient of the batch, too
            module.get_parameter(name).grad = grad_sample.mean(0)
        return torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()

    return step


def torch_expanded_weights(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    call = call_for_per_sample_grads(module, batch_size=len(x), loss_reduction="mean")

    def step() -> Tensor:
        for p in _trained(module):
            p.grad = p.grad_sample = None
        F.cross_entropy(call(x), y).backward()
        for p in _trained(module):
            p.grad = p.grad_sample.mean(0)
        found = _norms_of(module, 1)
        for p in _trained(module):
            del p.grad_sample
        return found

    return step


def backpack_l2(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model, loss = extend(module), extend(nn.CrossEntropyLoss())

    def step() -> Tensor:
        module.zero_grad()
        with backpack(BatchL2Grad()):
            loss(model(x), y).backward()
        return torch.stack([p.batch_l2 for p in _trained(module)]).sum(0).sqrt() * len(x)

    return step


ENGINES: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain": plain,
    "lightning_persample": ours,
    "hooks by hand": by_hand,
    "fuse_weight_grad=True": ours_fused,
    "hooks by hand, fused": partial(by_hand, fuse=True),
    "Opacus per-sample": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "torch.func vmap": torch_vmap,
    "torch ExpandedWeights": torch_expanded_weights,
    "BackPACK L2": backpack_l2,
}
_NEEDS = {"Opacus per-sample": "opacus", "Opacus ghost": "opacus", "BackPACK L2": "backpack"}


def available(engine: str) -> bool:
    """Whether the package that the engine needs is installed."""
    return engine not in _NEEDS or find_spec(_NEEDS[engine]) is not None
