"""From a backward that nothing observes to ``grad_sample`` on the weights: the ending that door one needs.

`expanded_weights` sees the backward and builds its record afterwards. A weight that was replaced for one call only gets
its gradient later, in a backward that the user runs outside of every mode. Here a leaf stands in for the weight during
the call; the hooks that fire in the backward gather what each sample contributes, and the autograd engine is asked to
call back at the end of that backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from lightning_persample.capture.contributions import Use
from lightning_persample.capture.dispatch import Dispatcher
from lightning_persample.capture.failure import guard, reason_of
from lightning_persample.capture.graph import accumulator
from lightning_persample.capture.observing import ObservingMode, modules_do_not_see
from lightning_persample.capture.parameters import adds_up, size_of_terms
from lightning_persample.capture.pull_back import settle
from lightning_persample.capture.record import PerSampleRecord, classify, say
from lightning_persample.capture.weight import Weight
from lightning_persample.errors import BatchSizeError, UnsupportedError
from lightning_persample.gradients import SampleGradient, add_up
from lightning_persample.torch_internals import after_backward, current_backward, without_torch_function

_OF_BACKWARD = (Tensor.backward, torch.autograd.backward)


@dataclass(frozen=True, eq=False)
class Target:
    """A weight that is to get ``grad_sample``."""

    name: str  # in messages
    original: Tensor
    weight: Weight  # what the dispatcher knows of the leaf that stands in for it
    factor: float  # that contributions are multiplied by: 1, or the batch size for a loss that is a mean

    def deliver(self, grad_sample: Tensor) -> None:
        """Set ``grad_sample``, or add to it, as autograd does with ``.grad``."""
        present = getattr(self.original, "grad_sample", None)
        if present is not None and present.shape != grad_sample.shape:
            raise BatchSizeError(
                f"`{self.name}` has a grad_sample of shape {tuple(present.shape)} from a batch of another size than "
                f"{grad_sample.shape[0]}; delete it with `del parameter.grad_sample` before the next backward"
            )
        self.original.grad_sample = grad_sample if present is None else present + grad_sample  # type: ignore[attr-defined]


def stand_in(original: Tensor) -> Tensor:
    """A leaf that shares the memory of a weight, to take its place in a call: its gradient is its own."""
    if not isinstance(original, nn.Parameter):
        return original.detach().requires_grad_()
    leaf = nn.Parameter(original.detach())
    vars(leaf).update(vars(original))
    return leaf


class DeliveringDispatcher(Dispatcher):
    """A dispatcher whose contributions end as ``grad_sample`` of the weights."""

    def __init__(self, weights: Mapping[str, Tensor], batch_size: int, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__(weights, batch_size, True, buffers)
        self.kept |= weights.keys()
        self.targets: dict[str, Target] = {}
        self.apart: set[Weight] = set()  # whose gradient over the batch is not the sum of the samples' gradients
        self.exposed: set[Weight] = set()  # that may be used where no call is seen

    def add_targets(self, originals: Mapping[str, Tensor], leaves: Mapping[str, Tensor], factor: float) -> None:
        """Deliver to these weights what arrives at the leaves of the same names."""
        known = {name: weight for weight in self.weights for name in weight.names}
        for name, leaf in leaves.items():
            self.targets[name] = Target(name, originals[name], known[name], factor)
            self.nodes.watch(accumulator(leaf), known[name])
            leaf.register_hook(partial(self._gradient_arrived, self.targets[name]))
            leaf.register_post_accumulate_grad_hook(_drop_gradient)

    def adopt(self, tensor: Tensor, weight: Weight, lineage: Iterable[Weight], targets: Mapping[str, Target]) -> None:
        """Follow a weight that other dispatchers know too, with the weights that it was derived from."""
        self.weights = list(dict.fromkeys((*self.weights, *lineage)))
        self.targets |= targets
        self.kept |= targets.keys()
        self.marks[tensor] = weight

    def _register(self, use: Use, involved: Mapping[int, Weight]) -> None:
        if use.not_additive is not None:
            self.apart |= set(involved.values())
        super()._register(use, involved)

    def contribute(self, weight: Weight, gradient: SampleGradient) -> None:
        """Take what one use contributes."""
        Delivery.current().expect(self, weight)
        super().contribute(weight, gradient)

    def refuse(self, weights: Iterable[Weight], reason: str) -> None:
        """Note that a gradient of these weights cannot be split by sample: in this backward, or in every one."""
        if current_backward() < 0:
            super().refuse(weights, reason)
            return
        lost = list(weights)
        for weight in lost:
            Delivery.current().expect(self, weight)
        Delivery.current().refuse(lost, reason)

    def _gradient_arrived(self, target: Target, grad: Tensor | None) -> None:
        if grad is not None:  # (a custom function may hand on none)
            Delivery.current().note(self, target, grad)

    def observe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function and see the torch calls in it."""

        def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if function in _OF_BACKWARD:
                return function(*args, **kwargs)
            if function is torch.autograd.grad:
                return self.differentiate(function, args, kwargs)
            return self.call(function, args, kwargs)

        self.visible = ObservingMode(answer)
        with modules_do_not_see(), self.visible.active():
            return function(*args, **kwargs)

    def end_forward(self) -> None:
        """Forget what only the calls need: what holds nodes would keep the graph alive for ever."""
        self.marks.clear()
        self.nodes.clear()


class Delivery:
    """What one backward gathers, for all dispatchers whose calls it reaches."""

    _running: ClassVar[WeakValueDictionary[int, Delivery]] = WeakValueDictionary()
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._dispatchers: dict[DeliveringDispatcher, None] = {}
        self._touched: set[Weight] = set()
        self._gradients: dict[Target, Tensor] = {}
        self._totals: dict[Target, Tensor] = {}
        self._failed: dict[Target, str] = {}
        self._refused: dict[Weight, str] = {}

    @classmethod
    def current(cls) -> Delivery:
        """The one of the backward that is running."""
        # Only the backward itself holds it, through the callback: one that fails midway takes it along.
        task = current_backward()
        with cls._lock:
            delivery = cls._running.get(task)
            if delivery is None:
                delivery = cls._running[task] = cls()
                after_backward(delivery.finish)
            return delivery

    def note(self, dispatcher: DeliveringDispatcher, target: Target, grad: Tensor) -> None:
        """Compare the gradient over the whole batch that arrived for a weight with what the calls contributed."""
        self._dispatchers.setdefault(dispatcher)
        self._gradients[target] = grad.detach()
        if not target.weight.children:  # (what is derived from it contributes when all is done)
            self._add_up(target)

    def expect(self, dispatcher: DeliveringDispatcher, weight: Weight) -> None:
        """Prepare for a contribution to a weight, which may be moved at once to what the weight is made of."""
        self._dispatchers.setdefault(dispatcher)
        reached = [weight]
        while reached:
            weight = reached.pop()
            if weight not in self._touched:
                weight.forget()  # a backward that failed midway may have left something
                self._touched.add(weight)
                reached += weight.derivation.parents.values() if weight.derivation is not None else ()

    def refuse(self, weights: Iterable[Weight], reason: str) -> None:
        """Note that the gradient of these weights cannot be split by sample."""
        for weight in weights:
            self._refused.setdefault(weight, reason)

    def finish(self) -> None:
        """Set ``grad_sample`` of every weight that got a gradient; called at the end of the backward."""
        # A gradient that cannot be split by sample gives an `UnsupportedError`; then none is set.
        weights = list(dict.fromkeys(weight for dispatcher in self._dispatchers for weight in dispatcher.weights))
        with torch.no_grad(), without_torch_function():
            settle(weights, lambda weight, error, text: self.refuse([weight], reason_of(error, text)))
        for target in self._gradients:
            self._add_up(target)
        for weight in weights:
            weight.forget()
        reasons = self._failed | self._reasons()
        totals = {target: total for target, total in self._totals.items() if target not in reasons}
        self._report(totals, reasons)
        for target, total in totals.items():
            target.deliver(total)

    def _add_up(self, target: Target) -> None:
        """Form the samples' gradients of a weight of which all contributions are there, and let those go."""
        if not target.weight.contributions:
            return
        with torch.no_grad(), without_torch_function():
            total = guard(self._total, partial(self._fail, target))(target, self._gradients[target])
        if total is not None:
            self._totals[target] = total
        target.weight.forget()

    def _fail(self, target: Target, error: Exception) -> None:
        self._failed[target] = reason_of(error, f"the sum of the uses of `{target.name}`")

    def _reasons(self) -> dict[Target, str]:
        """Why targets have no value, from what was refused in this backward and before it."""
        reasons: dict[Target, str] = {}
        for dispatcher in self._dispatchers:
            if dispatcher.fault:
                reasons |= dict.fromkeys(dispatcher.targets.values(), dispatcher.fault)
            for name, reason in dispatcher.refused.items():
                reasons.setdefault(dispatcher.targets[name], reason)
            for weight, reason in self._refused.items():
                if weight in dispatcher.weights:
                    for name in weight.names:
                        reasons.setdefault(dispatcher.targets[name], reason)
        return reasons

    def _total(self, target: Target, grad: Tensor) -> Tensor:
        weight = target.weight
        total = add_up(weight.contributions).dense()
        additive = all(weight not in dispatcher.apart for dispatcher in self._dispatchers)
        exposed = any(weight in dispatcher.exposed for dispatcher in self._dispatchers)
        if additive and (exposed or not weight.children):  # what is derived from it may be a penalty, no sample's own
            _check_sum(total, grad, weight)
        total = total.to(target.original.dtype)
        return total if target.factor == 1 else total * target.factor

    def _report(self, totals: Mapping[Target, Tensor], reasons: Mapping[Target, str]) -> None:
        lines = []
        for target in self._gradients:
            reached = [target.name] if target in totals else []
            refused = {target.name: reasons[target]} if target in reasons else {}
            missing = classify({target.name: target.original}, [target.name], reached, refused).unsupported
            lines += [f"- `{name}`: {reason}" for name, reason in missing.items()]
        if lines:
            raise UnsupportedError(
                f"grad_sample cannot be given for {len(lines)} of the {len(self._gradients)} weights that got a "
                "gradient, so none was set; freeze them with requires_grad_(False) to go on without:\n"
                + "\n".join(dict.fromkeys(lines))
            )
        for dispatcher in self._dispatchers:
            given = {target.name: total for target, total in totals.items()}
            mixing, axis_lost = dispatcher.notes.split(dispatcher.notes.known("mixing"))
            apart = dispatcher.notes.known("not_additive")
            record = PerSampleRecord(
                dispatcher.batch_size, given, coverage=1.0, mixing=mixing, axis_lost=axis_lost, not_additive=apart
            )
            say(record, "warn")


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


def _check_sum(total: Tensor, grad: Tensor, weight: Weight) -> None:
    """The samples' gradients must add up to the batch's; what else reached the weight was not seen."""
    grad = grad.to_dense()
    dtypes = {grad.dtype, *(each.dtype for _, grads in weight.calls for each in grads if each is not None)}
    sizes = (partial(vector_norm, grad), partial(vector_norm, total), partial(size_of_terms, weight))
    if not adds_up(vector_norm(total.sum(0) - grad), dtypes, *sizes):
        raise UnsupportedError(
            "the samples' gradients do not add up to the gradient of the batch: part of that comes from elsewhere than "
            "the module's calls on its inputs (a weight that the module returns, a gradient of a gradient); call "
            "loss.backward() on a function of the outputs alone"
        )
