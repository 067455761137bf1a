"""Which parameters got a gradient in a backward, and whether a hook of the user's changed it on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from lightning_persample.engine.dispatch import Dispatcher
from lightning_persample.engine.failure import guard
from lightning_persample.engine.sums import adds_up, size_of_terms
from lightning_persample.engine.weight import Weight
from lightning_persample.gradients import SampleGradient

__all__ = ["WatchedParameters"]


class WatchedParameters:
    """The trainable parameters of one capture.

    Args:
        parameters: by name.
        dispatcher: knows the weight of each parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dispatcher: Dispatcher) -> None:
        self._parameters = dict(parameters)
        self._dispatcher = dispatcher
        self.weights: dict[str, Weight] = dict(zip(self._parameters, dispatcher.weights, strict=True))
        self._handles: dict[str, RemovableHandle] = {}
        self._adopted: list[RemovableHandle] = []
        self._hooked: set[str] = set()

    def watch(self, reporting: Collection[Weight] = ()) -> None:
        """Watch every trainable parameter, behind the user's hooks; lazy ones can be watched once they have a shape."""
        for weight in self.weights.values():
            weight.reports = False
        for weight in reporting:
            weight.reports = weight.uses == 1 and weight.children == 0
        try:
            self._watch()
        except BaseException:  # an interrupt, too, leaves no hook behind
            self.close()
            raise

    def _watch(self) -> None:
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad or isinstance(parameter, UninitializedTensorMixin):
                continue
            hooks, ours = parameter._backward_hooks or {}, self._handles.get(name)
            weight = self.weights[name]
            if ours is None and not hooks and weight.reports:
                continue
            weight.reports = False
            if ours is not None and (not hooks or next(reversed(hooks)) == ours.id):
                continue
            if hooks:  # of the user's, after which ours has to run
                self._hooked.add(name)
                self._dispatcher.kept.add(name)
            if ours is not None:
                ours.remove()
            self._handles[name] = parameter.register_hook(self._noting(name))

    def adopt(self, name: str, tensor: Tensor) -> Weight:
        """Take another tensor for a parameter, too: the one that a sharded module holds while its forward runs."""
        weight = self.weights[name]
        self._dispatcher.marks[tensor] = weight
        self._adopted.append(tensor.register_hook(self._noting(name)))
        return weight

    def trainable(self) -> dict[str, int]:
        """Number of entries of each trainable parameter."""
        return {
            name: parameter.numel()
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and not isinstance(parameter, UninitializedTensorMixin)
        }

    def changed_by_hook(self, weight: Weight, grad: Tensor | None, total: SampleGradient | None) -> str | None:
        """Whether a hook made the gradient of a weight another one than the samples' contributions give."""
        if grad is None or total is None:
            return None
        if self._dispatcher.samples is not None:
            return "a hook is registered on it, whose effect is not known from some of the samples; leave out `samples`"
        added = torch.zeros_like(grad, dtype=total.dtype)
        for sample in range(total.batch_size):
            added += total.samples(sample, sample + 1).dense()[0]
        rest = torch.linalg.vector_norm(added - grad)
        sizes = (partial(torch.linalg.vector_norm, grad), lambda: total.sq_norm().sum().sqrt())
        dtypes = {grad.dtype} | self._dispatcher.dtypes
        if adds_up(rest, dtypes, *sizes, partial(size_of_terms, weight)):
            return None
        where = "it" if weight.derivation is None else f"what {weight.derivation.text} computes from it"
        return (
            f"a hook registered on {where} changes its gradient, or part of its gradient belongs to no sample; remove "
            "the hook or apply it to the loss"
        )

    def close(self) -> None:
        """Remove every hook."""
        for handle in (*self._handles.values(), *self._adopted):
            handle.remove()
        self._handles.clear()
        self._adopted.clear()

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        return guard(partial(self._note, name), self._dispatcher.fail)

    def _note(self, name: str, grad: Tensor) -> None:
        if self._dispatcher.accepting:
            kept = grad.detach().clone() if name in self._hooked and grad.layout == torch.strided else None
            self._dispatcher.got_gradient[name] = kept
