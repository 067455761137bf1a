"""Cases of the table look-ups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.rules.case import Arguments, Case

ROWS, D = 6, 3


def embedding_cases() -> Iterator[Case]:
    shapes = {"one_index": (1,), "samples_first": (1, 9), "time_first": (9, 1), "flattened": (9,), "grid": (2, 3, 4)}
    for name, shape in shapes.items():
        yield _case(f"embedding-{name}", shape, {})
    for padding_idx in (-1, 0, 3, ROWS - 1):
        for scale in (False, True):
            for sparse in (False,) if scale else (False, True):  # torch refuses both together
                options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale, "sparse": sparse}
                yield _case(f"embedding-padding_{padding_idx}-scale_{scale}-sparse_{sparse}", (1, 20), options)
    yield _case("embedding-flattened-padding-scale", (20,), {"padding_idx": 2, "scale_grad_by_freq": True})
    yield _case("embedding-int32", (1, 9), {"padding_idx": 1}, torch.int32)
    yield _case("embedding-two_rows", (1, 9), {"padding_idx": 0, "scale_grad_by_freq": True}, rows=2)


def _case(
    name: str,
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype_of_index: torch.dtype = torch.int64,
    *,
    rows: int = ROWS,
) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        return {
            "weight": torch.randn(rows, D, dtype=dtype),
            "indices": torch.randint(rows, (size, *shape), dtype=dtype_of_index),
            **options,
        }

    return Case(name, torch.embedding, build, batched=("indices",), weights=("weight",))
