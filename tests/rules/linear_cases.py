"""Cases of the linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.rules.case import Arguments, Case
from tests.torch_release import OLDEST, RELEASE

D, P = 4, 3


def linear_cases() -> Iterator[Case]:
    layouts = {
        "one_row": (1, D),
        "samples_first": (1, 5, D),
        "time_first": (5, 1, D),
        "flattened": (5, D),
        "four_axes": (1, 2, 3, D),
        "two_rows_and_time": (2, 3, D),
    }
    for layout, shape in layouts.items():
        yield _linear(f"linear-{layout}-bias", shape, (P, D), (P,))
        yield _linear(f"linear-{layout}-no_bias", shape, (P, D), None)
    yield _linear("linear-scalar_bias", (2, D), (P, D), ())
    yield _linear("linear-bias_of_one", (2, D), (P, D), (1,))
    if RELEASE > OLDEST:
        yield _linear("linear-bias_per_position", (1, 5, D), (P, D), (5, P))
        yield _linear("linear-vector-scalar_bias", (2, 5, D), (D,), ())
    yield _linear("linear-vector-no_bias", (2, D), (D,), None)
    yield _linear("linear-one_output", (2, D), (1, D), (1,))
    for op, second in ((torch.matmul, "other"), (torch.mm, "mat2")):
        name = op.__name__
        yield _product(f"{name}-one_row", op, second, (1, D), (D, P))
        yield _product(f"{name}-flattened", op, second, (5, D), (D, P))
        yield _product(f"{name}-one_output", op, second, (2, D), (D, 1))
    yield _product("matmul-samples_first", torch.matmul, "other", (1, 5, D), (D, P))
    yield _product("matmul-time_first", torch.matmul, "other", (5, 1, D), (D, P))
    yield _product("matmul-four_axes", torch.matmul, "other", (2, 3, 2, D), (D, P))
    yield _product("matmul-vector", torch.matmul, "other", (2, 5, D), (D,))
    yield _product("matmul-stack", torch.matmul, "other", (1, 2, 5, D), (2, D, P))
    yield _product("matmul-stack_broadcasts_input", torch.matmul, "other", (1, 1, 5, D), (2, D, P))
    yield _product("matmul-stack_of_one", torch.matmul, "other", (2, 3, 5, D), (1, D, P))
    yield _product("matmul-stack_with_more_axes", torch.matmul, "other", (5, D), (2, D, P))
    for factors in ({}, {"beta": 0.5, "alpha": -2}):
        name = "addmm-scaled" if factors else "addmm"
        yield _added(f"{name}-one_row", (1, D), (P,), factors)
        yield _added(f"{name}-flattened", (5, D), (P,), factors)
        yield _added(f"{name}-scalar", (2, D), (), factors)
        yield _added(f"{name}-one_output", (2, D), (1, 1), factors, 1)


def _linear(name: str, shape: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        arguments: Arguments = {
            "input": torch.randn((size, *shape), dtype=dtype),
            "weight": torch.randn(weight, dtype=dtype),
        }
        if bias is not None:
            arguments["bias"] = torch.randn(bias, dtype=dtype)
        return arguments

    return Case(name, F.linear, build)


def _product(
    name: str, op: Callable[..., Tensor], second: str, shape: tuple[int, ...], weight: tuple[int, ...]
) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        return {"input": torch.randn((size, *shape), dtype=dtype), second: torch.randn(weight, dtype=dtype)}

    return Case(name, op, build, weights=(second,))


def _added(
    name: str, shape: tuple[int, ...], bias: tuple[int, ...], factors: dict[str, float], outputs: int = P
) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        arguments: Arguments = {
            "input": torch.randn(bias, dtype=dtype),
            "mat1": torch.randn((size, *shape), dtype=dtype),
            "mat2": torch.randn((D, outputs), dtype=dtype),
        }
        return {**arguments, **factors}

    return Case(name, torch.addmm, build, batched=("mat1",), weights=("input", "mat2"))
