"""Cases of the convolutions and of the transposed ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.rules.case import Arguments, Case

OPS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
SPATIAL = {1: (11,), 2: (9, 8), 3: (6, 7, 5)}


def convolution_cases() -> Iterator[Case]:
    for axes in (1, 2, 3):
        for option, kernel, arguments in _options(axes):
            yield _case(f"conv{axes}d-{option}", axes, kernel, arguments)
        yield _case(f"conv{axes}d-two_rows", axes, (3,) * axes, {"padding": 1}, rows=2)
        yield _case(f"conv{axes}d-two_rows-groups-no_bias", axes, (2,) * axes, {"groups": 2}, rows=2, bias=False)
        yield _case(f"conv{axes}d-depthwise", axes, (3,) * axes, {"groups": 4}, channels=4, out=4)
        yield _case(f"conv{axes}d-depthwise_twofold", axes, (3,) * axes, {"groups": 4}, channels=4, out=8)
        yield _case(f"conv{axes}d-one_channel", axes, (2,) * axes, {}, channels=1, out=1)
    yield _case("conv2d-tall_kernel", 2, (3, 1), {"padding": (1, 0)})
    yield _case("conv2d-wide_kernel", 2, (1, 4), {"padding": (0, 2), "stride": (1, 3)})
    yield _case("conv2d-different_per_axis", 2, (3, 2), {"padding": (2, 1), "stride": (1, 2), "dilation": (2, 3)})
    yield _case("conv2d-same-different_per_axis", 2, (4, 3), {"padding": "same", "dilation": (1, 2)})
    yield _case("conv3d-dilation_in_one_axis", 3, (2, 3, 2), {"dilation": (1, 2, 1), "padding": (0, 1, 1)})
    yield _case("conv3d-same-different_per_axis", 3, (2, 3, 4), {"padding": "same"})
    for axes in (1, 2, 3):
        for option, kernel, arguments in _options_of_transposed(axes):
            yield _transposed(f"conv_transpose{axes}d-{option}", axes, kernel, arguments)
        yield _transposed(f"conv_transpose{axes}d-two_rows", axes, (3,) * axes, {"padding": 1}, rows=2)
        yield _transposed(f"conv_transpose{axes}d-no_bias", axes, (2,) * axes, {"groups": 2}, rows=2, bias=False)
        yield _transposed(f"conv_transpose{axes}d-depthwise", axes, (3,) * axes, {"groups": 4}, out=4)
    options = {"padding": (2, 1), "stride": (1, 3), "dilation": (3, 1), "output_padding": (2, 1)}
    yield _transposed("conv_transpose2d-different_per_axis", 2, (3, 2), options)


def _options(axes: int) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    three, two, four = (3,) * axes, (2,) * axes, (4,) * axes
    yield "plain", three, {}
    yield "point", (1,) * axes, {}
    yield "stride", three, {"stride": 2}
    yield "stride_beyond_kernel", two, {"stride": 3}
    yield "padding", three, {"padding": 1}
    yield "padding_beyond_kernel", two, {"padding": (3,) * axes}
    yield "dilation", two, {"dilation": 2}
    yield "dilation_stride", two, {"dilation": 2, "stride": 2}
    yield "dilation_stride_padding", three, {"dilation": 2, "stride": 3, "padding": 2}
    yield "valid", three, {"padding": "valid", "stride": 2}
    yield "same", three, {"padding": "same"}
    yield "same-even", two, {"padding": "same"}
    yield "same-even_four", four, {"padding": "same"}
    yield "same-even-dilation", two, {"padding": "same", "dilation": 3}
    yield "same-groups", two, {"padding": "same", "groups": 2}
    yield "groups", three, {"groups": 2}
    yield "groups_stride_dilation", two, {"groups": 2, "stride": 2, "dilation": 2, "padding": 1}
    yield "sequences_of_one", three, {"stride": [2], "padding": [1], "dilation": [1]}
    yield "tuples", two, {"stride": (2,) * axes, "padding": (1,) * axes, "dilation": (2,) * axes}


def _options_of_transposed(axes: int) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    three, two = (3,) * axes, (2,) * axes
    yield "plain", three, {}
    yield "point", (1,) * axes, {}
    yield "stride", three, {"stride": 2}
    yield "stride_beyond_kernel", two, {"stride": 3, "output_padding": 2}
    yield "padding", three, {"padding": 1}
    yield "padding_beyond_kernel", two, {"padding": (2,) * axes}
    yield "output_padding_beyond_stride", two, {"dilation": 3, "output_padding": 2}
    yield "groups_stride_dilation", two, {"groups": 2, "stride": 2, "dilation": 2, "padding": 1, "output_padding": 1}
    yield "sequences_of_one", three, {"stride": [2], "padding": [1], "output_padding": [1], "dilation": [1]}


def _case(
    name: str,
    axes: int,
    kernel: tuple[int, ...],
    options: dict[str, Any],
    *,
    rows: int = 1,
    channels: int = 2,
    out: int = 4,
    bias: bool = True,
) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        groups = options.get("groups", 1)
        arguments: Arguments = {
            "input": torch.randn((size, rows, channels, *SPATIAL[axes]), dtype=dtype),
            "weight": torch.randn((out, channels // groups, *kernel), dtype=dtype),
            "bias": torch.randn(out, dtype=dtype) if bias else None,
        }
        return {**arguments, **options}

    return Case(name, OPS[axes], build)


def _transposed(
    name: str,
    axes: int,
    kernel: tuple[int, ...],
    options: dict[str, Any],
    *,
    rows: int = 1,
    out: int = 2,
    bias: bool = True,
) -> Case:
    def build(size: int, dtype: torch.dtype) -> Arguments:
        arguments: Arguments = {
            "input": torch.randn((size, rows, 4, *SPATIAL[axes]), dtype=dtype),
            "weight": torch.randn((4, out // options.get("groups", 1), *kernel), dtype=dtype),
            "bias": torch.randn(out, dtype=dtype) if bias else None,
        }
        return {**arguments, **options}

    return Case(name, TRANSPOSED[axes], build)
