"""Faults of this package, put into one of its functions after the other: the training must not notice."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["broken"]


def _raising(kind: str) -> types.CodeType:
    found: dict[str, Any] = {}
    exec(f"def raising(*args, **kwargs):\n    raise {kind}('broken inside')\n", found)
    code: types.CodeType = found["raising"].__code__
    return code


@contextmanager
def broken(function: Callable[..., Any], kind: str = "RuntimeError") -> Iterator[None]:
    """Let a function raise, wherever it has been imported: its code is replaced."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    assert isinstance(function, types.FunctionType)
    code, function.__code__ = function.__code__, _raising(kind)
    try:
        yield
    finally:
        function.__code__ = code
