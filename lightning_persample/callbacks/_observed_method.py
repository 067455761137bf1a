"""Take the place of a method of a module, or of a loop of Lightning, for the time of a fit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from lightning_persample.engine import once

__all__ = ["ObservedMethod"]

_ABSENT = object()


class ObservedMethod:
    """Stands in an object's instance dictionary for one of its methods.

    A deep copy and a pickle of it are the method it stands for, bound to the copied object, so that copies of a module
    or a Trainer in the middle of a fit carry nothing of ours.

    Args:
        owner: the object whose method is replaced.
        name: the method's name.
        run: called instead of the method, with the method first, as a `Once`, and then the method's arguments.
        failed: is given what fails in `run` that is not the method's; the method has run then, or runs.
        is_live: whether the fit that this belongs to is still running. What an interrupted fit left behind, because a
            hook of another callback kept ours from running, is removed by the next fit.
        rests: whether a call is to be the method's and nothing more; asked at each call, and must not fail.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        run: Callable[..., Any],
        failed: Callable[[Exception], Any],
        is_live: Callable[[], bool],
        rests: Callable[[], bool] = bool,
    ) -> None:
        left = owner.__dict__.get(name)
        if isinstance(left, ObservedMethod) and not left._is_live():
            left.restore()
        self._is_live: Callable[[], bool] = is_live
        method = getattr(owner, name)
        functools.update_wrapper(self, method)
        # Lightning counts the arguments of one level of __wrapped__: it must find what it would find without us.
        self.__wrapped__ = getattr(method, "__wrapped__", method)
        self._owner = owner
        self._name = name
        self._own = owner.__dict__.get(name, _ABSENT)
        self._method = method
        self._run: Callable[..., Any] | None = once(run, method, failed)
        self._rests: Callable[[], bool] = rests

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None or self._rests():
            return self._method(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is _ABSENT:
            return getattr, (self._owner, self._name)
        return _as_it_is, (self._own,)

    def install(self) -> None:
        """Take the method's place."""
        self._owner.__dict__[self._name] = self

    def restore(self) -> None:
        """Put back exactly what was there; where somebody else has replaced the method since, leave theirs alone."""
        # Then theirs may call this one, or put it back later: from now on it is the method, and holds nothing else.
        self._run, self._is_live, self._rests = None, _never, _never
        if self._owner.__dict__.get(self._name) is not self:
            return
        if self._own is _ABSENT:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._own


def _never() -> bool:
    return False


def _as_it_is(value: Any) -> Any:
    return value
