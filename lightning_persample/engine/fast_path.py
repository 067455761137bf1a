"""Keep torch's fused inference paths as they are while calls are observed.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` in evaluation mode without gradient (a frozen teacher in a
training step) take a fused path, unless ``torch.overrides.has_torch_function`` is true, which any torch function
mode makes it. The fused path rounds differently: without this, observing a step would change what it computes.
A function that asks because it offers itself to overrides (`torch.overrides.wrap_torch_function`) gets the true answer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from lightning_persample.engine.observing import ObservingMode

__all__ = ["modules_do_not_see", "without_compilation"]


class _WhileAnyIsInside:
    """A change of what belongs to the whole process, for as long as any thread is inside.

    Args:
        change: makes the context of the change.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change, self._lock = change, threading.Lock()
        self._inside: set[object] = set()
        self._changed: AbstractContextManager[object] = nullcontext()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        who = object()
        try:
            try:
                self._enter(who)
                yield
            finally:
                self._leave(who)
        finally:
            self._leave(who)  # an interrupt may have kept the first one from it

    def _enter(self, who: object) -> None:
        with self._lock:
            is_first = not self._inside
            self._inside.add(who)
            if is_first:
                changed = self._change()
                changed.__enter__()
                self._changed = changed

    def _leave(self, who: object) -> None:
        with self._lock:
            self._inside.discard(who)
            if not self._inside:
                self._changed.__exit__(None, None, None)
                self._changed = nullcontext()


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _not_counted() -> Iterator[None]:
    asked = torch.overrides.has_torch_function

    def has_torch_function(args: Iterable[Any]) -> bool:
        offers_itself = "handle_torch_function" in sys._getframe(1).f_code.co_names
        if offers_itself or any(not isinstance(mode, ObservingMode) for mode in _get_current_function_mode_stack()):
            return bool(asked(args))
        return any(_overrides(type(arg)) for arg in args)

    backward, names = torch.autograd.backward, vars(torch.utils)
    references = names["weakref"]
    names["weakref"] = SimpleNamespace(**{**vars(references), "getweakrefs": _getweakrefs})
    torch.overrides.has_torch_function = has_torch_function
    Tensor.set_ = _offered(Tensor.set_)  # type: ignore[method-assign]
    for part in _PARTS:
        setattr(Tensor, part.__name__, part)
    if "handle_torch_function" not in backward.__code__.co_names:
        torch.autograd.backward = _offered(backward)
    try:
        yield
    finally:
        torch.overrides.has_torch_function, torch.autograd.backward = asked, backward
        names["weakref"] = references
        del Tensor.set_, Tensor.real, Tensor.imag  # those of TensorBase are seen again


def _getweakrefs(tensor: Tensor) -> list[Any]:
    """What `torch.utils.swap_tensors` asks before it swaps: captures know of tensors by weak references."""
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, ObservingMode):
            mode.offer(weakref.getweakrefs, tensor)
    return weakref.getweakrefs(tensor)


def _offered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch does not offer to modes; checkpoints call ``autograd.backward`` of old releases."""

    @wraps(function)
    def offer(*args: Any, **kwargs: Any) -> Any:
        if not (torch._C._is_torch_function_enabled() and _get_current_function_mode_stack()):
            return function(*args, **kwargs)
        return torch.overrides.handle_torch_function(function, (), *args, **kwargs)

    return offer


class _Part(property):
    """An attribute of tensors, assignments to which are offered."""

    def __init__(self, part: Any) -> None:
        super().__init__(part.__get__, _offered(part.__set__))
        self.__name__ = part.__name__


_PARTS = tuple(_Part(getattr(torch._C.TensorBase, name)) for name in ("real", "imag"))


def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    return kind is not Tensor and own is not None and own is not torch._C._disabled_torch_function_impl


without_compilation = _WhileAnyIsInside(_eager)
"""Run compiled code as it was written, because nothing of it can be seen; the next step is compiled again."""
modules_do_not_see = _WhileAnyIsInside(_not_counted)
"""Modules that ask whether an override is active do not count an `ObservingMode`."""
