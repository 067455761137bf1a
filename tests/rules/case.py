"""One case: an op, how its arguments are built, and the reference, which is a loop over single samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_persample.rules import Call, Rule, find_rule

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
        id: name of the case.
        op: the op.
        build: (B, dtype) -> the arguments by name; what is named in `batched` is batch-first.
        batched: the arguments that depend on the sample.
        weights: the arguments whose gradients are asked for.
        positional: pass the arguments by position, for an op that does not take their names.
        mixing: the op sees all samples at once, as rows of one batch.
    """

    id: str
    op: Callable[..., Tensor]
    build: Callable[[int, torch.dtype], Arguments]
    batched: tuple[str, ...] = ("input",)
    weights: tuple[str, ...] = ("weight", "bias")
    positional: bool = False
    mixing: bool = False

    @property
    def rule(self) -> Rule:
        rule = find_rule(self.op)
        assert rule is not None
        return rule

    def run(self, arguments: Mapping[str, Any]) -> Tensor:
        return self.op(*arguments.values()) if self.positional else self.op(**arguments)

    def asked(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The weights that this call really has."""
        return tuple(name for name in self.weights if isinstance(arguments.get(name), Tensor))

    def output_gradient(self, arguments: Mapping[str, Any]) -> Tensor:
        """A random gradient of the output, batch-first."""
        size = len(arguments[self.batched[0]])
        if self.mixing:
            return torch.randn_like(arguments["input"])
        sample = {
            name: value.new_zeros(value.shape[1:]) if name in self.batched else value
            for name, value in arguments.items()
        }
        output = self.run(sample)
        return torch.randn((size, *output.shape), dtype=output.dtype)


def reference(case: Case, arguments: Mapping[str, Any], grad_output: Tensor) -> dict[str, Tensor]:
    """The gradient of each sample by autograd through the real op, one sample after the other."""
    names = case.asked(arguments)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for sample, grad in enumerate(grad_output):
        with torch.enable_grad():
            call = dict(arguments)
            for name in names:
                call[name] = arguments[name].detach().requires_grad_()
            for name in case.batched:
                call[name] = arguments[name].flatten(0, 1) if case.mixing else arguments[name][sample]
            output = case.run(call)
        if case.mixing:
            only_this = torch.zeros_like(grad_output)
            only_this[sample] = grad
            grad = only_this.flatten(0, 1)
        found = torch.autograd.grad(output, [call[name] for name in names], grad)
        for name, gradient in zip(names, found, strict=True):
            rows[name].append(gradient.to_dense())
    return {name: torch.stack(row) for name, row in rows.items()}


def rule_call(case: Case, arguments: Mapping[str, Any], weights: frozenset[str]) -> Call:
    """The call as a rule is promised it, and no more.

    A tensor that the rule does not read is left out; a weight that it does not read has a shape and a dtype only.
    """
    kept = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in case.rule.reads:
            kept[name] = value
        elif name in weights:
            kept[name] = value.to("meta")
    size, output = len(arguments[case.batched[0]]), None
    if case.rule.reads_output:
        each = [{n: v[i] if n in case.batched else v for n, v in arguments.items()} for i in range(size)]
        output = torch.stack([case.run(sample) for sample in each])
    return Call(size, kept, weights, output=output)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare relative to the largest entry of the reference."""
    assert actual.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(largest, 1e-3), check_dtype=False)


def strided(tensor: Tensor) -> Tensor:
    """The same values with strides that no kernel expects."""
    return torch.stack([tensor, tensor], dim=1).movedim(1, -1)[..., 0]
