"""What waits for the gradients of a call, and reports what its weights get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_persample.engine.collector import Collector
from lightning_persample.engine.computation import computation
from lightning_persample.engine.failure import guard
from lightning_persample.engine.hooks import on_gradient
from lightning_persample.engine.observed import OwnBackward
from lightning_persample.engine.reporting import Report
from lightning_persample.engine.use import Use
from lightning_persample.engine.weight import Weight

__all__ = ["attach", "note_term", "refuse_where_used", "wait"]


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
