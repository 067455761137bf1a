"""Which of the Trainer's strategies a capture can work under, and why not under the others."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_persample.callbacks._lightning_names import is_a
from lightning_persample.engine import sharded_elsewhere

__all__ = ["why_no_mean_gradient", "why_strategy_is_unsupported"]

# By name: importing a strategy's own package is not needed to refuse it.
_REASONS = {
    "DeepSpeedStrategy": "DeepSpeed keeps gradients in buffers of its own and, at stage 3, weights too",
    "FSDPStrategy": "it holds weights of several layers in one flat tensor; use ModelParallelStrategy, fully_shard",
}


def why_no_mean_gradient(trainer: Trainer) -> str:
    """Why ``.grad`` does not hold the mean over all processes under the Trainer's strategy, or "" where it does."""
    hooks = getattr(trainer.strategy.model, "_comm_hooks", ()) if trainer.world_size > 1 else ()
    if not hooks:
        return ""
    hook = hooks[0][0]
    return f"DDP's communication hook `{getattr(hook, '__name__', type(hook).__name__)}` changes the gradients"


def why_strategy_is_unsupported(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why nothing can be captured under the Trainer's strategy, or None where it can."""
    strategy = trainer.strategy
    synchronized = [name for name, part in pl_module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if trainer.world_size > 1 and synchronized:
        return (
            f"SyncBatchNorm (`{synchronized[0]}`) is not supported, because samples of all devices influence each "
            "other in it; use GroupNorm, or BatchNorm without synchronization"
        )
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    for name, reason in _REASONS.items():
        if name in kinds:
            stage = getattr(strategy, "zero_stage_3", False)
            return f"{type(strategy).__name__}{' at ZeRO stage 3' if stage else ''} is not supported, because {reason}"
    if is_a(strategy, "ModelParallelStrategy"):
        return _why_model_parallel_is_unsupported(strategy, pl_module)
    if trainer.world_size > 1 and not is_a(strategy, "DDPStrategy"):
        return f"{type(strategy).__name__} on {trainer.world_size} devices is not supported"
    if strategy.model is not pl_module and not isinstance(strategy.model, DistributedDataParallel):
        wrapper = type(strategy.model).__name__
        return f"{type(strategy).__name__} is not supported, because it wraps the module in {wrapper}"
    return None


def _why_model_parallel_is_unsupported(strategy: Any, pl_module: LightningModule) -> str | None:
    name, size = type(strategy).__name__, strategy.device_mesh["tensor_parallel"].size()
    if size > 1:
        return (
            f"{name} with tensor_parallel_size={size} is not supported, because several devices compute one sample "
            "together; say tensor_parallel_size=1, data_parallel_size=<number of devices> and use fully_shard"
        )
    names = sharded_elsewhere(pl_module)
    if names:
        return (
            f"tensor parallelism is not supported: `{names[0]}`{f' and {len(names) - 1} more' if names[1:] else ''} is "
            "a DTensor in the forward, too, and not sharded by fully_shard alone"
        )
    return None
