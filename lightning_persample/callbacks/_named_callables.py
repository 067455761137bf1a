"""How a manifest names an option that may be a callable, and whether the name tells it from others."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

__all__ = ["is_told", "named"]

_ADDRESS = " at 0x"  # in what Python shows of an object that says nothing of itself


def named(value: Any) -> str | None:
    """An option as a manifest names it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        given = [_shown(each) for each in value.args]
        given += [f"{name}={_shown(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join([str(named(value.func)), *given])})"
    described = value if hasattr(value, "__qualname__") else type(value)
    return f"{described.__module__}.{described.__qualname__}"


def is_told(value: Any) -> bool:
    """Whether two options of equal names are alike, as long as nobody edits their code."""
    if value is None or isinstance(value, (str, type)):
        return True
    if isinstance(value, functools.partial):
        return is_told(value.func) and not any(_ADDRESS in repr(each) for each in (value.args, value.keywords))
    if inspect.ismethod(value) and not isinstance(value.__self__, (nn.Module, type)):
        return False
    return inspect.isroutine(value) and "<" not in value.__qualname__


def _shown(value: Any) -> str:
    shown = repr(value)
    return type(value).__qualname__ if _ADDRESS in shown else shown
