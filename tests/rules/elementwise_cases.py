"""Cases of the elementwise arithmetic with a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.rules.case import Arguments, Case

K, D = 2, 4
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vector": ((1, D), (D,)),
    "rows": ((K, D), (D,)),
    "axis_of_one": ((K, D), (1, D)),
    "time": ((1, 3, D), (3, D)),
    "time_only": ((1, 3, D), (3, 1)),
    "time_first": ((3, 1, D), (3, 1, D)),
    "scalar": ((K, D), ()),
    "single": ((K, D), (1,)),
    "channels": ((1, 3, 2, 2), (3, 1, 1)),
    "input_broadcasts": ((1, 3, 1), (D,)),
    "both_broadcast": ((1, 3, 1), (1, 1, D)),
    "more_axes": ((1, K, D), (3, 1, D)),
    "more_axes_not_aligned": ((K, D), (3, 1, D)),
}


def elementwise_cases() -> Iterator[Case]:
    for op, options in _ops():
        for weight in ("input", "other"):
            for layout, (shape, weight_shape) in SHAPES.items():
                yield _case(f"{_name(op, options)}-{weight}-{layout}", op, weight, shape, weight_shape, options)
    for op in (torch.mul, torch.div, torch.add):
        for dtype in (torch.int64, torch.bool):
            if op is not torch.add or dtype is not torch.bool:
                yield _case(f"{op.__name__}-input_{dtype}", op, "other", (K, D), (D,), {}, dtype)


def _ops() -> Iterator[tuple[Callable[..., Tensor], dict[str, Any]]]:
    for op in (torch.add, torch.sub, torch.rsub):
        yield op, {}
        yield op, {"alpha": -2.5}
    yield torch.mul, {}
    yield torch.div, {}
    yield torch.div, {"rounding_mode": "floor"}
    yield torch.div, {"rounding_mode": "trunc"}
    yield torch.Tensor.__rdiv__, {}


def _name(op: Callable[..., Tensor], options: dict[str, Any]) -> str:
    return "_".join([op.__name__.strip("_"), *(str(value) for value in options.values())])


def _case(
    name: str,
    op: Callable[..., Tensor],
    weight: str,
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    options: dict[str, Any],
    dtype_of_input: torch.dtype | None = None,
) -> Case:
    sample = "other" if weight == "input" else "input"

    def build(size: int, dtype: torch.dtype) -> Arguments:
        values = torch.rand((size, *shape), dtype=dtype) + 0.5
        if dtype_of_input is not None:
            values = torch.randint(0, 2, (size, *shape)).to(dtype_of_input)
        found = {sample: values, weight: torch.rand(weight_shape, dtype=dtype) + 0.5}
        return {"input": found["input"], "other": found["other"], **options}

    return Case(name, op, build, batched=(sample,), weights=(weight,), positional=op is torch.Tensor.__rdiv__)
