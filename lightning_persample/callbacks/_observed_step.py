"""One training step that the engine observes, and what is known of the losses in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.callbacks._consumer import Consumer
from lightning_persample.callbacks._sample_choice import SampleChoice
from lightning_persample.callbacks._sum_check import SumCheck
from lightning_persample.engine import PerSampleRecord, expanded_weights, of_user
from lightning_persample.errors import OptionError

__all__ = ["ObservedStep"]

NO_MEMORY = (
    "there is not enough memory to compare the sum of the samples' gradients with .grad: it is not compared in this fit"
)


class ObservedStep:
    """Opens a capture on a batch; without one where the batch's size cannot be read.

    Args:
        pl_module: the module that is trained.
        options: the callback whose loss_reduction, batch_dim, batch_size and kernel options hold.
        batch: the batch.
        layout: the batch as the engine looks for its samples.
        batch_size: number of samples B.
        quantities: what the records hold.
        choice: chooses the samples that they are for.
        check_sums: compare the sums of the samples' gradients with ``.grad``, where they are computed.
        averages: the backward writes an average over several processes to ``.grad``.

    Attributes:
        module: the module.
        capture: what observes it.
        sums_differ: whether such a sum was seen not to fit, in this step or before it.
        weights: what each sample weighs in the loss, (B,) or one number; None before there is a loss.

    Raises:
        OptionError: a quantity that does not exist.
        PerSampleError: the batch cannot be captured.
    """

    def __init__(
        self,
        pl_module: LightningModule,
        options: Consumer,
        batch: Any,
        layout: Any,
        batch_size: int,
        quantities: Collection[str],
        choice: SampleChoice,
        *,
        check_sums: bool,
        averages: bool,
    ) -> None:
        self.module = pl_module
        self._reduction = options.loss_reduction
        self._batch = batch
        self.sums_differ = not check_sums
        samples = choice.of_batch(batch_size)
        self._check_sums = check_sums and "grad_sample" in quantities and samples is None
        self._averages = averages
        self._sum_check: SumCheck | None = None
        self.weights: Tensor | float | None = None
        self._lacks_memory = False
        self.capture = expanded_weights(
            pl_module,
            layout,
            loss_reduction="sum" if callable(self._reduction) else self._reduction,
            batch_dim=options.batch_dim,
            batch_size=batch_size,
            quantities=tuple(sorted(quantities)),
            unsupported="ignore",  # what there is to say is for where records are delivered
            fuse_weight_grad=options.fuse_weight_grad,
            max_memory=options.max_memory,
            samples=samples,
        )

    def attach(self, loss: Tensor, outputs: Any) -> None:
        """Tell the capture the loss of the next backward."""
        reduction, size = self._reduction, self.capture.batch_size
        weights: Tensor | float = 1.0 if reduction == "sum" else 1.0 / size
        if callable(reduction):
            with torch.no_grad():
                weights = of_user(reduction, outputs, self._batch)
            if not isinstance(weights, Tensor):
                raise OptionError(
                    f"loss_reduction returned {type(weights).__name__}, but it must return a tensor of shape "
                    f"({size},) with the weight of each sample in the loss"
                )
            self.capture.attach_loss(loss, weights)
        else:
            self.capture.attach_loss(loss)
        self.weights = weights
        if self._check_sums:
            self._sum_check = SumCheck(self.module, loss, weights, averaged=self._averages)

    def close(self) -> None:
        """Close the capture and remove every hook. May be called twice."""
        self.capture.close()
        if self._sum_check is not None:
            self._sum_check.close()

    def start_backward(self) -> None:
        """Note what ``.grad`` holds before a backward."""
        if self._sum_check is not None:
            try:
                self._sum_check.start_backward()
            except torch.OutOfMemoryError:
                self._sum_check.close()
                self._sum_check, self._lacks_memory = None, True

    def why_sums_differ(self, record: PerSampleRecord) -> str | None:
        """Compare the sums with what the backward added to ``.grad``; said once, and not looked at again."""
        check, self._sum_check = self._sum_check, None
        if check is not None and self._reduction == "mean":
            check.weigh(1.0 / self.capture.counted)
        text = NO_MEMORY if self._lacks_memory else None
        try:
            text = text if check is None else check.finish(record)
        except torch.OutOfMemoryError:
            text = NO_MEMORY
        if text is not None:
            self.sums_differ, self._check_sums = True, False
        return text
