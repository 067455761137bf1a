"""Addition, subtraction, multiplication and division by a weight: a scale, a shift, a gate.

The weight may be either operand (or both). It broadcasts from the right against the per-sample shape of the output, and
its gradient is summed, per sample, over the axes along which it was broadcast.

A weight with more axes than the input, x (B, d) * w (h, 1, d), pushes the batch axis inwards: the op's output is
(h, B, d). The engine keeps ranks consistent: every batched operand is given leading axes of size 1 before it is made
batch-first, so that x is (B, 1, k, d), the gradient of the output is (B, h, k, d), and arithmetic on them broadcasts as
the op itself did. A weight whose own shape spans the batch axis is batch-first, too (`Call.per_sample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.rules.registry import Call, register_rule

_EITHER = ("input", "other")
_of_two = partial(register_rule, batched=_EITHER, weights=_EITHER, per_sample=_EITHER)


def widen(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which it is summed: float32 for float16 and bfloat16, its own dtype otherwise."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def times(grad: Tensor, number: complex | Tensor) -> Tensor:
    """The gradient of what was multiplied by a number."""
    factor: complex = (number.item() if isinstance(number, Tensor) else number).conjugate()
    return grad if factor == 1 else widen(grad) * factor


def align_rank(tensor: Tensor, rank: int) -> Tensor:
    """Give a batch-first tensor axes of size 1 after the batch axis until it has `rank`: (B, 1, ..., 1, *shape)."""
    return tensor[(slice(None),) + (None,) * (rank - tensor.dim())]


def sum_to_shape(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo the broadcasting of a weight, one sample at a time; grad (B, *out) -> (B, *shape)."""
    extra = grad.dim() - 1 - len(shape)
    if extra >= 0 and grad.shape[1 + extra :] == tuple(shape):  # repeated along axes of its own alone, as nearly always
        repeats, grad = prod(grad.shape[1 : 1 + extra]), widen(grad)
        return grad.sum(tuple(range(1, 1 + extra))) if repeats != 1 else grad.reshape(grad.shape[0], *shape)
    if extra < 0 or any(size not in (1, full) for size, full in zip(shape, grad.shape[1 + extra :], strict=True)):
        raise UnsupportedError(
            f"a weight of shape {tuple(shape)} does not broadcast to the per-sample shape {tuple(grad.shape[1:])}: "
            "its own axes must not span the batch"
        )
    axes = [*range(1, 1 + extra), *(1 + extra + axis for axis, size in enumerate(shape) if size == 1)]
    summed = [axis for axis in axes if grad.shape[axis] != 1]
    grad = widen(grad)
    if summed:
        grad = grad.sum(summed)
    return grad.reshape(grad.shape[0], *shape)


def _contribution(call: Call, name: str, grad: Tensor) -> Dense:
    weight: Tensor = call.arguments[name]
    if grad.is_complex() and not weight.is_complex():
        grad = grad.real
    return Dense(sum_to_shape(grad, weight.shape[1:] if name in call.per_sample else weight.shape))


def _operand(call: Call, name: str, grad_output: Tensor) -> Tensor | complex:
    """The value of an operand, ready to be multiplied with the gradient: conjugated, of its rank if it is batched."""
    value: Tensor | complex = call.arguments[name]
    if not isinstance(value, Tensor):
        return value.conjugate()
    if name not in call.weights or name in call.per_sample:
        value = align_rank(value, grad_output.dim())
    return widen(value).conj()


@_of_two(torch.add, arguments=("input", "other", "alpha"), reads=("alpha",))
def add(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``input + alpha * other``: dw = sum g over broadcast axes, times alpha for `other`."""
    return _linear_combination(call, grad_output, {"input": 1, "other": call.get("alpha", 1)})


@_of_two(torch.sub, arguments=("input", "other", "alpha"), reads=("alpha",))
def sub(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``input - alpha * other``."""
    return _linear_combination(call, grad_output, {"input": 1, "other": -call.get("alpha", 1)})


@_of_two(torch.rsub, arguments=("input", "other", "alpha"), reads=("alpha",))
def rsub(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``other - alpha * input``."""
    return _linear_combination(call, grad_output, {"input": -call.get("alpha", 1), "other": 1})


def _linear_combination(call: Call, grad_output: Tensor, factors: dict[str, complex]) -> dict[str, Dense]:
    found = {}
    for name in call.weights:
        found[name] = _contribution(call, name, times(grad_output, factors[name]))
    return found


@_of_two(torch.mul, arguments=("input", "other"))
def mul(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``input * other``: d input = sum g conj(other) over broadcast axes, d other = sum g conj(input)."""
    grad = widen(grad_output)
    partner = {"input": "other", "other": "input"}
    return {name: _contribution(call, name, grad * _operand(call, partner[name], grad)) for name in call.weights}


@_of_two(torch.div, arguments=("input", "other", "rounding_mode"))
def div(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``input / other``: d input = sum g / conj(other), d other = -sum g conj(input / other^2), over broadcast axes."""
    # grad_output (B, *out)
    if call.get("rounding_mode") is not None:
        return {name: _contribution(call, name, torch.zeros_like(grad_output)) for name in call.weights}
    return _quotient(call, grad_output, numerator="input", denominator="other")


@_of_two(torch.Tensor.__rdiv__, arguments=("input", "other"))
def rdiv(call: Call, grad_output: Tensor) -> dict[str, Dense]:
    """``other / input``, the reflected division."""
    return _quotient(call, grad_output, numerator="other", denominator="input")


def _quotient(call: Call, grad_output: Tensor, *, numerator: str, denominator: str) -> dict[str, Dense]:
    found: dict[str, Dense] = {}
    if not call.weights:
        return found
    grad = widen(grad_output)
    below = _operand(call, denominator, grad)
    if numerator in call.weights:
        found[numerator] = _contribution(call, numerator, grad / below)
    if denominator in call.weights:
        above = _operand(call, numerator, grad)
        found[denominator] = _contribution(call, denominator, -grad * above / (below * below))
    return found
