"""How many Python functions a step calls, and in which files of this package: the same numbers in every run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning_persample
from tests.benchmarks.engines import Step

PACKAGE = Path(lightning_persample.__file__).parent


def python_calls(step: Step, warm_up: int = 3) -> tuple[int, Counter[str]]:
    """All calls of one warm step, and those of this package's functions by file."""
    for _ in range(warm_up):
        step()
    calls, own = 0, Counter[str]()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                own[path.relative_to(PACKAGE).as_posix()] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls, own
