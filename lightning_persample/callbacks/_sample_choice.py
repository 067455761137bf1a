"""Which samples of a large batch values are computed for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SampleChoice"]


class SampleChoice:
    """Chooses samples at random, with random numbers of its own, so that training draws what it would draw.

    Args:
        most: the most samples of a batch; None is all.
        seed: tells the processes of a run apart.
    """

    def __init__(self, most: int | None, seed: int) -> None:
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)

    def of_batch(self, batch_size: int) -> Tensor | None:
        """The places of the samples that are chosen, in order: (m,) int64, different places; None is all."""
        if self._most is None or batch_size <= self._most:
            return None
        return torch.randperm(batch_size, generator=self._generator)[: self._most].sort().values
