"""A training step must not end because a rule or the engine has a fault: the parameters are refused by name instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_persample.errors import UnsupportedError

__all__ = ["FAILURES", "reason_of"]

FAILURES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


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
    failed = f"failed with {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if rule is not None and not rule.__module__.startswith("lightning_persample."):
        return (
            f"{what}: its rule {rule.__module__}.{rule.__qualname__} {failed}; check_rule shows in which calls, and "
            "what the rule reads must be registered with reads=(...)"
        )
    return (
        f"{what}: computing its per-sample gradient {failed}; this is a fault of lightning_persample, please report it"
    )
