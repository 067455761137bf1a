"""The hook by which a backward reports what each sample contributes to the weights of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from lightning_persample.engine.by_rule import Computation, Contributions
from lightning_persample.engine.failure import attempt, guard, in_smaller_chunks
from lightning_persample.engine.observed import Description
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import kernel_options
from lightning_persample.gradients.precision import without_autocast

if TYPE_CHECKING:
    from lightning_persample.engine.dispatch import Dispatcher
    from lightning_persample.engine.weight import Weight

__all__ = ["Report", "detached", "gradient_reader", "hooked_tensor", "on_gradient"]

_FREED = (
    "a second backward goes through it, but the first one was to free the graph; pass retain_graph=True to the first"
)


class Report:
    """Lets backward report what each sample contributes as soon as the gradients of a call's outputs are there.

    Args:
        dispatcher: receives contributions, or the reason why there are none.
        outputs: the outputs that can get a gradient.
        weights: the weights among the call's operands.
        compute: gives the contributions.
        description: the call in messages.
        keeps_values: whether `compute` holds what autograd holds, too, and lets go with it.
    """

    __slots__ = ("_compute", "_dispatcher", "_handle", "_keeps_values", "_kind", "_readers", "_text", "_weights")

    def __init__(
        self,
        dispatcher: Dispatcher,
        outputs: Sequence[Tensor],
        weights: list[Weight],
        compute: Computation,
        description: Description,
        keeps_values: bool,
    ) -> None:
        self._dispatcher, self._weights, self._text = dispatcher, weights, description
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
            self._dispatcher.nodes.release_later(self._handle)

    def _freed(self, grads: Sequence[Tensor | None]) -> Contributions:
        raise UnsupportedError(f"{self._text}: {_FREED}")

    def hook(self, grads: Sequence[Tensor | None]) -> None:
        """Note what the samples contribute."""
        self.contribute(grads)

    def _after_all(self, grads: Sequence[Tensor | None]) -> None:
        self.hook(grads)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._handle.remove()  # it holds nodes that hold it, a circle that no collector sees

    def tell(self) -> None:
        """Note that those weights get a gradient on which no hook has to wait for it."""
        for weight in self._weights:
            if weight.told:
                for name in weight.names:
                    self._dispatcher.got_gradient[name] = None

    def contribute(self, grads: Sequence[Tensor | None], wants_sums: bool = False) -> list[tuple[Weight, Tensor]]:
        """Note what the samples contribute."""
        dispatcher = self._dispatcher
        if not dispatcher.accepting:
            return []
        self.tell()
        if dispatcher.refused and _are_refused(self._weights, dispatcher):
            if dispatcher.frees:
                self._compute = None
            return []
        options = kernel_options(dispatcher.kernel_options)  # entered here: on CUDA this is another thread
        with torch._C.DisableTorchFunction(), options:
            if not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
                return self._collect(grads, wants_sums)
            with (
                torch.no_grad(),
                without_autocast(self._kind),
            ):  # (a backward may create a graph, or run under autocast)
                return self._collect(grads, wants_sums)

    def _collect(self, grads: Sequence[Tensor | None], wants_sums: bool) -> list[tuple[Weight, Tensor]]:
        dispatcher = self._dispatcher
        pairs = zip(grads, self._readers, strict=True)
        read = [None if grad is None else reader(grad) for grad, reader in pairs]
        compute = self._compute or self._freed
        contributions = in_smaller_chunks(partial(compute, read))
        sums = dispatcher.collect(contributions, wants_sums)
        dispatcher.note_call(self._weights, compute, read)
        if dispatcher.frees and self._keeps_values:
            self._compute = None  # autograd lets its saved tensors go now, too
        return sums

    def failed(self, error: Exception) -> None:
        """Say why there are no contributions."""
        dispatcher = self._dispatcher
        reason = dispatcher.why(error, str(self._text))
        for weight in self._weights:
            for name in weight.names:
                dispatcher.got_gradient.setdefault(name, None)
        if isinstance(error, torch.OutOfMemoryError):  # the training needs all that this backward has gathered
            self._compute = None
            for weight in dispatcher.weights:
                weight.forget()
            dispatcher.refuse(dispatcher.weights, reason)
        else:
            dispatcher.refuse(self._weights, reason)


def _are_refused(weights: list[Weight], dispatcher: Dispatcher) -> bool:
    return all(weight.names <= dispatcher.refused.keys() for weight in weights)


def on_gradient(output: Tensor, hook: Callable[[Tensor], None], failed: Callable[[Exception], None]) -> None:
    """Call the hook with the output's gradient, after all hooks of the user's that may change it."""
    hooked = hooked_tensor(output)
    node, place = hooked.grad_fn, hooked.output_nr
    if node is None:
        hooked.register_hook(guard(hook, failed))
        return

    def before_node(grads: Sequence[Tensor | None]) -> None:
        grad = grads[place]
        if grad is not None:
            attempt(hook, failed, grad)

    node.register_prehook(before_node)


def hooked_tensor(output: Tensor) -> Tensor:
    """The tensor whose hook reports the output's gradient."""
    # An op whose output is a view (linear on three axes, einsum) may be followed by an in-place op, which gives the
    # view a new history and leaves a hook on it silent; the tensor behind the view keeps its gradient.
    base = output._base if output._is_view() else None
    return output if base is None or not base.requires_grad else base


def gradient_reader(output: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the output's gradient from the gradient that the hook receives."""
    base = hooked_tensor(output)
    if base is output:
        return detached
    if base.is_contiguous() and output.is_contiguous() and base.numel() == output.numel():
        return partial(_reshaped, output.shape)
    base_size, base_stride = tuple(base.shape), base.stride()
    size, stride, offset = tuple(output.shape), output.stride(), output.storage_offset() - base.storage_offset()

    def read(grad: Tensor) -> Tensor:
        grad = detached(grad)
        if grad.stride() != base_stride:
            grad = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided(size, stride, grad.storage_offset() + offset)

    return read


def _reshaped(size: torch.Size, grad: Tensor) -> Tensor:
    """The gradient of an output that is the whole of a tensor in other sizes."""
    return detached(grad).reshape(size)


def detached(grad: Tensor) -> Tensor:
    """The gradient of an output that is no view, as it is, but for its history."""
    return grad.detach() if grad.requires_grad else grad
