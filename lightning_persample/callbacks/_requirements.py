"""What a Trainer, its module and its per-sample callbacks must fulfil for a shared capture."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_persample.callbacks._consumer import Consumer
from lightning_persample.callbacks._strategies import why_strategy_is_unsupported
from lightning_persample.errors import OptionError

__all__ = ["check_options_agree", "holds_compiled_code", "why_unsupported"]

_CAPTURE_OPTIONS = (
    "loss_reduction", "batch_dim", "batch_size", "sample_index", "engine", "fuse_weight_grad", "max_memory",
    "max_samples",
)  # fmt: skip


def check_options_agree(trainer: Trainer, callbacks: Sequence[Consumer]) -> None:
    """Refuse callbacks that cannot share one capture."""

    def described(callback: Consumer, option: str) -> str:
        place = trainer.callbacks.index(callback)  # type: ignore[attr-defined]
        return f"{type(callback).__name__} (callbacks[{place}]) has {option}={getattr(callback, option)!r}"

    first = callbacks[0]
    for option in _CAPTURE_OPTIONS:
        for other in callbacks[1:]:
            if getattr(first, option) != getattr(other, option):
                raise OptionError(
                    f"{described(first, option)}, but {described(other, option)}: all per-sample callbacks of a "
                    f"Trainer share one capture, so {option} must be the same for all of them"
                )


def holds_compiled_code(pl_module: LightningModule) -> bool:
    """Whether the module or a part of it went through ``torch.compile``."""
    if "torch._dynamo" not in sys.modules:
        return False
    compiled = torch._dynamo.eval_frame.OptimizedModule
    return pl_module._compiler_ctx is not None or any(
        isinstance(part, compiled) or part._compiled_call_impl is not None for part in pl_module.modules()
    )


def why_unsupported(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why this way of training cannot be captured, or None where it can."""
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step(self, dataloader_iter) is not supported, because it hides the batch"
    return why_strategy_is_unsupported(trainer, pl_module)
