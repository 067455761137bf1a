"""Linear maps: ``F.linear`` and a matrix product with a weight on the right, which a sum may take in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Outer, SampleGradient
from lightning_persample.rules.elementwise import align_rank, sum_to_shape, times, widen
from lightning_persample.rules.registry import Call, register_rule


@register_rule(
    F.linear,
    arguments=("input", "weight", "bias"),
    batched=("input",),
    weights=("weight", "bias"),
    adds_rows=lambda arguments: True,
)
def linear(call: Call, grad_output: Tensor) -> dict[str, SampleGradient]:
    """``y = x W^T + b``: dW = sum_t g_t (x) x_t, db = sum_t g_t."""
    # grad_output (B, *t, p), or (B, *t) for a weight of shape (d,)
    found: dict[str, SampleGradient] = {}
    if "weight" in call.weights:
        x = call.arguments["input"].to(grad_output.dtype).conj()
        if call.arguments["weight"].dim() == 1:
            _require_positions("linear", x.shape[:-1], grad_output.shape)
            found["weight"] = _vector(x, grad_output)
        else:
            if x.shape[:-1] != grad_output.shape[:-1]:
                _require_positions("linear", x.shape[:-1], grad_output.shape[:-1])
            found["weight"] = Outer(grad_output.flatten(1, -2), x.flatten(1, -2))
    if "bias" in call.weights:
        found["bias"] = Dense(sum_to_shape(grad_output, call.arguments["bias"].shape))
    return found


@register_rule(
    torch.mm, arguments=("input", "mat2"), batched=("input",), weights=("mat2",), adds_rows=lambda arguments: True
)
@register_rule(
    torch.matmul,
    arguments=("input", "other"),
    batched=("input",),
    weights=("other",),
    adds_rows=lambda arguments: arguments["other"].dim() <= 2,
)
def matmul(call: Call, grad_output: Tensor) -> dict[str, SampleGradient]:
    """``y = x @ W``: dW = sum_t x_t (x) g_t; grad_output (B, *t, p), or (B, *t) for a weight of shape (d,)."""
    if not call.weights:
        return {}
    (name,) = call.weights
    weight, op = call.arguments[name], "mm" if name == "mat2" else "matmul"
    x = call.arguments["input"].to(grad_output.dtype).conj()
    if weight.dim() == 1:
        _require_positions(op, x.shape[:-1], grad_output.shape)
        return {name: _vector(x, grad_output)}
    if weight.dim() == 2:
        _require_positions(op, x.shape[:-1], grad_output.shape[:-1])
        return {name: Outer(x.flatten(1, -2), grad_output.flatten(1, -2))}
    x = align_rank(x, grad_output.dim())
    _require_positions(op, x.shape[-2:-1], grad_output.shape[-2:-1])
    return {name: Dense(sum_to_shape(widen(x).mT @ widen(grad_output), weight.shape))}


@register_rule(
    torch.addmm,
    arguments=("input", "mat1", "mat2", "beta", "alpha"),
    batched=("input", "mat1"),
    weights=("input", "mat2"),
    reads=("mat1", "beta", "alpha"),
    adds_rows=lambda arguments: True,
)
def addmm(call: Call, grad_output: Tensor) -> dict[str, SampleGradient]:
    """``y = beta b + alpha x @ W``: dW = alpha sum_t x_t (x) g_t, db = beta sum_t g_t; grad_output (B, t, p)."""
    found: dict[str, SampleGradient] = {}
    if "mat2" in call.weights:
        x, grad = call.arguments["mat1"], times(grad_output, call.get("alpha", 1))
        _require_positions("addmm", x.shape[:-1], grad.shape[:-1])
        found["mat2"] = Outer(x.to(grad.dtype).conj(), grad)
    if "input" in call.weights:
        grad = times(grad_output, call.get("beta", 1))
        found["input"] = Dense(sum_to_shape(grad, call.arguments["input"].shape))
    return found


def _vector(x: Tensor, grad_output: Tensor) -> Dense:
    """The gradient of a weight (d,) that maps x (B, *t, d) to (B, *t): sum_t g_t x_t."""
    x, grad = widen(x).flatten(1, -2), widen(grad_output).flatten(1)
    return Dense((grad.unsqueeze(1) @ x).squeeze(1))


def _require_positions(op: str, of_input: torch.Size, of_output: torch.Size) -> None:
    """A linear map keeps every axis but the last; where it does not, the op has summed over the batch axis."""
    if of_input != of_output:
        raise UnsupportedError(
            f"{op} sums over the batch axis: its input has the batch-first positions {tuple(of_input)}, its output "
            f"{tuple(of_output)}; move the batch to an axis that {op} keeps"
        )
