"""The vector-Jacobian product of any op, also of one that torch.func does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import vjp

__all__ = ["Pull", "vector_jacobian"]

Pull: TypeAlias = Callable[[list[Tensor]], tuple[Tensor, ...]]

# An autograd.Function whose `forward` fills the context, as that of every custom op does and most in use do.
_UNKNOWN_TO_FUNC = "must override the setup_context"


def vector_jacobian(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Pull]:
    """Run a function, and give what takes gradients of its outputs to those of its inputs.

    Args:
        function: gives a list of tensors; it is called twice where torch.func does not know what is inside.
        inputs: its arguments.

    Returns:
        The outputs without a graph, and a function from one gradient for each of them to one for each input, zeros for
        an input that none depends on. It can be called any number of times.

    Raises:
        RuntimeError: of the function, as it was raised.
    """
    with torch.enable_grad():
        try:
            outputs, pull = vjp(function, *inputs)[:2]
            return outputs, pull
        except RuntimeError as error:
            if _UNKNOWN_TO_FUNC not in str(error):
                raise
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        found = function(*leaves)

    def pull_by_autograd(gradients: list[Tensor]) -> tuple[Tensor, ...]:
        pairs = [pair for pair in zip(found, gradients, strict=True) if pair[0].requires_grad]
        if not pairs:
            return tuple(map(torch.zeros_like, leaves))
        tops, given = zip(*pairs, strict=True)
        return torch.autograd.grad(tops, leaves, given, retain_graph=True, materialize_grads=True)

    return [output.detach() for output in found], pull_by_autograd
