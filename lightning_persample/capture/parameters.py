"""The parameters of a module: found, sharded, with a gradient, and whether that is the sum of the samples'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_persample.batch_axis.observed import operands_of
from lightning_persample.capture.annotations import kind_of
from lightning_persample.capture.collector import Collector
from lightning_persample.capture.contributions import ByRule
from lightning_persample.capture.dispatch import Dispatcher
from lightning_persample.capture.failure import guard, in_smaller_chunks
from lightning_persample.capture.graph import on_arrival
from lightning_persample.capture.weight import Computation, Weight
from lightning_persample.errors import PerSampleError, UnsupportedError
from lightning_persample.gradients import SampleGradient
from lightning_persample.torch_internals import (
    SECOND_WEIGHTS,
    WRAPPER_OF_FABRIC,
    backward_hooks,
    has_processes,
    local_part,
    tensors_held_by,
    version_counter,
)


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, where ``fabric.setup`` has wrapped it: parameters have the names that they have in it."""
    inner: Any = module.module if type(module).__name__ == WRAPPER_OF_FABRIC else module
    return inner


def check_module(module: object) -> None:
    """Raise a `PerSampleError` for what is not a module."""
    if not isinstance(module, nn.Module):
        raise PerSampleError(f"module must be a torch.nn.Module; got {type(module).__name__}")


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; an `UnsupportedError` where one is not initialized."""
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UnsupportedError(f"parameter `{lazy[0]}` is not initialized yet; run one batch through the module first")
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def by_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, for every place that holds what they replace, once each."""
    # A layer that is held twice has one place and two names: of those, `functional_call` would put back one alone.
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    replacing = {id(named[name]): tensor for name, tensor in tensors.items()}
    return {
        f"{path}.{name}" if path else name: replacing[id(held)]
        for path, part in module.named_modules()
        for name, held in tensors_held_by(part).items()
        if id(held) in replacing
    }


@contextmanager
def recurrent_layers_kept(module: nn.Module) -> Iterator[None]:
    """Recurrent layers hold their weights a second time, where `functional_call` leaves what it had put in place."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    kept = [{name: vars(layer)[name] for name in SECOND_WEIGHTS if name in vars(layer)} for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, kept, strict=True):
            vars(layer).update(values)


_UNSEEN = (
    "its gradient came from a forward of a sharded module that cannot be seen: call the module itself, not a method"
)
_DISTRIBUTED = "it is a DTensor in the forward, too (tensor parallelism): a sample's gradient lies on several devices"


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of the module went through ``fully_shard``."""
    return bool(_sharded_modules(module))


def sharded_elsewhere(module: nn.Module) -> list[str]:
    """The parameters that are distributed over devices, but not by ``fully_shard`` alone."""
    if not has_processes() or "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import DTensor, Shard

    gathered = {id(p) for part in _sharded_modules(module).values() for p in part.parameters()}
    return [
        name
        for name, p in module.named_parameters()
        if isinstance(p, DTensor)
        and (id(p) not in gathered or sum(isinstance(each, Shard) for each in p.placements) > 1)
    ]


class ShardedParameters:
    """Tells a capture which parameters the tensors are that appear in the forward of sharded modules."""

    # `module`: the module whose parameters are followed; `collector`: knows the marks of tensors; `adopt`: takes the
    # name and the tensor of each parameter found.

    def __init__(self, module: nn.Module, collector: Collector, adopt: Callable[[str, Tensor], Weight]) -> None:
        self._module = module
        self._collector = collector
        self._adopt = adopt
        self._foreign: WeakTensorKeyDictionary | None = None
        # on the modules that gather parameters; none where there is nothing to find
        self.hooks: list[RemovableHandle] = []
        self._shards: dict[str, nn.Parameter] = {}
        self._before_backward: dict[str, object] = {}
        parts = _sharded_modules(module).values()
        if parts:  # what is computed from weights is needed after their memory was freed
            collector.keep = _copied
        unsharded = guard(self._unsharded, collector.fail)
        self.hooks = [part.register_forward_pre_hook(unsharded) for part in parts]  # behind fully_shard's own
        self._shards = {name: p for name, p in module.named_parameters() if p.requires_grad} if parts else {}
        for name in sharded_elsewhere(module):
            collector.refused.setdefault(name, _DISTRIBUTED)

    def find(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Adopt the parameters among the arguments of a call, and all that the module holds beside them."""
        if kind_of(function).op is None:
            return
        for tensor in operands_of(args, kwargs):
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or self._is_weight(tensor):
                continue
            if self._foreign is None:
                self._foreign = WeakTensorKeyDictionary()
            if not self._foreign.get(tensor):
                self._adopt_all()
                self._foreign[tensor] = not self._is_weight(tensor)

    def start_backward(self) -> None:
        """Remember the gradients of the shards."""
        self._before_backward = {name: _state(shard.grad) for name, shard in self._shards.items()}

    def refuse_unseen(self, got_gradient: Collection[str]) -> None:
        """After the backward, refuse the parameters whose gradient came from a forward that was not seen."""
        for name, shard in self._shards.items():
            if name not in got_gradient and _state(shard.grad) != self._before_backward[name]:
                self._collector.refused.setdefault(name, _UNSEEN)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def _adopt_all(self) -> None:
        from torch.distributed.tensor import DTensor

        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and not self._is_weight(parameter):
                weight = self._adopt(name, parameter)
                if isinstance(parameter, DTensor):
                    self._collector.refuse([weight], _DISTRIBUTED)

    def _is_weight(self, tensor: Tensor) -> bool:
        return isinstance(self._collector.marks.get(tensor), Weight)

    def _unsharded(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._adopt_all()


def _sharded_modules(module: nn.Module) -> dict[str, nn.Module]:
    if not has_processes() or "torch.distributed.fsdp" not in sys.modules:  # (the import takes seconds)
        return {}
    from torch.distributed.fsdp import FSDPModule

    kind: type[nn.Module] = FSDPModule  # type: ignore[assignment]
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _state(grad: Tensor | None) -> object:
    """What changes with every gradient that is written or added."""
    local = local_part(grad)
    return None if local is None else (id(local), version_counter(local))


def computed_in(parameters: Iterable[Tensor], device: torch.device) -> set[torch.dtype]:
    """The dtypes that gradients of these parameters are computed in, that of autocast included."""
    dtypes = {parameter.dtype for parameter in parameters}
    return dtypes | ({torch.get_autocast_dtype(device.type)} if torch.is_autocast_enabled(device.type) else set())


def default_tolerance(dtypes: set[torch.dtype], device: torch.device) -> float:
    """The relative error that rounding alone may give in the lowest of these precisions."""
    lowest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if lowest > torch.finfo(torch.float32).eps:
        return 1e-1
    if lowest > torch.finfo(torch.float64).eps:
        return 1e-3 if device.type == "cpu" else 1e-2  # accelerators may multiply with 10 bits of mantissa
    return 1e-7


_OF_CENTRED = 1e-2  # of what a mean is taken from: its rounding is less than any tolerance of a sum


def adds_up(rest: Tensor, dtypes: set[torch.dtype], *sizes: Callable[[], Tensor]) -> bool:
    """Whether the norm of what remains of a sum, a number, is rounding beside one of these sizes, in these dtypes."""
    tolerance = default_tolerance(dtypes, rest.device)
    return any(not bool(rest > tolerance * size().to(rest)) for size in sizes)  # (of nan nothing can be said)


def size_of_terms(weight: Weight) -> Tensor:
    """The norm of all that the calls of this backward add up for a weight, as if nothing cancelled: a number."""
    squares = torch.zeros((), dtype=torch.float64)
    for compute, grads in weight.calls:
        drawn = [None if grad is None else grad * _random_like(grad) for grad in grads]
        squares += _sum_of_squares(weight, compute, drawn)
        uncentred = compute.uncentred() if isinstance(compute, ByRule) else None
        if uncentred is not None:  # (an input that is its own mean leaves rounding of itself)
            squares += _OF_CENTRED**2 * _sum_of_squares(weight, uncentred, drawn)
    return squares.sqrt()


def _sum_of_squares(weight: Weight, compute: Computation, grads: Sequence[Tensor | None]) -> Tensor:
    found = in_smaller_chunks(partial(compute, grads))
    squares = [in_smaller_chunks(gradient.sq_norm).cpu().double().sum() for owner, gradient in found if owner is weight]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(0)  # (the user's is left as it is)
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


class WatchedParameters:
    """The trainable parameters of one capture."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], dispatcher: Dispatcher) -> None:
        self._parameters = dict(parameters)
        self._dispatcher = dispatcher
        self.weights: dict[str, Weight] = dict(zip(self._parameters, dispatcher.weights, strict=True))
        self._handles: dict[str, RemovableHandle] = {}
        self._adopted: list[RemovableHandle] = []
        self._hooked: set[str] = set()
        self.trainable: dict[str, nn.Parameter] = {}  # those that have a shape, when the backward began

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
        self.trainable = {}
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad or isinstance(parameter, UninitializedTensorMixin):
                continue
            self.trainable[name] = parameter
            hooks, ours = backward_hooks(parameter) or {}, self._handles.get(name)
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
            self._handles[name] = self._note_arrival(parameter, name)

    def adopt(self, name: str, tensor: Tensor) -> Weight:
        """Take another tensor for a parameter, too: the one that a sharded module holds while its forward runs."""
        weight = self.weights[name]
        self._dispatcher.marks[tensor] = weight
        self._adopted.append(self._note_arrival(tensor, name))
        return weight

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

    def _note_arrival(self, tensor: Tensor, name: str) -> RemovableHandle:
        return on_arrival(tensor, partial(self._note, name), self._dispatcher.fail)

    def _note(self, name: str, grad: Tensor) -> None:
        if self._dispatcher.accepting:
            kept = grad.detach().clone() if name in self._hooked and grad.layout == torch.strided else None
            self._dispatcher.got_gradient[name] = kept
