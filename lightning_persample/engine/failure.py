"""A training step must not end because a rule or the engine has a fault: the parameters are refused by name instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients.cost import halved_memory_budget

__all__ = ["FAILURES", "in_smaller_chunks", "reason_of"]

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
_HALVINGS = 3

Result = TypeVar("Result")


def in_smaller_chunks(compute: Callable[[], Result]) -> Result:
    """Run a computation, and where memory does not suffice again with half the memory for its kernels, a few times.

    Args:
        compute: gives the same every time.

    Returns:
        What it returns. The last failure is passed on.
    """
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
    """Why there are no values: a refusal's own text, or for any other failure what failed and how.

    Args:
        error: one of `FAILURES`.
        what: the call or weight it failed on; its text is put in front.
        rule: the rule that raised it.

    Returns:
        A text for `PerSampleRecord.unsupported`.
    """
    if isinstance(error, UnsupportedError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{what}: there was not enough memory for its per-sample gradient, in kernels of 1/{2**_HALVINGS} of their "
            "usual memory either; use smaller batches, or ask for norms alone where gradients are asked for"
        )
    failed = f"failed with {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if rule is not None and not rule.__module__.startswith("lightning_persample."):
        return (
            f"{what}: its rule {rule.__module__}.{rule.__qualname__} {failed}; check_rule shows in which calls, and "
            "what the rule reads must be registered with reads=(...)"
        )
    return (
        f"{what}: computing its per-sample gradient {failed}; this is a fault of lightning_persample, please report it"
    )
