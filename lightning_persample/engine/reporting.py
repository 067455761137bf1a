"""The hook by which a backward reports what each sample contributes to the weights of one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from lightning_persample.engine.collector import Collector
from lightning_persample.engine.failure import guard, in_smaller_chunks
from lightning_persample.engine.hooks import gradient_reader, hooked_tensor, on_gradient
from lightning_persample.engine.observed import Description
from lightning_persample.engine.weight import Computation, Contributions, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import kernel_options
from lightning_persample.gradients.precision import without_autocast

__all__ = ["Report"]

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
        if not torch._C._autograd._get_current_graph_task_keep_graph():
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
        with torch._C.DisableTorchFunction(), options:
            if not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
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
