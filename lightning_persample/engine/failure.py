"""A training step must not end because a rule or the engine has a fault: the parameters are refused by name instead."""

from __future__ import annotations

from lightning_persample.errors import UnsupportedError

__all__ = ["FAILURES", "reason_of"]

FAILURES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def reason_of(error: Exception, what: object) -> str:
    """Why there are no values: a refusal's own text, or for any other failure what failed and how.

    Args:
        error: one of `FAILURES`.
        what: the call or weight it failed on; its text is put in front.

    Returns:
        A text for `PerSampleRecord.unsupported`.
    """
    if isinstance(error, UnsupportedError):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return (
        f"{what}: computing its per-sample gradient failed with {type(error).__name__}: {first_line}; this is a fault "
        "of lightning_persample or of a registered rule, please report it"
    )
