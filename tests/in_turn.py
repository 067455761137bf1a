"""Cases in several sizes, dtypes or layouts: by default each in one of these, and all the others with ``-m slow``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(cases: Iterable[Any], *sizes: Iterable[Any]) -> list[Any]:
    """Parameters (case, size, ...) of each case in every size; which one is not slow goes round from case to case.

    A case is a value, several of them in a tuple, or a `pytest.param`.
    """
    found = []
    combinations = list(product(*map(list, sizes)))
    for number, case in enumerate(cases):
        known = isinstance(case, type(pytest.param()))
        values = case.values if known else case if isinstance(case, tuple) else (case,)
        marks = case.marks if known else ()
        first = case.id if known and case.id else "-".join(map(str, values))
        for place, combination in enumerate(combinations):
            turn = (number + number // len(combinations)) % len(combinations)  # (not in step with cases of a product)
            slow = () if place == turn else (pytest.mark.slow,)
            name = "-".join([first, *map(str, combination)])
            found.append(pytest.param(*values, *combination, marks=(*marks, *slow), id=name))
    return found
