"""Offer torch calls to whoever observes them: those of the user, and those inside torch's own Python functions."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_persample.torch_internals import (
    CONTROL_FLOW,
    OFFERING,
    RUN_BACKWARD,
    TensorBase,
    count_function_modes,
    disabled_torch_function,
    function_modes,
    pop_function_mode,
    push_function_mode,
    run_eagerly,
    torch_function_is_enabled,
)

Answer: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ObservingMode(TorchFunctionMode):
    """Offers every torch call to a capture."""

    # `answer`: given the function, its arguments and its keyword arguments, gives what the call returns.

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.first = answer  # what answered first

    @contextmanager
    def active(self) -> Iterator[None]:
        """Offer the calls in this context; an interrupt, too, leaves the mode on no stack."""
        try:
            push_function_mode(self)
            yield
        finally:
            try:
                self.leave_stack()
            except BaseException:
                self.leave_stack()
                raise

    @contextmanager
    def observing(self) -> Iterator[None]:
        """The same, with what is compiled run as it was written, and modules that do not count this mode."""
        who = object()
        try:
            self.start(who)
            yield
        finally:
            try:
                self._leave(who)
            except BaseException:  # an interrupt may have kept it from all of it, or from its first line
                self._leave(who)
                raise

    def start(self, who: object) -> None:
        """Enter the context of `observing`."""
        without_compilation.enter(who)
        modules_do_not_see.enter(who)
        push_function_mode(self)

    def stop(self, who: object) -> None:
        """Leave it; twice does no harm."""
        try:
            self._leave(who)
        except BaseException:  # an interrupt may have kept it from all of it
            self._leave(who)
            raise

    def _leave(self, who: object) -> None:
        self.leave_stack()
        modules_do_not_see.leave(who)
        without_compilation.leave(who)

    def leave_stack(self) -> None:
        """Offer no more calls; those of modes above this one are."""
        above = []
        while count_function_modes():
            mode = pop_function_mode()
            if mode is not self:
                above.append(mode)
        for mode in reversed(above):
            push_function_mode(mode)

    def offer(self, function: Callable[..., Any], *args: Any) -> Any:
        """Offer a call that torch does not offer to modes."""
        return self.answer(function, args, {})

    def release(self) -> None:
        """Let calls run as they are from now on, and let go of the capture: a cycle would keep it for some time."""
        self.answer = self.first = _as_it_is

    def __enter__(self) -> ObservingMode:
        push_function_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        pop_function_mode()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the call on; torch calls this with the mode itself switched off."""
        return self.answer(func, args, kwargs or {})


def _as_it_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
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
        around = function_modes() if count_function_modes() and function is not torch.autograd.grad else ()
        if around and any(isinstance(mode, ObservingMode) and mode is not visible for mode in around):
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
    if RUN_BACKWARD not in names or RUN_BACKWARD not in function.__globals__:
        return decomposed(function), False

    def run(*args: Any, **kwargs: Any) -> Any:
        with _visible.get():
            return function.__globals__[RUN_BACKWARD](*args, **kwargs)

    return _answering_no(function, **{RUN_BACKWARD: run}), True


def _backward_of_torch(*args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.backward``, in the open unless somebody has replaced it."""
    function = getattr(torch.autograd.backward, "__wrapped__", torch.autograd.backward)
    if isinstance(function, types.FunctionType) and RUN_BACKWARD in function.__code__.co_names:
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


class _WhileAnyIsInside:
    """A change of what belongs to the whole process, for as long as any thread is inside.

    Args:
        change: makes the change, and gives what takes it back.
    """

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change, self._lock = change, threading.Lock()
        self._inside: set[object] = set()
        self._take_back: Callable[[], object] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        who = object()
        try:
            try:
                self.enter(who)
                yield
            finally:
                self.leave(who)
        finally:
            self.leave(who)  # an interrupt may have kept the first one from it

    def enter(self, who: object) -> None:
        """Make the change, unless somebody is inside already."""
        with self._lock:
            is_first = not self._inside
            self._inside.add(who)
            if is_first:
                self._take_back = self._change()

    def leave(self, who: object) -> None:
        """Take it back when the last one leaves; to leave twice changes nothing."""
        with self._lock:
            self._inside.discard(who)
            if not self._inside and self._take_back is not None:
                self._take_back()
                self._take_back = None


def _not_counted() -> Callable[[], None]:
    asked = getattr(torch.overrides.has_torch_function, "__wrapped__", torch.overrides.has_torch_function)
    offers = tuple(map(_OFFER, OFFERING))
    replaced, stand_ins = _stand_ins(
        asked, torch.autograd.backward, torch.compile, vars(torch.utils)["weakref"], offers
    )
    take_back = partial(_counted, replaced)
    try:
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        for name, write in _WRITES.items():
            if name not in vars(Tensor):
                setattr(Tensor, name, write)
    except BaseException:
        take_back()
        raise
    return take_back


_OFFER = attrgetter("handle_torch_function")
_Attributes: TypeAlias = "tuple[tuple[Any, str, Any], ...]"


@functools.cache
def _stand_ins(
    asked: Any, backward: Any, compiler: Any, references: Any, offers: Any
) -> tuple[_Attributes, _Attributes]:
    """What is replaced while calls are offered, by owner and name, and by what."""
    replaced: list[tuple[Any, str, Any]] = [(torch, "compile", compiler), (torch.utils, "weakref", references)]
    replaced += [(torch.overrides, "has_torch_function", asked), (torch.autograd, "backward", backward)]
    replaced += [(module, "handle_torch_function", offer) for module, offer in zip(OFFERING, offers, strict=True)]
    stand_ins = [_unseen_control_flow(compiler), _references(references), _without_observers(asked)]
    stand_ins.append(backward if "handle_torch_function" in backward.__code__.co_names else _offered(backward))
    stand_ins += map(_offered_at_once, offers)
    places = [(owner, name, stand_in) for (owner, name, _), stand_in in zip(replaced, stand_ins, strict=True)]
    return tuple(replaced), tuple(places)


def _counted(replaced: _Attributes) -> None:
    for owner, name, value in replaced:
        setattr(owner, name, value)
    for name in () if _fits else _WRITES:  # those of TensorBase are seen again
        if name in vars(Tensor):
            delattr(Tensor, name)


def keep_offering_writes(fit: object) -> None:
    """Let `Tensor` keep what offers writes between the captures of a fit, for which it would change at each."""
    _fits.add(fit)


def stop_offering_writes(fit: object) -> None:
    """Let captures take it back again; twice does no harm."""
    _fits.discard(fit)
    with modules_do_not_see():  # whoever leaves last takes it back
        pass


@functools.cache
def _offered_at_once(offer: Callable[..., Any]) -> Callable[..., Any]:
    """What torch does where the innermost mode is an `ObservingMode`, in one call in place of ten."""

    @wraps(offer)
    def handle_torch_function(function: Callable[..., Any], relevant: Any, *args: Any, **kwargs: Any) -> Any:
        if not (torch_function_is_enabled() and count_function_modes()):
            return offer(function, relevant, *args, **kwargs)
        mode = pop_function_mode()
        try:
            if type(mode) is ObservingMode:
                return mode.answer(function, args, kwargs)
        finally:
            push_function_mode(mode)
        return offer(function, relevant, *args, **kwargs)

    return handle_torch_function


@functools.cache
def _unseen_control_flow(compiler: Callable[..., Any]) -> Any:
    """What stands for `torch.compile`: control flow of torch, as `torch.cond`, is right only where it is compiled."""

    @wraps(compiler)
    def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = compiler(model, *args, **kwargs)
        if not getattr(model, "__module__", "").startswith(CONTROL_FLOW):
            return compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            with _unobserved():
                return compiled(*args, **kwargs)

        return run

    return compile_


@contextmanager
def _unobserved() -> Iterator[None]:
    """No observer is offered what is called here, and what is compiled runs so."""
    modes = function_modes()
    others = [mode for mode in modes if not isinstance(mode, ObservingMode)]
    for _ in modes:
        pop_function_mode()
    for mode in others:
        push_function_mode(mode)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        for _ in others:
            pop_function_mode()
        for mode in modes:
            push_function_mode(mode)


@functools.cache
def _without_observers(asked: Callable[[Iterable[Any]], Any]) -> Any:
    """What is asked in place of `has_torch_function`: whether anybody but an `ObservingMode` overrides it."""

    @wraps(asked)  # and were this one left in its place, the next one would not ask it
    def has_torch_function(args: Iterable[Any]) -> bool:
        offers_itself = "handle_torch_function" in sys._getframe(1).f_code.co_names
        if offers_itself or any(not isinstance(mode, ObservingMode) for mode in function_modes()):
            return bool(asked(args))
        return any(_overrides(type(arg)) for arg in args)

    return has_torch_function


@functools.cache
def _references(module: types.ModuleType) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(module), "getweakrefs": _getweakrefs})


def _getweakrefs(tensor: Tensor) -> list[Any]:
    """What `torch.utils.swap_tensors` asks before it swaps: captures know of tensors by weak references."""
    for mode in function_modes():
        if isinstance(mode, ObservingMode):
            mode.offer(weakref.getweakrefs, tensor)
    return weakref.getweakrefs(tensor)


@functools.cache
def _offered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch does not offer to modes; checkpoints call ``autograd.backward`` of old releases."""

    @wraps(function)
    def offer(*args: Any, **kwargs: Any) -> Any:
        if not (torch_function_is_enabled() and any(isinstance(mode, ObservingMode) for mode in function_modes())):
            return function(*args, **kwargs)
        return torch.overrides.handle_torch_function(function, (), *args, **kwargs)

    return offer


class _Part(property):
    """An attribute of tensors, assignments to which are offered."""

    def __init__(self, part: Any) -> None:
        super().__init__(part.__get__, _offered(part.__set__))
        self.__name__ = part.__name__


_WRITES = {"set_": _offered(TensorBase.set_), **{name: _Part(getattr(TensorBase, name)) for name in ("real", "imag")}}
# Fits between whose captures `Tensor` keeps these: CPython 3.13 caches no look-up of a class that changed 1,000 times
_fits: weakref.WeakSet[object] = weakref.WeakSet()


def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    return kind is not Tensor and own is not None and own is not disabled_torch_function


without_compilation = _WhileAnyIsInside(run_eagerly)
"""Run compiled code as it was written, because nothing of it can be seen; the next step is compiled again."""
modules_do_not_see = _WhileAnyIsInside(_not_counted)
"""Modules that ask whether an override is active do not count an `ObservingMode`."""
