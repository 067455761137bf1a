"""What a verification found: one row for each trainable parameter, printed as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["ParameterCheck", "VerificationReport", "table"]

Row: TypeAlias = tuple[tuple[str, ...], float, str, str]

_HEADER = ("parameter", "largest relative error", "status", "reason")


@dataclass(frozen=True)
class ParameterCheck:
    """One row of a `VerificationReport`.

    Attributes:
        name: the parameter.
        error: largest error of a sample's gradient, ``max_i ||g_i - r_i|| / ||r_i||`` with the one-sample loop's r_i (a
            norm below 1% of the whole gradient's counts as 1% of it); nan where there is nothing to compare.
        status: "agrees"; "differs"; "missing": the engine gives no value; "unused": neither has a gradient;
            "not compared": one of the two could not be run, or gave no finite values.
        reason: why, where the status is not plain "agrees" or "unused".
    """

    name: str
    error: float
    status: Literal["agrees", "differs", "missing", "unused", "not compared"]
    reason: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """Per-sample gradients of the engine beside those of the one-sample loop; true where all parameters agree.

    Attributes:
        parameters: one row for each trainable parameter.
        samples: how many samples were compared.
        tolerance: largest relative error that counts as agreement.
        reason: why nothing could be compared, or "".
        failure: the exception that kept the check from running, or None.
    """

    parameters: tuple[ParameterCheck, ...]
    samples: int
    tolerance: float
    reason: str = ""
    failure: Exception | None = field(default=None, compare=False, repr=False)

    def __bool__(self) -> bool:
        return not self.reason and all(row.status in ("agrees", "unused") for row in self.parameters)

    def named(self, status: str) -> tuple[ParameterCheck, ...]:
        """The rows with one status."""
        return tuple(row for row in self.parameters if row.status == status)

    def __str__(self) -> str:
        """The table, with each reason written once below it."""
        return (
            f"{self._summary()}\n{table(_HEADER, [((r.name,), r.error, r.status, r.reason) for r in self.parameters])}"
        )

    def _summary(self) -> str:
        if self.reason:
            return f"Per-sample gradients could not be compared with the one-sample loop: {self.reason}"
        agree, unknown = len(self.named("agrees")) + len(self.named("unused")), len(self.named("not compared"))
        rest = f", {unknown} could not be compared" if unknown else ""
        return (
            f"Per-sample gradients of {self.samples} samples, compared with the one-sample loop (tolerance "
            f"{self.tolerance:.0e}): {agree} of {len(self.parameters) - unknown} parameters agree{rest}"
        )


def table(header: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as text, with each reason written once below the table."""
    reasons = list(dict.fromkeys(reason for *_, reason in rows if reason))
    cells = [tuple(header)] + [
        (
            *names,
            "-" if math.isnan(error) else f"{error:.1e}",
            status,
            f"[{reasons.index(reason) + 1}]" if reason else "",
        )
        for names, error, status, reason in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(
        [line.rstrip() for line in lines] + [f"[{n}] {reason}" for n, reason in enumerate(reasons, start=1)]
    )
