"""Convolutions and transposed convolutions in one, two and three dimensions, with every option."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Patches, PatchGeometry, SampleGradient
from lightning_persample.rules.elementwise import widen
from lightning_persample.rules.registry import Call, register_rule

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_OPTIONS = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))


@register_rule(torch.conv1d, arguments=_ARGUMENTS, batched=("input",), weights=("weight", "bias"))
@register_rule(torch.conv2d, arguments=_ARGUMENTS, batched=("input",), weights=("weight", "bias"))
@register_rule(torch.conv3d, arguments=_ARGUMENTS, batched=("input",), weights=("weight", "bias"))
def convolution(call: Call, grad_output: Tensor) -> dict[str, SampleGradient]:
    """``y = conv(x, W) + b``: dW = sum over output positions t of g_t (x) patch_t(x), db = sum_t g_t."""
    return _contributions(call, grad_output, is_transposed=False)


@register_rule(torch.conv_transpose1d, arguments=_TRANSPOSED, batched=("input",), weights=("weight", "bias"))
@register_rule(torch.conv_transpose2d, arguments=_TRANSPOSED, batched=("input",), weights=("weight", "bias"))
@register_rule(torch.conv_transpose3d, arguments=_TRANSPOSED, batched=("input",), weights=("weight", "bias"))
def transposed_convolution(call: Call, grad_output: Tensor) -> dict[str, SampleGradient]:
    """The transpose of a convolution: dW = sum over input positions t of x_t (x) patch_t(g), db = sum_t g_t."""
    # Of the patches that fit into g, those that `output_padding` adds meet no input.
    return _contributions(call, grad_output, is_transposed=True)


def _contributions(call: Call, grad_output: Tensor, *, is_transposed: bool) -> dict[str, SampleGradient]:
    # grad_output (B, k, o, *out)
    found: dict[str, SampleGradient] = {}
    if "weight" in call.weights:
        kernel_size = tuple(call.arguments["weight"].shape[2:])
        axes = len(kernel_size)
        x = call.arguments["input"].to(grad_output.dtype).conj()
        if x.dim() != axes + 3:
            raise UnsupportedError(
                f"conv{'_transpose' if is_transposed else ''}{axes}d was called on one sample without a batch axis "
                f"(batch-first shape {tuple(x.shape)}); give it an input of {axes + 2} axes"
            )
        stride, padding, dilation, groups = [call.arguments.get(name, default) for name, default in _OPTIONS]
        if isinstance(stride, list) or isinstance(padding, list) or isinstance(dilation, list):
            stride, padding, dilation = [tuple(o) if isinstance(o, list) else o for o in (stride, padding, dilation)]
        geometry = _geometry(kernel_size, stride, padding, dilation, groups)
        found["weight"] = Patches(x, grad_output, geometry) if is_transposed else Patches(grad_output, x, geometry)
    if "bias" in call.weights:
        rows = widen(grad_output).flatten(3)
        is_one = rows.shape[1] == rows.shape[3] == 1  # position, as of what an image was averaged to
        found["bias"] = Dense(rows.flatten(1) if is_one else rows.sum((1, 3)))
    return found


@lru_cache(1024)
def _geometry(
    kernel_size: tuple[int, ...],
    stride: int | tuple[int, ...],
    padding: str | int | tuple[int, ...],
    dilation: int | tuple[int, ...],
    groups: int,
) -> PatchGeometry:
    axes = len(kernel_size)
    steps = per_axis(dilation, axes)
    return PatchGeometry(
        kernel_size, per_axis(stride, axes), resolve_padding(padding, kernel_size, steps), steps, groups
    )


def resolve_padding(
    padding: str | int | Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The padding (before, after) each spatial axis, as torch resolves it."""
    # "same" pads dilation * (kernel - 1) in total; where that is odd, the extra element goes after. A sequence of one
    # integer is for all axes.
    if padding == "valid":
        return ((0, 0),) * len(kernel_size)
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel_size, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise UnsupportedError(f"padding={padding!r} is not a padding of a convolution: 'same', 'valid' or integers")
    return tuple((size, size) for size in per_axis(padding, len(kernel_size)))


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One integer per spatial axis; torch also takes a sequence of one for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
