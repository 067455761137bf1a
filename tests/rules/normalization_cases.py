"""Cases of the normalization layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.rules.case import Arguments, Case

C = 4
AFFINE = {"affine": (True, True), "scale": (True, False), "shift": (False, True)}


def normalization_cases() -> Iterator[Case]:
    yield from _layer_norm()
    yield from _rms_norm()
    yield from _group_norm()
    yield from _instance_norm()
    yield from _batch_norm()


def _affine(shape: tuple[int, ...], dtype: torch.dtype, affine: str) -> Arguments:
    scale, shift = AFFINE[affine]
    return {
        "weight": torch.randn(shape, dtype=dtype) if scale else None,
        "bias": torch.randn(shape, dtype=dtype) if shift else None,
    }


def _layer_norm() -> Iterator[Case]:
    shapes = {"one_row": ((1,), (5,)), "time": ((1, 3), (5,)), "time_first": ((3, 1), (5,)), "two_axes": ((2,), (3, 5))}
    for name, (positions, normalized) in shapes.items():
        for affine in AFFINE:
            for eps in (1e-5, 0.3):

                def build(
                    size: int,
                    dtype: torch.dtype,
                    positions: tuple[int, ...] = positions,
                    normalized: tuple[int, ...] = normalized,
                    affine: str = affine,
                    eps: float = eps,
                ) -> Arguments:
                    return {
                        "input": torch.randn((size, *positions, *normalized), dtype=dtype),
                        "normalized_shape": normalized,
                        **_affine(normalized, dtype, affine),
                        "eps": eps,
                    }

                yield Case(f"layer_norm-{name}-{affine}-eps_{eps}", torch.layer_norm, build)


def _rms_norm() -> Iterator[Case]:
    for name, positions, normalized in (("one_row", (1,), (5,)), ("time", (1, 3), (5,)), ("two_axes", (2,), (3, 5))):
        for eps in (None, 0.3):

            def build(
                size: int,
                dtype: torch.dtype,
                positions: tuple[int, ...] = positions,
                normalized: tuple[int, ...] = normalized,
                eps: float | None = eps,
            ) -> Arguments:
                return {
                    "input": torch.randn((size, *positions, *normalized), dtype=dtype) * 0.1,
                    "normalized_shape": list(normalized),
                    "weight": torch.randn(normalized, dtype=dtype),
                    "eps": eps,
                }

            yield Case(f"rms_norm-{name}-eps_{eps}", torch.rms_norm, build)


def _channelwise(
    name: str, op: Any, shape: tuple[int, ...], affine: str, *, mixing: bool = False, **options: Any
) -> Case:
    """Running statistics are asked for by ``running=True``."""
    running = options.pop("running", None)

    def build(size: int, dtype: torch.dtype) -> Arguments:
        arguments: Arguments = {"input": torch.randn((size, *shape), dtype=dtype), **_affine(shape[1:2], dtype, affine)}
        if running is not None:
            arguments["running_mean"] = torch.randn(shape[1], dtype=dtype) if running else None
            arguments["running_var"] = torch.rand(shape[1], dtype=dtype) + 0.5 if running else None
        return {**arguments, **options}

    return Case(name, op, build, mixing=mixing)


def _group_norm() -> Iterator[Case]:
    for name, shape in (("vector", (1, C)), ("image", (1, C, 3, 2)), ("rows", (3, C, 5))):
        for affine in ("affine", "scale"):  # torch cannot differentiate the shift of a group norm without a scale
            for groups in (1, 2):
                yield _channelwise(
                    f"group_norm-{name}-{affine}-{groups}", torch.group_norm, shape, affine, num_groups=groups
                )
    yield _channelwise("group_norm-eps", torch.group_norm, (1, C, 5), "affine", num_groups=2, eps=0.3)


def _instance_norm() -> Iterator[Case]:
    for name, shape in (("sequence", (1, C, 5)), ("image", (1, C, 3, 2)), ("volume_rows", (2, C, 2, 3, 2))):
        for affine in AFFINE:
            for statistics, running in ((True, False), (True, True), (False, True)):
                yield _channelwise(
                    f"instance_norm-{name}-{affine}-own_{statistics}-running_{running}",
                    torch.instance_norm,
                    shape,
                    affine,
                    running=running,
                    use_input_stats=statistics,
                    momentum=0.1,
                    eps=1e-5 if running else 0.3,
                    cudnn_enabled=False,
                )


def _batch_norm() -> Iterator[Case]:
    for name, shape in (("vector", (1, C)), ("vector_rows", (3, C)), ("image", (1, C, 3, 2)), ("rows", (2, C, 5)),
                        ("one_channel", (1, 1)), ("image_of_one_channel", (1, 1, 3, 2))):  # fmt: skip
        for affine in AFFINE:
            for training, running in ((True, False), (True, True), (False, True)):
                yield _channelwise(
                    f"batch_norm-{name}-{affine}-training_{training}-running_{running}",
                    torch.batch_norm,
                    shape,
                    affine,
                    mixing=training,
                    running=running,
                    training=training,
                    momentum=0.1,
                    eps=1e-5 if running else 0.3,
                    cudnn_enabled=False,
                )
