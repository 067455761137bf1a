"""What the check of a rule found: one row for each way of calling it and each weight, printed as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_persample.engine.report import table

__all__ = ["RuleCheck", "RuleReport"]

_HEADER = ("call", "weight", "largest relative error", "status", "reason")


@dataclass(frozen=True)
class RuleCheck:
    """One row of a `RuleReport`.

    Attributes:
        call: how the rule was called: how many samples, with how many rows each, in which layout, by whom.
        weight: name of the weight.
        error: largest error of a sample's value, relative to the loop's: ``max_i ||g_i - r_i|| / ||r_i||`` for the
            gradients (a value below 1% of the largest sample's counts as 1% of it); where these agree, that of squared
            norms and inner products; nan where there is nothing to compare, or a value is not a finite number.
        status: "agrees"; "differs"; "missing": the rule gives no value; "raised": the rule raised an exception; "not
            found": `expanded_weights` does not come to the rule; "not compared": the example arguments prove nothing.
        reason: why, where the status is not "agrees".
    """

    call: str
    weight: str
    error: float
    status: Literal["agrees", "differs", "missing", "raised", "not found", "not compared"]
    reason: str = ""


@dataclass(frozen=True)
class RuleReport:
    """A rule beside a loop over single samples; true where all rows agree that prove anything, at least one per weight.

    Attributes:
        op: the op.
        checks: one row for each way of calling the rule and each weight.
        left_out: ways of calling the op that it does not allow.
    """

    op: str
    checks: tuple[RuleCheck, ...]
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        proven = {row.weight for row in self.named("agrees")}
        return bool(self.checks) and all(
            row.status == "agrees" or (row.status == "not compared" and row.weight in proven) for row in self.checks
        )

    def named(self, status: str) -> tuple[RuleCheck, ...]:
        """The rows with one status."""
        return tuple(row for row in self.checks if row.status == status)

    def __str__(self) -> str:
        """The table, with each reason written once below it."""
        agree = len(self.named("agrees"))
        lines = [
            f"The rule of {self.op!r}, compared with a loop over single samples: {agree} of {len(self.checks)} checks "
            "agree",
            table(_HEADER, [((r.call, r.weight), r.error, r.status, r.reason) for r in self.checks]),
        ]
        if self.left_out:
            lines.append(f"left out, because the op does not allow it: {', '.join(self.left_out)}")
        return "\n".join(lines)
