"""Hooks by which a backward reports what each sample contributes to the weights of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.linalg import vector_norm

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.base import is_plain
from lightning_persample.batch_axis.observed import Description, OwnBackward, user_place
from lightning_persample.capture.collector import Collector
from lightning_persample.capture.contributions import Use, check_unchanged, computation
from lightning_persample.capture.failure import guard, in_smaller_chunks
from lightning_persample.capture.graph import detached, gradient_reader, hooked_tensor, on_gradient
from lightning_persample.capture.weight import Computation, Contributions, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Outer, SampleGradient, kernel_options
from lightning_persample.gradients.norms import LONGEST_ROW, dense_sq_norm
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.rules import rule_of
from lightning_persample.torch_internals import (
    any_autocast_is_on,
    backward_keeps_graph,
    innermost_transform,
    version_counter,
    without_torch_function,
)

_FREED = (
    "a second backward goes through it, but the first one was to free the graph; pass retain_graph=True to the first"
)


class Report:
    """Lets backward report what each sample contributes as soon as the gradients of a call's outputs are there.

    Args:
        collector: receives contributions, or the reason why there are none.
        outputs: the outputs that can get a gradient.
        weights: the weights among the call's operands.
        compute: gives the contributions.
        description: the call in messages.
        keeps_values: whether `compute` holds what autograd holds, too, and lets go with it.
    """

    __slots__ = ("_collector", "_compute", "_handle", "_keeps_values", "_kind", "_readers", "_text", "_weights")

    def __init__(
        self,
        collector: Collector,
        outputs: Sequence[Tensor],
        weights: list[Weight],
        compute: Computation,
        description: Description,
        keeps_values: bool,
    ) -> None:
        self._collector, self._weights, self._text = collector, weights, description
        self._compute: Computation | None = compute
        self._keeps_values = keeps_values
        self._readers = [gradient_reader(output) for output in outputs]
        self._kind = outputs[0].device.type

    def attach(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the gradients of the outputs."""
        if len(outputs) == 1:
            on_gradient(outputs[0], lambda grad: self.hook((grad,)), self.failed)
        else:
            after_all = guard(self._after_all, self.failed)
            self._handle = register_multi_grad_hook([hooked_tensor(output) for output in outputs], after_all)
            self._collector.nodes.release_later(self._handle)

    def _freed(self, grads: Sequence[Tensor | None]) -> Contributions:
        raise UnsupportedError(f"{self._text}: {_FREED}")

    def hook(self, grads: Sequence[Tensor | None]) -> None:
        """Note what the samples contribute."""
        self.contribute(grads)

    def _after_all(self, grads: Sequence[Tensor | None]) -> None:
        self.hook(grads)
        if not backward_keeps_graph():
            self._handle.remove()  # it holds nodes that hold it, a circle that no collector sees

    def note_gradient(self) -> None:
        """Note that those weights get a gradient on which no hook has to wait for it."""
        for weight in self._weights:
            if weight.reports:
                for name in weight.names:
                    self._collector.got_gradient[name] = None

    def contribute(self, grads: Sequence[Tensor | None], wants_sums: bool = False) -> list[tuple[Weight, Tensor]]:
        """Note what the samples contribute."""
        collector = self._collector
        if not collector.accepting:
            return []
        self.note_gradient()
        if collector.refused and _are_refused(self._weights, collector):
            if collector.frees:
                self._compute = None
            return []
        options = kernel_options(collector.kernel_options)  # entered here: on CUDA this is another thread
        with without_torch_function(), options:
            if not (torch.is_grad_enabled() or any_autocast_is_on()):
                return self._collect(grads, wants_sums)
            with (
                torch.no_grad(),
                without_autocast(self._kind),
            ):  # (a backward may create a graph, or run under autocast)
                return self._collect(grads, wants_sums)

    def _collect(self, grads: Sequence[Tensor | None], wants_sums: bool) -> list[tuple[Weight, Tensor]]:
        collector = self._collector
        pairs = zip(grads, self._readers, strict=True)
        read = [None if grad is None else reader(grad) for grad, reader in pairs]
        compute = self._compute or self._freed
        contributions = in_smaller_chunks(partial(compute, read))
        sums = collector.collect(contributions, wants_sums)
        collector.note_call(self._weights, compute, read)
        if collector.frees and self._keeps_values:
            self._compute = None  # autograd lets its saved tensors go now, too
        return sums

    def failed(self, error: Exception) -> None:
        """Say why there are no contributions."""
        collector = self._collector
        reason = collector.why(error, str(self._text))
        for weight in self._weights:
            for name in weight.names:
                collector.got_gradient.setdefault(name, None)
        if isinstance(error, torch.OutOfMemoryError):  # the training needs all that this backward has gathered
            self._compute = None
            for weight in collector.weights:
                weight.forget()
            collector.refuse(collector.weights, reason)
        else:
            collector.refuse(self._weights, reason)


def _are_refused(weights: list[Weight], collector: Collector) -> bool:
    return all(weight.names <= collector.refused.keys() for weight in weights)


def attach(use: Use, collector: Collector) -> None:
    """Hook the gradients of the call's outputs, so that backward reports what each sample contributes."""
    weights = list(dict.fromkeys(use.weights.values()))
    reason = use.reason_against()
    if reason is not None:
        refuse_where_used(use.call.outputs, weights, reason, collector)
        return
    outputs = [output for output, _ in use.outputs]
    keeps_values = use.rule is None or bool(use.rule.reads)
    report = Report(collector, outputs, weights, computation(use), use.description, keeps_values)
    names = {use.weights[id(value)]: name for name, value in use.arguments.items() if id(value) in use.weights}
    wait(report, outputs, names, use.call.fused)


def wait(report: Report, outputs: Sequence[Tensor], names: Mapping[Weight, str], fused: OwnBackward | None) -> None:
    """Let the report know of the gradients of a call: by hooks on its outputs, or from its own backward."""
    if fused is None:
        report.attach(outputs)
        return

    def sums_by_name(grad: Tensor, wanted: bool) -> dict[str, Tensor]:
        return {names[weight]: total for weight, total in report.contribute((grad,), wanted and bool(names))}

    def none(error: Exception) -> dict[str, Tensor]:
        report.failed(error)
        return {}

    fused.sums = guard(sums_by_name, none)


def refuse_where_used(outputs: Iterable[Tensor], weights: list[Weight], reason: str, collector: Collector) -> None:
    """Refuse the weights of a call as soon as a gradient reaches one of its outputs."""

    def hook(grad: Tensor) -> None:
        if collector.accepting:
            collector.refuse(weights, reason)

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook, collector.fail)


def note_term(outputs: Iterable[Tensor], names: frozenset[str], collector: Collector) -> None:
    """Note, once a gradient reaches a call that adds a term of no sample to the loss, whose gradient has it."""

    def hook(grad: Tensor) -> None:
        if collector.accepting:
            collector.penalized |= names

    for output in outputs:
        if output.requires_grad:
            on_gradient(output, hook, collector.fail)


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
    if innermost_transform() is not None:  # a transform wraps what the call gives
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
    if any_autocast_is_on():
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
        self.weights, self.x, self.version, self.text = weights, x, version_counter(x), text

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
            with without_torch_function():  # (the mode would be offered every attribute, too)
                done = self._note_norms(grad, rows)
            if done:
                return
        self.contribute(grads)

    def _note_norms(self, grad: Tensor, rows: _OfRows) -> bool:
        """Note the norms of weight and bias, unless the general way has to find them, or say what is wrong."""
        if grad.dtype is not rows.x.dtype or grad.requires_grad or version_counter(rows.x) != rows.version:
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
