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
    """Add ``factor_i * f(g_i) . h(g'_j)`` to the score of each pair of rows, in float64.

    The test store is read once, and the training store once for each block of it. Cost: ``2 n m K`` operations for n
    training and m test rows of K columns, besides the transforms.

    Args:
        scores: what is added to, (train, test), float64.
        train: rows of training samples, several of one sample or one.
        test: rows of test samples.
        max_memory: bytes for blocks and products, besides `scores`; None takes 64 MiB for each.
        share: how many others, and this one, share these bytes.
        factors: a factor of each training row, (rows,).
        of_train: f, the identity if None; applied to every block as often as it is read.
        of_test: h, the identity if None.
    """
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
    """Blocks of rows in float64, so small that a copy of one, and two things of that size, may be held beside it.

    Args:
        store: the rows.
        max_memory: bytes; None reads blocks of 64 MiB.
        share: how many others, and this one, share these bytes.

    Yields:
        The rows' positions in the store, (m,), and their values, (m, K).

    Raises:
        OptionError: `max_memory` does not hold one row.
    """
    size = None
    if max_memory is not None:
        row = store.num_columns * (numpy.dtype(store.manifest.dtype).itemsize + 8)  # as it is stored and as it is given
        size = max_memory // (6 * share)
        if size < row:
            raise OptionError(
                f"max_memory={max_memory!r} is too little for rows of {store.num_columns} columns: "
                f"{6 * share * row} bytes are needed"
            )
    yield from store.blocks(size, torch.float64)


def unit_rows(values: Tensor) -> Tensor:
    """Each row over its norm; a row of zeros, which has no direction, is nan."""
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)
