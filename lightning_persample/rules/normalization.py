"""Scale and shift of the normalization layers.

Each is ``y = xhat * scale + shift`` with xhat the normalized input: d scale = sum_t g_t xhat_t, d shift = sum_t g_t.
Statistics are computed again, in float32 for float16 and bfloat16 inputs, as torch's own kernels do, unless autograd
has kept them in this precision. Where they belong to channels, xhat is never written down: with m and r the mean and
the reciprocal standard deviation, d scale = r sum_t g_t (x_t - m), which torch's batch norm takes in one pass over g
and x, and d shift with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.gradients.cost import chunks
from lightning_persample.gradients.norms import LONGEST_ROW
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.rules.elementwise import sum_to_shape, widen
from lightning_persample.rules.registry import Call, register_rule
from lightning_persample.torch_internals import without_torch_function

_STATISTICS = ("result1", "result2")  # mean and reciprocal standard deviation, as torch's nodes call them


def _kept(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The statistics that autograd keeps, batch-first, or None where it does not or not in this precision."""
    found = [call.saved[name] for name in _STATISTICS if name in call.saved]
    return (found[0], found[1]) if [one.dtype for one in found] == [dtype, dtype] else None


@register_rule(
    torch.layer_norm,
    arguments=("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    batched=("input",),
    weights=("weight", "bias"),
    saved=_STATISTICS,
)
def layer_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Layer norm over the trailing axes; grad_output (B, *t, *normalized_shape)."""
    shape = call.arguments["normalized_shape"]
    known = _kept(call, widen(grad_output).dtype)
    if known is not None and grad_output.device.type == "cpu":
        return _trailing("layer_norm", call, grad_output, _sums_of_centred, *known)

    def sums(x: Tensor, grad: Tensor) -> Tensor:
        return _sums(torch.layer_norm(widen(x), shape, None, None, call.get("eps", 1e-5), False), grad, shape)

    return _trailing("layer_norm", call, grad_output, sums)


@register_rule(
    torch.rms_norm,
    arguments=("input", "normalized_shape", "weight", "eps"),
    batched=("input",),
    weights=("weight",),
)
def rms_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Root mean square norm over the trailing axes; grad_output (B, *t, *normalized_shape)."""
    shape, eps = call.arguments["normalized_shape"], call.get("eps")
    if eps is None:
        eps = _machine_epsilon(call.arguments["input"].dtype)
    size, axes = prod(shape), tuple(range(-len(shape), 0))

    def sums(x: Tensor, grad: Tensor) -> Tensor:
        x = widen(x)
        if size > LONGEST_ROW or x.device.type != "cpu":
            return _sums(torch.rms_norm(x, shape, None, eps), grad, shape)
        squares = torch.linalg.vector_norm(x, dim=axes, keepdim=True).square_()
        return _weighted(squares.div_(size).add_(eps).rsqrt_(), x * grad)

    return _trailing("rms_norm", call, grad_output, sums)


@functools.cache
def _machine_epsilon(dtype: torch.dtype) -> float:
    """What `torch.rms_norm` takes for eps=None: the epsilon in which it computes, in torch 2.6 that of its input."""
    if dtype not in (torch.float16, torch.bfloat16):
        return torch.finfo(dtype).eps
    with torch.no_grad(), without_torch_function(), without_autocast("cpu"):
        small = float(torch.rms_norm(torch.full((1,), 2.0**-6, dtype=dtype), (1,)))
    return torch.finfo(dtype if small < 0.75 else torch.float32).eps


@register_rule(
    torch.group_norm,
    arguments=("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    batched=("input",),
    weights=("weight", "bias"),
    saved=_STATISTICS,
)
def group_norm(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """Group norm; grad_output (B, k, c, *t)."""
    groups, eps = call.arguments["num_groups"], call.get("eps", 1e-5)

    def statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
        known = _kept(call, rows.dtype)
        if known is None:
            return _statistics_of_groups(rows, groups, eps)
        return known[0].flatten(0, 1), known[1].flatten(0, 1)

    return _channelwise(call, grad_output, groups, statistics)


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
    """Instance norm, by the statistics of each instance or (use_input_stats False) by the running statistics."""
    # grad_output (B, k, c, *t)
    # The running statistics are not read where the instance's own are in use: the forward may have updated them.
    eps = call.arguments["eps"]
    channels = grad_output.shape[2]
    if not call.arguments["use_input_stats"]:
        return _channelwise(call, grad_output, channels, lambda x: _running_statistics(call, x), eps)
    return _channelwise(call, grad_output, channels, lambda x: _statistics_of_groups(x, channels, eps))


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
    """Batch norm, by the running statistics in evaluation, by those of the whole batch in training."""
    # In evaluation the values are those of a loop over single samples. In training the samples influence each other:
    # the value of sample i is its contribution to the gradient of the batch: the gradient when the output's gradient is
    # zero for all other samples. The running statistics are not read in training: the forward has updated them.
    eps = call.arguments["eps"]
    channels = grad_output.shape[2]
    if not _training(call.arguments):
        return _channelwise(call, grad_output, channels, lambda x: _running_statistics(call, x), eps)
    return _channelwise(call, grad_output, channels, lambda x: _statistics_of_batch(x, eps))


def _trailing(
    op: str, call: Call, grad_output: Tensor, sums: Callable[..., Tensor], *statistics: Tensor
) -> dict[str, Dense]:
    """`sums` gives d scale (b, ...) of the input, the output's gradient and the statistics of b samples."""
    shape = tuple(call.arguments["normalized_shape"])
    if tuple(grad_output.shape[-len(shape) :]) != shape or grad_output.dim() < len(shape) + 2:
        raise UnsupportedError(
            f"{op} normalizes over the batch axis: normalized_shape is {shape}, the per-sample output "
            f"{tuple(grad_output.shape[1:])}; normalize over the axes of one sample"
        )
    found = {}
    if "weight" in call.weights:
        tensors = (call.arguments["input"], grad_output, *statistics)
        bytes_each = 4 * max(grad_output.element_size(), 4) * grad_output[:1].numel()
        parts = list(chunks(len(grad_output), bytes_each, grad_output.device))
        if not grad_output.numel():
            scales = sum_to_shape(grad_output, shape)
        elif len(parts) == 1:
            scales = sums(*tensors)
        else:
            scales = torch.cat([sums(*(tensor[part] for tensor in tensors)) for part in parts])
        found["weight"] = Dense(scales.view(len(scales), *shape))
    if "bias" in call.weights:
        found["bias"] = Dense(sum_to_shape(grad_output, shape))
    return found


def _sums(normalized: Tensor, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """sum_t g_t xhat_t; xhat is written over."""
    return sum_to_shape(normalized.mul_(grad), shape)


def _sums_of_centred(x: Tensor, grad: Tensor, mean: Tensor, reciprocal: Tensor) -> Tensor:
    """sum_t r_t g_t (x_t - m_t), (b, 1, d)."""
    return _weighted(reciprocal, torch.sub(x, mean).mul_(grad))


def _weighted(weights: Tensor, terms: Tensor) -> Tensor:
    """sum_t weights_t terms_t, (b, 1, d): a product of matrices sums in the pass in which it multiplies."""
    weights = weights.reshape(len(terms), 1, -1)
    return torch.bmm(weights, terms.reshape(len(terms), weights.shape[2], -1))


def _channelwise(
    call: Call,
    grad_output: Tensor,
    groups: int,
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]],
    eps: float | None = None,
) -> dict[str, Dense]:
    """`statistics` gives mean and reciprocal deviation, with `eps` variance, of n = B * k rows, (n, groups)."""
    wide = widen(grad_output)
    B, k, c = wide.shape[:3]
    if "weight" not in call.weights or not wide.numel():
        return {name: Dense(wide.flatten(3).sum((1, 3)) if wide.dim() > 3 else wide.sum(1)) for name in call.weights}
    rows = widen(call.arguments["input"]).flatten(0, 1)
    mean, spread = (
        (one if groups == c else one.unsqueeze(2).expand(-1, -1, c // groups)).reshape(-1).contiguous()
        for one in statistics(rows)
    )
    # Batch norm's own kernel adds up over the batch; with all rows as channels of one sample, only over positions.
    given = (None, None, mean, spread, True, 0.0) if eps is None else (mean, spread, None, None, False, eps)
    _, scale, shift = torch.ops.aten.native_batch_norm_backward(
        wide.reshape(1, B * k * c, -1).contiguous(),
        rows.reshape(1, B * k * c, -1).contiguous(),
        spread,  # (in place of a scale, which is not read for these two results)
        *given,
        (False, True, True),
    )
    found = {"weight": scale, "bias": shift}
    return {
        name: Dense(found[name].view(B, c) if k == 1 else found[name].view(B, k, c).sum(1)) for name in call.weights
    }


def _statistics_of_groups(rows: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    n, c = rows.shape[:2]
    rows = rows.contiguous()
    _, mean, reciprocal = torch.native_group_norm(rows, None, None, n, c, rows[0, 0].numel(), groups, eps)
    return mean, reciprocal


def _statistics_of_batch(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _, mean, reciprocal = torch.native_batch_norm(rows, None, None, None, None, True, 0.0, eps)
    return mean.expand(rows.shape[0], -1), reciprocal.expand(rows.shape[0], -1)


def _running_statistics(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    names = "running_mean", "running_var"
    mean, var = (call.arguments[name].to(rows.dtype).expand(rows.shape[0], -1) for name in names)
    return mean, var
