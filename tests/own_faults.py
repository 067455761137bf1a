"""Faults of this package, put into one of its functions after the other: the training must not notice."""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning_persample
from lightning_persample.gradients import cost

__all__ = ["broken", "called", "interrupted", "name_of"]

_PACKAGE = f"{Path(lightning_persample.__file__).parent}{os.sep}"


def called(run: Callable[[], Any]) -> dict[types.CodeType, int]:
    """The functions of this package that a run calls, nested ones among them, and how often."""
    found: dict[types.CodeType, int] = {}

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and not code.co_name.startswith("<"):
            found[code] = found.get(code, 0) + 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def name_of(code: types.CodeType) -> str:
    """As in ``callbacks.statistics.Window.add``."""
    return f"{code.co_filename.removeprefix(_PACKAGE)[:-3].replace(os.sep, '.')}.{code.co_qualname}"


def _raising(kind: str, code: types.CodeType) -> types.CodeType:
    found: dict[str, Any] = {}
    cells = ", ".join(f"c{place}" for place in range(len(code.co_freevars)))  # as many as a function with closure has
    held = f"({cells},)" if cells else "None"
    exec(
        f"def outer({cells}):\n def raising(*a, **k):\n  {held}\n  raise {kind}('broken inside')\n return raising",
        found,
    )
    raising: types.CodeType = found["outer"](*[None] * len(code.co_freevars)).__code__
    return raising


def _with(code: types.CodeType, old: types.CodeType, new: types.CodeType) -> types.CodeType:
    """The code, with another one in the place of one nested in it."""
    if code is old:
        return new
    parts = tuple(_with(part, old, new) if isinstance(part, types.CodeType) else part for part in code.co_consts)
    changed = any(part is not before for part, before in zip(parts, code.co_consts, strict=True))
    return code.replace(co_consts=parts) if changed else code


@functools.cache
def _functions(modules: int) -> list[types.FunctionType]:
    """All functions of this package, once so many modules are there."""
    gc.unfreeze()  # what conftest.py keeps from the garbage collector is not among its objects
    found = [each for each in gc.get_objects() if type(each) is types.FunctionType]
    gc.freeze()
    return [each for each in found if each.__code__.co_filename.startswith(_PACKAGE)]


@contextmanager
def _kernels_as_before() -> Iterator[None]:
    """Where the end of a context was broken: for the tests that come after."""
    before = cost._state.set(cost._state.get())
    try:
        yield
    finally:
        cost._state.reset(before)


@contextmanager
def broken(function: Callable[..., Any] | types.CodeType, kind: str = "RuntimeError") -> Iterator[None]:
    """Let a function raise, wherever it has been imported and whatever makes it: its code is replaced."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    old = function if isinstance(function, types.CodeType) else function.__code__
    new, changed = _raising(kind, old), []
    for each in _functions(len(sys.modules)):
        if each.__code__.co_filename == old.co_filename:
            code = _with(each.__code__, old, new)
            if code is not each.__code__:
                changed.append((each, each.__code__))
                each.__code__ = code
    assert changed, old
    try:
        with _kernels_as_before():
            yield
    finally:
        for each, code in changed:
            each.__code__ = code


@contextmanager
def interrupted(code: types.CodeType, call: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raise once, at the n-th call of a function."""
    calls = 0

    def strike(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code is code:
            calls += 1
            if calls == call:
                sys.setprofile(None)
                raise error("broken inside")

    sys.setprofile(strike)
    try:
        with _kernels_as_before():
            yield
    finally:
        sys.setprofile(None)
