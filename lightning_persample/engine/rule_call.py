"""One call of a rule, with no more than it is promised, and its structures beside the loop's gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_persample.engine.by_rule import wrong_answer
from lightning_persample.engine.example_call import ExampleCall, Samples, relative_error
from lightning_persample.engine.following import POINTWISE
from lightning_persample.gradients import Dense, SampleGradient
from lightning_persample.rules import Call
from lightning_persample.rules.elementwise import align_rank

__all__ = ["Finding", "RuleCall", "Status", "compared", "raised"]

Status: TypeAlias = Literal["agrees", "differs", "missing", "raised", "not found", "not compared"]
Finding: TypeAlias = tuple[float, Status, str]


class RuleCall:
    """A call of a rule that can be repeated.

    Args:
        example: the call of the op, in the precision in which the rule is called.
        samples: the batched arguments and the gradients of the outputs, in any precision.
        asked: the weights that are asked for.
        dtype: the precision of the gradients of the outputs.
        strided: give every argument and gradient strides that no kernel expects.
    """

    def __init__(
        self, example: ExampleCall, samples: Samples, asked: tuple[str, ...], dtype: torch.dtype, *, strided: bool
    ) -> None:
        self.rule = example.rule
        self.asked = asked
        self.batch_size = samples.count
        self._lay = _strided if strided else torch.clone
        rank = samples.output_grads[0].dim() if self.rule.op in POINTWISE else 0
        self.values: dict[str, Any] = dict(example.named)
        for name, tensor in samples.inputs.items():
            aligned = align_rank(tensor, rank) if tensor.dim() < rank else tensor
            self.values[name] = _like(aligned, dtype)
        self.grads = tuple(self._lay(_like(grad, dtype)) for grad in samples.output_grads)
        reads_output = self.rule.reads_output and samples.output is not None
        self.output = self._lay(_like(samples.output, dtype)) if reads_output and samples.output is not None else None

    @property
    def held_back(self) -> frozenset[str]:
        """The tensors among the arguments that the rule has not declared to read."""
        return frozenset(n for n, v in self.values.items() if isinstance(v, Tensor) and not self.rule.is_read(n))

    def compare(
        self, expected: Mapping[str, Tensor], tolerance: float, given: frozenset[str] = frozenset()
    ) -> dict[str, Finding]:
        """Call the rule and compare."""
        arguments: dict[str, Any] = {}
        for name, value in self.values.items():
            if name not in self.held_back or name in given:
                arguments[name] = self._lay(value) if isinstance(value, Tensor) else value
            elif name in self.asked:
                arguments[name] = value.to("meta")
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {f"grad_output[{place}]": grad for place, grad in enumerate(self.grads)}
        versions = {name: tensor._version for name, tensor in tensors.items()}
        call = Call(self.batch_size, arguments, frozenset(self.asked), output=self.output)
        try:
            with torch.no_grad():
                found: Any = self.rule.function(call, self.grads if self.rule.several_outputs else self.grads[0])
        except Exception as error:  # whatever the rule raises, which the report names
            return dict.fromkeys(expected, (math.nan, "raised", raised(error)))
        written = [name for name, tensor in tensors.items() if tensor._version != versions[name]]
        if written:
            reason = f"the rule writes into {', '.join(written)}, which belongs to the caller: write to a copy"
            return dict.fromkeys(expected, (math.nan, "differs", reason))
        findings: dict[str, Finding] = {}
        for name, rows in expected.items():
            wrong = wrong_answer(found, {name: tuple(rows.shape)})
            if wrong:
                is_there = isinstance(found, Mapping) and name in found
                findings[name] = (math.nan, "differs" if is_there else "missing", f"the rule {wrong}")
            else:
                findings[name] = compared(found[name], rows, tolerance)
        return findings


def compared(found: SampleGradient, expected: Tensor, tolerance: float, sq_norm: Tensor | None = None) -> Finding:
    """One structure beside the loop's gradients: the gradients, squared norms and inner products."""
    # expected (B, *shape), sq_norm (B,)
    if not bool(expected.any()):
        reason = "the loop's gradients are all zero, which proves nothing: give other example arguments"
        return math.nan, "not compared", reason
    square = expected.abs().square().reshape(len(expected), -1).sum(1)
    try:
        dense = found.dense()
        if dense.shape != expected.shape:
            reason = f"its structure is of shape {tuple(found.shape)}, but dense() gives {tuple(dense.shape)}"
            return math.nan, "differs", reason
        quantities = {
            "gradients": (dense, expected),
            "squared norms": (found.sq_norm() if sq_norm is None else sq_norm, square),
            "inner products with themselves": (found.inner(found), square),
            "inner products": (found.inner(Dense(expected.to(found.dtype))), square),
            "gradients of the last sample": (found.samples(len(expected) - 1, len(expected)).dense(), expected[-1:]),
        }
        errors = {what: relative_error(*pair) for what, pair in quantities.items()}
    except Exception as error:  # whatever the rule's structure raises, which the report names
        return math.nan, "raised", raised(error)
    wrong = [what for what, error in errors.items() if not error <= tolerance]
    if any(math.isnan(error) for error in errors.values()):
        return math.nan, "differs", f"the {wrong[0]} hold values that are not finite"
    if not wrong:
        return max(errors.values()), "agrees", ""
    factor = _factor(dense, expected, tolerance) if wrong[0] == "gradients" else None
    if factor is not None:
        return errors[wrong[0]], "differs", f"every value of the gradients is {factor:.4g} times the loop's"
    return errors[wrong[0]], "differs", f"the {wrong[0]} are off by more than {tolerance:.0e}"


def _factor(found: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """The one number that all gradients are a multiple of the loop's by, or None."""
    factor = float((found * expected.conj()).sum().real / expected.abs().square().sum())
    return factor if factor and relative_error(found, factor * expected) <= tolerance else None


def raised(error: Exception) -> str:
    """An exception as a reason."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another precision; integers stay what they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _strided(tensor: Tensor) -> Tensor:
    """A copy with strides that no kernel expects: every axis has gaps, and the first one varies fastest."""
    order = tuple(reversed(range(tensor.dim())))
    memory = tensor.new_empty((*reversed(tensor.shape), 2))
    return memory[..., 0].permute(order).copy_(tensor)
