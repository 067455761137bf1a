"""A linear map of one row per sample, with the least that Python has to do.

Small models use nearly every weight in this way, and their training step takes little longer than the Python of a few
calls. What `Dispatcher.call`, `Use`, `by_rule` and the structures do for any call comes to this here: weight and bias
get ``g_b (x) x_b`` and ``g_b``, with the norms ``|g_b| |x_b|`` and ``|g_b|``. A call with anything out of
the ordinary is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from lightning_persample.engine.batch_axis import BatchAxis
from lightning_persample.engine.computation import changed_text
from lightning_persample.engine.failure import FAILURES
from lightning_persample.engine.following import is_plain
from lightning_persample.engine.observed import Description, user_place
from lightning_persample.engine.reporting import Report, detached
from lightning_persample.engine.weight import Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Outer, SampleGradient
from lightning_persample.gradients.norms import LONGEST_ROW, dense_sq_norm
from lightning_persample.rules import rule_of

if TYPE_CHECKING:
    from lightning_persample.engine.dispatch import Dispatcher

__all__ = ["LINEAR", "linear_of_rows"]

LINEAR = nn.functional.linear
_RULE = rule_of("linear")
_CLASSES = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float64)
_FIRST = (0, 1, 1, None, None)
_READERS: list[Callable[[Tensor], Tensor]] = [detached]


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
    x = tensors[0]
    if type(x) not in _CLASSES or x.dim() != 2 or x.dtype not in _DTYPES or not is_plain(x):
        return None
    marks = dispatcher.marks
    axis, dtype = marks.get(x), x.dtype
    if type(axis) is not BatchAxis or (axis.dim, axis.outer, axis.inner, axis.owner, axis.mixing) != _FIRST:
        return None
    weights, sizes = [], [x.shape]
    for parameter in tensors[1:]:
        mark = marks.get(parameter) if type(parameter) in _CLASSES else None
        if type(mark) is not Weight or not parameter.requires_grad or parameter.dtype is not dtype:
            return None
        weights.append(mark)
        sizes.append(parameter.shape)
    if len(sizes[1]) != 2 or (len(sizes) == 3 and sizes[2] != sizes[1][:1]):  # (a bias may be broadcast)
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    rows = x.detach()
    output: Tensor = LINEAR(*args)
    marks[output] = axis
    dispatcher.nodes.watch_linear(output, tensors, weights)
    for weight in weights:
        weight.uses += 1
    names = tuple([name for weight in weights for name in weight.names])
    text = Description("linear", tuple(sizes), user_place(), names)
    report = _RowsReport(dispatcher, weights, rows, text)
    output.grad_fn.register_prehook(report.hook)  # type: ignore[union-attr]
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
    """What the backward does with the gradient of the output, which is no view."""

    __slots__ = ()

    def __init__(self, dispatcher: Dispatcher, weights: list[Weight], x: Tensor, text: Description) -> None:
        self._dispatcher, self._weights, self._text = dispatcher, weights, text
        self._compute = _OfRows(weights, x, text)
        self._readers, self._keeps_values = _READERS, True

    def hook(self, grads: Sequence[Tensor | None]) -> None:
        """Note the norms; where more is asked for, or anything is unusual, go the general way."""
        grad, dispatcher, weights = grads[0], self._dispatcher, self._weights
        if grad is None or not dispatcher.accepting:
            return
        self.tell()
        if dispatcher.wants_no_more(weights):
            with torch._C.DisableTorchFunction():  # (the mode would be offered every attribute, too)
                done = self._note_norms(grad, self._compute)
            if done:
                return
        self._kind = grad.device.type
        self.contribute(grads)

    def _note_norms(self, grad: Tensor, rows: object) -> bool:
        """Note the norms of weight and bias, unless the general way has to find them, or say what is wrong."""
        if type(rows) is not _OfRows or type(grad) is not Tensor or grad.requires_grad:
            return False
        if grad.dtype is not rows.x.dtype or rows.x._version != rows.version:
            return False
        try:
            of_grad = _row_norms(grad)
            norm = of_grad * _row_norms(rows.x)
        except FAILURES:
            return False
        weight, *biases = self._weights
        weight.norm = norm
        for bias in biases:
            bias.norm = of_grad
        if self._dispatcher.frees:
            self._compute = None
        return True


def _row_norms(rows: Tensor) -> Tensor:
    return vector_norm(rows, 2, 1) if rows.shape[1] <= LONGEST_ROW else dense_sq_norm(rows).sqrt()
