"""The release of torch that the tests run with: the oldest that is supported can do less."""

from __future__ import annotations

import pytest
import torch

__all__ = ["OLDEST", "RELEASE", "not_in_the_oldest"]

OLDEST = (2, 6)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

not_in_the_oldest = pytest.mark.skipif(
    RELEASE <= OLDEST,
    reason="torch 2.6 does not say whether saved tensors are hooked (norm layers keep none) or which decay Adam has, "
    "shows no torch.autograd.backward to modes, runs `map` without its compiler, has no backward of a product with a "
    "jagged tensor, and its FSDP2 needs a GPU",
)
