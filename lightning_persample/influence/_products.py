"""Inner products of the rows of two stores, a block of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.influence._alignment import Rows
from lightning_persample.influence.store import GradientStore

__all__ = ["Transform", "add_products", "float64_blocks", "unit_rows"]

_PRODUCT_BYTES = 1 << 26

Transform = Callable[[Tensor], Tensor]
"""Rows (m, K) in float64 to as many rows."""


def add_products(
    scores: Tensor,
    train: Rows,
    test: Rows,
    *,
    max_memory: int | None,
    share: int = 1,
    factors: Tensor | None = None,
    of_train: Transform | None = None,
    of_test: Transform | None = None,
) -> None:
    """Add ``factor_i * f(g_i) . h(g'_j)`` to the score of each pair of rows, in float64."""
    # The test store is read once, and the training store once for each block of it. Cost: ``2 n m K`` operations for n
    # training and m test rows of K columns, besides the transforms.
    product_bytes = _PRODUCT_BYTES if max_memory is None else max_memory // (3 * share)
    for test_at, right in float64_blocks(test.store, max_memory, share):
        right = right if of_test is None else of_test(right)
        columns = test.places[test_at]
        for train_at, left in float64_blocks(train.store, max_memory, share):
            left = left if of_train is None else of_train(left)
            if factors is not None:
                left = left * factors[train_at, None]
            rows = train.places[train_at]
            step = max(1, product_bytes // (8 * len(right)))
            for start in range(0, len(left), step):
                part = slice(start, start + step)
                scores.index_put_((rows[part, None], columns), left[part] @ right.T, accumulate=True)


def float64_blocks(store: GradientStore, max_memory: int | None, share: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows in float64, each in a third of the memory: with the block before it, or with a copy of itself."""
    size = None
    if max_memory is not None:
        row = store.num_columns * (numpy.dtype(store.manifest.dtype).itemsize + 16)  # as stored, and two in float64
        size = max_memory // (3 * share)
        if size < row:
            raise OptionError(
                f"max_memory={max_memory!r} is too little for rows of {store.num_columns} columns: "
                f"{3 * share * row} bytes are needed"
            )
    yield from store.blocks(size, torch.float64)


def unit_rows(values: Tensor) -> Tensor:
    """Each row over its norm; a row of zeros, which has no direction, is nan."""
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)
