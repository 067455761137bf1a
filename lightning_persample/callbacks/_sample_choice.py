"""Which samples of a large batch values are computed for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_persample.engine.batch import batch_tensors, read_batch_size

__all__ = ["SampleChoice"]


class SampleChoice:
    """Chooses samples at random, with random numbers of its own, so that training draws what it would draw.

    Args:
        most: the most samples of a batch; None is all.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B; None reads it from the batch's tensors.
        seed: tells the processes of a run apart.
    """

    def __init__(self, most: int | None, batch_dim: int, batch_size: int | None, seed: int) -> None:
        self._most, self._batch_dim, self._batch_size = most, batch_dim, batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def of_batch(self, batch: Any) -> Tensor | None:
        """The places of the samples that are chosen, in order.

        Args:
            batch: the batch; one whose size cannot be read gives a `BatchSizeError`.

        Returns:
            (m,) int64, different places; None is all.
        """
        if self._most is None:
            return None
        size = self._batch_size
        if size is None:
            size = read_batch_size(list(batch_tensors(batch)), self._batch_dim)
        if size <= self._most:
            return None
        return torch.randperm(size, generator=self._generator)[: self._most].sort().values
