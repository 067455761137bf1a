"""Every error and warning this package raises, and how the user's own code is called, whose errors are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class PerSampleError(RuntimeError):
    """Base of every error of this package."""


class UnsupportedError(PerSampleError):
    """A per-sample gradient that was asked for cannot be given exactly; the text names op, parameter and remedy."""


class BatchSizeError(PerSampleError):
    """The batch size cannot be read from the batch, or the sizes found disagree."""


class OptionError(PerSampleError, ValueError):
    """An option has a value that is not allowed; the text names the value and what is allowed."""


class RuleRegistrationError(PerSampleError):
    """A rule is registered twice, or names an argument that its op does not have; or an op to be checked has none."""


class VerificationError(PerSampleError):
    """Per-sample gradients differ from those of the one-sample loop; the text is the report's table."""


class PerSampleWarning(UserWarning):
    """Something about the reported values that a user must know: a missing parameter, a layer that mixes samples."""


def is_of_package(function: object) -> bool:
    """Whether a function is one of this package; one made by `exec` may have no module."""
    return (getattr(function, "__module__", None) or "").startswith("lightning_persample.")


def of_user(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a user may have written: what it raises is the user's, unless it is of this package after all."""
    return function(*args, **kwargs) if is_of_package(function) else call_of_user(function, args, kwargs)


def call_of_user(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame by which a traceback says that an error is the user's."""
    return function(*args, **kwargs)


def each_of_user(items: Iterable[Any]) -> Iterator[Any]:
    """Go through what a user may have written."""
    iterator, end = of_user(iter, items), object()
    while (item := of_user(next, iterator, end)) is not end:
        yield item
