"""A linear map of rows, those of one sample side by side, with the least that Python has to do.

Most weights are used in this way, and the training step of a small model takes little longer than the Python of a few
calls. What `Dispatcher.call`, `Use`, `ByRule` and the structures do for any call comes to this here: with one row per
sample, weight and bias get ``g_b (x) x_b`` and ``g_b``, with the norms ``|g_b| |x_b|`` and ``|g_b|``; with several,
``sum_t g_bt (x) x_bt`` and ``sum_t g_bt``. A call with anything out of the ordinary is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from lightning_persample.engine.batch_axis import BatchAxis
from lightning_persample.engine.by_rule import check_unchanged
from lightning_persample.engine.collector import Collector
from lightning_persample.engine.failure import guard
from lightning_persample.engine.following import is_plain
from lightning_persample.engine.hooks import detached, gradient_reader, hooked_tensor
from lightning_persample.engine.observed import Description, user_place
from lightning_persample.engine.reporting import Report
from lightning_persample.engine.weight import Weight
from lightning_persample.gradients import Dense, Outer, SampleGradient, kernel_options
from lightning_persample.gradients.norms import LONGEST_ROW, dense_sq_norm
from lightning_persample.rules import rule_of

__all__ = ["LINEAR", "RowsOfLinear", "note_rows", "rows_of_linear"]

LINEAR = nn.functional.linear
_RULE = rule_of("linear")
_CLASSES = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float64)
_READERS: list[Callable[[Tensor], Tensor]] = [detached]


class RowsOfLinear(NamedTuple):
    """An ordinary call of ``F.linear`` that is about to run: its tensors, where the batch lies, x and the weights."""

    tensors: tuple[Tensor, ...]
    axis: BatchAxis
    x: Tensor
    weights: list[Weight]
    is_single: bool


def rows_of_linear(collector: Collector, args: tuple[Any, ...]) -> RowsOfLinear | None:
    """What is known of a call of ``F.linear`` with these arguments; None where it is no ordinary one."""
    if not 2 <= len(args) <= 3 or not torch.is_grad_enabled() or rule_of("linear") is not _RULE:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform wraps what the call gives
        return None
    tensors = args if len(args) == 2 or args[2] is not None else args[:2]
    x = tensors[0]
    if type(x) not in _CLASSES or x.dtype not in _DTYPES or not is_plain(x):
        return None
    marks, shape, dtype = collector.marks, x.shape, x.dtype
    axis = marks.get(x)
    if type(axis) is not BatchAxis or axis.dim or axis.outer != 1 or axis.owner is not None or axis.mixing is not None:
        return None
    is_single = len(shape) == 2 and axis.inner == 1
    if not is_single and (collector.fuse or len(shape) < 2 or not x.numel()):
        return None
    weights, sizes = [], []
    for parameter in tensors[1:]:
        mark = marks.get(parameter) if type(parameter) in _CLASSES else None
        if (
            type(mark) is not Weight
            or not (mark.derivation is None or mark.is_current(parameter))
            or not parameter.requires_grad
            or parameter.dtype is not dtype
        ):
            return None
        weights.append(mark)
        sizes.append(parameter.shape)
    if len(sizes[0]) != 2 or 0 in sizes[0]:
        return None
    if len(sizes) == 2 and sizes[1] != sizes[0][:1]:  # (a bias may be broadcast)
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    return RowsOfLinear(tensors, axis, x.detach(), weights, is_single)


def note_rows(collector: Collector, output: Tensor, call: RowsOfLinear) -> None:
    """Let the backward report what a call of ``F.linear`` contributes, which has given this output."""
    tensors, axis, rows, weights, is_single = call
    collector.marks[output] = axis
    if is_single:
        collector.nodes.watch_linear(output, tensors, weights)
    else:
        collector.nodes.watch_call(output, hooked_tensor(output).grad_fn, tensors)
    for weight in weights:
        weight.uses += 1
    names = tuple([name for weight in weights for name in weight.names])
    text = Description("linear", tuple([tensor.shape for tensor in tensors]), user_place(), names)
    if is_single:
        report = _RowsReport(collector, weights, _OfRows(weights, rows, text))
        output.grad_fn.register_prehook(guard(report.hook, report.failed))  # type: ignore[union-attr]
    else:
        compute = _OfSeveralRows(weights, rows, text, collector.batch_size)
        _SeveralRowsReport(collector, weights, compute, output).attach((output,))


class _OfRows:
    """Gives the contributions; with the input, which autograd holds, too, this is let go after a backward."""

    __slots__ = ("text", "version", "weights", "x")

    def __init__(self, weights: list[Weight], x: Tensor, text: Description) -> None:
        self.weights, self.x, self.version, self.text = weights, x, x._version, text

    def __call__(self, grads: Sequence[Tensor | None]) -> list[tuple[Weight, SampleGradient]]:
        (grad,) = grads
        check_unchanged(((self.x, self.version),), self.text)
        return [] if grad is None else list(zip(self.weights, self.gradients(grad), strict=False))

    def gradients(self, grad: Tensor) -> list[SampleGradient]:
        """Those of weight and bias."""
        return [Outer(grad.unsqueeze(1), self.x.unsqueeze(1)), Dense(grad)]


class _OfSeveralRows(_OfRows):
    """The same where a sample has several rows."""

    __slots__ = ("batch_size",)

    def __init__(self, weights: list[Weight], x: Tensor, text: Description, batch_size: int) -> None:
        super().__init__(weights, x, text)
        self.batch_size = batch_size

    def outer(self, grad: Tensor) -> Outer:
        """The gradient of the weight."""
        rows = (self.batch_size, -1)
        return Outer(grad.reshape(*rows, grad.shape[-1]), self.x.reshape(*rows, self.x.shape[-1]))

    def gradients(self, grad: Tensor) -> list[SampleGradient]:
        outer = self.outer(grad)
        return [outer, Dense(outer.left.sum(1))]


class _RowsReport(Report):
    """What the backward does with the gradient of the output, which is no view."""

    __slots__ = ()

    def __init__(self, collector: Collector, weights: list[Weight], compute: _OfRows) -> None:
        self._collector, self._weights, self._text = collector, weights, compute.text
        self._compute, self._kind = compute, compute.x.device.type
        self._readers, self._keeps_values = _READERS, True

    def hook(self, grads: Sequence[Tensor | None]) -> None:
        """Note the norms; where more is asked for, or anything is unusual, go the general way."""
        grad, collector, weights, rows = grads[0], self._collector, self._weights, self._compute
        if grad is None or not collector.accepting:
            return
        if collector.wants_no_more(weights) and type(grad) is Tensor and isinstance(rows, _OfRows):
            with torch._C.DisableTorchFunction():  # (the mode would be offered every attribute, too)
                done = self._note_norms(grad, rows)
            if done:
                return
        self.contribute(grads)

    def _note_norms(self, grad: Tensor, rows: _OfRows) -> bool:
        """Note the norms of weight and bias, unless the general way has to find them, or say what is wrong."""
        if grad.dtype is not rows.x.dtype or grad.requires_grad or rows.x._version != rows.version:
            return False
        try:
            if not self.take_norms(grad, rows):
                return False
        except Exception:  # for want of memory perhaps: the general way tries it, and says what is wrong
            return False
        self.note_gradient()
        if self._collector.frees:
            self._compute = None
        return True

    def take_norms(self, grad: Tensor, rows: _OfRows) -> bool:
        """Note the norms of weight and bias."""
        of_grad = _row_norms(grad)
        norm = of_grad * _row_norms(rows.x)
        weight, *biases = self._weights
        weight.norm = norm
        for bias in biases:
            bias.norm = of_grad
        return True


class _SeveralRowsReport(_RowsReport):
    """The same where a sample has several rows, and the output may be a view."""

    __slots__ = ()

    def __init__(self, collector: Collector, weights: list[Weight], compute: _OfRows, output: Tensor) -> None:
        super().__init__(collector, weights, compute)
        self._readers = [gradient_reader(output)]

    def take_norms(self, grad: Tensor, rows: _OfSeveralRows) -> bool:  # type: ignore[override]
        """Note the norms of weight and bias."""
        (reader,) = self._readers
        outer = rows.outer(reader(grad))
        with kernel_options(self._collector.kernel_options):
            norm = outer.sq_norm().sqrt_()
        weight, *biases = self._weights
        for bias in biases:
            bias.norm = _row_norms(outer.left.sum(1))
        weight.norm = norm
        return True


def _row_norms(rows: Tensor) -> Tensor:
    return vector_norm(rows, 2, 1) if rows.shape[1] <= LONGEST_ROW else dense_sq_norm(rows).sqrt()
