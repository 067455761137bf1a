"""Scale and shift of the normalization layers.

Each is ``y = xhat * scale + shift`` with xhat the normalized input: d scale = sum_t g_t xhat_t, d shift = sum_t g_t.
The normalized input is recomputed by the same torch op without its affine part, in float32 for float16 and bfloat16
inputs as torch's own kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.rules.elementwise import sum_to_shape, widen
from lightning_persample.rules.registry import Call, register_rule

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


@register_rule(
    torch.layer_norm,
    arguments=("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    batched=("input",),
    weights=("weight", "bias"),
)
def layer_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Layer norm over the trailing axes.

    Args:
        call: input (B, *t, *normalized_shape); weight and bias of shape normalized_shape.
        grad_output: (B, *t, *normalized_shape).

    Returns:
        weight, bias: `Dense` of shape normalized_shape.
    """
    shape = call.arguments["normalized_shape"]
    return _trailing(
        "layer_norm", call, grad_output, lambda x: torch.layer_norm(x, shape, None, None, call.get("eps", 1e-5), False)
    )


@register_rule(
    torch.rms_norm,
    arguments=("input", "normalized_shape", "weight", "eps"),
    batched=("input",),
    weights=("weight",),
)
def rms_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Root mean square norm over the trailing axes.

    Args:
        call: input (B, *t, *normalized_shape); weight of shape normalized_shape. eps None is the machine epsilon of the
            dtype in which torch computes: float32 for float16 and bfloat16.
        grad_output: (B, *t, *normalized_shape).

    Returns:
        weight: `Dense` of shape normalized_shape.
    """
    shape = call.arguments["normalized_shape"]
    return _trailing("rms_norm", call, grad_output, lambda x: torch.rms_norm(x, shape, None, call.get("eps")))


@register_rule(
    torch.group_norm,
    arguments=("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    batched=("input",),
    weights=("weight", "bias"),
)
def group_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Group norm.

    Args:
        call: input (B, k, c, *t); weight and bias (c,).
        grad_output: (B, k, c, *t).

    Returns:
        weight, bias: `Dense` of shape (c,).
    """
    groups, eps = call.arguments["num_groups"], call.get("eps", 1e-5)
    return _channelwise(call, grad_output, lambda x: torch.group_norm(x, groups, None, None, eps, False))


@register_rule(
    torch.instance_norm,
    arguments=(
        "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps", "cudnn_enabled",
    ),
    batched=("input",),
    weights=("weight", "bias"),
    reads=("input", "running_mean", "running_var"),
)  # fmt: skip
def instance_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Instance norm, by the statistics of each instance or (use_input_stats False) by the running statistics.

    The running statistics are not read where the instance's own are in use: the forward may have updated them.

    Args:
        call: input (B, k, c, *t); weight, bias, running_mean and running_var (c,).
        grad_output: (B, k, c, *t).

    Returns:
        weight, bias: `Dense` of shape (c,).
    """
    eps = call.arguments["eps"]
    if not call.arguments["use_input_stats"]:
        return _channelwise(call, grad_output, _by_running_statistics(call, eps))
    return _channelwise(
        call, grad_output, lambda x: torch.instance_norm(x, None, None, None, None, True, 0.0, eps, False)
    )


def _training(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["training"])


@register_rule(
    torch.batch_norm,
    arguments=(
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
    batched=("input",),
    weights=("weight", "bias"),
    reads=("input", "running_mean", "running_var"),
    mixes_samples=_training,
)  # fmt: skip
def batch_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Batch norm, by the running statistics in evaluation, by those of the whole batch in training.

    In evaluation the values are those of a loop over single samples. In training the samples influence each other: the
    value of sample i is its contribution to the gradient of the batch: the gradient when the output's gradient is zero
    for all other samples. The running statistics are not read in training: the forward has updated them.

    Args:
        call: input (B, k, c) or (B, k, c, *t); weight, bias, running_mean and running_var (c,).
        grad_output: of the input's shape.

    Returns:
        weight, bias: `Dense` of shape (c,).
    """
    eps = call.arguments["eps"]
    if not _training(call.arguments):
        return _channelwise(call, grad_output, _by_running_statistics(call, eps))
    return _channelwise(call, grad_output, lambda x: torch.batch_norm(x, None, None, None, None, True, 0.0, eps, False))


def _trailing(op: str, call: Call, grad_output: Tensor, normalize: Callable[[Tensor], Tensor]) -> dict[str, Dense]:
    shape = tuple(call.arguments["normalized_shape"])
    if tuple(grad_output.shape[-len(shape) :]) != shape or grad_output.dim() < len(shape) + 2:
        raise UnsupportedError(
            f"{op} normalizes over the batch axis: normalized_shape is {shape}, the per-sample output "
            f"{tuple(grad_output.shape[1:])}; normalize over the axes of one sample"
        )
    found = {}
    if "weight" in call.weights:
        scaled = widen(grad_output) * normalize(widen(call.arguments["input"]))
        found["weight"] = Dense(sum_to_shape(scaled, shape))
    if "bias" in call.weights:
        found["bias"] = Dense(sum_to_shape(grad_output, shape))
    return found


def _channelwise(call: Call, grad_output: Tensor, normalize: Callable[[Tensor], Tensor]) -> dict[str, Dense]:
    """`normalize` maps rows (B * k, c, *t) to normalized rows."""
    found = {}
    if "weight" in call.weights:
        rows = widen(call.arguments["input"]).flatten(0, 1)
        normalized = normalize(rows).unflatten(0, grad_output.shape[:2])
        found["weight"] = Dense(_sum_to_channels(widen(grad_output) * normalized))
    if "bias" in call.weights:
        found["bias"] = Dense(_sum_to_channels(grad_output))
    return found


def _sum_to_channels(grad: Tensor) -> Tensor:
    """(B, k, c, *t) -> (B, c)."""
    return widen(grad).sum([axis for axis in range(1, grad.dim()) if axis != 2])


def _by_running_statistics(call: Call, eps: float) -> Callable[[Tensor], Tensor]:
    mean, var = widen(call.arguments["running_mean"]), widen(call.arguments["running_var"])

    def normalize(rows: Tensor) -> Tensor:
        channels = (-1,) + (1,) * (rows.dim() - 2)
        return (rows - mean.view(channels)) * (var + eps).rsqrt().view(channels)

    return normalize
