"""Squared norms and sums of gradients that are formed once: every way to cut the work, against a loop in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients import (
    Dense,
    KernelOptions,
    Outer,
    Patches,
    PatchGeometry,
    SampleGradient,
    kernel_options,
    sq_norms_and_sum,
    structure,
)
from tests.in_turn import in_turn

SIZES = {  # samples, positions, rows, columns
    "one-piece": (4, 3, 5, 6),
    "cut-along-rows": (5, 7, 130, 40),
    "cut-along-samples": (7, 3, 9, 300),
    "cut-along-both": (9, 2, 70, 200),
    "rows-longer-than-one-sum": (3, 2, 3, 5000),
    "one-sample": (1, 4, 90, 70),
    "one-position": (6, 1, 40, 50),
    "no-sample": (0, 3, 5, 6),
    "no-position": (4, 0, 5, 6),
    "no-row": (4, 3, 0, 6),
    "no-column": (4, 3, 5, 0),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def draw(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, dtype=torch.float32 if not dtype.is_complex else dtype).to(dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def assert_formed(gradient: SampleGradient, expected: list[Tensor]) -> None:
    squares, total = sq_norms_and_sum(gradient)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if gradient.dtype.itemsize == 8 and not gradient.dtype.is_complex else {}
    alone = torch.stack([wide(each).abs().square().sum() for each in expected]) if expected else torch.zeros(0)
    torch.testing.assert_close(squares.double(), alone.double(), **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))
    summed = sum(map(wide, expected)) if expected else wide(torch.zeros(gradient.shape, dtype=gradient.dtype))
    torch.testing.assert_close(wide(total), summed, **(tolerance or {"rtol": 1e-5, "atol": 1e-4}))
    assert squares.dtype == gradient.dtype.to_real()
    assert total.dtype == gradient.dtype


@pytest.mark.parametrize(
    ("size", "dtype", "cache"),
    in_turn(
        [pytest.param(size, dtype, id=f"{name}-{dtype}") for name, size in SIZES.items() for dtype in DTYPES],
        [2**12, 2**16, 2**22],
    ),
)
def test_outer_products(size: tuple[int, ...], dtype: torch.dtype, cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_IN_CACHE", cache)
    B, T, p, d = size
    left, right = draw(B, T, p, dtype=dtype), draw(B, T, d, dtype=dtype)
    assert_formed(Outer(left, right), [wide(g).T @ wide(x) for g, x in zip(left, right, strict=True)])


@pytest.mark.parametrize("limit", [1, 10_000, None])
def test_outer_products_under_a_limit(limit: int | None) -> None:
    left, right = torch.randn(5, 6, 70), torch.randn(6, 5, 90).transpose(0, 1)
    with kernel_options(KernelOptions(max_memory=limit)):
        assert_formed(Outer(left, right), [wide(g).T @ wide(x) for g, x in zip(left, right, strict=True)])


@pytest.mark.parametrize("limit", [1, 10_000, None])
@pytest.mark.parametrize("channels", [(3, 8, 1), (4, 6, 2), (16, 16, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions(limit: int | None, channels: tuple[int, int, int], stride: int) -> None:
    in_channels, out_channels, groups = channels
    x = torch.randn(5, in_channels, 9, 8)
    size = out_channels, in_channels // groups, 3, 2
    weight = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    outputs = [F.conv2d(wide(one)[None], weight, None, stride, 1, 1, groups) for one in x]
    grad = torch.randn(5, *outputs[0].shape[1:])
    expected = [torch.autograd.grad(y, weight, wide(g)[None])[0] for y, g in zip(outputs, grad, strict=True)]
    geometry = PatchGeometry((3, 2), (stride, stride), ((1, 1), (1, 1)), (1, 1), groups)
    with kernel_options(KernelOptions(max_memory=limit)):
        assert_formed(Patches(grad.unsqueeze(1), x.unsqueeze(1), geometry), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_written_out(dtype: torch.dtype) -> None:
    gradient = draw(6, 4, 3, dtype=dtype)
    assert_formed(Dense(gradient), list(wide(gradient)))
