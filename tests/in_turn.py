"""Cases in several sizes, dtypes, layouts or kinds: by default each in one of these, and all with ``-m slow``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def _name(value: Any) -> str:
    """The same in every process."""
    return str(getattr(value, "__name__", value))


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
        first = case.id if known and case.id else "-".join(map(_name, values))
        for place, combination in enumerate(combinations):
            turn = (number + number // len(combinations)) % len(combinations)  # (not in step with cases of a product)
            slow = () if place == turn else (pytest.mark.slow,)
            name = "-".join([first, *map(_name, combination)])
            found.append(pytest.param(*values, *combination, marks=(*marks, *slow), id=name))
    return found


def every_other(cases: Iterable[Any], kind: Callable[[str], Any] = lambda name: None, first: int = 0) -> list[Any]:
    """Cases that other tests take, too: of each kind, by their name, every other one is not slow, from the `first`."""
    found = []
    counts: Counter[Any] = Counter()
    for case in cases:
        if not case.marks:
            counts[kind(case.id)] += 1
            if counts[kind(case.id)] % 2 == first:
                case = pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        found.append(case)
    return found


RECURRENT = ("lstm-projected-", "lstm-", "gru-", "rnn-relu-", "rnn-")


def one_kind_each(names: Iterable[str]) -> list[Any]:
    """Parameters of names; of a case that recurrent layers of several kinds share, one kind in turn is not slow."""
    names = list(names)
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = next((kind for kind in RECURRENT if name.startswith(kind)), "")
        kinds.setdefault(name.removeprefix(kind) if kind else name, []).append(name)
    chosen = {of_case[number % len(of_case)] for number, of_case in enumerate(kinds.values())}
    return [pytest.param(name, id=name, marks=[] if name in chosen else [pytest.mark.slow]) for name in names]
