"""Make the torch calls inside torch's own Python functions visible.

Functions of torch.nn.functional written in Python (multi_head_attention_forward, layer_norm, dropout, ...) are
offered to a torch function mode as one call. A copy of such a function whose globals answer False to
``has_torch_function`` runs its body as it stands: the same code, the same numerics, and each primitive call in it is
seen.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from lightning_persample.engine.observing import ObservingMode

__all__ = ["decomposed", "decomposed_backward", "is_composite"]

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_ENGINE = "_engine_run_backward"  # what torch.autograd.backward calls after it has checked its arguments
_ASKING = {*_QUESTIONS, "handle_torch_function", "Tensor"}
_NO = "".format  # takes whatever it is asked about and answers with what is false, without a call into Python
_MODULES = ("torch.nn.functional", "torch.functional")
_visible: ContextVar[AbstractContextManager[Any]] = ContextVar("where a backward is seen", default=nullcontext())  # noqa: B039
_inner: ContextVar[tuple[AbstractContextManager[Any], ...]] = ContextVar("where captures inside see it", default=())


def is_composite(function: Callable[..., Any]) -> bool:
    """Whether this is one of torch's Python functions that can be run in the open."""
    return (
        isinstance(function, types.FunctionType)
        and function.__module__ in _MODULES
        and any(question in function.__code__.co_names for question in _QUESTIONS)
    )


@functools.cache
def decomposed(function: types.FunctionType) -> types.FunctionType:
    """A copy of the function that runs its body instead of offering itself to the mode again."""
    return _answering_no(function)


def decomposed_backward(function: Callable[..., Any], visible: AbstractContextManager[Any]) -> Callable[..., Any]:
    """A copy of a function of torch that runs a backward, such as ``Tensor.backward``, that runs its body."""
    # Where another capture is around this one, a function that fills ``.grad`` is called itself, so that this is
    # offered to the other: each has its record.
    assert isinstance(function, types.FunctionType)
    copy, runs_engine = _backward_in_the_open(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        captures = (visible, *_inner.get())
        around = (mode for mode in _get_current_function_mode_stack() if mode is not visible)
        if function is not torch.autograd.grad and any(isinstance(mode, ObservingMode) for mode in around):
            inside = _inner.set(captures)
            try:
                return function(*args, **kwargs)
            finally:
                _inner.reset(inside)
        seen = visible if len(captures) == 1 else _within(captures)
        inside, before = _inner.set(()), _visible.set(seen)
        try:
            if runs_engine:  # which alone is to be seen
                return copy(*args, **kwargs)
            with seen:
                return copy(*args, **kwargs)
        finally:
            _visible.reset(before)
            _inner.reset(inside)

    return run


@contextmanager
def _within(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """All of them, the first one outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@functools.cache
def _backward_in_the_open(function: types.FunctionType) -> tuple[types.FunctionType, bool]:
    """The copy, in which the engine runs within the context in `_visible`, and whether it calls the engine itself."""
    names = set(function.__code__.co_names)
    if names - _ASKING == {"torch", "autograd", "backward"}:  # ``Tensor.backward`` hands on to the other
        return _answering_no(function, torch=_TORCH), True
    if _ENGINE not in names or _ENGINE not in function.__globals__:
        return decomposed(function), False

    def run(*args: Any, **kwargs: Any) -> Any:
        with _visible.get():
            return function.__globals__[_ENGINE](*args, **kwargs)

    return _answering_no(function, **{_ENGINE: run}), True


def _backward_of_torch(*args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.backward``, in the open unless somebody has replaced it."""
    function = getattr(torch.autograd.backward, "__wrapped__", torch.autograd.backward)
    if isinstance(function, types.FunctionType) and _ENGINE in function.__code__.co_names:
        return _backward_in_the_open(function)[0](*args, **kwargs)
    with _visible.get():
        return function(*args, **kwargs)


# What stands for the module torch in a copy of ``Tensor.backward``.
_TORCH = types.SimpleNamespace(autograd=types.SimpleNamespace(backward=_backward_of_torch))


def _answering_no(function: types.FunctionType, **replaced: Any) -> types.FunctionType:
    namespace = {**function.__globals__, **dict.fromkeys(_QUESTIONS, _NO), **replaced}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
