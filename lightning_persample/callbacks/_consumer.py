"""What the shared capture of a Trainer knows of the callbacks that it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_persample.engine import PerSampleRecord

__all__ = ["Consumer"]


class Consumer(Protocol):
    """A `PerSampleCallback`, as far as the capture goes: its options, what it asks for and where records go."""

    every_n_steps: int | None
    loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor]
    batch_dim: int
    batch_size: int | None
    sample_index: Callable[[Any], Any] | None
    unsupported: Literal["warn", "error", "vmap"]
    engine: Literal["expanded", "vmap", "loop"]
    verify: bool
    fuse_weight_grad: bool
    max_memory: int | None
    max_samples: int | None

    def needs(self, trainer: Trainer) -> set[str]:
        """The quantities that it reads."""

    def should_capture(self, trainer: Trainer) -> bool:
        """Whether it wants the record of the current batch."""

    def receives_records(self) -> bool:
        """Whether it does anything with the records."""

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Take the record of a captured batch."""

    def _backward_starts(self, trainer: Trainer) -> None: ...

    def _backward_ended(self, trainer: Trainer, record: PerSampleRecord | None) -> None: ...

    def _goes_by_steps(self) -> bool: ...

    def _rest(self, *, automatic: bool) -> bool: ...

    def _end_rest(self, *, has_missed: bool) -> None: ...

    def _skip_hooks(self) -> None: ...

    def _restore_hooks(self) -> None: ...
