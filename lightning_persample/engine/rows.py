"""A linear map of one row per sample, with the least that Python has to do.

Small models use nearly every weight in this way, and their training step takes little longer than the Python of a few
calls. What `Dispatcher.call`, `Use`, `by_rule` and the structures do for any call comes to this here: weight and bias
get ``g_b (x) x_b`` and ``g_b``, with the squared norms ``|g_b|^2 |x_b|^2`` and ``|g_b|^2``. A call with anything out of
the ordinary is left to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_persample.engine.batch_axis import BatchAxis
from lightning_persample.engine.computation import changed_text
from lightning_persample.engine.failure import FAILURES
from lightning_persample.engine.following import is_plain
from lightning_persample.engine.graph import boundary
from lightning_persample.engine.observed import Description, describe
from lightning_persample.engine.reporting import Report
from lightning_persample.engine.weight import Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Outer, SampleGradient
from lightning_persample.gradients.norms import dense_sq_norm
from lightning_persample.gradients.precision import autocast_is_on
from lightning_persample.rules import rule_of

if TYPE_CHECKING:
    from lightning_persample.engine.dispatch import Dispatcher

__all__ = ["LINEAR", "linear_of_rows"]

LINEAR = nn.functional.linear
_RULE = rule_of("linear")
_CLASSES = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float64)
_FIRST = (0, 1, 1, None, None)


def linear_of_rows(dispatcher: Dispatcher, args: tuple[Any, ...]) -> Tensor | None:
    """Run a call of ``F.linear``, if it is an ordinary one, and let the backward report what it contributes.

    Args:
        dispatcher: the state of the capture.
        args: input, weight and, unless there is none, bias.

    Returns:
        The output; None where nothing was done, as the call is another one.
    """
    if not 2 <= len(args) <= 3 or not torch.is_grad_enabled() or rule_of("linear") is not _RULE:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform wraps what the call gives
        return None
    tensors = args if len(args) == 2 or args[2] is not None else args[:2]
    x, *parameters = tensors
    if type(x) not in _CLASSES or x.dim() != 2 or x.dtype not in _DTYPES or not is_plain(x):
        return None
    marks = dispatcher.marks
    axis, dtype = marks.get(x), x.dtype
    if type(axis) is not BatchAxis or (axis.dim, axis.outer, axis.inner, axis.owner, axis.mixing) != _FIRST:
        return None
    weights = []
    for dim, parameter in zip((2, 1), parameters, strict=False):
        mark = marks.get(parameter) if type(parameter) in _CLASSES else None
        if type(mark) is not Weight or not parameter.requires_grad or parameter.dim() != dim:
            return None
        if parameter.dtype is not dtype or parameter.shape[0] != args[1].shape[0]:  # (a bias may be broadcast)
            return None
        weights.append(mark)
    if autocast_is_on(x.device.type):
        return None
    stop = boundary(tensors)
    output = LINEAR(*args)
    marks[output] = axis
    dispatcher.nodes.watch_inside((output,), stop)
    names = {name for weight in weights for name in weight.names}
    for weight in weights:
        weight.uses += 1
    text = describe("linear", tensors, names)
    report = _RowsReport(dispatcher, (output,), weights, _OfRows(weights, x.detach(), text), text, keeps_values=True)
    report.attach((output,))
    return output


class _OfRows:
    """Gives the contributions; with the input, which autograd holds, too, this is let go after a backward."""

    __slots__ = ("text", "version", "weights", "x")

    def __init__(self, weights: list[Weight], x: Tensor, text: Description) -> None:
        self.weights, self.x, self.version, self.text = weights, x, x._version, text

    def __call__(self, grads: Sequence[Tensor | None]) -> list[tuple[Weight, SampleGradient]]:
        (grad,) = grads
        if self.x._version != self.version:
            raise UnsupportedError(changed_text(self.text, self.x))
        if grad is None:
            return []
        found: list[SampleGradient] = [Outer(grad.unsqueeze(1), self.x.unsqueeze(1)), Dense(grad)]
        return list(zip(self.weights, found, strict=False))


class _RowsReport(Report):
    """What the backward does with the gradient of the output."""

    __slots__ = ()

    def hook(self, grads: Sequence[Tensor | None]) -> None:
        """Note the squared norms; where more is asked for, or anything is unusual, go the general way."""
        grad, dispatcher = grads[0], self._dispatcher
        if grad is None or not dispatcher.accepting:
            return
        if dispatcher.wants_no_more(self._weights):
            with torch._C.DisableTorchFunction():
                sq_norms = self._sq_norms(grad)
            if sq_norms is not None:
                for weight, sq_norm in zip(self._weights, sq_norms, strict=False):
                    weight.sq_norm = sq_norm
                if dispatcher.frees:
                    self._compute = None
                return
        self.contribute(grads)

    def _sq_norms(self, grad: Tensor) -> tuple[Tensor, Tensor] | None:
        """The squared norms of weight and bias; None where the general way has to find them, or say what is wrong."""
        rows = self._compute
        if type(rows) is not _OfRows or type(grad) is not Tensor or grad.requires_grad:
            return None
        if grad.dtype is not rows.x.dtype or rows.x._version != rows.version:
            return None
        try:
            of_grad = dense_sq_norm(grad)
            return of_grad * dense_sq_norm(rows.x), of_grad
        except FAILURES:
            return None
