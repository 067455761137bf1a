"""Run a module in a second pass: afterwards it, and the random number generators, are as if nothing had run."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, Dataset

from lightning_persample.capture.observing import ObservingMode
from lightning_persample.errors import PerSampleError
from lightning_persample.torch_internals import TENSOR_HOOKS, DropoutBase, is_view, version_kept

_LONGEST_SEARCHED = 10_000  # items: what is longer is data, not state
_LARGEST_KEPT = 1 << 24  # bytes of an array of numpy: what is larger is data
_CONTAINERS: dict[Any, Callable[..., None]] = {  # that are searched, and what fills them; the first that fits counts
    OrderedDict: OrderedDict.update,  # (its order is in memory of its own)
    dict: dict.update,
    list: list.extend,
    set: set.update,
    deque: deque.extend,
}


_TRAINERS = ("lightning", "pytorch_lightning")  # what a Trainer holds is not the module's
_NOT_THE_USERS = ("torch", "builtins", *_TRAINERS)
_DATA = (Dataset, DataLoader)


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@contextmanager
def untouched(module: nn.Module, *containers: Any) -> Iterator[ModuleState]:
    """Undo at the end of this context what was done to the module, to these containers and to the generators."""
    state = ModuleState(module, *containers)
    try:
        yield state
    finally:
        state.restore()


class ModuleState:
    """The state of a module, to be put back as often as wanted; it takes the memory of one more copy."""

    # It consists of parameters, their ``.grad``, buffers, training mode, every other attribute of the module and its
    # submodules (those of metrics included) with the lists, dicts, sets, tensors, arrays, random number generators and
    # objects of the user's own classes in them, whether tensors require gradients, with their hooks and attributes, and
    # the state of the random number generators of torch, Python and numpy. Classes are the user's if they are of the
    # package of the module's class; other objects are not looked into.
    # A graph that was made before goes backward afterwards: its tensors count as never written to.

    def __init__(self, module: nn.Module, *containers: Any) -> None:
        lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise PerSampleError(
                f"parameter `{lazy[0]}` is not initialized yet, and running the module again would create it; run one "
                "batch through the module first"
            )
        package = _package_of(type(module))
        self._package = None if package in _NOT_THE_USERS else package
        self.holds_graph = False  # whether a tensor in it is part of a graph, and is not put back
        self._seen: dict[int, Any] = {}
        self._put_back: list[Callable[[], None]] = []
        # Of each random number generator what gives its state, that at the start, and what puts it back
        self._random_states: list[tuple[Callable[[], Any], Any, Callable[[], None]]] = []
        self._grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._take_random_states({tensor.device for tensor in (*module.parameters(), *module.buffers())})
        for each in (module, *containers):
            self._take(each)

    def restore(self, *, random_states: bool = True) -> None:
        """Put everything back."""
        for _, _, put_back in self._random_states if random_states else ():
            put_back()
        with torch.no_grad():
            for put_back in reversed(self._put_back):
                put_back()
        for parameter, grad in self._grads:
            parameter.grad = grad

    def drew_random_numbers(self) -> bool:
        """Whether a random number generator is in another state than at the start."""
        return any(not _is_same(state(), before) for state, before, _ in self._random_states)

    def _take(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._take_tensor(value)
        elif isinstance(value, torch.Generator | np.random.RandomState):
            self._keep_random_state(value.get_state, value.set_state)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # (it has no state)
            self._keep_random_state(value.getstate, value.setstate)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._keep_random_state(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
        elif isinstance(value, np.ndarray):
            self._take_array(value)
        elif isinstance(value, nn.Module):
            self._take_container(value, value.__dict__, dict)
        else:
            for kind in _CONTAINERS:
                if isinstance(value, kind):
                    self._take_container(value, value, kind)
                    break
            if self._is_of_the_user(value):
                self._take_slots(value)
                if hasattr(value, "__dict__"):
                    self._take_container(value, vars(value), dict)

    def _is_of_the_user(self, value: Any) -> bool:
        if _package_of(type(value)) != self._package or isinstance(value, _DATA):
            return False
        return not any(_package_of(base) in _TRAINERS for base in type(value).__mro__)

    def _take_container(self, value: Any, filled: Any, kind: Any) -> None:
        self._seen[id(value)] = value  # kept, so that the id stays its own
        items = kind(filled)

        def refill() -> None:  # by the methods of the kind: a subclass may do more in its own
            kind.clear(filled)
            _CONTAINERS[kind](filled, items)

        self._put_back.append(refill)
        if len(items) <= _LONGEST_SEARCHED:
            for item in items.values() if isinstance(items, dict) else items:
                self._take(item)

    def _take_slots(self, value: Any) -> None:
        parts = [part for kind in type(value).__mro__ if "__slots__" in vars(kind) for part in vars(kind).values()]
        slots = [part for part in parts if isinstance(part, MemberDescriptorType) and hasattr(value, part.__name__)]
        self._seen[id(value)] = value
        for slot in slots:
            item = slot.__get__(value)
            self._put_back.append(partial(slot.__set__, value, item))
            self._take(item)

    def _take_tensor(self, tensor: Tensor) -> None:
        # A tensor with a graph belongs to a computation, and one with an axis of stride 0 cannot be written to.
        expanded = tensor.layout is torch.strided and any(
            stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        self.holds_graph |= tensor.grad_fn is not None
        if tensor.grad_fn is not None or tensor.is_inference() or expanded:
            return
        self._take_container(tensor, vars(tensor), dict)
        here, value, kept = tensor.detach(), tensor.detach().clone(), version_kept(tensor)
        requires_grad, hooks = tensor.requires_grad, {name: getattr(tensor, name) for name in TENSOR_HOOKS}
        for each in hooks.values():
            self._take(each)

        def put_back() -> None:
            if tensor.layout is torch.strided and not tensor.detach().is_set_to(here):
                tensor.data = here
            here.copy_(value)
            kept.__exit__(None, None, None)
            for name, each in hooks.items():
                added = getattr(tensor, name)
                if each is None and added is not None:
                    added.clear()
            if tensor.requires_grad != requires_grad and not is_view(tensor):
                (tensor if tensor.grad_fn is None else tensor.detach_()).requires_grad_(requires_grad)

        self._put_back.append(put_back)

    def _take_array(self, array: Any) -> None:
        if array.nbytes > _LARGEST_KEPT or not array.flags.writeable:
            return
        self._seen[id(array)] = array
        self._put_back.append(partial(np.copyto, array, array.copy()))

    def _keep_random_state(self, get: Callable[..., Any], put_back: Callable[..., Any], *device: Any) -> None:
        before = get(*device)
        self._random_states.append((partial(get, *device), before, partial(put_back, before, *device)))

    def _take_random_states(self, devices: set[torch.device]) -> None:
        self._keep_random_state(torch.get_rng_state, torch.set_rng_state)
        for device in devices:
            if device.type not in ("cpu", "meta"):
                generators = torch.get_device_module(device)
                self._keep_random_state(generators.get_rng_state, generators.set_rng_state, device)
        self._keep_random_state(random.getstate, random.setstate)
        self._keep_random_state(np.random.get_state, np.random.set_state)


def _is_same(state: Any, other: Any) -> bool:
    """Whether two states of one generator are equal: tensors, arrays, numbers, or tuples and dicts of these."""
    if isinstance(state, dict):
        return all(_is_same(state[name], other[name]) for name in state)
    if isinstance(state, tuple):
        return all(map(_is_same, state, other))
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    return bool(state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other)


@contextmanager
def replaced(attributes: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Let an object have other attributes in this context, of which it afterwards has its own, or none as before."""
    own = {name: attributes[name] for name in others if name in attributes}
    attributes.update(others)
    try:
        yield
    finally:
        for name in others:
            del attributes[name]
        attributes.update(own)


# Functions of torch that draw a dropout mask, and where their probability stands.
_DROPOUT: dict[Callable[..., Any], tuple[int, str]] = {
    **dict.fromkeys(
        (
            F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
            torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
        ),
        (1, "p"),
    ),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}  # fmt: skip


def _without_its_dropout(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name = _DROPOUT.get(function, (len(args), ""))
    if place < len(args):
        args = (*args[:place], 0.0, *args[place + 1 :])
    elif name and (name in kwargs or name == "p"):
        kwargs = {**kwargs, name: 0.0}
    return function(*args, **kwargs)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set the dropout probability of torch's own layers and functions to 0 in this context."""
    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, (DropoutBase, nn.MultiheadAttention, nn.RNNBase)):
                name = "p" if isinstance(layer, DropoutBase) else "dropout"
                stack.enter_context(replaced(vars(layer), {name: 0.0}))
        stack.enter_context(ObservingMode(_without_its_dropout).active())
        yield


@contextmanager
def recurrent_layers_can_go_backward(module: nn.Module) -> Iterator[None]:
    """Let recurrent layers of cuDNN, which have no backward in evaluation, compute the same in training."""
    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and not layer.training and any(p.is_cuda for p in layer.parameters()):
                stack.enter_context(replaced(vars(layer), {"training": True, "dropout": 0.0}))
        yield
