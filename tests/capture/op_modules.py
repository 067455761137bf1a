"""A case of a rule as a small module that calls the op on all samples at once, as a model would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.rules.case import Arguments, Case

__all__ = ["SIZE", "OneCall", "in_place", "one_call"]

SIZE = 7  # samples; no other axis of the cases has this size


class OneCall(nn.Module):
    """One call of an op: its weights are parameters, its other tensors are buffers.

    Args:
        case: the op and which of its arguments are what.
        arguments: batch-first.
        axis: where the rows of the samples lie in the tensors of the batch.
    """

    def __init__(self, case: Case, arguments: Arguments, axis: int) -> None:
        super().__init__()
        self.case, self.axis = case, axis
        self.options = {name: None if isinstance(value, Tensor) else value for name, value in arguments.items()}
        self.tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        for name in self.tensors:
            if name in case.weights:
                self.register_parameter(name, nn.Parameter(arguments[name].clone()))
            elif name not in case.batched:
                self.register_buffer(name, arguments[name].clone())

    def forward(self, *batch: Tensor) -> Tensor:
        given = dict(zip(self.case.batched, batch, strict=True))
        arguments = dict(self.options)
        for name in self.tensors:
            arguments[name] = _rows_of_all(given[name], self.axis) if name in given else getattr(self, name)
        return self.case.run(arguments)


@cache
def one_call(case: Case, dtype: torch.dtype) -> tuple[OneCall, list[Tensor]]:
    """The module of a case and its batch, which are for copying: the next caller gets the same."""
    arguments = case.build(SIZE, dtype)
    of_sample = case.output_gradient(arguments).shape[1:]
    first = arguments[case.batched[0]]
    for axis in sorted(range(first.dim() - 1), key=lambda axis: first.shape[axis + 1] != 1):
        module = OneCall(case, arguments, axis)
        batch = [arguments[name] for name in case.batched]
        if _keeps_samples_apart(module, batch, of_sample):
            return OneCall(case, arguments, axis), batch
    raise AssertionError(f"{case.id}: samples cannot be rows along any axis")


def _rows_of_all(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(0, axis).flatten(axis, axis + 1)


def _keeps_samples_apart(module: OneCall, batch: list[Tensor], of_sample: torch.Size) -> bool:
    """Whether the output is that of one sample with one axis longer."""
    try:
        with torch.no_grad():
            shape = module(*batch).shape
    except RuntimeError:
        return False
    longer = [
        axis for axis, size in enumerate(of_sample) if shape == (*of_sample[:axis], size * SIZE, *of_sample[axis + 1 :])
    ]
    return bool(longer)


def in_place(case: Case, function: Callable[..., Any]) -> Case:
    """The case with an op that writes into its first argument, which has the output's shape."""

    def written(input: Tensor, other: Tensor, **options: Any) -> Tensor:
        shape = torch.broadcast_shapes(input.shape, other.shape)
        return function(input.expand(shape).clone(), other, **options)

    return replace(case, op=written, positional=False)
