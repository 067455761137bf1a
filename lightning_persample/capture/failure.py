"""The boundary between this package and the user's training: what goes wrong on this side becomes a reason.

Every entry into this package (a torch call that is offered to it, a hook in the backward, a hook of Lightning) goes
through `guard`, `once` or `Dispatcher.call`. A failure of its own makes values absent, which is reported with its
reason; the user's step goes on. What the user's own code or torch raises for the user's call passes unchanged, and so
does what the user has asked for: `stop` raises that.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_persample.errors import (
    OptionError,
    PerSampleError,
    PerSampleWarning,
    UnsupportedError,
    VerificationError,
    call_of_user,
    is_of_package,
)
from lightning_persample.gradients.cost import halved_memory_budget

FAULT = "this is a fault of lightning_persample"
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_HALVINGS = 3

Result = TypeVar("Result")


def attempt(run: Callable[..., Any], otherwise: Callable[[Exception], Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `run`, whose own failures go to `otherwise`, which then answers; a failure of the user's passes."""
    try:
        return run(*args, **kwargs)
    except Exception as error:
        if _passes(error):
            raise
        failure = error
    try:
        return otherwise(failure)
    except Exception as error:  # (of what cannot be said, nothing can be said)
        if _passes(error):
            raise
        return None
    finally:
        del failure  # its traceback holds this frame


# `guard(run, otherwise)` is `run` under `attempt`; made without a call of a Python function, because steps make many.
guard: Callable[..., Callable[..., Any]] = partial(partial, attempt)


def once(
    observe: Callable[..., Any], function: Callable[..., Any], otherwise: Callable[[Exception], Any]
) -> Callable[..., Any]:
    """`observe(function, *args)` for a function of the user's, which runs exactly once however `observe` fares."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        run = Once(function)
        try:
            attempt(observe, otherwise, run, *args, **kwargs)
            if run.error is not None:  # and on the way out something of ours has failed, too
                raise run.error
        finally:
            run.error = None  # its traceback holds this frame
        return run.result if run.has_run else function(*args, **kwargs)

    return observed


def raise_again(error: Exception) -> NoReturn:
    """To be run by `attempt`, for a failure that was caught without it."""
    try:
        raise error
    finally:
        del error  # its traceback holds this frame


class OverwrittenError(UnsupportedError):
    """A tensor that a per-sample gradient is computed from was changed in place; where, stands between the texts."""

    def __init__(self, before: str, tensor: Tensor, after: str) -> None:
        super().__init__(before + after)
        self.before, self.tensor, self.after = before, tensor, after


class Once:
    """A function of the user's, and what came of it."""

    __slots__ = ("error", "function", "has_run", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.has_run = function, False
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        self.has_run = True
        try:
            self.result = call_of_user(self.function, args, kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result


def stop(error: Exception) -> NoReturn:
    """Raise what the user has asked for, as with ``unsupported="error"``."""
    raise error


def _passes(error: Exception) -> bool:
    """Whether an exception is the user's, or is meant for the user."""
    if isinstance(error, (OptionError, VerificationError, PerSampleWarning)):
        return True
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in _PASSING:
            return True
        trace = trace.tb_next
    return False


_PASSING = (call_of_user.__code__, stop.__code__)


def run_all(*steps: Callable[[], object]) -> None:
    """Run each of them, even where others fail or are interrupted; the first failure is passed on at the end."""
    failures: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            failures.append(error)
    try:
        if failures:
            raise min(failures, key=lambda error: isinstance(error, Exception))  # an interrupt before any other
    finally:
        failures.clear()  # the traceback of one holds this frame


def in_smaller_chunks(compute: Callable[[], Result]) -> Result:
    """Run a computation, and where memory does not suffice again with half the memory for its kernels, a few times."""
    try:
        return compute()  # as nearly always
    except torch.OutOfMemoryError:
        pass
    for times in range(1, _HALVINGS):
        try:
            with halved_memory_budget(times):
                return compute()
        except torch.OutOfMemoryError:
            continue
    with halved_memory_budget(_HALVINGS):
        return compute()


def reason_of(error: Exception, what: object, rule: Callable[..., Any] | None = None) -> str:
    """Why there are no values: a refusal's own text, or for any other failure what failed and how."""
    if isinstance(error, PerSampleError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{what}: there was not enough memory for its per-sample gradient, in kernels of 1/{2**_HALVINGS} of their "
            "usual memory either; use smaller batches, or ask for norms alone where gradients are asked for"
        )
    failed = _failed(error)
    if rule is not None and not is_of_package(rule):
        return (
            f"{what}: its rule {rule.__module__}.{rule.__qualname__} {failed}; check_rule shows in which calls, and "
            "what the rule reads must be registered with reads=(...)"
        )
    return f"{what}: computing its per-sample gradient {failed}; {_whose(error)}"


def fault_of(error: Exception, what: str) -> str:
    """What has failed by a fault of this package; `what` is that part of it. A refusal has its own text."""
    return str(error) if isinstance(error, PerSampleError) else f"{what} {_failed(error)}; {_whose(error)}"


def _failed(error: Exception) -> str:
    return f"failed with {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _whose(error: Exception) -> str:
    """Whose fault it is, with the place in this package, and the request for a report."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    place = f" ({own[-1].filename.removeprefix(_PACKAGE)}:{own[-1].lineno})" if own else ""
    return f"{FAULT}{place}, please report it"
